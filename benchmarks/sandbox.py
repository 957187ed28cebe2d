"""Runs per second and latency of each kind of sandbox, side by side, on small Python programs.

    python -m benchmarks.sandbox [--kinds zygote bubblewrap landlock process] [--workers 2] [--runs 200] [--json FILE]

Each kind runs `print(sum(range(1000)))` one after another (latency, with one worker), then as many at once as there are
workers (runs per second), in turns with the other kinds. A test of code (`tests/s`) is a call of a function, for which
a second process is forked. `interpreter` is a bare `python -I -S` without any sandbox, for comparison. `cpu ms` is the
CPU time of one run, of all processes involved. `load` is the machine's before the round.
"""

import argparse
import asyncio
import json
import os
import resource
import time
from pathlib import Path
from statistics import median, quantiles

from benchmarks.peers import machine
from birl.sandbox.code import Case, run_test
from birl.sandbox.local import LocalSandbox
from birl.sandbox.open import LOCAL, tried
from birl.sandbox.protocol import Limits

PROGRAM = {"main.py": "print(sum(range(1000)))"}
EXPECTED = b"499500\n"
GOAL = 200  # runs a second of the zygote with two workers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(LOCAL), choices=LOCAL)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    found = asyncio.run(measured(args.kinds, args.workers, args.runs, args.rounds))
    print(f"{'kind':<14}{'runs/s':>8}{'best':>8}{'tests/s':>9}{'cpu ms':>8}{'median ms':>11}{'p95 ms':>8}{'load':>7}")
    for kind, rounds in found.items():
        rates = [r["runs_per_s"] for r in rounds]
        latency = [ms for r in rounds for ms in r["latency_ms"]]
        p95, tests, load = (
            quantiles(latency, n=20)[-1],
            *(median(r[k] for r in rounds) for k in ("tests_per_s", "load")),
        )
        cpu = rounds[-1]["cpu_ms"]
        print(f"{kind:<14}{median(rates):>8.0f}{max(rates):>8.0f}{tests:>9.0f}{cpu:>8.1f}", end="")
        print(f"{median(latency):>11.1f}{p95:>8.1f}{load:>7.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine(), "kinds": found}, indent=1) + "\n")
    rates = [r["runs_per_s"] for r in found.get("zygote", [])]
    return 0 if not rates or max(rates) >= GOAL else 1


async def measured(kinds: list[str], workers: int, runs: int, rounds: int) -> dict[str, list[dict]]:
    """Figures of each kind, one entry for each round."""
    found: dict[str, list[dict]] = {kind: [] for kind in [*kinds, "interpreter"]}
    boxes = {}
    for kind in kinds:
        trial = await tried(kind)
        if not trial.python:
            raise SystemExit(f"{kind}: {trial.reason}")
        boxes[kind] = LocalSandbox(kind, python=trial.python, workers=workers)
    try:
        for _ in range(rounds):
            found["interpreter"].append(await bare(next(iter(boxes.values())).python, workers, runs))
            for kind, box in boxes.items():
                found[kind].append({"load": os.getloadavg()[0], **await one_round(box, runs)})
    finally:
        for box in boxes.values():
            await box.close()
    for kind, box in boxes.items():
        found[kind][-1]["cpu_ms"] = await processor_time(kind, box.python, runs)
    return found


async def processor_time(kind: str, python: str, runs: int) -> float:
    """CPU time of one run [ms]. That of children is known only after they have ended, so the sandbox is closed first;
    its start is included."""
    began = spent()
    async with LocalSandbox(kind, python=python, workers=1) as box:
        for _ in range(runs):
            await box.run(PROGRAM, ["python", "main.py"], Limits())
    return (spent() - began) / runs * 1000


async def bare(python: str, workers: int, runs: int) -> dict:
    """The same program in new interpreters, without isolation and limits."""
    latency = []

    async def lane() -> None:
        for _ in range(runs // workers):
            began = time.perf_counter()
            words = (python, "-I", "-S", "-c", PROGRAM["main.py"])
            process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env={})
            await process.communicate()
            latency.append((time.perf_counter() - began) * 1000)

    began, load, used = time.perf_counter(), os.getloadavg()[0], spent()
    await asyncio.gather(*(lane() for _ in range(workers)))
    rate = len(latency) / (time.perf_counter() - began)
    cpu = (spent() - used) / len(latency) * 1000
    return {"load": load, "runs_per_s": rate, "tests_per_s": 0.0, "latency_ms": latency, "cpu_ms": cpu}


def spent() -> float:
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


async def one_round(box: LocalSandbox, runs: int) -> dict:
    async def run() -> float:
        began = time.perf_counter()
        result = await box.run(PROGRAM, ["python", "main.py"], Limits())
        if result.stdout != EXPECTED:
            raise SystemExit(f"{box.kind}: {result}")
        return (time.perf_counter() - began) * 1000

    await asyncio.gather(*(run() for _ in range(box.workers)))  # so that all workers have started
    latency = [await run() for _ in range(max(20, runs // 10))]
    began = time.perf_counter()
    await asyncio.gather(*(run() for _ in range(runs)))
    took = time.perf_counter() - began
    case = Case(call="f", args=(20,), expected=400)
    began = time.perf_counter()
    tests = [run_test(box, "def f(x):\n    return x * x", case, Limits()) for _ in range(runs // 4)]
    verdicts = await asyncio.gather(*tests)
    if not all(verdict.passed for verdict in verdicts):
        raise SystemExit(f"{box.kind}: {verdicts}")
    per_test = (time.perf_counter() - began) / len(verdicts)
    return {"runs_per_s": runs / took, "latency_ms": latency, "tests_per_s": 1 / per_test}


if __name__ == "__main__":
    raise SystemExit(main())
