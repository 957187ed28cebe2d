// Where the marks of an axis are, and what they say.
import { count, duration, exact } from "./figures.js";

/** Round numbers from low to high, about `most` of them. */
export function linear(low, high, most) {
  const step = nice((high - low) / most), first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  const found = [];
  for (let n = 0; n <= last - first; n++) found.push((first + n) * step + 0); // + 0: no -0; first may be too large for ++
  return found;
}

/** Round numbers on a scale of logarithms: powers of ten, with 2 and 5 between few of them; low > 0. */
export function logarithmic(low, high, most) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / most));
  const between = last - first <= most / 2 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = first; power <= last; power += every) {
    for (const digit of between) {
      const value = digit * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found.length > 1 ? found : linear(low, high, most).filter((value) => value > 0);
}

/** Seconds: multiples of minutes, hours and days. */
export function seconds(low, high, most) {
  const rough = (high - low) / most;
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const step = steps.find((one) => one >= rough);
  if (!step || rough < 1) return rough < 1 ? linear(low, high, most) : linear(low / 86400, high / 86400, most).map((v) => v * 86400);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(value);
  return found;
}

export const AXES = {
  step: { name: "step", ticks: linear, text: count, exact },
  time: { name: "time", ticks: seconds, text: (value) => (value ? duration(value) : "0"), exact: duration },
  tokens: { name: "tokens", ticks: linear, text: count, exact },
};

/** The marks of a y-axis in as few characters as tell them apart. */
export function labels(values) {
  const size = Math.max(...values.map(Math.abs)), step = values.length > 1 ? Math.abs(values[1] - values[0]) : size;
  if (size >= 1e4) return values.map((value) => brief(value));
  if (size < 1e-3) return values.map((value) => (value ? value.toExponential(value.toPrecision(2).includes("e") ? 0 : 1) : "0"));
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return values.map((value) => value.toFixed(digits));
}

function brief(value) {
  for (const [bound, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= bound) return `${Number((value / bound).toPrecision(4))}${unit}`;
  }
  return String(Number(value.toPrecision(3)));
}

function nice(rough) {
  const power = 10 ** Math.floor(Math.log10(rough)), share = rough / power;
  return (share <= 1 ? 1 : share <= 2 ? 2 : share <= 5 ? 5 : 10) * power;
}
