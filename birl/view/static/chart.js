// One chart on a canvas: axes, lines with what is behind them, a mark at an x, zoom by dragging.
import { el, fill, visible } from "./dom.js";
import { exact, figure } from "./figures.js";
import { AXES, labels, linear, logarithmic } from "./ticks.js";

const LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20, HEIGHT = 190, DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const LISTED = 12; // runs at the pointer

/** Colours as the canvas wants them, by name of the custom property; asked for again when the theme changes. */
export function palette() {
  const probe = el("span", { hidden: true });
  document.body.append(probe);
  const found = {};
  for (const name of ["bg", "fg", "muted", "line", "grid", "accent", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"]) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}

/** The colour and dash of the i-th run: eight colours, then the same with dashes. */
export const look = (i) => ({ color: `c${(i % 8) + 1}`, dash: DASHES[Math.floor(i / 8) % DASHES.length] });

/** it: what the server tells of the figure. hooks: mark(x or null), zoom(low, high), reset(). Returns {element, draw, mark, width}. */
export function chart({ name, heading, about }, hooks) {
  const lines = el("canvas", { "aria-hidden": "true" }), over = el("canvas", {
    role: "slider", tabindex: "0", "aria-label": `${visible(heading)}: value at`, "aria-valuemin": "0", "aria-valuemax": "0",
    "aria-valuenow": "0", "aria-valuetext": "no values",
  });
  const values = el("span", { class: "values" }), note = el("p", { class: "empty muted small", hidden: true });
  const tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const element = el("figure", { class: "chart" },
    el("figcaption", {}, el("h3", {}, el("bdi", {}, visible(heading))),
      el("p", { class: "about muted small" }, about, name === heading ? null : [" ", el("code", {}, visible(name))]), values),
    el("div", { class: "plot" }, lines, over, note, tip));
  const it = { state: null, scale: null, at: null, drag: null };

  function draw(state) {
    it.state = state;
    it.scale = scaled(state, element.clientWidth);
    note.hidden = Boolean(it.scale.y);
    note.textContent = state.series.some((s) => s.points.x.length) ? "No values above 0: a log scale cannot show them."
      : "No values here.";
    const pen = sheet(lines, it.scale);
    if (it.scale.y) {
      axes(pen, it.scale, state);
      for (const series of state.series) curve(pen, it.scale, series, state.colors);
    }
    overlay();
    tell();
  }

  function overlay() {
    const pen = sheet(over, it.scale), { state, scale } = it;
    if (!scale.y) return;
    if (it.drag) {
      pen.fillStyle = state.colors.accent;
      pen.globalAlpha = 0.15;
      pen.fillRect(Math.min(it.drag.from, it.drag.to), TOP, Math.abs(it.drag.to - it.drag.from), scale.bottom - TOP);
      pen.globalAlpha = 1;
    }
    if (it.at === null || it.at < state.low || it.at > state.high) return;
    pen.strokeStyle = state.colors.muted;
    pen.beginPath();
    pen.moveTo(Math.round(scale.x(it.at)) + 0.5, TOP);
    pen.lineTo(Math.round(scale.x(it.at)) + 0.5, scale.bottom);
    pen.stroke();
  }

  /** found: [{look, label, value}] at x, or the last ones where x is null. */
  function mark(x, found, where) {
    it.at = x;
    const room = Math.max(1, Math.floor(x === null ? element.clientWidth / 60 : (element.clientWidth - 60) / 75)), more = found.length - room, say = x === null ? figure : exact;
    fill(values, where ? el("span", { class: "where" }, where) : null, found.slice(0, room).map((one) => el("span",
      { title: visible(one.label) }, el("i", { class: "dot", style: { background: `var(--${one.color})` } }), say(one.value))),
      more > 0 ? el("span", {}, `+${more}`) : null);
    const said = found.map((one) => `${visible(one.label)} ${say(one.value)}`).join(", ");
    over.setAttribute("aria-valuetext", `${where || "last"}: ${said || "no values"}`);
    if (x !== null) over.setAttribute("aria-valuenow", String(x));
    hint(x, found, where);
    if (it.scale) overlay();
  }

  /** What is at x, with names, beside the pointer. */
  function hint(x, found, where) {
    tip.hidden = x === null || !found.length || !it.scale?.y || !(over.matches(":hover") || over.matches(":focus-visible"));
    if (tip.hidden) return;
    fill(tip, el("b", {}, visible(heading)), el("div", { class: "muted" }, where), found.slice(0, LISTED).map((one) => el("div", { class: "one" },
      el("i", { class: "dot", style: { background: `var(--${one.color})` } }), el("bdi", {}, visible(one.label)), el("b", {}, figure(one.value)))),
      found.length > LISTED ? el("div", { class: "muted" }, `and ${found.length - LISTED} more`) : null);
    const at = it.scale.x(x), left = at > it.scale.width / 2 ? at - tip.offsetWidth - 12 : at + 12;
    tip.style.left = `${Math.max(0, Math.min(left, it.scale.width - tip.offsetWidth))}px`;
  }

  function tell() {
    over.setAttribute("aria-valuemin", String(it.state.low));
    over.setAttribute("aria-valuemax", String(it.state.high));
  }

  const place = (event) => {
    const x = event.clientX - over.getBoundingClientRect().left;
    return Math.max(LEFT, Math.min(it.scale.width - RIGHT, x));
  };
  over.addEventListener("pointerdown", (event) => {
    if (event.button || !it.scale) return;
    it.drag = { from: place(event), to: place(event) };
    over.setPointerCapture(event.pointerId);
  });
  over.addEventListener("pointermove", (event) => {
    if (!it.scale) return;
    if (it.drag) it.drag.to = place(event);
    hooks.mark(it.scale.back(place(event)));
  });
  const drop = (event) => {
    const drag = it.drag;
    it.drag = null;
    if (drag && event.type === "pointerup" && Math.abs(drag.to - drag.from) > 5) {
      hooks.zoom(...[it.scale.back(drag.from), it.scale.back(drag.to)].sort((a, b) => a - b));
    } else if (it.scale) overlay();
  };
  over.addEventListener("pointerup", drop);
  over.addEventListener("pointercancel", drop);
  over.addEventListener("pointerleave", () => { if (!it.drag) hooks.mark(null); });
  over.addEventListener("dblclick", () => hooks.reset());
  over.addEventListener("keydown", (event) => keys(event, it, hooks));
  over.addEventListener("blur", () => hooks.mark(null));
  return { element, draw, mark, get state() { return it.state; } };
}

function keys(event, it, hooks) {
  if (!it.state || event.ctrlKey || event.metaKey || event.altKey) return;
  const { low, high, series } = it.state, points = series.flatMap((s) => s.points.x).filter((x) => x >= low && x <= high);
  const at = it.at === null ? high : it.at, width = high - low;
  const pick = (fits, best) => { const found = points.filter(fits); return found.length ? best(...found.slice(0, 1e5)) : at; };
  const go = (x) => { it.at = x; hooks.mark(x); }; // the next key may come before the next frame is drawn
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

/** A canvas of the right size, empty, in CSS pixels. */
function sheet(canvas, scale) {
  const dense = devicePixelRatio || 1, wide = Math.round(scale.width * dense), tall = Math.round(HEIGHT * dense);
  if (canvas.width !== wide || canvas.height !== tall) [canvas.width, canvas.height] = [wide, tall];
  const pen = canvas.getContext("2d");
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  pen.clearRect(0, 0, scale.width, HEIGHT);
  return pen;
}

function scaled(state, width) {
  const right = Math.max(width - RIGHT, LEFT + 10), bottom = HEIGHT - BOTTOM, wide = state.high - state.low || 1;
  const x = (value) => LEFT + ((value - state.low) / wide) * (right - LEFT);
  const back = (pixel) => state.low + ((pixel - LEFT) / (right - LEFT)) * wide;
  const range = reach(state), scale = { width, right, bottom, x, back, y: null };
  if (!range) return scale;
  const [low, high] = state.log ? range.map(Math.log10) : range;
  scale.range = range;
  scale.y = (value) => bottom - (((state.log ? Math.log10(value) : value) - low) / (high - low)) * (bottom - TOP);
  return scale;
}

/** Lowest and highest value that is seen, with some air; null where there is nothing to show. */
function reach({ series, log, low: left, high: right }) {
  let low = Infinity, high = -Infinity;
  for (const { points, line, raw } of series) {
    for (const values of [line, raw, points.min, points.max]) {
      (values || []).forEach((value, i) => {
        if (points.x[i] < left || points.x[i] > right || (log && value <= 0)) return;
        if (value < low) low = value;
        if (value > high) high = value;
      });
    }
  }
  if (low > high) return null;
  if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  const varies = high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)); // less is rounding: a mean of equal values
  const air = varies ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - air < 0 ? Math.min(0, low) - air * 0.3 : low - air, high + air];
}

function axes(pen, scale, state) {
  const axis = AXES[state.axis], [low, high] = scale.range;
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  pen.lineWidth = 1;
  const across = (state.log ? logarithmic : linear)(low, high, 5), words = labels(across);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  across.forEach((value, i) => {
    const y = Math.round(scale.y(value)) + 0.5;
    stroke(pen, state.colors.grid, [[LEFT, y], [scale.right, y]]);
    pen.fillStyle = state.colors.muted;
    pen.fillText(state.log ? labels([value])[0] : words[i], LEFT - 6, y);
  });
  stroke(pen, state.colors.line, [[LEFT, scale.bottom + 0.5], [scale.right, scale.bottom + 0.5]]);
  pen.textBaseline = "top";
  const ticks = axis.ticks(state.low, state.high, Math.max(2, Math.floor((scale.right - LEFT) / 80)));
  for (const value of ticks) {
    const x = Math.round(scale.x(value)) + 0.5, word = axis.text(value), half = pen.measureText(word).width / 2;
    stroke(pen, state.colors.line, [[x, scale.bottom], [x, scale.bottom + 4]]);
    pen.textAlign = "center";
    pen.fillStyle = state.colors.muted;
    pen.fillText(word, Math.min(x, scale.width - half), scale.bottom + 6);
  }
}

function curve(pen, scale, { points, line, raw, color, dash }, colors) {
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, TOP - 2, scale.right - LEFT, scale.bottom - TOP + 4);
  pen.clip();
  pen.lineJoin = "round";
  if (points.min) {
    pen.fillStyle = colors[color];
    pen.globalAlpha = 0.16;
    const up = path(scale, points.x, points.max), down = path(scale, points.x, points.min).reverse();
    pen.beginPath();
    [...up, ...down].forEach(([x, y]) => pen.lineTo(x, y));
    pen.fill();
  }
  if (raw) {
    pen.globalAlpha = 0.3;
    stroke(pen, colors[color], path(scale, points.x, raw));
  }
  pen.globalAlpha = 1;
  pen.lineWidth = 1.6;
  pen.setLineDash(dash);
  const main = path(scale, points.x, line);
  stroke(pen, colors[color], main);
  if (main.length <= 40) {
    pen.fillStyle = colors[color];
    for (const [x, y] of main) {
      pen.beginPath();
      pen.arc(x, y, 2.2, 0, 7);
      pen.fill();
    }
  }
  pen.restore();
}

/** On a log scale values up to 0 have no place and are passed over. */
function path(scale, x, y) {
  const found = [];
  for (let i = 0; i < x.length; i++) {
    const at = scale.y(y[i]);
    if (Number.isFinite(at)) found.push([scale.x(x[i]), at]);
  }
  return found;
}

function stroke(pen, color, places) {
  pen.strokeStyle = color;
  pen.beginPath();
  for (const [x, y] of places) pen.lineTo(x, y);
  pen.stroke();
}
