"""Interruption of training by a checkpoint: written in the background, and synchronously.

    python -m benchmarks.checkpoint [--steps 8] [--rounds 3] [--json FILE]

SFT of SmolLM2-135M with a checkpoint after every second step (1.6 GB: float32 weights and two moments). `stands still`
is metrics.jsonl's time/checkpoint; `share` is the total cost of a checkpoint, including slower steps meanwhile,
relative to a step without one.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.peers import ROOT, environment, machine
from birl.models.load import resolve

LENGTH = 400  # characters of an answer


def trained(folder: Path, steps: int, every: int, asynchronous: bool, threads: int) -> dict[str, float]:
    """Seconds of a step, of its interruption by a checkpoint, and of all steps."""
    import subprocess

    rows = [{"prompt": f"What is {i}?", "response": f"{i} is a number. " * (LENGTH // 16)} for i in range(64)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *(f"model.path={resolve('smollm2')}", f"data.train={folder}/a.jsonl", f"steps={steps}", "batch_size=8"),
        *(
            f"checkpoint.every={every}",
            f"checkpoint.asynchronous={str(asynchronous).lower()}",
            "checkpoint.keep_last=1",
        ),
        *("track.console=off", "track.tensorboard=false", "track.report=false", f"run={folder}/run"),
    ]
    command = [sys.executable, "-m", "birl", "sft", *words]
    subprocess.run(command, cwd=ROOT, env=environment(threads), check=True, capture_output=True)
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    stood = [m["time/checkpoint"] for m in metrics]
    return {
        "step": statistics.median(m["time/train"] for m in metrics),
        "stands_still": statistics.mean([s for s in stood if s > 0] or [0.0]),
        "all": sum(m["time/train"] + m["time/checkpoint"] for m in metrics) / len(metrics),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"none": [], "background": [], "at once": []}
    for _ in range(options.rounds):
        for name, every in (("none", 0), ("background", 2), ("at once", 2)):
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(trained(Path(folder), options.steps, every, name == "background", options.threads))
    medians = {n: {k: statistics.median(r[k] for r in rounds) for k in rounds[0]} for n, rounds in found.items()}
    plain = medians["none"]["all"]
    for name, figures in medians.items():
        cost = 2 * (figures["all"] - plain)  # every second step has a checkpoint
        figures["share"] = cost / plain
        print(
            f"{name:<12} step {figures['step']:6.2f} s   stands still {figures['stands_still']:6.2f} s   "
            f"a checkpoint costs {cost:6.2f} s = {cost / plain:6.1%} of a step"
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "medians": medians, "rounds": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
