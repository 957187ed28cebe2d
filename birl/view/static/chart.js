// One chart, drawn by uPlot, with its title, the values at the pointer, and keyboard control. For page and report.
import { el, fill, visible } from "./dom.js";
import { count, duration, exact, figure } from "./figures.js";

const HEIGHT = 190, LEFT = 46, DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]], COLOURS = 8;
const LISTED = 12; // runs listed at the pointer
const WHOLE = Array.from({ length: 19 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, ...WHOLE.map((n) => 86400 * n)];

/** Kinds of x-axes: name, distances of ticks, text of a tick, a value with all digits. */
export const AXES = {
  step: { name: "step", incrs: WHOLE, text: count, exact },
  time: { name: "time", incrs: SECONDS, text: (value) => (value ? duration(value) : "0"), exact: duration },
  tokens: { name: "tokens", incrs: WHOLE, text: count, exact },
};

/** Colours for the canvas, by name of the custom property; read again when the theme changes. */
export function palette() {
  const probe = el("span", { hidden: true });
  document.body.append(probe);
  const colors = {};
  for (const name of ["muted", "line", "grid", ...Array.from({ length: COLOURS }, (_, n) => `c${n + 1}`)]) {
    probe.style.color = `var(--${name})`;
    colors[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return colors;
}

/** The colour and dash of the i-th run: eight colours, then the same with dashes. */
export const look = (i) => ({ color: `c${(i % COLOURS) + 1}`, dash: DASHES[Math.floor(i / COLOURS) % DASHES.length] });

/** named: values stand beside the names of their lines. hooks: mark(x or null), zoom(low, high), reset(). Returns
 *  {element, draw, mark, at, state}.
 *
 *  draw(state): {series, low, high, log, axis, colors}; a series: {label, color, dash, points: {x, y, and min, max, n where
 *  a point stands for n}, line: what is drawn of y, raw: drawn faintly behind it, solid: min to max is an area}. */
export function chart({ name, heading, about, named }, hooks) {
  const values = el("span", { class: named ? "values named" : "values" }), note = el("p", { class: "empty muted small", hidden: true });
  const tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" }), sheet = el("div", { "aria-hidden": "true" });
  const over = el("div", { class: "plot", role: "slider", tabindex: "0", "aria-label": `${visible(heading)}: value at`,
    "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0", "aria-valuetext": "no values" }, sheet, note, tip);
  const element = el("figure", { class: "chart" },
    el("figcaption", {}, el("h3", {}, el("bdi", {}, visible(heading))),
      el("p", { class: "about muted small" }, about, name === heading ? null : [" ", el("code", {}, visible(name))]), values), over);
  const it = { state: null, plot: null, kind: "", at: null };

  function draw(state) {
    it.state = state;
    const { data, series, bands } = aligned(state), width = over.clientWidth;
    if (!width) return;
    const empty = !data.slice(1).some((column) => column.some(Number.isFinite)), { log, axis, colors } = state;
    note.hidden = !empty;
    note.textContent = state.series.some((s) => s.points.x.length) ? "No values above 0: a log scale cannot show them." : "No values here.";
    const kind = JSON.stringify([log, axis, colors, series, bands]);
    if (it.kind !== kind) {
      it.plot?.destroy();
      it.plot = new uPlot(options(it, hooks, width, series, bands), data, sheet);
      it.kind = kind;
    } else {
      if (it.plot.width !== width) it.plot.setSize({ width, height: HEIGHT });
      it.plot.setData(data);
    }
    line();
    over.setAttribute("aria-valuemin", String(state.low));
    over.setAttribute("aria-valuemax", String(state.high));
  }

  /** The vertical line at x. */
  function line() {
    const { plot, state, at } = it, there = at !== null && at >= state.low && at <= state.high;
    plot?.setCursor(there ? { left: plot.valToPos(at, "x"), top: 0 } : { left: -10, top: -10 }, false);
  }

  /** told: [{color, label, value}] at x, or the last ones if x is null. */
  function mark(x, told, where) {
    it.at = x;
    const wide = element.clientWidth, room = Math.max(1, Math.floor(x === null ? wide / 60 : (wide - 60) / 75));
    const more = told.length - room, say = x === null ? figure : exact, dot = (one) => el("i", { class: "dot", style: { background: `var(--${one.color})` } });
    fill(values, where ? el("span", { class: "where" }, where) : null,
      told.slice(0, named ? told.length : room).map((one) => el("span", { title: visible(one.label) }, dot(one), named ? el("bdi", {}, `${visible(one.label)} `) : null, say(one.value))), more > 0 && !named ? el("span", {}, `+${more}`) : null);
    const words = told.map((one) => `${visible(one.label)} ${say(one.value)}`).join(", ");
    over.setAttribute("aria-valuetext", `${where || "last"}: ${words || "no values"}`);
    if (x !== null) over.setAttribute("aria-valuenow", String(x));
    if (!it.plot) return;
    line();
    tip.hidden = x === null || !told.length || !note.hidden || !(over.matches(":hover") || over.matches(":focus-visible"));
    if (tip.hidden) return;
    fill(tip, el("b", {}, visible(heading)), el("div", { class: "muted" }, where), told.slice(0, LISTED).map((one) => el("div", { class: "one" },
      dot(one), el("bdi", {}, visible(one.label)), el("b", {}, figure(one.value)))),
    told.length > LISTED ? el("div", { class: "muted" }, `and ${told.length - LISTED} more`) : null);
    const at = LEFT + it.plot.valToPos(x, "x"), left = at > wide / 2 ? at - tip.offsetWidth - 12 : at + 12;
    tip.style.left = `${Math.max(0, Math.min(left, wide - tip.offsetWidth))}px`;
  }

  over.addEventListener("keydown", (event) => keys(event, it, hooks));
  over.addEventListener("blur", () => hooks.mark(null));
  return { element, draw, mark, at: (x) => told(it.state, x), get state() { return it.state; } };
}

/** Columns on a common x for uPlot, and the style of each. */
function aligned({ series, colors, log }) {
  const series_ = [{}], bands = [], tables = [];
  const fits = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values); // a log scale has no other values
  const faint = (color, share) => color.replace("rgb(", "rgba(").replace(")", `, ${share})`);
  for (const { points, line, raw, color, dash, solid } of series) {
    const stroke = colors[color], table = [points.x], add = (values, looks) => {
      table.push(fits(values));
      series_.push({ points: { show: false }, ...looks });
    };
    if (points.min) {
      bands.push({ series: [series_.length, series_.length + 1], fill: faint(stroke, solid ? 0.7 : 0.16) });
      for (const edge of [points.max, points.min]) add(edge, { width: 0 });
    }
    if (raw) add(raw, { stroke: faint(stroke, 0.3), width: 1 });
    add(line, { stroke, dash, width: solid ? 0 : 1.6, points: { show: !solid && line.length <= 40, size: 4, fill: stroke } });
    tables.push(table);
  }
  return { data: tables.length ? uPlot.join(tables) : [[]], series: series_, bands };
}

function options(it, hooks, width, series, bands) {
  const { log, axis, colors } = it.state, font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const lines = { stroke: colors.grid, width: 1 }, way = AXES[axis], own = { font, stroke: colors.muted };
  return {
    width, height: HEIGHT, series, bands, legend: { show: false }, padding: [8, 14, 0, 0],
    scales: { x: { time: false, range: () => [it.state.low, it.state.high] }, y: { distr: log ? 3 : 1, range: (u, low, high) => reach(low, high, log) } },
    axes: [
      { ...own, size: 24, gap: 3, space: 70, grid: { show: false }, ticks: { ...lines, stroke: colors.line, size: 4 }, border: { show: true, stroke: colors.line, width: 1 },
        incrs: way.incrs, values: (u, marks) => marks.map(way.text) },
      { ...own, size: LEFT, gap: 6, space: 32, grid: lines, ticks: { show: false }, values: (u, marks) => labels(marks, log) },
    ],
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => hooks.reset() } },
    hooks: {
      init: [({ over }) => {
        const tell = (event) => hooks.mark(it.plot.posToVal(event.clientX - over.getBoundingClientRect().left, "x"));
        for (const kind of ["pointerdown", "pointermove"]) over.addEventListener(kind, tell);
        over.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hooks.mark(null)); // a touch stays until the next one
      }],
      setSelect: [(u) => {
        const { left, width: wide } = u.select;
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        if (wide > 5) hooks.zoom(u.posToVal(left, "x"), u.posToVal(left + wide, "x"));
      }],
    },
  };
}

