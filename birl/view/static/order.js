// Which figures a run is judged by, in the order in which one asks.
const VALIDATIONS = ["validation/all/score", "validation/all/pass@1", "validation/accuracy", "validation/nll"];
const FIRST = ["reward/mean", VALIDATIONS, "loss", "kl", "entropy", "clip_fraction", "mismatch/mean", "staleness/mean",
  "length/mean", "speed/generate", "speed/train", "grad_norm"];

/** Those of the names; of the figures of a validation the one that there is. */
export function first(names) {
  const known = new Set(names);
  return FIRST.map((wanted) => [wanted].flat().find((name) => known.has(name))).filter(Boolean);
}
