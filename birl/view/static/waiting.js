// Breakdown of a run's time: waits of each process, and the trace for Perfetto.
import { offer } from "./chosen.js";
import { el, fill, name, repeat } from "./dom.js";
import { count, duration } from "./figures.js";

const LIVE = 3, ENDED = 30; // seconds between two requests

export async function show(root, params, api) {
  const run = params.get("run");
  if (!run) return offer(root, api, "Waiting");
  const parts = { title: el("h1", {}), sentence: el("p", { class: "note verdict" }), warn: el("div", {}), shares: el("div", {}), trace: el("p", {}) };
  fill(root, parts.title, parts.sentence, parts.warn, parts.shares, parts.trace);
  const load = async () => {
    const data = await api("waiting", { run });
    fill(parts.title, "Waiting: ", name(data.name));
    fill(parts.sentence, data.limit);
    fill(parts.warn, data.broken.map((place) => el("p", { class: "problem" }, `${place} is no span and was passed over.`)));
    fill(parts.shares, shares(data));
    fill(parts.trace, el("a", { href: `/api/waiting/trace?${new URLSearchParams({ run })}`, download: "" }, "Download the trace"),
      ` (${count(data.spans)} spans) and open it in ui.perfetto.dev or chrome://tracing: every step, request, group and wait as a timeline, with versions and queues.`);
    return data.running ? LIVE : ENDED;
  };
  const first = await load();
  return repeat(load, first);
}

function shares(data) {
  if (!data.shares) return el("p", { class: "muted" }, "No step is finished yet.");
  const { learner, processes, episodes, steps, seconds } = data.shares;
  const waits = Object.fromEntries(Object.entries(episodes).map(([key, its]) => [key === "engine" ? key : `wait:${key}`, its]));
  const blocks = [["learner", learner], ...Object.entries(processes), ["episodes, of their own time", waits]];
  const rows = blocks.flatMap(([process, its]) => Object.entries(its).filter(([, share]) => share >= 0.005)
    .map(([what, share], i) => el("tr", {}, el("th", { scope: "row" }, i ? el("span", { class: "unseen" }, process) : name(process)),
      el("td", {}, name(data.words[what] || what.replace(/^wait:/, "waiting for "))), el("td", { class: "n" }, `${(100 * share).toFixed(1)} %`),
      el("td", { class: "share" }, el("span", { class: what.startsWith("wait:") ? "bit hatched" : "bit", style: { width: `${Math.min(100 * share, 100)}%` } })))));
  return [el("p", { class: "muted small" }, `Share of the time, steps ${steps[0]} to ${steps[1]}, ${duration(seconds)} in all. Hatched: waiting.`),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Share of the time" }, el("table", { class: "shares" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Process"), el("th", { scope: "col" }, "What"),
        el("th", { scope: "col", class: "n" }, "Share"), el("th", { scope: "col" }, el("span", { class: "unseen" }, "Bar")))),
      el("tbody", {}, rows)))];
}
