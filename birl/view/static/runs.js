// The list of runs.
import { el, fill, name, repeat } from "./dom.js";
import { count } from "./figures.js";

export async function show(root, params, api) {
  const place = el("div", {});
  fill(root, el("h1", {}, "Runs"), place);
  return repeat(async () => {
    const { runs } = await api("runs");
    fill(place, el("table", {}, runs.map((run) => el("tr", {},
      el("th", { scope: "row" }, el("a", { href: `#/curves?run=${run.id}` }, name(run.name))),
      el("td", { class: `state ${run.state.split(" ")[0]}` }, run.state), el("td", { class: "n" }, count(run.step))))));
  }, 5);
}
