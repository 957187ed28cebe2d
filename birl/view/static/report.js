// The charts of a report or of a notebook, with embedded data.
import { chart, look, palette } from "./chart.js";
import { exact } from "./figures.js";
import { smoothed } from "./smooth.js";

const LONG = 60, WEIGHT = 0.8; // points from which on a line is smoothed, and how much
const data = JSON.parse(document.getElementById("data").textContent);
const steps = data.flatMap((one) => one.lines.flatMap((line) => line.x));
const range = { low: null, high: null, colors: palette() };
const made = data.map((one) => chart({ ...one, named: one.lines.length > 1 }, { mark, zoom, reset: () => zoom(null, null) }));

function lines({ lines: given, stacked }) {
  const floor = [];
  return given.map(({ label, x, y }, i) => {
    if (stacked) {
      const min = x.map((_, n) => floor[n] || 0), max = x.map((_, n) => min[n] + Math.max(0, y[n] || 0));
      floor.splice(0, floor.length, ...max);
      return { ...look(i), label, points: { x, y, min, max }, line: max, raw: null, solid: true };
    }
    const long = y.length > LONG && y.every(Number.isFinite);
    return { ...look(i), label, points: { x, y }, line: long ? smoothed({ y }, WEIGHT) : y, raw: long ? y : null };
  });
}

function draw(n) {
  const [first, last] = [Math.min, Math.max].map((best) => steps.reduce((one, other) => best(one, other)));
  const low = range.low ?? first, end = range.high ?? last;
  made[n].draw({ series: lines(data[n]), low, high: end > low ? end : low + 1, log: false, axis: "step", colors: range.colors });
}

function mark(x) {
  for (const one of made) {
    const told = one.at(x);
    one.mark(x, told, x === null ? "" : `step ${exact(told.find((each) => each.there)?.x ?? x)}`);
  }
}

function zoom(low, high) {
  Object.assign(range, { low, high });
  data.forEach((_, n) => draw(n));
}

const seen = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.clientWidth) draw(Number(target.dataset.chart)); // within a closed part it is 0
  mark(null);
});
document.querySelectorAll("[data-chart]").forEach((place) => {
  place.append(made[place.dataset.chart].element);
  seen.observe(place);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  range.colors = palette();
  zoom(range.low, range.high);
});
