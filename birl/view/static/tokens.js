// Tokens coloured by one of their figures, with a legend and the exact values of the token at the pointer.
import { el, fill } from "./dom.js";
import { short } from "./figures.js";

const LOW = "−", SCALES = {
  advantage: { label: "advantage", title: "what the token is rewarded or punished with" },
  logprob: { label: "probability", title: "of the token when it was sampled",
    bins: [[0.9, "s0", "≥ 90 %"], [0.5, "s1", "50–90 %"], [0.2, "s2", "20–50 %"], [0.05, "s3", "5–20 %"], [0.01, "s4", "1–5 %"], [0, "s5", "< 1 %"]],
    value: (t) => (t.logprob === null ? null : Math.exp(t.logprob)), up: true },
  ratio: { label: "ratio", title: "learner's probability ÷ engine's, when it was first trained",
    bins: [[-0.2, "n4", "< 0.82"], [-0.05, "n3", "0.82–0.95"], [-0.005, "n1", "0.95–0.995"], [0.005, "d0", "1 ± 0.005"], [0.05, "p1", "1.005–1.05"], [0.2, "p3", "1.05–1.22"], [Infinity, "p4", "> 1.22"]],
    value: (t) => t.gap },
  mismatch: { label: "mismatch", title: "distance between the learner's and the engine's log-prob [nats]",
    bins: [[1e-5, "s0", "≤ 0.00001"], [1e-3, "s1", "≤ 0.001"], [0.01, "s2", "≤ 0.01"], [0.05, "s3", "≤ 0.05"], [0.2, "s4", "≤ 0.2"], [Infinity, "s5", "> 0.2"]],
    value: (t) => (t.gap === null ? null : Math.abs(t.gap)) },
  entropy: { label: "entropy", title: "of what could have been said there [nats]",
    bins: [[0.1, "s0", "≤ 0.1"], [0.5, "s1", "≤ 0.5"], [1, "s2", "≤ 1"], [2, "s3", "≤ 2"], [3, "s4", "≤ 3"], [Infinity, "s5", "> 3"]],
    value: (t) => t.entropy },
  version: { label: "version of the weights", title: "which weights sampled the token" },
  mask: { label: "generated or given", title: "the model's own tokens are trained",
    bins: [[0, "d0", "prompt, environment"], [Infinity, "p3", "the model: trained"]], value: (t) => t.mask },
  none: { label: "nothing", bins: [], value: () => null },
};
export const COLOURS = Object.entries(SCALES).map(([key, scale]) => [key, scale.label]);

/** Flat tokens of all samples: the response's lists as one object for each token. */
export function tokensOf(episode) {
  const found = [];
  episode.samples.forEach((sample, part) => {
    const special = new Set(sample.special), at = (name, n) => (sample[name] ? sample[name][n] : null);
    sample.ids.forEach((id, n) => found.push({
      n: found.length, part, place: n, id, shown: sample.shown[n], special: special.has(n), mask: sample.mask[n],
      logprob: at("logprobs", n), version: at("versions", n), entropy: at("entropies", n), gap: at("gaps", n),
      advantage: sample.advantages ? sample.advantages[n] : sample.mask[n] ? episode.advantage : null,
    }));
  });
  return found;
}

/** Bins for this episode: [highest value, class, label], and the value that they are applied to. */
function scaleOf(key, tokens) {
  if (key === "advantage") {
    const most = tokens.reduce((all, t) => Math.max(all, Math.abs(t.advantage ?? 0)), 0);
    if (!most) return { bins: [[Infinity, "d0", "0"]], value: (t) => t.advantage };
    const at = [-0.8, -0.6, -0.4, -0.2, -1e-9, 1e-9, 0.2, 0.4, 0.6, 0.8, Infinity];
    const kinds = ["n5", "n4", "n3", "n2", "n1", "d0", "p1", "p2", "p3", "p4", "p5"];
    return { bins: at.map((edge, n) => [edge * most, kinds[n], { 0: `${LOW}${short(most)}`, 5: "0", 10: short(most) }[n] || ""]), value: (t) => t.advantage };
  }
  if (key === "version") {
    const versions = [...new Set(tokens.map((t) => t.version).filter((v) => v !== null && v >= 0))].sort((a, b) => b - a);
    const bins = versions.slice(0, 6).map((v, age) => [-v, `s${age}`, age ? `${v}` : `${v} (newest here)`]);
    if (versions.length > 6) { bins[5][0] = Infinity; bins[5][2] = `${versions[5]} and older`; }
    return { bins, value: (t) => (t.version === null || t.version < 0 ? null : -t.version) };
  }
  return SCALES[key];
}

