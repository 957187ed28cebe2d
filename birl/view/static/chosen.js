// The selection of runs in a view, and the controls above the curves.
import { AXES, look } from "./chart.js";
import { el, fill, name, visible } from "./dom.js";

/** The runs in the URL; if there are none, the run that was updated last. */
export async function choose(params, api) {
  const named = [...new Set(params.getAll("run"))];
  if (named.length) return named;
  const { runs } = await api("runs");
  const newest = [...runs].sort((a, b) => b.updated - a.updated)[0];
  return newest ? [newest.id] : [];
}

/** A selection of runs, for a view of one run. */
export async function offer(root, api, title) {
  const { runs } = await api("runs");
  fill(root, el("h1", {}, title), el("p", {}, runs.length ? "Of which run?" : "There are no runs yet."),
    el("ul", {}, runs.map((run) => el("li", {}, el("a", { href: `#/${title.toLowerCase()}?run=${run.id}` }, name(run.name))))));
  return null;
}

/** Style of the i-th run: its own, or that of the first seed in the same band. */
export function place(it, i) {
  if (!it.view.band) return i;
  const first = it.about.findIndex((run) => run.family === it.about[i].family && !it.view.hidden.has(run.id));
  return first < 0 || it.view.hidden.has(it.about[i].id) ? i : first;
}

/** The controls. act: changed() redraw, asked() other data are needed, found() other charts, reset(). */
export function bar(root, it, act) {
  const { view } = it;
  const weight = el("output", { class: "small", for: "smooth" }, view.smooth ? view.smooth.toFixed(3) : "off");
  const families = new Set(it.about.map((run) => run.family));
  const axis = el("select", { id: "axis", on: { change: (e) => { Object.assign(view, { axis: e.target.value, low: null, high: null }); reset.hidden = true; act.asked(); } } },
    Object.entries(AXES).map(([key, { name: word }]) => el("option", { value: key, selected: key === view.axis }, word)));
  const smooth = el("input", { type: "range", id: "smooth", min: "0", max: "100", value: String(position(view.smooth)), on: { input: (e) => {
    view.smooth = weightOf(Number(e.target.value));
    weight.textContent = view.smooth ? view.smooth.toFixed(3) : "off";
    act.changed();
  } } });
  const check = (key, words) => el("label", {}, el("input", { type: "checkbox", checked: view[key], on: { change: (e) => { view[key] = e.target.checked; act.changed(); } } }), words);
  const reset = el("button", { type: "button", class: "reset", hidden: view.low === null, on: { click: act.reset } }, "Whole range");
  const find = el("input", { type: "search", id: "find", placeholder: "such as reward", value: view.find, size: "14", on: { input: (e) => { view.find = e.target.value; act.found(); } } });
  fill(root,
    el("div", { class: "bar", role: "group", "aria-label": "How curves are drawn" },
      el("label", { for: "axis" }, "by", axis),
      el("label", { for: "smooth" }, "smoothing", smooth, weight),
      check("log", "log scale"),
      families.size < it.about.length ? check("band", "seeds as a band") : null,
      el("label", { for: "find" }, "figures", find), reset));
}

/** A link to the report of a run. */
export const report = (id) => el("a", { class: "small", href: `/report?${new URLSearchParams({ run: id })}`, target: "_blank", rel: "noopener" }, "report");

/** Every run with its colour: a button that toggles it. */
export function legend(root, it, act) {
  const others = [el("a", { href: "#/", class: "small" }, "other runs"), it.runs.length < 2 ? report(it.runs[0]) : null];
  it.swatches = it.about.map(() => el("i", {}));
  recolor(it);
  fill(root, el("div", { class: "legend", role: "group", "aria-label": "Runs; press one to hide or show it" }, it.about.map((run, i) => {
    const button = el("button", { type: "button", class: "run", "aria-pressed": String(!it.view.hidden.has(run.id)), on: { click: () => {
      if (!it.view.hidden.delete(run.id)) it.view.hidden.add(run.id);
      button.setAttribute("aria-pressed", String(!it.view.hidden.has(run.id)));
      act.changed();
    } } }, it.swatches[i], name(run.name),
    run.running ? el("span", { class: "state running", title: "running" }, "running") : null);
    button.title = visible(run.name);
    return button;
  }), others, it.about.length > 1 ? el("a", { class: "small", href: `#/compare?${new URLSearchParams(it.runs.map((id) => ["run", id]))}` }, "compare") : null));
}

/** Update the swatches to the styles of the curves. */
export function recolor(it) {
  it.swatches.forEach((swatch, i) => {
    const { color, dash } = look(place(it, i));
    swatch.className = `swatch${dash.length ? " dashed" : ""}`;
    swatch.style.color = `var(--${color})`;
  });
}

// The slider is finer towards 1, where the weights differ most: 0, then 0.5 to 0.999.
const weightOf = (at) => (at ? 1 - 0.5 ** (1 + (at / 100) * 9) : 0);
const position = (weight) => (weight ? Math.round(((Math.log(1 - weight) / Math.log(0.5) - 1) / 9) * 100) : 0);
