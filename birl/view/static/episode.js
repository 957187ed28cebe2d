// One episode: its turns token by token, its flags, its pictures, and its group side by side.
import { el, fill, keep, trouble } from "./dom.js";
import { short, whole } from "./figures.js";
import { outcome, reasons } from "./flags.js";
import { COLOURS, paint, tokenNode, tokensOf, values } from "./tokens.js";

const NAMES = { assistant: "model", prompt: "prompt", environment: "environment" };

export async function showEpisode(root, params, api) {
  const run = params.get("run"), row = params.get("row"), q = params.get("q") || "", text = params.get("text") || "";
  const episode = await api("rollouts/one", { run, row });
  const tokens = tokensOf(episode);
  let at = params.has("token") ? Number(params.get("token")) : -1;

  const panel = el("div", { class: "panel", role: "status", "aria-label": "Values of the token" }, el("span", { class: "muted" },
    "Point at a token, or press → to go from token to token."));
  const legend = el("div", {});
  const choice = el("select", { id: "colour", on: { change: () => colour(choice.value) } },
    COLOURS.map(([key, label]) => el("option", { value: key }, label)));
  let aim = Number(params.get("at") || row), turn = 0; // position in the list reached by keys
  const talk = el("div", { class: "talk", tabindex: "0", role: "group", "aria-label": "Conversation, token by token",
    on: { mouseover: hover, mouseleave: back, click: hover, keydown: move } }, conversation(episode, tokens));
  const beside = el("section", { "aria-label": "The group" }, el("h2", {}, "The group"), el("p", { class: "muted" }, "…"));
  const list = el("a", { href: listAddress() }, "← list");
  fill(root,
    el("div", { class: "bar crumbs" }, list,
      el("button", { type: "button", on: { click: () => go(-1) }, title: "k" }, "previous"),
      el("button", { type: "button", on: { click: () => go(1) }, title: "j" }, "next")),
    el("h1", {}, `Step ${whole(episode.step)}, `, el("bdi", {}, episode.task || `group ${episode.group}`), `, answer ${episode.episode + 1}`),
    facts(episode), reasons(episode.flags),
    episode.detail ? el("p", { class: "note" }, el("bdi", {}, episode.detail)) : null,
    el("div", { class: "bar colours" }, el("label", {}, "Colour by", choice), legend),
    episode.known ? null : el("p", { class: "note" }, "The run has no model/tokenizer.json, so tokens are shown as numbers."),
    talk, panel, pictures(run, episode), beside);

  let kept = "advantage";
  try { kept = localStorage.getItem("birl-colour") || kept; } catch { /* storage is switched off */ }
  choice.value = COLOURS.some(([key]) => key === kept) ? kept : "advantage";
  colour(choice.value);
  if (tokens[at]) point(at, true);
  document.addEventListener("keydown", keys);
  let gone = false;
  api("rollouts/group", { run, row }).then((found) => { if (!gone) fill(beside, group(found, run)); },
    (error) => { if (!gone) fill(beside, el("h2", {}, "The group"), el("p", { class: "problem" }, error.message)); });
  return () => {
    gone = true;
    document.removeEventListener("keydown", keys);
  };

  function colour(key) {
    try { localStorage.setItem("birl-colour", key); } catch { /* storage is switched off */ }
    fill(legend, paint(talk, key, tokens));
    mark();
  }

  function mark() {
    const before = talk.querySelector(".tok.here");
    if (before) before.classList.remove("here");
    const node = at >= 0 ? talk.querySelector(`#t${at}`) : null;
    if (node) node.classList.add("here");
    return node;
  }

  /** Select a token: its values are shown, and it is in the URL. */
  function point(n, scroll) {
    at = n;
    const node = mark();
    values(panel, tokens[n], tokens.length);
    const now = new URLSearchParams(params);
    now.set("token", n);
    keep(now);
    if (node && scroll) {
      const folded = node.closest("details");
      if (folded) folded.open = true;
      node.scrollIntoView({ block: "center" });
    }
  }

  function hover(event) {
    const node = event.target.closest(".tok");
    if (!node) return;
    if (event.type === "click") point(Number(node.dataset.n), false);
    else values(panel, tokens[node.dataset.n], tokens.length);
  }

  function back() { if (at >= 0 && tokens[at]) values(panel, tokens[at], tokens.length); }

  function move(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !tokens.length) return;
    const first = Math.max(0, tokens.findIndex((token) => token.mask)); // first token of the model
    const to = { ArrowRight: at < 0 ? first : at + 1, ArrowLeft: at < 0 ? first : at - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    point(Math.max(0, Math.min(tokens.length - 1, to)), true);
  }

  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "Escape") location.hash = listAddress();
    else if (event.key === "j") go(1);
    else if (event.key === "k") go(-1);
    else if ((event.key === "ArrowRight" || event.key === "ArrowLeft") && event.target !== talk) {
      talk.focus({ preventScroll: true });
      move(event);
    }
  }

  /** URL parameters: the run, its search, and more. */
  function address(more) {
    return new URLSearchParams({ run, ...(q && { q }), ...(text && { text }), ...more });
  }

  function listAddress() {
    return `#/rollouts?${address({ at: params.get("at") || "0" })}`;
  }

  /** Go to the next or previous one, counted from the target of the last key press. */
  async function go(by) {
    if (aim + by < 0) return;
    aim += by;
    const mine = ++turn, { rows } = await api("rollouts", { run, q, text, offset: aim, limit: 1 }).catch((problem) => {
      trouble(problem.message);
      return { rows: [] };
    });
    if (mine !== turn || gone) return;
    if (!rows.length) { aim -= by; return; }
    location.hash = `/rollouts?${address({ row: rows[0].row, at: aim })}`;
  }
}

