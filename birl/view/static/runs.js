// The list of runs: sorted by any column, chosen for curves and comparison.
import { el, fill, name, repeat, visible } from "./dom.js";
import { count, duration, figure } from "./figures.js";

const EVERY = 5; // s between questions to the server
const COLUMNS = [ // key, heading, what it sorts by, number?
  ["name", "run", (run) => run.name.toLowerCase()],
  ["state", "state", (run) => run.state],
  ["step", "steps", (run) => run.step, true],
  ["last", "last reward", (run) => run.last, true],
  ["validation", "best validation", (run) => run.validation?.value, true],
  ["seconds", "time", (run) => run.seconds, true],
  ["model", "model", (run) => run.model],
  ["algorithm", "algorithm", (run) => run.algorithm],
  ["changed", "written", (run) => run.changed, true],
];

export async function show(root, params, api) {
  const it = { runs: [], chosen: new Set(params.getAll("run")), by: "changed", down: true, find: "" };
  [it.note, it.place] = [el("p", { class: "muted small", id: "chosen" }), el("div", {})];
  const go = (path, words) => el("button", { type: "button", disabled: true, on: { click: () => {
    location.hash = `#/${path}?${new URLSearchParams([...it.chosen].map((id) => ["run", id]))}`;
  } } }, words);
  it.buttons = [go("curves", "Show curves"), go("compare", "Compare")];
  const find = el("input", { type: "search", id: "find", placeholder: "name, model, algorithm", on: { input: (e) => { it.find = e.target.value.toLowerCase(); draw(it); } } });
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

/** Runs without the value come last, whichever way it is sorted. */
function compare(a, b, down) {
  const [without, other] = [a, b].map((value) => value === null || value === undefined || value === "");
  if (without || other) return without - other;
  const order = a < b ? -1 : a > b ? 1 : 0;
  return down ? -order : order;
}

function head(it, [key, words, , number]) {
  const now = it.by === key;
  return el("th", { scope: "col", class: number ? "n" : null, "aria-sort": now ? (it.down ? "descending" : "ascending") : null },
    el("button", { type: "button", data: { key: `sort-${key}` }, on: { click: () => {
      it.down = now ? !it.down : Boolean(number);
      it.by = key;
      draw(it);
    } } }, words));
}

function row(it, run) {
  const best = run.validation, query = `run=${run.id}`;
  const pick = el("input", { type: "checkbox", checked: it.chosen.has(run.id), data: { key: `pick-${run.id}` }, "aria-label": `Choose ${visible(run.name)}`, on: { change: (e) => {
    if (e.target.checked) it.chosen.add(run.id); else it.chosen.delete(run.id);
    told(it);
  } } });
  return el("tr", {},
    el("td", {}, pick),
    el("th", { scope: "row" }, el("a", { href: `#/curves?${query}`, data: { key: `run-${run.id}` } }, name(run.name)),
      el("div", { class: "more small" }, el("a", { href: `#/rollouts?${query}` }, "rollouts"), " ", el("a", { href: `#/timeline?${query}` }, "timeline")),
      run.problem ? el("div", { class: "small bad" }, "config.json cannot be read") : null),
    el("td", {}, el("span", { class: `state ${run.state}` }, run.state)),
    el("td", { class: "n" }, count(run.step), run.total ? el("span", { class: "muted" }, ` / ${count(run.total)}`) : null),
    el("td", { class: "n" }, figure(run.last), run.headline === "loss" && run.last !== null ? el("span", { class: "muted" }, " loss") : null),
    el("td", { class: "n" }, best ? [figure(best.value), el("span", { class: "muted" }, ` at ${count(best.step)}`)] : "–"),
    el("td", { class: "n" }, duration(run.seconds)),
    el("td", {}, name(run.model || "–")), el("td", {}, name(run.algorithm || "–")),
    el("td", { class: "n muted" }, run.changed ? ago(run.changed) : "–"));
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
