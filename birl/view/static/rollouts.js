// Rollouts of a run: a search and its list; with row= in the address, one episode (episode.js).
import { el, fill, keep, name, repeat, say } from "./dom.js";
import { chart } from "./flags.js";
import { showEpisode } from "./episode.js";

const READY = [ // what people look for first
  ["right without a digit", "reward>=1 -/\\d/"],
  ["truncated", "outcome:truncated"],
  ["longest", "sort:-tokens"],
  ["failed", "-outcome:ok,truncated"],
  ["flagged", "flag:any"],
];
const COLUMNS = [ // name, what it sorts by, class
  ["row", "", "n number"], ["step", "step", "n step"], ["task", "group", "task"], ["outcome", "", "outcome"], ["reward", "reward", "n"],
  ["tokens", "tokens", "n"], ["flags", "", "marks"], ["answer", "", "start"],
];
const PAGE = 100; // rows of one question
const TALLEST = 8e6; // px; browsers cannot make a box as high as a million rows

export async function show(root, params, api) {
  await sheet();
  const run = params.get("run");
  if (!run) return choose(root, api);
  return params.has("row") ? showEpisode(root, params, api) : list(root, params, api);
}

let styled = null;

/** The sheet of these views, once; done when it is there, as the list measures its rows. */
function sheet() {
  styled ||= new Promise((done) => {
    document.head.append(el("link", { rel: "stylesheet", href: "/static/rollouts.css", on: { load: done, error: done } }));
  });
  return styled;
}

async function choose(root, api) {
  const { runs } = await api("runs");
  fill(root, el("h1", {}, "Rollouts"),
    runs.length ? el("p", {}, "Of which run?") : el("p", { class: "note" }, "There are no runs here yet."),
    el("ul", {}, runs.map((run) => el("li", {}, el("a", { href: `#/rollouts?run=${run.id}` }, name(run.name))))));
  return null;
}

export function figure(value, digits = 3) {
  return value === null || value === undefined ? "–" : String(Number(value.toPrecision(digits))).replace("-", "−");
}

export function whole(value) {
  return value.toLocaleString("en").replace(/,/g, "\u2009");
}

