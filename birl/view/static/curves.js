import { el, fill } from "./dom.js";

export async function show(root, params, api) {
  fill(root, el("h1", {}, "curves"));
}
