// Building the page. Text always becomes text nodes: innerHTML is never used, whatever a model or a file says.

/** An element. props: class, style (object), data (object), on (object of listeners), value/checked/... as properties,
 *  anything else as an attribute (true: present, false/null: absent). Children: nodes, strings, numbers, arrays, null. */
export function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) set(node, name, value);
  add(node, children);
  return node;
}

const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "indeterminate", "open", "hidden"]);

function set(node, name, value) {
  if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
  else if (name === "style") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
  else if (name === "data") Object.assign(node.dataset, value);
  else if (PROPERTIES.has(name)) node[name] = value;
  else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
}

export function add(node, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replace the content of node by children. */
export function fill(node, ...children) {
  const fresh = document.createDocumentFragment();
  add(fresh, children);
  node.replaceChildren(fresh);
  return node;
}

// Characters that a browser interprets instead of showing: control characters, bidi overrides, invisible tags, lone surrogates.
// Newline, tab and the two joiners (emoji and Persian are wrong without them) stay.
const OBEYED = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu;

/** Escape these characters, as birl/visible.py does: visible("a\u202eb") is "a⟪U+202E⟫b". */
export function visible(text) {
  return String(text).replace(OBEYED, (c) => ("\n\t\u200c\u200d".includes(c) ? c
    : `⟪U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟫`));
}

/** A name from a file: escaped, with isolated text direction. */
export function name(text) {
  return el("bdi", {}, visible(text));
}

/** Announce to screen readers, once. */
export function say(text) {
  const place = document.getElementById("said");
  if (place.textContent !== text) place.textContent = text;
}

/** Show an error above the view; "" removes it. */
export function trouble(text) {
  const place = document.getElementById("trouble");
  if (place.textContent !== text) place.textContent = text;
  place.hidden = !text;
}

/** Call act now and every `seconds`, not while the tab is hidden, never concurrently. Returns a function to stop.
 *  act may return a number: seconds until the next call. Its errors are shown above the view until it succeeds. */
export function repeat(act, seconds) {
  let timer = 0, stopped = false, busy = false;
  const turn = async () => {
    clearTimeout(timer);
    if (stopped || busy || document.hidden) return;
    busy = true;
    let next = seconds;
    try {
      next = (await act()) || seconds;
      if (!stopped) trouble("");
    } catch (error) {
      if (!stopped) trouble(error.message);
    }
    busy = false;
    if (!stopped) timer = setTimeout(turn, next * 1000);
  };
  document.addEventListener("visibilitychange", turn);
  turn();
  return () => {
    stopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", turn);
  };
}

/** Put params into the URL without reloading the view. */
export function keep(params) {
  const path = location.hash.split("?")[0] || "#/";
  const query = params.toString();
  history.replaceState(null, "", path + (query ? `?${query}` : ""));
}