/** Range of the visible values, with a margin. */
function reach(low, high, log) {
  if (low === null || !(low <= high)) return log ? [1, 10] : [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  const varies = high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)); // smaller differences are rounding errors: a mean of equal values
  const air = varies ? (high - low) * 0.06 : Math.max(Math.abs(low), Math.abs(high)) * 0.1 || 1;
  return [low >= 0 && low - air < 0 ? Math.min(0, low) - air * 0.3 : low - air, high + air];
}

/** Tick labels of a y-axis with the fewest digits that distinguish them; null is a tick without a label. */
export function labels(marks, log) {
  const known = marks.filter((mark) => mark !== null), size = Math.max(...known.map(Math.abs));
  const digits = Math.max(0, ...known.map((mark) => {
    const [mantissa, exponent] = Number(mark.toPrecision(6)).toExponential().split("e");
    return (mantissa.split(".")[1] || "").length - exponent;
  }));
  return marks.map((mark) => {
    if (mark === null || (log && Number(mark.toPrecision(1)) !== Number(mark.toPrecision(6)))) return ""; // the end of the scale
    if (log ? mark < 1e-3 : size < 0.1 && digits > 4) return mark ? Number(mark.toPrecision(2)).toExponential() : "0";
    if (log ? mark >= 1e4 : size >= 1e4) return count(mark);
    return log ? String(Number(mark.toPrecision(3))) : mark.toFixed(digits);
  });
}

