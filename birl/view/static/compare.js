// Runs side by side: the keys that differ, and the result of each.
import { look } from "./chart.js";
import { choose } from "./chosen.js";
import { el, fill, name, repeat } from "./dom.js";
import { count, exact, figure } from "./figures.js";

const EVERY = 5; // s between requests to the server

export async function show(root, params, api) {
  const runs = await choose(params, api);
  if (!runs.length) return fill(root, el("h1", {}, "Compare"), el("p", {}, "There are no runs yet.")) && null;
  const place = el("div", {}), find = { text: "" };
  const box = el("input", { type: "search", id: "find", placeholder: "such as reward", on: { input: (e) => { find.text = e.target.value.toLowerCase(); draw(); } } });
  fill(root, el("h1", {}, "Compare"), el("div", { class: "bar" }, el("label", { for: "find" }, "keys and figures", box),
    el("a", { href: `#/curves?${new URLSearchParams(runs.map((id) => ["run", id]))}` }, "their curves"), el("a", { href: "#/" }, "other runs")), place);
  let answer = null, last = "";
  const draw = () => answer && fill(place, page(answer, find.text));
  return repeat(async () => {
    const found = await api("compare", { run: runs });
    if (JSON.stringify(found) === last) return;
    [answer, last] = [found, JSON.stringify(found)];
    draw();
  }, EVERY);
}

function page({ runs, keys, figures }, find) {
  const fits = (word) => word.toLowerCase().includes(find);
  const shown = keys.filter(({ key }) => fits(key)), rows = figures.filter((row) => fits(row.name) || fits(row.heading));
  const problems = runs.filter((run) => run.problem).map((run) => el("p", { class: "problem" }, name(run.problem)));
  const one = runs.length < 2 ? el("p", { class: "note" }, "Select at least two runs in ", el("a", { href: "#/" }, "the list of runs"), ".") : null;
  return [problems, one,
    el("h2", { id: "keys" }, "Configuration"),
    shown.length ? region("keys", el("table", { class: "sides" }, head("key", runs), el("tbody", {}, shown.map((row) => el("tr", {},
      el("th", { scope: "row" }, el("code", {}, name(row.key))),
      row.values.map((value, i) => el("td", {}, row.set[i] ? el("code", {}, name(written(value))) : el("span", { class: "muted" }, "not there"))))))))
      : el("p", { class: "muted" }, keys.length ? "No key that differs is called so." : runs.length > 1 ? "No key differs." : ""),
    el("h2", { id: "figures" }, "Figures"),
    el("p", { class: "muted small" }, "Last value, and the best with its step where one end is better (↑ higher, ↓ lower). Bold: the best of these runs. Grey: the same in all."),
    rows.length ? region("figures", el("table", { class: "sides" }, head("figure", runs), el("tbody", {}, rows.map(line))))
      : el("p", { class: "muted" }, "No figures.")];
}

const region = (id, table) => el("div", { class: "scroll", role: "region", tabindex: "0", "aria-labelledby": id }, table);

function head(word, runs) {
  return el("thead", {}, el("tr", {}, el("th", { scope: "col" }, word), runs.map((run, i) => el("th", { scope: "col" },
    el("i", { class: `swatch${look(i).dash.length ? " dashed" : ""}`, style: { color: `var(--${look(i).color})` } }),
    el("a", { href: `#/curves?run=${run.id}` }, name(run.name)), run.state === "running" ? el("span", { class: "state running" }, "running") : null))));
}

function line(row) {
  const sign = { high: 1, low: -1 }[row.better] || 0;
  const reached = row.values.filter((value) => value && sign).map((value) => sign * value.best), best = Math.max(...reached);
  const differ = reached.some((value) => value !== best);
  const same = row.values.length > 1 && row.values.every((value) => value?.last === row.values[0]?.last);
  return el("tr", { class: same ? "muted" : null }, el("th", { scope: "row" }, name(row.heading), row.heading === row.name ? null : [" ", el("code", { class: "muted" }, name(row.name))], sign ? el("span", { class: "muted" }, sign > 0 ? " ↑" : " ↓") : null),
    row.values.map((value) => {
      if (!value) return el("td", { class: "muted" }, "–");
      const wins = differ && sign * value.best === best;
      return el("td", { title: `last ${exact(value.last)} at step ${value.last_step}` }, figure(value.last), sign
        ? el("span", { class: "muted" }, " · ", el(wins ? "strong" : "span", {}, figure(value.best)), ` at ${count(value.best_step)}`) : null);
    }));
}

/** A value as in `key=value`. */
const written = (value) => {
  if (typeof value === "string") return value || "“”";
  return typeof value === "number" && value && Math.abs(value) < 1e-3 ? value.toExponential() : JSON.stringify(value);
};
