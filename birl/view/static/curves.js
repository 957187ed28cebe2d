// Curves of one or more runs, updated while they run.
import { AXES, chart, look, palette } from "./chart.js";
import { bar, choose, legend, place, recolor } from "./chosen.js";
import { el, fill, keep, repeat, say, trouble, visible } from "./dom.js";
import { figure } from "./figures.js";
import { band, smoothed } from "./smooth.js";

const FLAT = "Unchanged", OPEN = ["Overview", "Other figures"], JUDGED = /^(reward\/mean|loss|nll|accuracy|validation\/all\/score)$/;
// Seconds between requests to the server: while a run is running, if none is, and while files are read.
const WATCHED = 2, ENDED = 15, READING = 0.5;

export async function show(root, params, api) {
  const runs = await choose(params, api);
  if (!runs.length) return fill(root, el("h1", {}, "Curves"), el("p", {}, "There are no runs yet. ",
    el("a", { href: "#/" }, "The list"), " shows them as soon as they begin.")) && null;
  const number = (key) => (params.get(key) && Number.isFinite(Number(params.get(key))) ? Number(params.get(key)) : null);
  const zoomed = number("from") !== null && number("from") < number("to");
  const view = { // state in the URL; invalid values are ignored
    axis: Object.hasOwn(AXES, params.get("x")) ? params.get("x") : "step", smooth: Math.min(0.999, Math.max(0, number("smooth"))),
    log: params.get("log") === "1", band: params.get("band") !== "0", find: params.get("find") || "",
    low: zoomed ? number("from") : null, high: zoomed ? number("to") : null, hidden: new Set(params.getAll("hide")),
  };
  const it = { api, runs, view, about: [], figures: [], charts: new Map(), data: new Map(), fresh: new Set(), seen: new Set(), version: "",
    span: [0, 1], read: 1, at: null, colors: palette(), turned: new Set(), asking: false, again: false, question: 0, over: false };
  it.place = { warnings: el("div", {}), legend: el("div", {}), bar: el("div", {}), status: el("p", { class: "muted small status" }), charts: el("div", {}) };
  fill(root, el("h1", {}, "Curves"), it.place.warnings, it.place.legend, it.place.bar, it.place.status, it.place.charts);
  it.watch = new IntersectionObserver((entries) => noticed(it, entries), { rootMargin: "200px" });
  await learn(it);

  const redraw = () => { it.colors = palette(); drawAll(it); };
  let wide = root.clientWidth;
  const size = new ResizeObserver(() => {
    if (Math.abs(root.clientWidth - wide) < 2) return;
    wide = root.clientWidth;
    stale(it);
    drawAll(it);
  });
  size.observe(root);
  addEventListener("themechange", redraw);
  const stop = repeat(async () => {
    await gather(it, true);
    if (share(it) < 1) return READING;
    return it.about.some((run) => run.running) ? WATCHED : ENDED;
  }, WATCHED);
  return () => {
    it.over = true;
    stop();
    size.disconnect();
    it.watch.disconnect();
    removeEventListener("themechange", redraw);
  };
}

/** Load the names and states of the runs; rebuilds what has changed. */
async function learn(it) {
  const { runs, version, figures } = await it.api("metrics", { run: it.runs });
  const differs = (key) => JSON.stringify(runs.map((run) => run[key])) !== JSON.stringify(it.about.map((run) => run[key]));
  const was = it.figures.length ? unchanging(it).join() : null, [state, names] = [differs("running"), differs("names")];
  [it.about, it.figures] = [runs, figures];
  it.version ||= version; // until something is drawn
  if (state) controls(it);
  if (names || was !== unchanging(it).join()) sections(it);
  told(it);
}

/** Progress of reading the runs, of the drawn data and of the server. */
const share = (it) => Math.min(it.read, it.about.reduce((sum, run) => sum + run.read, 0) / it.about.length);

function told(it) {
  const rows = it.about.reduce((sum, run) => sum + run.rows, 0), live = it.about.filter((run) => run.running).length;
  const broken = it.about.filter((run) => run.broken).map((run) => `${visible(run.name)}: ${run.broken} lines are no JSON and are left out`);
  const warnings = it.about.filter((run) => run.warning).map((run) => el("p", { class: "problem" }, `${it.about.length > 1 ? `${visible(run.name)}: ` : ""}${run.warning}`));
  const read = share(it), long = `reading, ${Math.floor(100 * read)} % so far: some of all steps are shown`;
  const words = [read < 1 ? long : `${figure(rows)} steps`, live ? `${live} running` : "", ...broken, ...it.about.map((run) => run.problem && visible(run.problem))];
  fill(it.place.status, words.filter(Boolean).join(" · "), rows ? "" : ". No step is finished yet; curves appear as soon as one is.");
  fill(it.place.warnings, warnings);
}

