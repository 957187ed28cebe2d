"""Seconds from the start of the process to the first step with a mean reward of 0.95, birl against TRL.

    python -m benchmarks.learning [--lr 3e-5] [--seed 0] [--threads 2] [--json FILE]

The demo's data, 8 prompts x 8 answers x 32 tokens, float32 weights and bfloat16 compute on both sides, the same
learning rate; imports, loading, and birl's validations and checkpoints included. TRL takes about ten minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.peers import OURS, ROOT, curve_of, environment, run, verdict

GOAL = 3.0
DATA = "recipes/data/arithmetic/train.jsonl"


def ours(args: argparse.Namespace, folder: str) -> dict:
    words = ["recipes/smollm2_arithmetic_grpo_cpu2.yaml", f"optimizer.lr={args.lr}", f"seed={args.seed}"]
    words += ["steps=60", "track.console=off", f"run={folder}/run"]
    start = time.time()
    process = subprocess.Popen([OURS, "-m", "birl", "rl", *words], cwd=ROOT, env=environment(args.threads))
    log, curve = Path(folder, "run", "metrics.jsonl"), []
    while process.poll() is None:
        time.sleep(0.5)
        curve = curve_of(log, start)
        if any(x["reward"] >= args.target for x in curve):
            process.terminate()
            break
    process.wait()
    return {"learning": curve}


def reached(result: dict, target: float) -> float:
    times = [x["seconds"] for x in result["learning"] if x["reward"] >= target]
    if not times:
        raise SystemExit(f"reward {target} was not reached: {result['learning']}")
    return times[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    from birl.models.load import resolve

    with tempfile.TemporaryDirectory() as folder:
        mine = ours(args, folder)
    print(json.dumps(mine), file=sys.stderr, flush=True)
    sizes = {"prompts": 8, "group": 8, "tokens": 32, "lr": args.lr, "seed": args.seed, "steps": 60}
    peer = run(
        "benchmarks.peer_trl",
        threads=args.threads,
        learn=True,
        precision="mixed",
        model=resolve("smollm2"),
        data=DATA,
        target=args.target,
        **sizes,
    )
    times = reached(mine, args.target), reached(peer, args.target)
    return verdict(
        "learning",
        [times[0]],
        [times[1]],
        goal=GOAL,
        unit="s",
        lower_is_better=True,
        json_file=args.json,
        details={"curves": {"ours": mine["learning"], "peer": peer["learning"]}},
    )


if __name__ == "__main__":
    sys.exit(main())
