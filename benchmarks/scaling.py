"""Gain of a second process: seconds of a training step and bytes that ranks send each other, by form of parallelism.

    python -m benchmarks.scaling [--forms ddp fsdp tp cp] [--ranks 2] [--rounds 3] [--json FILE]
    python -m benchmarks.scaling --tiny        a few seconds, to see that it runs

One process on one thread against `--ranks` of them, one thread each: SmolLM2-135M's layers, fewer of them, bfloat16.
Weak: the same work for each rank, efficiency t(1) / t(n); strong: the same total work, t(1) / (n t(n)). tp and cp split
a micro-batch, so they have only strong scaling. The single process computes as the ranks do: with birl's kernels if
each rank has the whole model (ddp), with transformers' modules (BIRL_KERNELS=0) if it is split. Bytes are those
received by a rank in a step, beside the minimum of the form.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import ROOT, environment, machine
from birl.process import free_port

GOAL = 0.8  # weak efficiency of ddp and fsdp
BYTES = 1.1  # relative to the minimum
TIMEOUT = 1800.0
TINY = ("--tiny", "--layers", "2", "--tokens", "16", "--steps", "2")


def launch(form: str, ranks: int, words: list[str]) -> dict[str, Any]:
    """Run all ranks to their end; returns rank 0's result. Exits with the first error."""
    place = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    place |= {"BIRL_KERNELS": 1 if form == "ddp" else 0}
    command = [sys.executable, "-m", "benchmarks.scaling_rank", "--form", form, *words]
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder) / str(rank) for rank in range(ranks)]
        started = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment(1), **{k: str(v) for k, v in place.items()}, "RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=errors[rank].open("w"),
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = started[0].communicate(timeout=TIMEOUT)[0]
            codes = [process.wait(timeout=60) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            rank = next(r for r, code in enumerate(codes) if code)
            raise SystemExit(f"rank {rank} of {form}={ranks}:\n{errors[rank].read_text()[-3000:]}")
    return json.loads(said.strip().splitlines()[-1])


def measure(form: str, ranks: int, groups: int, words: list[str], rounds: int) -> dict[str, Any]:
    """Seconds of a step, by round: one process with the work of one rank and of all, and all ranks with the work of
    all; the three in turns, so that a drift of the machine affects all equally."""
    sides = {"one": (1, groups), "one, all work": (1, groups * ranks), "ranks": (ranks, groups * ranks)}
    if form in ("ddp", "fsdp"):
        sides["ranks, work of one"] = (ranks, groups if groups % ranks == 0 else groups * ranks)
    found: dict[str, Any] = {name: [] for name in sides}
    for number in range(rounds):
        for name, (size, its) in list(sides.items())[:: 1 if number % 2 == 0 else -1]:
            load = os.getloadavg()[0]
            done = launch(form, size, [*words, "--groups", str(its)])
            found[name].append(done | {"load_before": load})
            print(f"{form} {name}: {median(done['seconds']):.3g} s", file=sys.stderr, flush=True)
    return found


def figures(form: str, ranks: int, found: dict[str, Any]) -> dict[str, float]:
    """Efficiencies of the medians, and bytes relative to the minimum."""
    seconds = {name: median(s for one in rounds for s in one["seconds"]) for name, rounds in found.items()}
    last = found["ranks"][-1]
    sent = sum(last["bytes"].values())
    told = {"strong": seconds["one, all work"] / (ranks * seconds["ranks"])}
    if form in ("ddp", "fsdp"):
        told["weak"] = seconds["one"] / seconds["ranks"]
        told["strong"] = seconds["one"] / (ranks * seconds["ranks, work of one"])
    return told | {"bytes": sent, "least": last["least"], "of_least": sent / last["least"], **seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp", "tp", "cp"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--groups", type=int, default=2, help="micro-batches of a rank in a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help=f"as with {' '.join(TINY)}")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    table, runs = {}, {}
    for form in args.forms:
        runs[form] = measure(form, args.ranks, args.groups, list(TINY) if args.tiny else [], args.rounds)
        table[form] = figures(form, args.ranks, runs[form])
    print("| form | weak | strong | MB a step and rank | the least | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for form, row in table.items():
        weak = f"{row['weak']:.2f}" if "weak" in row else ""
        cells = f"{row['strong']:.2f} | {row['bytes'] / 1e6:.1f} | {row['least'] / 1e6:.1f} | {row['of_least']:.3f}"
        print(f"| {form}={args.ranks} | {weak} | {cells} |")
    if args.json:
        told = {"name": "scaling", "goal": GOAL, "table": table, "runs": runs, "machine": machine()}
        Path(args.json).write_text(json.dumps(told, indent=1) + "\n")
    weakest = min((row["weak"] for row in table.values() if "weak" in row), default=1.0)
    most = max(row["of_least"] for row in table.values())
    print(f"scaling: weak efficiency {weakest:.2f} goal {GOAL:.2f}, bytes {most:.2f} of the least, goal {BYTES:.2f}")
    return 0 if weakest >= GOAL and most <= BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
