// Rollouts of a run: a search and its list; with row= in the URL, one episode (episode.js).
import { offer } from "./chosen.js";
import { el, fill, keep, name, repeat, say } from "./dom.js";
import { showEpisode } from "./episode.js";
import { short, whole } from "./figures.js";
import { chart, outcome } from "./flags.js";
import { grid } from "./grid.js";

const READY = [ // common searches
  ["right without a digit", "reward >= 1 and not regexp_matches(text, '\\d')"],
  ["truncated", "outcome = 'truncated'"],
  ["longest", "order by tokens desc"],
  ["failed", "outcome not in ('ok', 'truncated')"],
  ["flagged", "len(flags) > 0"],
];
const COLUMNS = [ // name, sort key, class
  ["row", "", "n number"], ["step", "step", "n step"], ["outcome", "", "outcome"], ["reward", "reward", "n"],
  ["tokens", "tokens", "n"], ["flags", "", "marks"], ["prompt", '"group"', "asked"], ["answer", "", "start"],
];
// Seconds between requests to the server: while it is searching, while the run is running, and otherwise.
const SEARCHING = 0.05, WATCHED = 4, ENDED = 60, FAILED = 30;

export async function show(root, params, api) {
  await sheet();
  const run = params.get("run");
  if (!run) return offer(root, api, "Rollouts");
  return params.has("row") ? showEpisode(root, params, api) : list(root, params, api);
}

let styled = null;

/** Load the style sheet of these views, once; resolves when it is loaded, as the list measures its rows. */
function sheet() {
  styled ||= new Promise((done) => {
    document.head.append(el("link", { rel: "stylesheet", href: "/static/rollouts.css", on: { load: done, error: done } }));
  });
  return styled;
}

function list(root, params, api) {
  const it = { api, run: params.get("run"), query: params.get("q") || "", words: params.get("text") || "", turn: 0, done: false, wrong: false };
  const box = (id, label, value, placeholder) => {
    it[id] = el("input", { type: "search", id, value, placeholder, spellcheck: "false", autocomplete: "off", autocapitalize: "off" });
    return el("label", { class: "wide" }, el("span", { class: "unseen" }, label), it[id]);
  };
  const form = el("form", { class: "bar search", role: "search", on: { submit: (e) => { e.preventDefault(); seek(it, it.where.value, it.has.value); } } },
    box("has", "Words of prompt or answer", it.words, "words of prompt or answer"),
    box("where", "Condition in SQL", it.query, "SQL: reward < 0.5 and step > 3 order by tokens desc"), el("button", { type: "submit" }, "Search"));
  it.heads = COLUMNS.map(([label, sort, kind]) => el("div", { role: "columnheader", class: kind },
    sort ? el("button", { type: "button", tabindex: "-1", on: { click: () => sortBy(it, sort) } }, label) : label));
  it.rows = grid("Episodes", it.heads, { page: (first, count) => page(it, first, count), cells, chosen: () => remember(it),
    open: (row, at) => open(it, row, at), failed: (error) => wrong(it, error),
    none: () => (it.wrong ? "" : it.done ? "No matches. Try fewer conditions." : "…") });
  it.place = { title: el("h1", {}, "Rollouts"), problem: el("div", {}), bars: el("div", {}), exports: el("p", { class: "small" }),
    status: el("p", { class: "muted small counts" }), ready: el("div", { class: "bar ready", role: "group", "aria-label": "Ready searches" },
      [...READY, ["all", ""]].map(([label, query]) => el("button", { type: "button", class: "chip", data: { query }, on: { click: () => seek(it, query, query ? it.words : "") } }, label))) };
  const { title, ready, problem, bars, status, exports } = it.place;
  fill(root, title, form, ready, problem, bars, status, it.rows.element, exports,
    el("details", { class: "small muted help" }, el("summary", {}, "How to search, and keys"), helpText()));

  const keys = (event) => slash(it, event), size = () => it.rows.draw();
  document.addEventListener("keydown", keys);
  addEventListener("resize", size);
  it.rows.clear(Number(params.get("at")) || 0);
  it.return = params.has("at"); // to the row in the URL, when it is loaded
  if (it.return) it.rows.element.focus({ preventScroll: true });
  remember(it);
  it.stop = repeat(() => ask(it), WATCHED);
  return () => {
    it.turn += 1; // pending responses are dropped
    it.stop();
    document.removeEventListener("keydown", keys);
    removeEventListener("resize", size);
  };
}

/** A new query. */
function seek(it, query, words = it.words) {
  it.where.value = query;
  it.has.value = words;
  Object.assign(it, { query, words, done: false, wrong: false, return: false });
  it.turn += 1;
  it.rows.clear(0);
  remember(it);
  it.stop();
  it.stop = repeat(() => ask(it), WATCHED);
}

/** URL parameters: the run and its search. */
function address({ run, query, words }) {
  return new URLSearchParams({ run, ...(query && { q: query }), ...(words && { text: words }) });
}

/** Update the URL, and what else depends on the query. */
function remember(it) {
  const now = address(it);
  if (it.rows.at) now.set("at", it.rows.at);
  keep(now);
  const words = address(it);
  fill(it.place.exports, "Export what was found: ", ["jsonl", "csv"].map((form, n) => [n ? " · " : "",
    el("a", { href: `/api/rollouts/export?${words}&format=${form}`, download: "" }, form.toUpperCase())]));
  for (const chip of it.place.ready.children) chip.setAttribute("aria-pressed", String(chip.dataset.query === it.query));
}