// ---- controls

/** Update the legend with the running runs; the controls are not rebuilt, as somebody may be typing. */
function controls(it) {
  const act = { changed: () => { remember(it); recolor(it); drawAll(it); }, asked: () => { remember(it); stale(it); ask(it); },
    found: () => { remember(it); sections(it); }, reset: () => zoom(it, null, null) };
  legend(it.place.legend, it, act);
  if (!it.place.bar.childElementCount) bar(it.place.bar, it, act);
}

function remember(it) {
  const { view } = it, query = new URLSearchParams(it.runs.map((id) => ["run", id]));
  if (view.axis !== "step") query.set("x", view.axis);
  if (view.smooth) query.set("smooth", view.smooth);
  if (view.log) query.set("log", "1");
  if (!view.band) query.set("band", "0");
  if (view.find) query.set("find", view.find);
  if (view.low !== null) query.set("from", view.low);
  if (view.high !== null) query.set("to", view.high);
  view.hidden.forEach((id) => query.append("hide", id));
  keep(query);
}

/** Names of the figures that are constant in all rows of all runs, without the main figures of a run. */
function unchanging(it) {
  return it.figures.map(({ name }) => name).filter((name) => {
    const runs = it.about.filter((run) => run.names.includes(name)), values = runs.map((run) => own(run.constant, name));
    return values.every((value) => value !== undefined && value === values[0]) && !JUDGED.test(name);
  });
}

/** The charts by section, the most important first and open; constant ones last. */
function sections(it) {
  it.watch.disconnect();
  it.seen.clear();
  const find = it.view.find.toLowerCase(), flat = new Set(unchanging(it));
  const wanted = it.figures.filter(({ name, heading }) => [name, heading].some((word) => word.toLowerCase().includes(find)));
  const groups = new Map([["Overview", []]]);
  for (const figure of wanted.filter(({ name }) => !flat.has(name))) groups.set(figure.section, [...(groups.get(figure.section) || []), figure]);
  const same = wanted.filter(({ name }) => flat.has(name)), zero = same.filter(({ name }) => it.about.every((run) => !own(run.constant, name)));
  if (same.length) groups.set(FLAT, same);
  const open = (group) => (OPEN.includes(group) || Boolean(find)) !== it.turned.has(group);
  const told = (group, { length }) => (group === FLAT && zero.length ? `${length}, ${zero.length} of them 0` : length);
  fill(it.place.charts, [...groups].filter(([, members]) => members.length).map(([group, members]) => el("details",
    { class: "group", open: open(group), on: { toggle: (e) => { if (e.target.open !== open(group)) it.turned[it.turned.has(group) ? "delete" : "add"](group); } } },
    el("summary", {}, el("h2", {}, group), el("span", { class: "muted small" }, told(group, members))),
    el("div", { class: "charts" }, members.map((figure) => one(it, figure))))),
  it.figures.length && !wanted.length ? el("p", { class: "note" }, `No figure is called like “${visible(it.view.find)}”.`) : null);
}

function one(it, figure) {
  const { name } = figure;
  if (!it.charts.has(name)) {
    it.charts.set(name, chart(figure, { mark: (x) => mark(it, x), zoom: (low, high) => zoom(it, low, high), reset: () => zoom(it, null, null) }));
  }
  const { element } = it.charts.get(name);
  element.dataset.metric = name;
  it.watch.observe(element);
  return element;
}

function zoom(it, low, high) {
  Object.assign(it.view, { low, high });
  say(low === null ? "The whole range" : `From ${figure(low)} to ${figure(high)}`);
  remember(it);
  stale(it);
  it.place.bar.querySelector(".reset").hidden = low === null;
  drawAll(it);
  ask(it);
}

// ---- data

function noticed(it, entries) {
  for (const entry of entries) {
    const name = entry.target.dataset.metric;
    if (!entry.isIntersecting) { it.seen.delete(name); continue; }
    it.seen.add(name);
    if (it.fresh.has(name)) draw(it, name); // other charts may be drawn meanwhile
  }
  ask(it);
}

/** Request all visible data again; the drawn curves stay until the response. */
function stale(it) {
  it.fresh.clear();
  it.question += 1;
}

/** Fetch visible data that is missing. */
const ask = (it) => gather(it).catch((problem) => trouble(problem.message));

/** The same; `poll`: also ask for newer data. */
async function gather(it, poll = false) {
  if (it.asking) { it.again = true; return; }
  it.asking = true;
  try {
    do {
      it.again = false;
      await once(it, poll);
      poll = false;
    } while (it.again && !it.over);
  } finally {
    it.asking = false;
  }
}