/** The value of each series at x, or its last one: [{...series, value, x, there}]. */
function told(state, x) {
  return (state?.series || []).map((one) => {
    const all = one.points.x, i = x === null ? all.length - 1 : nearest(all, x), there = x === null || !beyond(all, x);
    return { ...one, there, value: there ? (one.members ? one.line : one.points.y)[i] : null, x: all[i] };
  });
}

/** Index of the x that is nearest to `at`; x rises. -1 if there is none. */
function nearest(x, at) {
  if (!x.length) return -1;
  let low = 0, high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] < at) low = middle; else high = middle;
  }
  return Math.abs(x[low] - at) <= Math.abs(x[high] - at) ? low : high;
}

/** Whether `at` is farther beyond a curve's ends than the distance of its points there: then it has no value. */
function beyond(x, at) {
  const last = x.length - 1;
  if (last < 1) return false;
  return at < x[0] - (x[1] - x[0]) || at > x[last] + (x[last] - x[last - 1]);
}

function keys(event, it, hooks) {
  if (!it.state || event.ctrlKey || event.metaKey || event.altKey) return;
  const { low, high, series } = it.state, points = series.flatMap((s) => s.points.x).filter((x) => x >= low && x <= high);
  const at = it.at === null ? high : it.at, width = high - low;
  const pick = (fits, best) => points.filter(fits).reduce((one, other) => (one === null ? other : best(one, other)), null) ?? at;
  const go = (x) => { it.at = x; hooks.mark(x); }; // the next key press may precede the next frame
  const moves = {
    ArrowLeft: () => go(event.shiftKey ? Math.max(low, at - width / 10) : pick((x) => x < at, Math.max)),
    ArrowRight: () => go(event.shiftKey ? Math.min(high, at + width / 10) : pick((x) => x > at, Math.min)),
    Home: () => go(low), End: () => go(high),
    "+": () => hooks.zoom(Math.max(low, at - width / 4), Math.min(high, at + width / 4)),
    "-": () => hooks.zoom(low - width / 2, high + width / 2),
    0: () => hooks.reset(), Escape: () => hooks.reset(),
  };
  const act = moves[event.key === "=" ? "+" : event.key];
  if (!act) return;
  event.preventDefault();
  act();
}
