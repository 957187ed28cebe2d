// Flags: bars with the number of flagged episodes of each step; the reasons and the outcome of one episode.
import { el } from "./dom.js";

const MEANING = {
  repetition: "the same piece again and again",
  length: "much longer than answers were before",
  format: "answer markers empty, or several of them",
  duplicate: "the same answer twice in a group",
  unbacked: "right by its score, without the answer in the text",
  script: "letters of a second script",
};

/** found: the chart of /api/rollouts. narrow(from, to): called with the steps of a bar that was clicked. */
export function chart(found, narrow) {
  if (!found || !found.from.length) return null;
  const counts = Object.entries(found.flags).map(([name, values]) => [name, values.reduce((a, b) => a + b, 0)]);
  const flagged = found.any.reduce((a, b) => a + b, 0), all = found.rows.reduce((a, b) => a + b, 0);
  const most = Math.max(...found.rows.map((rows, n) => (rows ? found.any[n] / rows : 0)));
  const bars = found.from.map((from, n) => {
    const share = found.rows[n] ? found.any[n] / found.rows[n] : 0;
    const steps = from === found.to[n] ? `step ${from}` : `steps ${from} to ${found.to[n]}`;
    const own = Object.entries(found.flags).filter(([, values]) => values[n]).map(([name, values]) => `${values[n]} ${name}`);
    return el("span", { class: "flagbar",
      title: `${steps}: ${found.any[n]} of ${found.rows[n]} flagged${own.length ? ` (${own.join(", ")})` : ""}`,
      on: { click: () => narrow(from, found.to[n]) } },
    el("i", { style: { height: `${Math.round(100 * share)}%` } }));
  });
  const told = `${flagged} of ${all} episodes are flagged, at most ${Math.round(100 * most)} % of a step`;
  return el("figure", { class: "flagchart" },
    el("figcaption", { class: "small muted" }, `${told}. `, counts.map(([name, count]) =>
      el("span", { class: `mark f-${name}`, title: MEANING[name] }, `${name} ${count}`))),
    el("div", { class: "flagbars", role: "img", "aria-label": `${told}, steps ${found.from[0]} to ${found.to.at(-1)}` }, bars));
}

export function reasons(flags) {
  if (!flags.length) return null;
  return el("ul", { class: "reasons", "aria-label": "Flags" }, flags.map((flag) =>
    el("li", {}, el("span", { class: `mark f-${flag.name}` }, flag.name), " ", el("bdi", {}, flag.reason))));
}

export function outcome(text) {
  return el("span", { class: { ok: "", truncated: "warn" }[text] ?? "bad" }, text);
}
