// What is where on the canvas of the timeline: laid out, drawn, and found again under the pointer.
import { palette } from "./chart.js";
import { visible } from "./dom.js";

export const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const KNOWN = { // what has a colour of its own; waits are hatched besides
  train: "--c1", generate: "--c3", load: "--c7", sync: "--c7", validate: "--c5", checkpoint: "--c4", group: "--c6",
  idle: "--c8", other: "--c8", started: "--c8", engine: "--c3", "wait:rollout": "--c2", "wait:engines": "--c7",
};
const HEAD = 20, LANE = 18, ROW = 7, CROWD = 34, GAP = 3, STRIP = 54, AXIS = 22;

export function colour(what) {
  return KNOWN[what] || (what.startsWith("wait:") ? "--c2" : "--c8");
}

const waits = (what) => what.startsWith("wait:");

/** Gives the canvas its size and state.boxes: what is drawn from which y to which. Returns a sentence about it. */
export function layout(canvas, state) {
  const boxes = [{ kind: "axis", y: 0, height: AXIS }];
  let y = AXIS;
  const put = (box) => { boxes.push({ ...box, y }); y += box.height + GAP; };
  if (state.data.steps.length) {
    put({ kind: "head", text: "learner, share of each step", height: HEAD - GAP });
    put({ kind: "steps", height: STRIP });
  }
  for (const process of state.data.processes) {
    put({ kind: "head", text: process.name, height: HEAD - GAP });
    for (const lane of process.lanes) {
      const height = lane.kind === "crowd" ? CROWD : Math.max(LANE, lane.rows * ROW);
      put({ kind: lane.kind, lane, process, height, most: lane.kind === "crowd" ? Math.max(...lane.crowd, 1) : 0 });
    }
  }
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = `${y + 4}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round((y + 4) * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round((y + 4) * ratio);
  }
  state.boxes = boxes;
  return `${state.data.processes.length} processes, ${boxes.filter((box) => box.lane).length} lanes.`;
}

export function draw(canvas, state) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, pen = canvas.getContext("2d");
  const style = getComputedStyle(canvas), ink = palette(), hue = (key) => ink[key.slice(2)];
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, canvas.height / ratio);
  pen.font = `11px ${style.fontFamily}`;
  pen.textBaseline = "middle";
  const scale = width / (state.end - state.begin), x = (t) => (t - state.begin) * scale;
  const tools = { pen, hue, x, width, scale, state, fillOf: filler(pen, hue, ratio) };
  axis(tools, canvas.height / ratio);
  for (const box of state.boxes) {
    if (box.kind === "head") text(tools, box.text, 0, box.y + box.height / 2, "--fg", 600);
    else if (box.kind === "steps") steps(tools, box);
    else if (box.kind === "crowd") crowd(tools, box);
    else if (box.lane) spans(tools, box);
    if (box.lane) label(tools, box.lane.lane, box);
  }
}

/** A colour, or for waits its hatching. */
function filler(pen, hue, ratio) {
  const made = {};
  return (key, hatched) => {
    if (!hatched) return hue(key);
    if (made[key]) return made[key];
    const size = 6, tile = document.createElement("canvas");
    tile.width = tile.height = size * ratio;
    const own = tile.getContext("2d");
    own.scale(ratio, ratio);
    own.globalAlpha = 0.22;
    own.fillStyle = hue(key);
    own.fillRect(0, 0, size, size);
    own.globalAlpha = 0.85;
    own.strokeStyle = hue(key);
    own.lineWidth = 1.4;
    for (const shift of [-size, 0, size]) {
      own.beginPath();
      own.moveTo(shift, size);
      own.lineTo(shift + size, 0);
      own.stroke();
    }
    const pattern = pen.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix([1 / ratio, 0, 0, 1 / ratio, 0, 0]));
    return (made[key] = pattern);
  };
}

function axis({ pen, hue, x, width, state }, height) {
  const step = nice((state.end - state.begin) / Math.max(width / 110, 2));
  pen.strokeStyle = hue("--grid");
  pen.fillStyle = hue("--muted");
  pen.lineWidth = 1;
  for (let n = Math.ceil(state.begin / step); n * step <= state.end; n++) {
    const at = Math.round(x(n * step)) + 0.5, said = stamp(n * step, step);
    pen.beginPath();
    pen.moveTo(at, AXIS - 5);
    pen.lineTo(at, height);
    pen.stroke();
    const room = pen.measureText(said).width;
    pen.fillText(said, Math.min(Math.max(at - room / 2, 0), width - room), 8);
  }
}

function nice(rough) {
  const size = 10 ** Math.floor(Math.log10(rough));
  for (const times of rough >= 20 ? [] : [1, 2, 5, 10]) if (times * size >= rough) return times * size;
  return [30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find((s) => s >= rough)
    || Math.ceil(rough / 86400) * 86400;
}

function stamp(seconds, step) {
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (Math.abs(seconds) < 60 || step < 1) return `${seconds.toFixed(digits)} s`;
  const whole = Math.round(Math.abs(seconds)), two = (n) => String(n).padStart(2, "0");
  const h = Math.floor(whole / 3600), m = Math.floor((whole % 3600) / 60), s = whole % 60;
  return `${seconds < 0 ? "−" : ""}${h ? `${h}:${two(m)}` : m}:${two(s)}`;
}

function text({ pen, hue, state }, said, x, y, key, weight = 400) {
  const font = pen.font;
  pen.font = `${weight} ${font}`;
  pen.fillStyle = hue(key);
  pen.fillText(visible(said), x, y);
  pen.font = font;
}

/** A word over what is drawn, on a bit of the background. */
function label(tools, said, box, right = false) {
  const { pen, hue, width } = tools, room = pen.measureText(said).width + 8, x = right ? width - room : 0;
  pen.globalAlpha = 0.86;
  pen.fillStyle = hue("--bg");
  pen.fillRect(x, box.y, room, 14);
  pen.globalAlpha = 1;
  text(tools, said, x + 4, box.y + 7, "--muted");
}

function shade({ state, fillOf }, what, version) {
  if (state.by === "version" && version >= 0) return fillOf(COLOURS[version % COLOURS.length], waits(what));
  return fillOf(state.by === "version" ? "--c8" : colour(what), waits(what));
}

function spans(tools, box) {
  const { pen, x, width, hue, state } = tools, { lane } = box;
  const rows = box.kind === "nested" ? 1 : lane.rows, high = box.height / rows;
  pen.fillStyle = hue("--grid");
  pen.fillRect(0, box.y, width, box.height);
  if (box.process.bubbles && lane === box.process.lanes.find((its) => its.lane !== "weights")) bubbles(tools, box);
  for (let i = 0; i < lane.start.length; i++) {
    const from = Math.max(x(lane.start[i]), -2), till = Math.min(x(lane.end[i]), width + 2);
    if (till < -1 || from > width + 1) continue;
    const inset = box.kind === "nested" ? Math.min(lane.row[i], 2) * 4 : 0, room = Math.max(till - from, 1);
    const top = box.y + (box.kind === "nested" ? inset : lane.row[i] * high);
    if (inset) { pen.fillStyle = hue("--bg"); pen.fillRect(from, top, room, box.height - inset); }
    if (lane.count[i] > 1) pen.globalAlpha = Math.max(Math.min(lane.seconds[i] / (room / tools.scale), 1), 0.15); // partly idle
    pen.fillStyle = shade(tools, state.data.names[lane.name[i]], lane.version[i]);
    pen.fillRect(from, top, room - (room > 3 ? 0.7 : 0), box.kind === "nested" ? box.height - inset : high - 1);
    pen.globalAlpha = 1;
  }
}

function bubbles(tools, box) {
  const { pen, x, fillOf } = tools, [starts, ends] = box.process.bubbles;
  pen.fillStyle = fillOf("--c8", true);
  for (let i = 0; i < starts.length; i++) pen.fillRect(x(starts[i]), box.y, Math.max(x(ends[i]) - x(starts[i]), 1), box.height);
}

/** How many at once, as heights. Columns are those of the window that was asked for, wherever it lies now. */
function crowd(tools, box) {
  const { pen, x, width, hue, state } = tools, { lane } = box, n = lane.crowd.length;
  const pixel = (state.data.end - state.data.begin) / n, what = state.data.names[lane.name];
  pen.fillStyle = hue("--grid");
  pen.fillRect(0, box.y, width, box.height);
  if (box.process.bubbles) bubbles(tools, box);
  for (let i = 0; i < n; i++) {
    const from = x(state.data.begin + i * pixel), till = x(state.data.begin + (i + 1) * pixel);
    if (!lane.crowd[i] || till < 0 || from > width) continue;
    const high = Math.max((lane.crowd[i] / box.most) * box.height, 1);
    pen.fillStyle = shade(tools, what, lane.version[i]);
    pen.fillRect(from, box.y + box.height - high, till - from + 0.4, high);
  }
  label(tools, `up to ${Math.round(box.most)}`, box, true);
}

const ORDER = ["train", "generate", "sync", "wait:engines", "validate", "checkpoint", "wait:rollout"];

function stacked(step) {
  const place = (what) => (ORDER.includes(what) ? ORDER.indexOf(what) : ORDER.length - 1.5);
  return Object.entries(step.seconds).sort(([a], [b]) => place(a) - place(b));
}

function steps(tools, box) {
  const { pen, x, width, fillOf, hue } = tools;
  pen.fillStyle = hue("--grid");
  pen.fillRect(0, box.y, width, box.height);
  for (const step of tools.state.data.steps) {
    const from = x(step.begin), till = x(step.end);
    if (till < 0 || from > width) continue;
    const all = Math.max(Object.values(step.seconds).reduce((a, b) => a + b, 0), step.end - step.begin, 1e-9);
    let y = box.y + box.height;
    for (const [what, seconds] of stacked(step)) {
      const high = (seconds / all) * box.height;
      pen.fillStyle = fillOf(colour(what), waits(what));
      pen.fillRect(from, y - high, Math.max(till - from - (till - from > 4 ? 1 : 0), 1), high);
      y -= high;
    }
    const said = step.first === step.last ? `${step.first}` : `${step.first}–${step.last}`;
    if (till - from > pen.measureText(said).width + 14) {
      pen.fillStyle = hue("--bg");
      pen.globalAlpha = 0.86;
      pen.fillRect(from + 2, box.y + 2, pen.measureText(said).width + 6, 13);
      pen.globalAlpha = 1;
      text(tools, said, from + 5, box.y + 9, "--fg");
    }
  }
}

/** What lies at a place of the canvas [CSS pixels]: {title, lines}, or null. */
export function spot(state, px, py, width) {
  const box = state.boxes.find((its) => py >= its.y && py < its.y + its.height);
  const t = state.begin + (px / width) * (state.end - state.begin), near = (1.5 / width) * (state.end - state.begin);
  if (!box) return null;
  if (box.kind === "steps") return stepAt(state, t);
  if (box.kind === "crowd") return crowdAt(state, box, t);
  return box.lane ? spanAt(state, box, t, near, py) : null;
}

function spanAt(state, box, t, near, py) {
  const { lane } = box, row = Math.floor((py - box.y) / (box.height / lane.rows));
  let best = -1;
  for (let i = 0; i < lane.start.length; i++) { // the last one is drawn on top
    if (t < lane.start[i] - near || t > lane.end[i] + near) continue;
    if (box.kind === "nested" ? py - box.y < Math.min(lane.row[i], 2) * 4 : lane.row[i] !== row) continue;
    best = i;
  }
  if (best < 0) return null;
  const many = lane.count[best], lines = [`${box.process.name}, ${lane.lane}`, `${seconds(lane.seconds[best])}, from ${lane.start[best].toFixed(3)} s`];
  if (many > 1) lines.push(`${many} spans, closer than a pixel`);
  if (lane.step[best]) lines.push(`step ${lane.step[best]}`);
  if (lane.group[best] >= 0) lines.push(`group ${lane.group[best]}`);
  if (lane.version[best] >= 0) lines.push(`version ${lane.version[best]} of the weights`);
  if (lane.tokens[best] > 0) lines.push(`${lane.tokens[best].toLocaleString("en-US")} tokens, ${Math.round(lane.tokens[best] / Math.max(lane.seconds[best], 1e-6)).toLocaleString("en-US")} a second`);
  return { title: state.data.said[lane.name[best]], lines };
}

function crowdAt(state, box, t) {
  const { lane } = box, place = Math.floor(((t - state.data.begin) / (state.data.end - state.data.begin)) * lane.crowd.length);
  if (!(place in lane.crowd)) return null;
  const lines = [`${box.process.name}, ${lane.lane}`, `${lane.crowd[place].toFixed(1)} at once, at most ${Math.round(box.most)}`];
  if (lane.version[place] >= 0) lines.push(`version ${lane.version[place]} of the weights`);
  return { title: state.data.said[lane.name], lines };
}

function stepAt(state, t) {
  const step = state.data.steps.find((its) => t >= its.begin && t <= its.end);
  if (!step) return null;
  const all = Math.max(step.end - step.begin, 1e-9), said = Object.fromEntries(state.data.names.map((key, i) => [key, state.data.said[i]]));
  return { title: step.first === step.last ? `Step ${step.first}` : `Steps ${step.first} to ${step.last}`,
    lines: [seconds(all), ...stacked(step).reverse().map(([what, its]) => `${((100 * its) / all).toFixed(1)} % ${said[what] || what}`)] };
}

function seconds(value) {
  return value < 0.001 ? `${(value * 1e6).toFixed(0)} µs` : value < 1 ? `${(value * 1e3).toFixed(1)} ms` : `${value.toFixed(3)} s`;
}
