"""Sampling, birl's engine against vLLM's CPU build and transformers' `generate`: SmolLM2-135M in bfloat16, in turns.

    python -m benchmarks.rollout [--peer vllm|generate] [--batches 16 32 64] [--rounds 5] [--threads 2] [--json FILE]

128 tokens an answer, 8 answers a prompt. Ours returns a log-prob for each token and packs its weights again in each
timed call, as after an optimizer step; the peers compute no log-probs by default (`--logprobs`, vLLM only). vLLM runs
with the best setting found: both threads, compiled, one process. One line for each batch size; the verdict is for the
smallest ratio among them. `--lengths uneven` (vLLM only): a quarter, half, three quarters, all of the tokens, in turns.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.peers import OURS, in_turns, machine, run, verdict

GOALS = {"vllm": 2.0, "generate": 3.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=GOALS, default="generate")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--group", type=int, default=8, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--lengths", default="same", choices=["same", "uneven"])
    parser.add_argument("--logprobs", action="store_true", help="have vLLM give the log-prob of each token, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", default="recipes/data/arithmetic/train.jsonl")
    parser.add_argument("--goal", type=float, help="least ratio; without it 2 against vLLM, 3 against generate")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    if args.peer == "generate" and args.lengths == "uneven":
        parser.error("--lengths uneven needs --peer vllm: peer_generate gives all answers the same length")
    from birl.models.load import resolve

    sizes = {k: getattr(args, k) for k in ("tokens", "precision", "data")}
    uneven = {"lengths": "uneven"} if args.lengths == "uneven" else {}
    asked = {"logprobs": 0} if args.logprobs and args.peer == "vllm" else {}
    results, runs = {}, {}
    for batch in args.batches:
        work = {"model": resolve("smollm2"), "threads": args.threads, "batch": batch, **sizes, **uneven}
        work["group"] = min(args.group, batch)
        ours, peer = in_turns(
            partial(run, "benchmarks.our_generate", python=OURS, **work),
            partial(run, f"benchmarks.peer_{args.peer}", **work, **asked),
            args.rounds,
        )
        runs[batch] = {"ours": ours, "peer": peer}  # each with the load before and after it
        results[batch] = ([r["tokens_per_s"] for r in ours], [r["tokens_per_s"] for r in peer])
        a, b = map(median, results[batch])
        print(f"batch {batch}: ours {a:.0f} tok/s peer {b:.0f} tok/s ratio {a / b:.2f}", flush=True)
    if args.json:
        options = {"peer": args.peer, "lengths": args.lengths, "logprobs": args.logprobs}
        text = json.dumps({**options, "tokens_per_s": results, "runs": runs, "machine": machine()}, indent=1)
        Path(args.json).write_text(text + "\n")
    ours, peer = min(results.values(), key=lambda r: median(r[0]) / median(r[1]))
    goal = args.goal or GOALS[args.peer]
    return verdict(f"rollout against {args.peer}", ours, peer, goal=goal, unit="tok/s", lower_is_better=False)


if __name__ == "__main__":
    sys.exit(main())
