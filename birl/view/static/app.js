// The shell of the page: routing to views, requests to the server, dark or light theme.
import { el, fill, trouble } from "./dom.js";

const VIEWS = [ // path, name, module
  ["/", "Runs", "./runs.js"],
  ["/curves", "Curves", "./curves.js"],
  ["/compare", "Compare", "./compare.js"],
  ["/rollouts", "Rollouts", "./rollouts.js"],
  ["/waiting", "Waiting", "./waiting.js"],
];

/** Response of the server to /api/path. query: an object, values may be lists, or URLSearchParams. Throws an Error with
 *  the server's own sentence. */
export async function api(path, query) {
  const words = query instanceof URLSearchParams ? query : new URLSearchParams();
  if (words !== query) {
    for (const [key, value] of Object.entries(query || {})) {
      for (const one of [value].flat()) if (one !== undefined && one !== null) words.append(key, one);
    }
  }
  const address = `/api/${path.replace(/^\/?(api\/)?/, "")}${words.size ? `?${words}` : ""}`;
  let answer;
  try {
    answer = await fetch(address);
  } catch {
    throw new Error("birl view does not answer. Is it still running? Start it again in the terminal, then reload.");
  }
  const said = await answer.json().catch(() => ({ error: `${address} gave no JSON (${answer.status}).` }));
  if (!answer.ok) throw new Error(said.error || `${address}: ${answer.status}`);
  return said;
}

let stop = null, turn = 0;

async function show() {
  const mine = ++turn;
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const params = new URLSearchParams(query || "");
  const view = VIEWS.find(([at]) => at === (path || "/")) || VIEWS[0];
  menu(view, params);
  if (stop) stop();
  stop = null;
  trouble("");
  const main = document.getElementById("content");
  const root = el("div", { class: "view", "aria-busy": "true" });
  fill(main, root);
  try {
    const module = await import(view[2]).catch((problem) => {
      throw new Error(`The view ${view[1]} did not load (${problem.message}). Reload the page.`);
    });
    const ended = await module.show(root, params, api);
    if (mine === turn) stop = ended; else if (ended) ended();
  } catch (problem) {
    if (mine === turn) fill(root, el("h1", {}, view[1]), el("p", { class: "problem", role: "alert" }, problem.message));
  }
  if (mine !== turn) return; // another view is shown meanwhile
  root.removeAttribute("aria-busy");
  document.title = `${view[1]} · birl`;
}

function menu(current, params) {
  const runs = new URLSearchParams(params.getAll("run").map((id) => ["run", id])).toString();
  fill(document.getElementById("views"), VIEWS.map(([path, name]) => el("a", {
    href: `#${path}${path !== "/" && runs ? `?${runs}` : ""}`,
    "aria-current": path === current[0] ? "page" : null,
  }, name)));
}

const THEMES = { "": "auto", light: "light", dark: "dark" };

function themes() {
  const button = document.getElementById("theme"), order = Object.keys(THEMES);
  const tell = () => {
    const now = document.documentElement.dataset.theme || "";
    button.textContent = `◐ ${THEMES[now]}`;
    button.setAttribute("aria-label", `Colours: ${THEMES[now]}. Change`);
  };
  button.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "";
    const next = order[(order.indexOf(now) + 1) % order.length];
    if (next) document.documentElement.dataset.theme = next; else delete document.documentElement.dataset.theme;
    try { localStorage.setItem("birl-theme", next); } catch { /* storage is switched off */ }
    tell();
    dispatchEvent(new Event("themechange"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
  tell();
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the URL belongs to the view
  document.getElementById("content").focus();
});
addEventListener("hashchange", show);
themes();
show();