const ORDER = /(?:^|\s)order\s+by\s+("?\w+"?)(\s+desc)?[^']*$/i, STEPS = /^step between \d+ and \d+(?: and \((.*)\))?$/s;
const sorted = (query) => ORDER.exec(query) || ["", "", ""];

function sortBy(it, field) {
  const [, by, down] = sorted(it.query);
  seek(it, `${it.query.replace(ORDER, "")} order by ${field}${by === field && down ? "" : " desc"}`.trim());
}

function narrow(it, from, to) {
  const order = sorted(it.query)[0], where = it.query.replace(ORDER, "");
  const others = STEPS.test(where) ? STEPS.exec(where)[1] || "" : where;
  seek(it, `step between ${from} and ${to}${others && ` and (${others})`}${order}`);
}

/** Response of the server to the query; null if it is outdated. */
async function asked(it, words) {
  const { turn } = it, found = await it.api("rollouts", { run: it.run, q: it.query, text: it.words, ...words });
  if (turn !== it.turn) return null;
  if (it.begun !== undefined && found.begun !== it.begun) it.rows.forget(); // a resume cut the file back
  it.begun = found.begun;
  return found;
}

const page = async (it, offset, limit) => (await asked(it, { offset, limit }))?.rows || [];

/** Show the search's progress; returns seconds until the next request. */
async function ask(it) {
  const { turn } = it;
  let found;
  try {
    found = await asked(it, { offset: 0, limit: 1, chart: 1 });
  } catch (error) {
    if (turn === it.turn) wrong(it, error);
    return FAILED;
  }
  if (!found) return SEARCHING;
  const { title, ready, problem, bars, status, exports } = it.place;
  it.wrong = false;
  fill(title, "Rollouts of ", name(found.run));
  fill(problem, found.missing ? el("p", { class: "note" }, found.missing) : null);
  for (const part of [ready, bars, status, it.rows.element, exports]) part.hidden = Boolean(found.missing);
  if (found.missing) return found.running ? WATCHED : ENDED;
  it.done = found.done;
  fill(bars, chart(found.chart, (from, to) => narrow(it, from, to)));
  tell(it, found);
  it.rows.grow(found.total, !sorted(it.query)[1]);
  if (it.return && (found.done || it.rows.at < found.total)) {
    it.return = false;
    it.rows.select(it.rows.at);
  }
  return found.done ? (found.running ? WATCHED : ENDED) : SEARCHING;
}

/** Show an error. If nothing was found yet, the text of the query before is removed. */
function wrong(it, error) {
  it.wrong = true;
  fill(it.place.problem, el("p", { class: "problem", role: "alert" }, error.message));
  if (it.rows.total) return;
  fill(it.place.bars);
  fill(it.place.status);
  it.rows.draw();
}

function tell(it, found) {
  const words = [`${whole(found.total)} of ${whole(found.indexed)} episodes`];
  if (found.indexed_share < 1) words.push(`reading the file: ${Math.floor(100 * found.indexed_share)} %`);
  else if (!found.done) words.push(`searching: ${Math.floor(100 * found.looked_share)} %`);
  const first = found.broken[0];
  fill(it.place.status, words.join(" · "), found.skipped
    ? el("span", { class: "warn" }, ` · ${found.skipped} broken line${found.skipped > 1 ? "s" : ""} passed over, first line ${first.line}: ${first.problem}`)
    : null);
  if (found.done) say(words[0]);
  const [, by, down] = sorted(it.query);
  it.heads.forEach((head, n) => {
    if (COLUMNS[n][1] && by === COLUMNS[n][1]) head.setAttribute("aria-sort", down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
}

function open(it, row, at) {
  const there = address(it);
  there.set("row", row.row);
  there.set("at", at);
  location.hash = `/rollouts?${there}`;
}

function slash(it, event) {
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    event.preventDefault();
    it.has.focus();
  } else if (event.key === "Escape" && (event.target === it.has || event.target === it.where)) {
    event.preventDefault(); // Chromium would empty it
    [it.has.value, it.where.value] = [it.words, it.query];
    it.rows.element.focus();
  }
}

function cells(one) {
  const marks = one.flags.map((flag) => el("span", { class: `mark f-${flag.name}`, title: flag.reason }, flag.name));
  const flat = (text) => el("bdi", {}, text.replace(/\n/g, " ↵ "));
  const asked = el("span", { title: one.task }, flat(one.asked || one.task)); // without a tokenizer the prompt's text is not known
  const values = [whole(one.row), whole(one.step), outcome(one.outcome), short(one.reward), whole(one.tokens), marks, asked, flat(one.text)];
  return values.map((value, n) => el("div", { role: "gridcell", class: COLUMNS[n][2] }, value));
}

function helpText() {
  const rows = [
    ["reward >= 1 and tokens < 50", "numbers: row, step, group (in double quotes, as it is a word of SQL), episode, turns, tokens, prompt_tokens, reward, score, advantage"],
    ["outcome in ('ok', 'truncated')", "names: outcome, source, task"],
    ["len(flags) > 0 and not 'length' in flags", "flags: repetition, length, format, duplicate, unbacked, script"],
    ["prompt ilike '%apples%'", "texts: text (the model's output), prompt, answer (the right one), detail; ilike: in any case"],
    ["regexp_matches(text, '\\d+ apples?', 'i')", "a regular expression"],
    ["reward is null", "an episode that failed has no reward"],
    ["order by tokens desc", "the order; without it the newest step first"],
  ];
  return el("div", {}, el("table", {}, el("tbody", {}, rows.map(([term, what]) => el("tr", {}, el("td", {}, el("code", {}, term)), el("td", {}, what))))),
    el("p", {}, "Keys: / search · j k ↓ ↑ move · Enter open · in an episode: j k next and previous, ← → tokens, Escape back."));
}