function facts(episode) {
  const found = [["outcome", outcome(episode.outcome)], ["reward", short(episode.reward, 6)]];
  if (episode.score !== episode.reward) found.push(["score", short(episode.score, 6)]);
  for (const [part, value] of Object.entries(episode.parts)) found.push([part, short(value, 6)]);
  for (const [agent, value] of Object.entries(episode.rewards)) found.push([`reward of ${agent}`, short(value, 6)]);
  found.push(["advantage", short(episode.advantage, 6)], ["right answer", episode.answer === null ? "–" : el("bdi", {}, episode.answer)],
    ["tokens", `${whole(episode.tokens)} generated, ${whole(episode.prompt)} prompt`], ["group", whole(episode.group)]);
  if (episode.source) found.push(["source", el("bdi", {}, episode.source)]);
  return el("dl", { class: "facts" }, found.map(([what, value]) => el("div", {}, el("dt", {}, what), el("dd", {}, value))));
}

function conversation(episode, tokens) {
  if (!episode.samples.length) return el("pre", { class: "said" }, el("bdi", {}, episode.text || "No output."));
  const spoken = episode.samples.flatMap((sample) => sample.blocks.filter((block) => block.model)).length;
  const told = spoken === episode.turns.length ? episode.turns : [];
  let first = 0, turn = 0;
  return episode.samples.map((sample, part) => {
    const parts = sample.blocks.map((block) => {
      const own = block.model ? told[turn] : null;
      turn += block.model ? 1 : 0;
      return blockOf(block, tokens, first, own, spoken > 1 && block.model ? turn : 0);
    });
    first += sample.ids.length;
    return part ? [el("h2", {}, `Part ${part + 1}`), el("p", { class: "muted small" },
      "What the model saw here does not continue the part before: the history was shortened or rewritten, or another agent speaks."), parts] : parts;
  });
}

function blockOf(block, tokens, first, told, turn) {
  const label = NAMES[block.role] || block.role;
  const notes = [turn ? `turn ${turn}` : "", told && told.agent ? told.agent : "", told && told.reward !== null ? `reward ${short(told.reward)}` : ""];
  const nodes = tokens.slice(first + block.start, first + block.end).map(tokenNode);
  const head = nodes.splice(0, block.body - block.start);
  return el("section", { class: `block ${block.model ? "model" : block.role}` },
    el("h3", {}, label, el("span", { class: "muted" }, ` ${notes.filter(Boolean).join(" · ")}`)),
    el("div", { class: "said" }, head.length ? el("span", { class: "header" }, head) : null, nodes),
    block.calls.map((call) => el("div", { class: "call" }, el("span", { class: "muted" }, "calls "), el("b", {}, call.name),
      el("pre", {}, pretty(call.arguments)))));
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 1); } catch { return text; }
}

function pictures(run, episode) {
  if (!episode.pictures) return null;
  return el("section", { "aria-label": "Pictures" }, el("h2", {}, "Pictures"), el("div", { class: "pictures" },
    Array.from({ length: episode.pictures }, (_, n) => {
      const address = `/api/rollouts/picture?${new URLSearchParams({ run, row: episode.row, number: n })}`;
      return el("a", { href: address, target: "_blank", rel: "noreferrer" }, el("img", { src: address, alt: `Picture ${n + 1} that the model saw`, loading: "lazy" }));
    })));
}

function group(found, run) {
  const cards = found.episodes.map((one) => {
    const words = new URLSearchParams({ run, row: one.row, at: one.row }); // among all episodes, not those of the query
    return el("article", { class: `card${one.row === found.row ? " now" : ""}` },
      el("h3", {}, el("a", { href: `#/rollouts?${words}`, "aria-current": one.row === found.row ? "true" : null }, `answer ${one.episode + 1}`), " ",
        el("b", {}, short(one.reward)), el("span", { class: "muted" }, ` advantage ${short(one.advantage)} · ${whole(one.tokens)} tokens `), outcome(one.outcome)),
      reasons(one.flags),
      one.detail ? el("p", { class: "note small" }, el("bdi", {}, one.detail)) : null,
      el("div", { class: "said small", tabindex: "0", role: "group", "aria-label": `Text of answer ${one.episode + 1}` }, el("bdi", {}, one.text.map(([same, text]) => (same ? text : el("mark", {}, text))))));
  });
  return [el("h2", {}, `The group: ${found.episodes.length} answers to the same question`),
    el("p", { class: "muted small" }, "Best reward first. Marked is what the first one does not say."),
    el("div", { class: "cards" }, cards)];
}