async function once(it, poll) {
  const missing = [...it.seen].filter((name) => !it.fresh.has(name));
  if (!missing.length && !poll) return;
  const metrics = missing.length ? missing : [...it.seen], { view, question } = it;
  const answer = await it.api("curves", {
    run: it.runs, metric: metrics, x: view.axis, from: view.low ?? undefined, to: view.high ?? undefined, width: width(it),
    known: missing.length ? undefined : it.version,
  });
  if (it.over) return;
  if (question !== it.question) { it.again = true; return; } // the view has changed meanwhile
  if (answer.unchanged) {
    if (it.about.some((run) => run.running !== answer.running[run.id])) await learn(it);
    return;
  }
  const newer = it.version !== answer.version;
  if (newer) it.fresh.clear();
  [it.version, it.span, it.read] = [answer.version, answer.span, answer.read];
  for (const name of metrics) {
    it.data.set(name, answer.curves);
    it.fresh.add(name);
    draw(it, name);
  }
  if (newer) await learn(it);
  if (newer && missing.length) it.again = true;
}

function width(it) {
  const [first] = it.seen;
  const wide = first ? it.charts.get(first).element.clientWidth - 54 : 500;
  return Math.max(100, Math.round(wide / 50) * 50);
}

// ---- drawing

/** The curves of a metric: of each visible run, or of each family of seeds. */
function series(it, name) {
  const curves = it.data.get(name);
  const shown = it.about.map((run, i) => ({ run, ...look(place(it, i)), points: own(curves?.[run.id], name) }))
    .filter(({ run, points }) => points && points.x.length && !it.view.hidden.has(run.id));
  const weight = name.startsWith("validation/") ? 0 : it.view.smooth; // few points, each of them a mean already
  const single = (one) => ({ ...one, label: one.run.name, raw: weight ? one.points.y : null, line: smoothed(one.points, weight) });
  if (!it.view.band) return shown.map(single);
  const families = Map.groupBy ? Map.groupBy(shown, ({ run }) => run.family) : grouped(shown);
  return [...families.values()].map((members) => {
    if (members.length < 2) return single(members[0]);
    const points = band(members.map((one) => ({ ...one.points, y: smoothed(one.points, weight) })));
    return { ...members[0], points, line: points.y, raw: null, label: `mean of ${members.length} seeds of ${members[0].run.name}`, members };
  });
}

const own = (object, name) => (object && Object.hasOwn(object, name) ? object[name] : undefined); // a figure may be called __proto__

function grouped(shown) {
  const families = new Map();
  for (const one of shown) families.set(one.run.family, [...(families.get(one.run.family) || []), one]);
  return families;
}

function draw(it, name) {
  const { view } = it, low = view.low ?? it.span[0], end = view.high ?? it.span[1], high = end > low ? end : low + 1;
  it.charts.get(name).draw({ series: series(it, name), low, high, log: view.log, axis: view.axis, colors: it.colors });
  values(it, name);
}

function drawAll(it) {
  for (const name of it.seen) if (it.data.has(name)) draw(it, name);
}

// ---- values at an x, in all charts at once

function mark(it, x) {
  it.at = x;
  it.exact = null;
  cancelAnimationFrame(it.frame);
  it.frame = requestAnimationFrame(() => it.seen.forEach((name) => values(it, name)));
  clearTimeout(it.wait);
  const thinned = [...it.seen].some((name) => it.charts.get(name).state?.series.some((one) => one.points.n));
  if (x !== null && thinned) it.wait = setTimeout(() => figures(it, x), 60);
}

/** A point of a long curve stands for many steps: the exact values come from the server. */
async function figures(it, x) {
  const found = await it.api("values", { run: it.runs, x: it.view.axis, at: x }).catch(() => null);
  if (!found || it.over || it.at !== x) return;
  it.exact = found.runs;
  it.seen.forEach((name) => values(it, name));
}

function values(it, name) {
  const { state, at, mark: tell } = it.charts.get(name), x = it.at;
  if (!state) return;
  const told = at(x).map((one) => {
    const known = one.there && !one.members ? it.exact?.[one.run.id]?.values : null;
    return known ? { ...one, value: own(known, name) } : one;
  });
  if (x === null) return tell(null, told, "");
  const one = told.find((each) => each.there), exactly = one && it.exact?.[one.run.id];
  const where = exactly && it.view.axis === "step" ? (name.startsWith("validation/") ? exactly.validation_step : exactly.step) : one?.x;
  tell(x, told, told.length ? `${AXES[it.view.axis].name} ${AXES[it.view.axis].exact(where ?? x)}` : "");
}