function list(root, params, api) {
  const run = params.get("run");
  const state = { query: params.get("q") || "", total: 0, at: Number(params.get("at") || 0), pages: new Map(), asked: new Set(), turn: 0, done: false };
  let rowHeight = 0;

  const input = el("input", { type: "search", id: "query", value: state.query, spellcheck: "false",
    autocomplete: "off", autocapitalize: "off", placeholder: "reward>=1 -/\\d/ outcome:ok step:10..20 flag:repetition" });
  const form = el("form", { class: "bar search", role: "search", on: { submit: (e) => { e.preventDefault(); seek(input.value); } } },
    el("label", { class: "wide" }, el("span", { class: "unseen" }, "Search"), input),
    el("button", { type: "submit" }, "Search"));
  const ready = el("div", { class: "bar ready", role: "group", "aria-label": "Ready searches" },
    READY.map(([label, query]) => el("button", { type: "button", class: "chip", on: { click: () => seek(query) } }, label)),
    el("button", { type: "button", class: "chip", on: { click: () => seek("") } }, "all"));
  const title = el("h1", {}, "Rollouts");
  const status = el("p", { class: "muted small counts" });
  const problem = el("div", {});
  const bars = el("div", {});
  const heads = COLUMNS.map(([label, sort, kind]) => el("div", { role: "columnheader", class: kind },
    sort ? el("button", { type: "button", tabindex: "-1", on: { click: () => sortBy(sort) } }, label) : label));
  const space = el("div", { class: "space", role: "presentation" });
  const body = el("div", { class: "rows", role: "rowgroup" }, space);
  const grid = el("div", { class: "grid", role: "grid", tabindex: "0", "aria-label": "Episodes", "aria-rowcount": "1",
    on: { scroll: draw, keydown: key, click, dblclick: () => open(state.at) } },
    el("div", { role: "rowgroup", class: "heads" }, el("div", { role: "row", class: "row", "aria-rowindex": "1" }, heads)), body);
  const exports = el("p", { class: "small" });
  const help = el("details", { class: "small muted help" }, el("summary", {}, "How to search, and keys"), helpText());
  fill(root, title, form, ready, problem, bars, status, grid, exports, help);

  /** A new query. */
  function seek(query) {
    input.value = query;
    Object.assign(state, { query, at: 0, total: 0, pages: new Map(), asked: new Set(), done: false });
    state.turn += 1;
    grid.scrollTop = 0;
    remember();
    draw();
    again();
  }

  function remember() {
    const now = new URLSearchParams({ run });
    if (state.query) now.set("q", state.query);
    if (state.at) now.set("at", state.at);
    keep(now);
    const words = new URLSearchParams({ run, q: state.query });
    fill(exports, "Export what was found: ", ["jsonl", "csv"].map((form, n) => [n ? " · " : "",
      el("a", { href: `/api/rollouts/export?${words}&format=${form}`, download: "" }, form.toUpperCase())]));
    for (const chip of ready.children) {
      const query = (READY.find(([label]) => label === chip.textContent) || ["", ""])[1];
      chip.setAttribute("aria-pressed", String(query === state.query));
    }
  }

  function sortBy(field) {
    const word = /(?:^|\s)sort:(-?)(\w+)/.exec(state.query);
    const down = word && word[2] === field && word[1] ? "" : "-";
    seek(`${state.query.replace(/(?:^|\s)sort:\S+/, "")} sort:${down}${field}`.trim());
  }

  /** How far the search is; seconds until the next question. */
  async function ask() {
    const turn = state.turn;
    let found;
    try {
      found = await api("rollouts", { run, q: state.query, offset: 0, limit: 1, chart: 1 });
    } catch (error) {
      if (turn === state.turn) {
        fill(problem, el("p", { class: "problem", role: "alert" }, error.message));
        state.total = 0;
        draw();
      }
      return 30;
    }
    if (turn !== state.turn) return 0.01;
    fill(problem, found.missing ? el("p", { class: "note" }, found.missing) : null);
    for (const part of [ready, bars, status, grid, exports]) part.hidden = Boolean(found.missing);
    if (found.missing) {
      fill(title, "Rollouts of ", name(found.run));
      return found.running ? 4 : 60;
    }
    const grown = found.total !== state.total;
    Object.assign(state, { total: found.total, done: found.done });
    if (grown) {
      for (const [page, rows] of state.pages) if (rows.length < PAGE || !found.done || /sort:/.test(state.query)) state.pages.delete(page);
      if (state.at >= state.total) state.at = Math.max(0, state.total - 1);
    }
    fill(bars, chart(found.chart, (from, to) => seek(`${state.query.replace(/(?:^|\s)step:\S+/, "")} step:${from}..${to}`.trim())));
    fill(title, "Rollouts of ", name(found.run));
    tell(found);
    draw();
    return found.done ? (found.running ? 4 : 60) : 0.05;
  }

  function tell(found) {
    const words = [`${whole(found.total)} of ${whole(found.indexed)} episodes`];
    if (found.indexed_share < 1) words.push(`reading the file: ${Math.floor(100 * found.indexed_share)} %`);
    else if (!found.done) words.push(`searching: ${Math.floor(100 * found.looked_share)} %`);
    if (found.slow) words.push(`${found.slow} answers not looked at: the expression took too long`);
    const first = found.broken[0];
    fill(status, words.join(" · "), found.skipped
      ? el("span", { class: "warn" }, ` · ${found.skipped} broken line${found.skipped > 1 ? "s" : ""} passed over, first line ${first.line}: ${first.problem}`)
      : null);
    if (found.done) say(words[0]);
    grid.setAttribute("aria-rowcount", String(found.total + 1));
    heads.forEach((head, n) => {
      const field = COLUMNS[n][1], word = /(?:^|\s)sort:(-?)(\w+)/.exec(found.query);
      if (field && word && word[2] === field) head.setAttribute("aria-sort", word[1] ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }

  /** Rows that can be seen. Where all would be too high for a browser, the way of the scroll bar stands for more. */
  function draw() {
    rowHeight = parseFloat(getComputedStyle(grid).getPropertyValue("--row")) || 28;
    const high = state.total * rowHeight, boxed = Math.min(high, TALLEST);
    space.style.setProperty("height", `${boxed}px`);
    const view = grid.clientHeight || 400;
    const slack = Math.max(1, boxed - view), way = Math.min(1, grid.scrollTop / slack);
    const top = high > TALLEST ? way * (high - view) : grid.scrollTop; // px in the list of all rows
    const first = Math.max(0, Math.floor(top / rowHeight) - 6);
    const last = Math.min(state.total, first + Math.ceil(view / rowHeight) + 14);
    const shift = grid.scrollTop - top;
    const rows = [];
    for (let at = first; at < last; at += 1) rows.push(rowAt(at, at * rowHeight + shift));
    body.replaceChildren(space, ...rows);
    const active = rows.some((row) => row.id === `row-${state.at}`);
    if (active) grid.setAttribute("aria-activedescendant", `row-${state.at}`);
    else grid.removeAttribute("aria-activedescendant");
    if (!state.total) body.append(el("div", { class: "none muted", role: "row" }, el("div", { role: "gridcell" },
      state.done ? "Nothing fits. Fewer words find more." : "…")));
  }

  function rowAt(at, top) {
    const one = (state.pages.get(Math.floor(at / PAGE)) || [])[at % PAGE];
    if (!one) fetchPage(Math.floor(at / PAGE));
    return el("div", { role: "row", class: `row${at === state.at ? " now" : ""}`, id: `row-${at}`, "aria-rowindex": String(at + 2),
      "aria-selected": String(at === state.at), style: { top: `${top}px` }, data: { at } }, one ? cells(one) : el("div", { role: "gridcell" }, "…"));
  }

  async function fetchPage(page) {
    if (state.asked.has(page)) return;
    state.asked.add(page);
    const turn = state.turn;
    try {
      const found = await api("rollouts", { run, q: state.query, offset: page * PAGE, limit: PAGE });
      if (turn === state.turn) {
        state.pages.set(page, found.rows);
        if (found.rows.length) draw();
      }
    } catch (error) {
      if (turn === state.turn) fill(problem, el("p", { class: "problem", role: "alert" }, error.message));
    }
    state.asked.delete(page);
  }

  function select(at) {
    if (!state.total) return;
    state.at = Math.max(0, Math.min(state.total - 1, at));
    const high = state.total * rowHeight, view = grid.clientHeight, head = grid.firstChild.offsetHeight;
    const way = high > TALLEST ? (TALLEST - view) / (high - view) : 1;
    const top = high > TALLEST ? grid.scrollTop / way : grid.scrollTop, own = state.at * rowHeight;
    if (own < top) grid.scrollTop = own * way;
    else if (own + rowHeight + head > top + view) grid.scrollTop = (own + rowHeight + head - view) * way;
    remember();
    draw();
  }

  function open(at) {
    const one = (state.pages.get(Math.floor(at / PAGE)) || [])[at % PAGE];
    if (!one) return;
    const there = new URLSearchParams({ run, row: one.row });
    if (state.query) there.set("q", state.query);
    there.set("at", at);
    location.hash = `/rollouts?${there}`;
  }

  function click(event) {
    const row = event.target.closest(".row[data-at]");
    if (!row) return;
    const at = Number(row.dataset.at);
    if (event.target.closest("a") || at === state.at) open(at); else select(at);
  }

  function key(event) {
    if (event.target !== grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const many = Math.max(1, Math.floor(grid.clientHeight / rowHeight) - 2);
    const to = { ArrowDown: state.at + 1, j: state.at + 1, ArrowUp: state.at - 1, k: state.at - 1, PageDown: state.at + many,
      PageUp: state.at - many, Home: 0, End: state.total - 1 }[event.key];
    if (to !== undefined) select(to);
    else if (event.key === "Enter" || event.key === "ArrowRight") open(state.at);
    else return;
    event.preventDefault();
  }

  function slash(event) {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      event.preventDefault();
      input.focus();
    } else if (event.key === "Escape" && event.target === input) {
      event.preventDefault(); // Chromium would empty it
      input.value = state.query;
      grid.focus();
    }
  }

  document.addEventListener("keydown", slash);
  addEventListener("resize", draw);
  remember();
  let stop = repeat(ask, 4);
  function again() { stop(); stop = repeat(ask, 4); }
  if (params.has("at")) {
    grid.focus({ preventScroll: true });
    const wait = setInterval(() => { if (state.total > state.at) { clearInterval(wait); select(state.at); } }, 30);
    setTimeout(() => clearInterval(wait), 5000);
  }
  return () => {
    stop();
    document.removeEventListener("keydown", slash);
    removeEventListener("resize", draw);
  };
}

function cells(one) {
  const marks = one.flags.map((flag) => el("span", { class: `mark f-${flag.name}`, title: flag.reason }, flag.name));
  const values = [whole(one.row), whole(one.step), el("bdi", {}, one.task), outcome(one.outcome), figure(one.reward), whole(one.tokens),
    marks, el("bdi", {}, one.text.replace(/\n/g, " ↵ "))];
  return values.map((value, n) => el("div", { role: "gridcell", class: COLUMNS[n][2] }, value));
}

export function outcome(text) {
  return el("span", { class: { ok: "", truncated: "warn" }[text] ?? "bad" }, text);
}

function helpText() {
  const rows = [
    ["reward>=1 tokens<50 step:10..20 step:300..", "numbers: step, group, episode, turns, tokens, prompt, reward, score, advantage"],
    ["outcome:ok,truncated source:gsm8k flag:any", "one of the names; flag: repetition, length, format, duplicate, unbacked, script, any, none"],
    ["task:train.jsonl:17", "part of the task's name"],
    ['word "two words"', "text in what the model said, in any case"],
    ["/\\d+ apples?/ /yes|no/i", "a regular expression; i: in any case"],
    ["-outcome:ok -/\\d/", "a minus turns a term round"],
    ["sort:-tokens", "the order, largest first"],
  ];
  return el("div", {}, el("table", {}, el("tbody", {}, rows.map(([term, what]) => el("tr", {}, el("td", {}, el("code", {}, term)), el("td", {}, what))))),
    el("p", {}, "Keys: / search · j k ↓ ↑ move · Enter open · in an episode: j k next and previous, ← → tokens, Escape back."));
}
