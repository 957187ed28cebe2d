// The timeline of a run: lanes for each process, drawn on a canvas from what fits into its pixels.
import { offer } from "./chosen.js";
import { el, fill, keep, name, repeat, say, visible } from "./dom.js";
import { count, duration } from "./figures.js";
import { COLOURS, colour, draw, layout, spot } from "./lanes.js";

const ZOOM = 1.6, PAN = 0.25, LIVE = 3; // seconds between two looks at a run that goes on
const KEYS = "Arrow keys move, + and - zoom, 0 shows all.";

export async function show(root, params, api) {
  const id = params.get("run");
  if (!id) return offer(root, api, "Timeline");
  const canvas = el("canvas", { class: "lanes", tabindex: 0, role: "img", "aria-describedby": "keys" });
  const tip = el("div", { class: "tip", role: "presentation", hidden: true });
  const parts = { sentence: el("p", { class: "note verdict" }), legend: el("p", { class: "legend small" }),
    shares: el("div", {}), longest: el("div", {}), title: el("h1", {}, "Timeline"), warn: el("div", {}) };
  const by = el("select", { on: { change: () => { state.by = by.value; set("by", by.value); paint(); } } },
    el("option", { value: "activity" }, "activity"), el("option", { value: "version" }, "version of the weights"));
  const state = { by: params.get("by") === "version" ? "version" : "activity", data: null, begin: null, end: null, all: true };
  by.value = state.by;
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, on: { click: act } }, text);
  fill(root, parts.title, parts.sentence, parts.warn,
    el("div", { class: "bar" },
      button("−", "Zoom out", () => zoom(ZOOM)), button("+", "Zoom in", () => zoom(1 / ZOOM)),
      button("◀", "Earlier", () => pan(-PAN)), button("▶", "Later", () => pan(PAN)), button("All", "Show all", () => all()),
      el("label", {}, "Colour by", by)),
    parts.legend, el("div", { class: "stage" }, canvas, tip),
    el("p", { class: "muted small", id: "keys" }, `${KEYS} Drag to move; Ctrl and the wheel zoom. Hatched: waiting, or an engine without work.`),
    el("h2", {}, "Share of the time"), parts.shares, el("h2", {}, "Longest in sight"), parts.longest);

  let waiting = 0, asked = 0, stopped = false;
  const given = ["from", "to"].map((key) => Number.parseFloat(params.get(key)));
  if (given.every(Number.isFinite) && given[0] < given[1]) Object.assign(state, { begin: given[0], end: given[1], all: false });

  function set(key, value) {
    if (value === null) params.delete(key); else params.set(key, value);
    keep(params);
  }
  async function load() {
    clearTimeout(waiting);
    waiting = 0;
    const mine = ++asked, query = { run: id, width: Math.round(canvas.clientWidth) || 800 };
    if (!state.all) Object.assign(query, { begin: state.begin, end: state.end });
    const data = await api("timeline", query);
    if (mine !== asked || stopped) return data.running;
    state.data = data;
    if (state.all) Object.assign(state, { begin: data.begin, end: data.end });
    paint();
    words(parts, data);
    return data.running;
  }
  const soon = () => { if (!waiting) waiting = setTimeout(() => load().catch(failed), 120); };
  const failed = (problem) => fill(parts.warn, el("p", { class: "problem", role: "alert" }, problem.message));
  function paint() {
    if (!state.data) return;
    const hidden = layout(canvas, state);
    draw(canvas, state);
    legend(parts.legend, state);
    canvas.setAttribute("aria-label", `Timeline from ${time(state.begin)} to ${time(state.end)}. ${hidden}`);
  }
  function move(begin, end) {
    const last = state.data.last, length = Math.min(Math.max(end - begin, 1e-3), last * 1.1 + 1e-3);
    begin = Math.min(Math.max(begin, -0.05 * last), last * 1.05 - length);
    Object.assign(state, { begin, end: begin + length, all: false });
    set("from", begin.toFixed(3));
    set("to", state.end.toFixed(3));
    tip.hidden = true;
    paint();
    soon();
    say(`From ${time(state.begin)} to ${time(state.end)}`);
  }
  function zoom(factor, at = (state.begin + state.end) / 2) {
    if (state.data) move(at - (at - state.begin) * factor, at + (state.end - at) * factor);
  }
  function pan(share) {
    const by = (state.end - state.begin) * share;
    if (state.data) move(state.begin + by, state.end + by);
  }
  function all() {
    Object.assign(state, { all: true }, state.data && { begin: 0, end: state.data.last }); // the next key goes on from there
    set("from", null);
    set("to", null);
    load().then(() => say("All of the run")).catch(failed);
  }
  const keys = { ArrowLeft: () => pan(-PAN), ArrowRight: () => pan(PAN), "+": () => zoom(1 / ZOOM), "=": () => zoom(1 / ZOOM),
    "-": () => zoom(ZOOM), 0: () => all(), Home: () => all() };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event));
  }, { passive: false });
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return state.begin + ((event.clientX - box.left) / box.width) * (state.end - state.begin);
  };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (!state.data || event.button) return;
    drag = { x: event.clientX, begin: state.begin, end: state.end };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!state.data) return;
    if (drag) {
      const by = ((drag.x - event.clientX) / canvas.clientWidth) * (drag.end - drag.begin);
      if (Math.abs(drag.x - event.clientX) > 3) move(drag.begin + by, drag.end + by);
      return;
    }
    hover(event);
  });
  const released = () => { drag = null; };
  canvas.addEventListener("pointerup", released);
  canvas.addEventListener("pointercancel", released);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  function hover(event) {
    const box = canvas.getBoundingClientRect();
    const found = spot(state, event.clientX - box.left, event.clientY - box.top, box.width);
    tip.hidden = !found;
    if (!found) return;
    fill(tip, el("b", {}, visible(found.title)), found.lines.map((line) => el("div", {}, visible(line))));
    tip.style.left = `${Math.max(0, Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  }
  const resized = new ResizeObserver(() => { if (state.data) { paint(); soon(); } });
  resized.observe(canvas.parentElement);
  addEventListener("themechange", paint);
  let quiet = () => {};
  const end = () => {
    stopped = true;
    quiet();
    clearTimeout(waiting);
    resized.disconnect();
    removeEventListener("themechange", paint);
  };
  const running = await load().catch((problem) => { end(); throw problem; });
  quiet = repeat(async () => (waiting || drag || document.hidden ? LIVE : ((await load()) ? LIVE : 30)), running ? LIVE : 30);
  return end;
}

/** Everything beside the drawing. */
function words(parts, data) {
  fill(parts.title, "Timeline: ", name(data.name));
  fill(parts.sentence, data.limit.sentence);
  fill(parts.warn, data.broken.map((place) => el("p", { class: "problem" }, `${place} is no span and was passed over.`)));
  fill(parts.shares, shares(data));
  fill(parts.longest, el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Longest in sight" }, el("table", { class: "spans" },
    el("thead", {}, el("tr", {}, ["Process", "Lane", "What"].map((head) => el("th", { scope: "col" }, head)),
      ["Start", "Seconds", "Step", "Version", "Tokens"].map((head) => el("th", { scope: "col", class: "n" }, head)))),
    el("tbody", {}, data.longest.map((row) => el("tr", {}, el("td", {}, name(row.process)), el("td", {}, name(row.lane)),
      el("th", { scope: "row" }, name(row.name)),
      [time(row.start), row.seconds.toFixed(3), row.step || "–", row.version < 0 ? "–" : row.version, row.tokens < 0 ? "–" : count(row.tokens)]
        .map((value) => el("td", { class: "n" }, String(value)))))))));
}

function shares(data) {
  if (!data.shares) return el("p", { class: "muted" }, "No step is finished yet.");
  const { learner, processes, episodes, steps, seconds } = data.shares;
  const waits = Object.fromEntries(Object.entries(episodes).map(([key, its]) => [key === "engine" ? key : `wait:${key}`, its]));
  const blocks = [["learner", learner], ...Object.entries(processes), ["episodes, of their own time", waits]];
  const rows = blocks.flatMap(([process, its]) => Object.entries(its).filter(([, share]) => share >= 0.005)
    .map(([what, share], i) => el("tr", {}, el("th", { scope: "row" }, i ? el("span", { class: "unseen" }, process) : name(process)),
      el("td", {}, name(data.words[what] || what.replace(/^wait:/, "waiting for "))), el("td", { class: "n" }, `${(100 * share).toFixed(1)} %`),
      el("td", { class: "share" }, el("span", { class: what.startsWith("wait:") ? "lane-bit hatched" : "lane-bit", style: { width: `${Math.min(100 * share, 100)}%`, "--hue": `var(${colour(what)})` } })))));
  return [el("p", { class: "muted small" }, `Steps ${steps[0]} to ${steps[1]}, ${duration(seconds)} in all.`),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Share of the time" }, el("table", { class: "shares spans" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Process"), el("th", { scope: "col" }, "What"),
        el("th", { scope: "col", class: "n" }, "Share"), el("th", { scope: "col" }, el("span", { class: "unseen" }, "Bar")))),
      el("tbody", {}, rows)))];
}

function legend(place, state) {
  const { data } = state;
  if (state.by === "version") {
    if (!data.versions) return fill(place, "No versions are known.");
    const [first, last] = data.versions, shown = Math.min(last - first + 1, COLOURS.length);
    return fill(place, `Versions ${first} to ${last}: `,
      Array.from({ length: shown }, (_, i) => mark(COLOURS[(first + i) % COLOURS.length], String(first + i))),
      last - first >= COLOURS.length ? "and so on, each colour again after eight" : null);
  }
  return fill(place, data.names.map((key, i) => [key, data.said[i]]).filter(([key]) => key !== "started")
    .map(([key, said]) => mark(colour(key), said, key.startsWith("wait:"))));
}

function mark(hue, text, hatched = false) {
  return el("span", { class: "lane-key" }, el("span", { class: hatched ? "lane-bit hatched" : "lane-bit", style: { "--hue": `var(${hue})` } }), name(text));
}

function time(seconds) {
  const sign = seconds < 0 ? "−" : "", size = Math.abs(seconds);
  return sign + (size < 120 ? `${size.toFixed(size < 10 ? 2 : 1)} s` : duration(size));
}
