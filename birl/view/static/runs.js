// The list of runs: sortable by any column, with a selection for curves and comparison.
import { report } from "./chosen.js";
import { el, fill, name, repeat, visible } from "./dom.js";
import { count, duration, figure } from "./figures.js";

const EVERY = 5; // s between requests to the server
const COLUMNS = [ // key, heading, sort key, number?
  ["name", "run", (run) => run.name.toLowerCase()],
  ["state", "state", (run) => run.state],
  ["step", "steps", (run) => run.step, true],
  ["reward", "reward or loss", (run) => run.reward, true],
  ["best", "best validation", (run) => run.best, true],
  ["seconds", "time", (run) => run.seconds, true],
  ["model", "model", (run) => run.model],
  ["algorithm", "algorithm", (run) => run.algorithm],
  ["updated", "written", (run) => run.updated, true],
];

export async function show(root, params, api) {
  const it = { runs: [], chosen: new Set(params.getAll("run")), by: "updated", down: true, find: "" };
  [it.note, it.place] = [el("p", { class: "muted small", id: "chosen" }), el("div", {})];
  const go = (path, words) => el("button", { type: "button", disabled: true, on: { click: () => {
    location.hash = `#/${path}?${new URLSearchParams([...it.chosen].map((id) => ["run", id]))}`;
  } } }, words);
  it.buttons = [go("curves", "Show curves"), go("compare", "Compare")];
  const find = el("input", { type: "search", id: "find", placeholder: "name, model, algorithm", size: "24", on: { input: (e) => { it.find = e.target.value.toLowerCase(); draw(it); } } });
  fill(root, el("h1", {}, "Runs"), el("div", { class: "bar" }, el("label", { for: "find" }, "filter", find), it.buttons, it.note), it.place);
  let last = "";
  return repeat(async () => {
    const answer = await api("runs");
    const now = JSON.stringify(answer);
    if (now === last) return;
    last = now;
    [it.runs, it.folders] = [answer.runs, answer.folders];
    draw(it);
  }, EVERY);
}

function draw(it) {
  if (!it.folders) return; // nothing is known yet
  const focused = document.activeElement?.dataset?.key;
  const order = COLUMNS.find(([key]) => key === it.by)[2];
  const fits = (run) => [run.name, run.model, run.algorithm, run.state].join(" ").toLowerCase().includes(it.find);
  const shown = it.runs.filter(fits).sort((a, b) => compare(order(a), order(b), it.down));
  if (!it.runs.length) fill(it.place, empty(it.folders));
  else fill(it.place, el("div", { class: "scroll", role: "region", "aria-label": "Runs", tabindex: "0" }, el("table", { class: "runs" },
    el("thead", {}, el("tr", {}, el("td", {}), COLUMNS.map((column) => head(it, column)))), el("tbody", {}, shown.map((run) => row(it, run))))),
  shown.length ? null : el("p", { class: "note" }, "No run fits the filter."));
  if (focused) it.place.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  told(it);
}

const empty = (folders) => el("div", { class: "note" }, el("p", {}, `No runs yet below ${folders.map(visible).join(", ")}.`),
  el("p", {}, "Start one in a terminal, and it appears here: ", el("code", {}, "birl rl data.train=my.jsonl")));

/** Runs without the value come last in both directions. */
function compare(a, b, down) {
  const [without, other] = [a, b].map((value) => value === null || value === undefined || value === "");
  if (without || other) return without - other;
  const order = a < b ? -1 : a > b ? 1 : 0;
  return down ? -order : order;
}

function head(it, [key, words, , number]) {
  const now = it.by === key;
  return el("th", { scope: "col", class: number ? "n" : null, data: { column: key }, "aria-sort": now ? (it.down ? "descending" : "ascending") : null },
    el("button", { type: "button", data: { key: `sort-${key}` }, on: { click: () => {
      it.down = now ? !it.down : Boolean(number);
      it.by = key;
      draw(it);
    } } }, words));
}

function row(it, run) {
  const query = `run=${run.id}`;
  const pick = el("input", { type: "checkbox", checked: it.chosen.has(run.id), data: { key: `pick-${run.id}` }, "aria-label": `Choose ${visible(run.name)}`, on: { change: (e) => {
    if (e.target.checked) it.chosen.add(run.id); else it.chosen.delete(run.id);
    told(it);
  } } });
  return el("tr", {},
    el("td", {}, pick),
    el("th", { scope: "row" }, el("a", { href: `#/curves?${query}`, data: { key: `run-${run.id}` } }, name(run.name)),
      el("div", { class: "more small" }, el("a", { href: `#/rollouts?${query}` }, "rollouts"), " ", el("a", { href: `#/waiting?${query}` }, "waiting"), " ", report(run.id)),
      run.problem ? el("div", { class: "small bad" }, "config.json cannot be read") : null),
    cell("state", el("span", { class: `state ${run.state}` }, run.state)),
    cell("step", el("span", {}, count(run.step), run.total ? el("span", { class: "muted" }, ` / ${count(run.total)}`) : null), progress(run)),
    cell("reward", el("span", {}, figure(run.reward), run.reward === null ? null : el("span", { class: "muted" }, run.headline === "loss" ? " loss" : " reward")), spark(run)),
    cell("best", run.best === null ? "–" : [figure(run.best), el("span", { class: "muted" }, ` at ${count(run.best_step)}`)]),
    cell("seconds", duration(run.seconds)),
    cell("model", name(run.model || "–")), cell("algorithm", name(run.algorithm || "–")),
    cell("updated", run.updated ? ago(run.updated) : "–"));
}

/** A cell that shows its column's name on narrow screens. */
function cell(key, ...inside) {
  const [, words, , number] = COLUMNS.find(([one]) => one === key);
  return el("td", { class: number ? "n" : null, data: { column: key, words } }, inside);
}

const progress = (run) => (run.total ? el("progress", { max: String(run.total), value: Math.min(run.step, run.total), "aria-label": `Steps of ${visible(run.name)}` }) : null);

/** Sparkline of the reward or loss, scaled to its range. */
function spark(run) {
  const points = run.curve || [], [wide, high] = [96, 18];
  if (points.length < 2) return null;
  const ends = (values) => [Math.min(...values), Math.max(...values)], [[left, right], [low, top]] = [0, 1].map((n) => ends(points.map((point) => point[n])));
  const x = (step) => (1 + ((step - left) / (right - left || 1)) * (wide - 2)).toFixed(1), y = (value) => (top > low ? high - 2 - ((value - low) / (top - low)) * (high - 4) : high / 2).toFixed(1);
  const [box, line] = ["svg", "polyline"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  const words = `${run.headline === "loss" ? "loss" : "reward"} from ${figure(points[0][1])} to ${figure(points.at(-1)[1])}`;
  for (const [key, value] of Object.entries({ class: "spark", viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": words })) box.setAttribute(key, value);
  line.setAttribute("points", points.map(([step, value]) => `${x(step)},${y(value)}`).join(" "));
  box.append(line);
  return box;
}

function ago(seconds) {
  const day = (date) => date.toLocaleDateString("en-CA"), then = new Date(seconds * 1000);
  return day(then) === day(new Date()) ? then.toTimeString().slice(0, 5) : day(then);
}

function told(it) {
  const known = new Set(it.runs.map((run) => run.id));
  for (const id of it.chosen) if (!known.has(id)) it.chosen.delete(id);
  it.buttons.forEach((button) => { button.disabled = !it.chosen.size; });
  it.note.textContent = it.chosen.size ? `${it.chosen.size} of ${it.runs.length} chosen` : `${it.runs.length} runs; choose some to see them together`;
}
