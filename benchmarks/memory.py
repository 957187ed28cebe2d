"""Memory predicted by `birl plan` against that of training steps of SmolLM2-135M: the peak resident set of the process.

    python -m benchmarks.memory [--only bfloat16] [--threads 2] [--json FILE]

The goal: no prediction is more than 15 % off.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import ROOT, environment, machine, run

GOAL = 15.0  # per cent
DATA = "recipes/data/arithmetic/train.jsonl"
PROMPT = 37  # tokens of each of its prompts
FULL: dict[str, object] = {"group": 8, "tokens": 120}  # 3,988 tokens: one full micro-batch
SETTINGS: dict[str, dict[str, object]] = {  # options of benchmarks.our_grpo
    "bfloat16, 4 x 4 x 64": {},
    "bfloat16, 4 x 8 x 120": FULL,
    "bfloat16, 4 x 8 x 120, tokens_per_microbatch=1024": {**FULL, "more": "learner.tokens_per_microbatch=1024"},
    "bfloat16, 4 x 8 x 120, gradient_checkpointing": {**FULL, "more": "learner.gradient_checkpointing=true"},
    "bfloat16, 4 x 4 x 64, reference model": {"more": "algorithm.kl_coef=0.1"},
    "float32, 4 x 4 x 64": {"precision": "float32"},
    "bfloat16, 4 x 4 x 64, BIRL_KERNELS=0": {},
    "float32, 4 x 4 x 64, BIRL_KERNELS=0": {"precision": "float32"},
}


def predicted(options: dict[str, object], threads: int) -> float:
    """Predicted peak [GiB], by `birl plan --json` in a separate process."""
    words = [
        f"model.dtype={options.get('precision', 'bfloat16')}",
        f"data.max_prompt_tokens={PROMPT}",
        "rollout.prompts=4",
        f"rollout.group_size={options.get('group', 4)}",
        f"rollout.max_tokens={options.get('tokens', 64)}",
        "validation.every=0",
        "checkpoint.asynchronous=false",  # whether the copy still exists at the peak depends on the disk
        *str(options.get("more", "")).split(),
    ]
    command = [sys.executable, "-m", "birl", "plan", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(threads), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["peak"] / 2**30


def measured(options: dict[str, object], threads: int) -> float:
    """Measured peak [GiB] of two steps."""
    from birl.models.load import resolve

    python, work = Path(sys.executable), {"model": resolve("smollm2"), "data": DATA, "steps": 2, **options}
    return run("benchmarks.our_grpo", python=python, threads=threads, **work)["peak_rss_gb"] * 1e9 / 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    found = {}
    for name, options in SETTINGS.items():
        if args.only not in name:
            continue
        os.environ["BIRL_KERNELS"] = "0" if "BIRL_KERNELS=0" in name else "1"
        ours, real = predicted(options, args.threads), measured(options, args.threads)
        found[name] = {"predicted_gib": ours, "measured_gib": real, "off": 100 * (ours / real - 1)}
        print(f"{name}: predicted {ours:.2f} GiB measured {real:.2f} GiB off {found[name]['off']:+.1f} %", flush=True)
    worst = max(abs(figures["off"]) for figures in found.values())
    if args.json:
        figures = {"name": "memory", "worst": worst, "goal": GOAL, "settings": found, "machine": machine()}
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    print(f"memory: worst {worst:.1f} % off, goal {GOAL:.1f} %")
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
