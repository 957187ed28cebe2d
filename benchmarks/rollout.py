"""Sampling, birl's engine against transformers' `generate`: SmolLM2-135M in bfloat16, 128 tokens an answer, in turns.

    python -m benchmarks.rollout [--batches 16 32 64] [--rounds 2] [--threads 2] [--json FILE]

Ours gives a log-prob for each token and lays its weights out anew in each timed call, as after an optimizer step;
`generate` computes no log-probs. All answers have the same length, which flatters `generate`: it cannot refill the
places of answers that ended. One line for each batch size; the goal is for the largest: 8 prompts x 8 answers.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.peers import OURS, in_turns, machine, run, verdict

GOAL = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--group", type=int, default=8, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", default="recipes/data/arithmetic/train.jsonl")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    from birl.models.load import resolve

    sizes = {k: getattr(args, k) for k in ("group", "tokens", "precision", "data")}
    results = {}
    for batch in args.batches:
        work = {"model": resolve("smollm2"), "threads": args.threads, "batch": batch, **sizes}
        ours, peer = in_turns(
            partial(run, "benchmarks.our_generate", python=OURS, **work),
            partial(run, "benchmarks.peer_generate", **work),
            args.rounds,
        )
        results[batch] = ([r["tokens_per_s"] for r in ours], [r["tokens_per_s"] for r in peer])
        a, b = map(median, results[batch])
        print(f"batch {batch}: ours {a:.0f} tok/s peer {b:.0f} tok/s ratio {a / b:.2f}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"tokens_per_s": results, "machine": machine()}, indent=1) + "\n")
    ours, peer = results[max(results)]
    return verdict("rollout", ours, peer, goal=GOAL, unit="tok/s", lower_is_better=False)


if __name__ == "__main__":
    sys.exit(main())