function classOf(scale, token) {
  const value = scale.value(token);
  if (value === null || value === undefined) return "";
  const bin = scale.up ? scale.bins.find(([edge]) => value >= edge) : scale.bins.find(([edge]) => value <= edge);
  return bin ? bin[1] : "";
}

/** Display text of a token: whitespace is marked, parts of characters are bytes. */
function content(token) {
  const pieces = typeof token.shown === "string" ? [token.shown] : token.shown;
  return pieces.map((piece) => (typeof piece === "string" ? spaced(piece)
    : el("span", { class: "byte", title: piece[1] ? `part of ${piece[1]}` : "no character" }, piece[0])));
}

function spaced(text) {
  return text.split(/([ \t\n]+)/).filter(Boolean).map((part) => (/^[ \t\n]/.test(part)
    ? [...part].map((c) => (c === " " ? el("span", { class: "ws" }, " ")
      : c === "\t" ? el("span", { class: "ws tab" }, "\t") : [el("span", { class: "ws line" }), "\n"]))
    : part));
}

/** Element of a token. */
export function tokenNode(token) {
  const text = typeof token.shown === "string" ? token.shown : "";
  const right = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/.test(text);
  return el("span", { class: `tok${token.special ? " special" : ""}`, id: `t${token.n}`, data: { n: token.n }, dir: right ? "rtl" : null }, content(token));
}

export function paint(root, key, tokens) {
  const scale = scaleOf(key, tokens);
  for (const node of root.querySelectorAll(".tok")) {
    const token = tokens[node.dataset.n], kind = classOf(scale, token);
    node.className = `tok${token.special ? " special" : ""}${kind ? ` ${kind}` : ""}${token.mask ? "" : " given"}`;
  }
  const used = tokens.some((token) => classOf(scale, token));
  return el("div", { class: "legend small", role: "note", "aria-label": `Colours: ${SCALES[key].label}` },
    SCALES[key].title ? el("span", { class: "muted" }, `${SCALES[key].title}: `) : null,
    key !== "none" && !used ? el("span", { class: "warn" }, "not in this run's rollouts.jsonl") : scale.bins.map(([, kind, label]) =>
      el("span", { class: "step" }, el("i", { class: kind }), label)));
}

/** The exact values of one token, as a line of text. */
export function values(panel, token, count) {
  const percent = token.logprob === null ? "" : ` (${short(100 * Math.exp(token.logprob))} %)`;
  const text = typeof token.shown === "string" ? JSON.stringify(token.shown) : token.shown.map((p) => (typeof p === "string" ? JSON.stringify(p)
    : `bytes ${p[0]}${p[1] ? ` of ${p[1]}` : ", no character"}`)).join(" + ");
  const facts = [
    ["token", `${token.n} of ${count}`], ["text", text], ["id", token.id],
    ["log-prob", token.logprob === null ? null : `${number(token.logprob)}${percent}`],
    ["advantage", token.advantage === null ? null : number(token.advantage)],
    ["ratio", token.gap === null ? null : number(Math.exp(token.gap))],
    ["mismatch", token.gap === null ? null : `${number(Math.abs(token.gap))} nats`],
    ["entropy", token.entropy === null ? null : `${number(token.entropy)} nats`],
    ["version", token.version === null || token.version < 0 ? null : token.version],
    ["", token.mask ? "generated by the model" : "given to the model"],
  ];
  fill(panel, facts.filter(([, value]) => value !== null).map(([what, value]) => el("span", { class: "fact" },
    what ? el("span", { class: "muted" }, `${what} `) : null, el("bdi", {}, String(value)))));
}

function number(value) {
  return (Math.abs(value) >= 1e-4 || value === 0 ? String(Number(value.toPrecision(6))) : value.toExponential(2)).replace(/-/g, LOW);
}
