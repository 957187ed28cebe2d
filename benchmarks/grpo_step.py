"""One GRPO step, birl against TRL: 4 prompts x 4 answers x 64 tokens of SmolLM2-135M in bfloat16, in turns.

    python -m benchmarks.grpo_step [--rounds 3] [--threads 2] [--json FILE]

The step is generation, reward and update; its seconds leave the first step of each process out. Memory is the peak
resident set of the whole process. The goal: at least twice as fast, in no more memory.
"""

import argparse
import sys
from functools import partial
from statistics import median

from benchmarks.peers import OURS, in_turns, run, verdict

GOAL = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of each process, the first one not timed")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", default="recipes/data/arithmetic/train.jsonl")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    from birl.models.load import resolve

    sizes = {k: getattr(args, k) for k in ("prompts", "group", "tokens", "steps", "precision", "data")}
    work = {"model": resolve("smollm2"), "threads": args.threads, **sizes}
    ours, peer = in_turns(
        partial(run, "benchmarks.our_grpo", python=OURS, **work),
        partial(run, "benchmarks.peer_trl", **work),
        args.rounds,
    )
    memory = [median(r["peak_rss_gb"] for r in side) for side in (ours, peer)]
    print(f"memory: ours {memory[0]:.2f} GB peer {memory[1]:.2f} GB ratio {memory[1] / memory[0]:.2f} goal 1.00")
    details = {"memory_gb": {"ours": memory[0], "peer": memory[1]}, "runs": {"ours": ours, "peer": peer}}
    slow = verdict(
        "grpo_step",
        [r["step_s"] for r in ours],
        [r["step_s"] for r in peer],
        goal=GOAL,
        unit="s",
        lower_is_better=True,
        json_file=args.json,
        details=details,
    )
    return slow or int(memory[0] > memory[1])


if __name__ == "__main__":
    sys.exit(main())
