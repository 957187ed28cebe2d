// A virtual list of very many rows: only visible rows are fetched and drawn; one row is selected.
import { el } from "./dom.js";

const PAGE = 100; // rows of one request
const TALLEST = 8e6; // px; browsers cannot make a box as high as a million rows

/** heads: the cells of its header. hooks: page(first, count), the promise of so many rows; cells(row); chosen(at); open(row,
 *  at); failed(problem); none(), what stands there instead of rows.
 *
 *  clear(at): other rows, the one at `at` chosen. grow(total, appended): so many rows by now; appended: the first of them
 *  are what they were. forget(): all of them are fetched anew. select(at), draw(). */
export function grid(label, heads, hooks) {
  const it = { hooks, total: 0, at: 0, pages: new Map(), asked: new Set(), turn: 0, age: 0, row: 28 };
  it.space = el("div", { class: "space", role: "presentation" });
  it.body = el("div", { class: "rows", role: "rowgroup" }, it.space);
  it.head = el("div", { role: "rowgroup", class: "heads" }, el("div", { role: "row", class: "row", "aria-rowindex": "1" }, heads));
  it.element = el("div", { class: "grid", role: "grid", tabindex: "0", "aria-label": label, "aria-rowcount": "1",
    on: { scroll: () => draw(it), keydown: (event) => key(it, event), click: (event) => click(it, event) } }, it.head, it.body);
  return { element: it.element, get at() { return it.at; }, get total() { return it.total; },
    clear: (at) => clear(it, at), grow: (total, appended) => grow(it, total, appended), forget: () => old(it, () => true),
    select: (at) => select(it, at), draw: () => draw(it) };
}

function clear(it, at) {
  Object.assign(it, { at, total: 0, pages: new Map(), asked: new Set() });
  it.turn += 1;
  it.element.scrollTop = 0;
  draw(it);
}

function grow(it, total, appended) {
  if (total !== it.total) old(it, (rows) => !appended || rows.length < PAGE || total < it.total);
  it.total = total;
  it.element.setAttribute("aria-rowcount", String(total + 1));
  draw(it);
}

/** Request pages again; the shown rows stay until the response. */
function old(it, which) {
  it.age += 1;
  for (const page of it.pages.values()) page.fresh &&= !which(page.rows);
}

/** Scroll position [px in a box as high as all rows], and px of that box for each px of the scroll bar. */
function scrolled(it) {
  it.row = parseFloat(getComputedStyle(it.element).getPropertyValue("--row")) || 28;
  const high = it.total * it.row, view = it.element.clientHeight || 400;
  const scale = high > TALLEST ? (high - view) / (TALLEST - view) : 1, top = it.element.scrollTop * scale;
  return { high, view, scale, top: scale > 1 ? Math.min(top, high - view) : top };
}

function draw(it) {
  const { high, view, top } = scrolled(it);
  it.space.style.setProperty("height", `${Math.min(high, TALLEST)}px`);
  const first = Math.max(0, Math.floor(top / it.row) - 6), last = Math.min(it.total, first + Math.ceil(view / it.row) + 14);
  const shift = it.element.scrollTop - top, rows = [];
  for (let at = first; at < last; at += 1) rows.push(rowAt(it, at, at * it.row + shift));
  it.body.replaceChildren(it.space, ...rows);
  if (it.at >= first && it.at < last) it.element.setAttribute("aria-activedescendant", `row-${it.at}`);
  else it.element.removeAttribute("aria-activedescendant");
  if (!it.total) it.body.append(el("div", { class: "none muted", role: "row" }, el("div", { role: "gridcell" }, it.hooks.none())));
}

const known = (it, at) => it.pages.get(Math.floor(at / PAGE))?.rows[at % PAGE];

function rowAt(it, at, top) {
  const page = Math.floor(at / PAGE), one = known(it, at);
  if (!it.pages.get(page)?.fresh) fetchPage(it, page);
  return el("div", { role: "row", class: `row${at === it.at ? " now" : ""}`, id: `row-${at}`, "aria-rowindex": String(at + 2),
    "aria-selected": String(at === it.at), style: { top: `${top}px` }, data: { at } }, one ? it.hooks.cells(one) : el("div", { role: "gridcell" }, "…"));
}

async function fetchPage(it, page) {
  if (it.asked.has(page)) return;
  const { turn, age, asked } = it;
  asked.add(page);
  try {
    const rows = await it.hooks.page(page * PAGE, PAGE);
    if (turn !== it.turn) return;
    asked.delete(page);
    it.pages.set(page, { rows, fresh: age === it.age });
    draw(it);
  } catch (problem) {
    asked.delete(page);
    if (turn === it.turn) it.hooks.failed(problem);
  }
}

function select(it, at) {
  if (!it.total) return;
  it.at = Math.max(0, Math.min(it.total - 1, at));
  const { view, scale, top } = scrolled(it), own = it.at * it.row, below = own + it.row + it.head.offsetHeight - view;
  if (own < top) it.element.scrollTop = own / scale;
  else if (below > top) it.element.scrollTop = below / scale;
  it.hooks.chosen(it.at);
  draw(it);
}

function open(it, at) {
  const one = known(it, at);
  if (one) it.hooks.open(one, at);
}

function click(it, event) {
  const row = event.target.closest(".row[data-at]");
  if (!row) return;
  const at = Number(row.dataset.at);
  if (at === it.at) open(it, at); else select(it, at);
}

function key(it, event) {
  if (event.target !== it.element || event.ctrlKey || event.metaKey || event.altKey) return;
  const many = Math.max(1, Math.floor(it.element.clientHeight / it.row) - 2);
  const to = { ArrowDown: it.at + 1, j: it.at + 1, ArrowUp: it.at - 1, k: it.at - 1, PageDown: it.at + many,
    PageUp: it.at - many, Home: 0, End: it.total - 1 }[event.key];
  if (to !== undefined) select(it, to);
  else if (event.key === "Enter" || event.key === "ArrowRight") open(it, it.at);
  else return;
  event.preventDefault();
}
