"""Gain of asynchronous training: `birl rl` itself, synchronous and asynchronous, the same steps, in separate processes.

    python -m benchmarks.async [--parts components cores waits tails reward] [--steps 12] [--out benchmarks/results]

    components  an engine and a learner alone, one thread each: cost of a decode step and of a training step
    cores       every answer has `--tokens` tokens, without waits: an engine and a learner with a core each, against the
                embedded engine that alternates with the learner and has both cores
    waits       as cores, but every answer's environment takes 0.1 to 5 s
    tails       lengths are lognormal, the longest eight times the median
    reward      the demo's task: seconds from the start until the mean reward of three steps is `--target`

For every setting of rollout.max_staleness and rollout.order_window, means over all steps except the first `--warm`:

    step        seconds from step to step
    engine      seconds that the engine computed
    train       seconds that the learner computed; weights: that it waited for them to arrive
    ideal       max(engine, train + weights), the least of each in any setting of the part: engine and learner at their
                best, without waits. If they alternate in one process their sum
    reached     ideal / step. The rest of the step is in wait (the learner waits for groups) and other (logs)

The goal is 0.9 for the best setting of waits and of tails. Each part writes async_<part>.json with all figures, the
machine and its load; async_<part>_<setting>.json is input of `birl plan --simulate --measured`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.peers import ROOT, environment, machine

PARTS = ("components", "cores", "waits", "tails", "reward")
SERVER = ("engine.kind=birl", "engine.threads=1", "weights.method=shared")
GOAL = 0.9
WAIT = (0.1, 5.0)  # s
QUICK = (0.02, 0.1)


def settings(part: str, prompts: int, quick: bool) -> list[tuple[str, int, tuple[str, ...]]]:
    """Settings of a part: (name, threads of the learner, words of the command)."""
    served = {
        "cores": [(0, 0), (1, 0), (2, 0)],
        "waits": [(0, 0), (1, 0), (2, 0), (4, 0)],
        "tails": [(0, 0), (1, 0), (2, 0), (4, 0), (2, prompts)],
    }[part]
    found = []
    for staleness, window in served:
        name = f"staleness {staleness}" + (f", window {window}" if window else "")
        words = (*SERVER, f"rollout.max_staleness={staleness}", f"rollout.order_window={window}")
        found.append((name, 1, words))
    if part == "cores":
        found.append(("embedded", 2, ("engine.kind=embedded",)))
    return [found[0], found[-1]] if quick else found


def child(args: argparse.Namespace, run: Path, threads: int, world: Sequence[object], words: Sequence[str]) -> None:
    """Run `birl rl` to its end. Raises `SystemExit` with its output if it fails."""
    command = [sys.executable, "-m", "benchmarks.uneven", *map(str, world), "rl", *words]
    command += [f"run={run}", f"threads={threads}", "track.console=off", "track.tensorboard=false"]
    command += ["track.report=false", "checkpoint.every=0", "validation.every=0"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(threads), capture_output=True, text=True, timeout=args.timeout
        )
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{' '.join(command)}\nhad not ended after {error.timeout:g} s") from None
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nexited with {done.returncode}:\n{(done.stderr or done.stdout)[-3000:]}")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def measured(run: Path, warm: int) -> dict[str, Any]:
    """Means of a step [s, tokens], without the first `warm`."""
    metrics, engine = lines(run / "metrics.jsonl")[warm:], lines(run / "engine.jsonl")[warm - 1 :]
    steps = len(metrics)

    def mean(name: str) -> float:
        return sum(m.get(name) or 0.0 for m in metrics) / steps

    found = {name: mean(f"time/{name}") for name in ("step", "wait", "train", "weights")}
    found["engine"] = (engine[-1]["seconds"] - engine[0]["seconds"]) / steps
    found["other"] = found["step"] - found["wait"] - found["train"] - found["weights"]
    found["tokens"] = mean("tokens/generated")
    found["rate"] = found["tokens"] / found["step"]
    found["staleness"] = mean("staleness/mean")
    found |= {name: mean(f"weights/{name}") for name in ("paused", "bytes")}
    groups: dict[int, list[int]] = {}
    for row in lines(run / "rollouts.jsonl"):
        groups.setdefault(row["group"], []).append(sum(sum(s["mask"]) for s in row["samples"]))
    prompts = [s["mask"].index(1) for row in lines(run / "rollouts.jsonl") for s in row["samples"]]
    return {**found, "steps": steps, "answers": list(groups.values()), "prompt": fmean(prompts)}


def shares(results: dict[str, dict[str, Any]]) -> None:
    """Add `ideal` and `reached` to each result."""
    served = [r for name, r in results.items() if name != "embedded"]
    engine, learner = min(r["engine"] for r in served), min(r["train"] + r["weights"] for r in served)
    for name, r in results.items():
        r["ideal"] = r["engine"] + r["train"] if name == "embedded" else max(engine, learner)
        r["reached"] = r["ideal"] / r["step"]


def table(part: str, results: dict[str, dict[str, Any]]) -> None:
    columns = ("step", "engine", "train", "weights", "wait", "other", "ideal", "reached", "staleness", "rate")
    print(f"\n| {part} | " + " | ".join(columns[:-1]) + " | tok/s | load |\n" + "| --- " * (len(columns) + 2) + "|")
    for name, r in results.items():
        figures = " | ".join(f"{r[c]:.2f}" for c in columns[:-1])
        print(f"| {name} | {figures} | {r['rate']:.0f} | {r['load']:.1f} |", flush=True)


def compare(args: argparse.Namespace, part: str, folder: Path, parts: dict[str, Any]) -> int:
    """Run all settings of one part, `--rounds` times in turns; keeps the round with the median step of each."""
    wait = (QUICK if args.quick else WAIT) if part == "waits" else (0.0, 0.0)
    sigma, longest = (args.sigma, 8 * args.tokens) if part == "tails" else (0.0, args.tokens)
    world = ["--wait", *wait, "--tokens", args.tokens, "--sigma", sigma, "--longest", longest]
    words = [f"model.path={args.model}", f"data.train={args.data}", f"rollout.prompts={args.prompts}"]
    words += [f"rollout.group_size={args.group}", f"rollout.max_tokens={longest}", f"steps={args.steps + args.warm}"]
    words += ["reward=benchmarks/uneven.py:noise", "optimizer.lr=1e-7", f"engine.max_batch={args.max_batch}"]
    rounds: dict[str, list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for name, threads, more in settings(part, args.prompts, args.quick):
            run = folder / f"{part}-{number}-{name.replace(' ', '_').replace(',', '')}"
            load, began = os.getloadavg()[0], time.perf_counter()
            child(args, run, threads, world, [*words, *more])
            rounds.setdefault(name, []).append(measured(run, args.warm) | {"load_before": load})
            rounds[name][-1]["load"] = os.getloadavg()[0]
            seconds = time.perf_counter() - began
            print(f"{part}, {name}: {rounds[name][-1]['step']:.2f} s a step ({seconds:.0f} s)", file=sys.stderr)
            shutil.rmtree(run)  # a checkpoint is 1.6 GB
    results = {n: sorted(found, key=lambda r: r["step"])[len(found) // 2] for n, found in rounds.items()}
    shares(results)
    table(part, results)
    write(args, f"async_{part}", {"part": part, "results": results, "steps of rounds": steps_of(rounds)})
    for name, result in results.items():
        if parts and name != "embedded":
            scenario = simulated(args, part, name, result, parts)
            write(args, f"async_{part}_{name.replace(' ', '_').replace(',', '')}", scenario, about=False)
    best = max((n for n in results if n != "embedded"), key=lambda n: results[n]["reached"])
    reached, step = results[best]["reached"], results[best]["step"]
    others = [n for n in ("staleness 0", "embedded") if n in results and n != best]
    gains = [f"{results[n]['step'] / step:.2f} times as fast as {n}" for n in others]
    goal = "" if part == "cores" else f" goal {GOAL:.2f}"
    print(f"async, {part}: {best} reaches {reached:.2f} of the ideal{goal}; {', '.join(gains)}", flush=True)
    return 0 if part == "cores" or args.quick else int(reached < GOAL)


def steps_of(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    return {name: [r["step"] for r in found] for name, found in rounds.items()}


def simulated(
    args: argparse.Namespace, part: str, name: str, result: dict[str, Any], parts: dict[str, Any]
) -> dict[str, Any]:
    """Input of `birl plan --simulate --measured`: the parts measured alone, and the results of a run."""
    staleness, window = int(name.split()[1].rstrip(",")), int(name.split()[3]) if "window" in name else 0
    rest = max(result["weights"] - result["paused"], 1e-3)
    episodes: dict[str, Any] = {"tokens": result["answers"], "prompt": result["prompt"]}
    if part == "waits":
        episodes["reward"] = list(QUICK if args.quick else WAIT)
    return {
        "engine": parts["engine"] | {"max_batch": args.max_batch},
        "learner": parts["learner"],
        "sync": {"pause": result["paused"], "bytes": result["bytes"], "bandwidth": result["bytes"] / rest},
        "episodes": episodes,
        "run": {"prompts": args.prompts, "group_size": args.group, "order_window": window},
        "result": {
            **{"seconds_per_step": result["step"], "engines": 1, "learners": 1},
            **{"max_staleness": staleness, "shared": False},
        },
        "sources": {
            **{f"engine.{key}": "benchmarks.async, an engine alone with one thread" for key in parts["engine"]},
            **{f"learner.{key}": "benchmarks.async, a learner alone with one thread" for key in parts["learner"]},
            **{f"sync.{key}": f"the run, {result['steps']} steps" for key in ("pause", "bytes", "bandwidth")},
        },
    }


def components(args: argparse.Namespace) -> dict[str, Any]:
    """Run in a separate process: threads of this one would compete with the runs for cores."""
    sizes = ["--prompts", args.prompts, "--group", args.group, "--tokens", args.tokens, "--max-batch", args.max_batch]
    command = [sys.executable, "-m", "benchmarks.alone", "--model", args.model, "--data", args.data, *map(str, sizes)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(1), capture_output=True, text=True, timeout=args.timeout, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nexited with {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"components: {json.dumps(found)}", flush=True)
    write(args, "async_components", found)
    return found


def learning(args: argparse.Namespace, folder: Path) -> int:
    """Measure the seconds to the same reward."""
    quick = ["reward=benchmarks/uneven.py:letters", "optimizer.lr=3e-3", f"data.train={args.data}"]
    quick += [f"rollout.prompts={args.prompts}", f"rollout.group_size={args.group}"]
    demo = ["recipes/smollm2_arithmetic_grpo_cpu2.yaml", "optimizer.lr=3e-5"]
    words = [
        *(quick if args.quick else demo),
        f"model.path={args.model}",
        f"steps={args.most}",
        "rollout.max_tokens=32",
    ]
    ways = [("embedded, synchronous", 2, ())]
    ways += [(f"staleness {n}", 1, (*SERVER, f"rollout.max_staleness={n}")) for n in (0, 1, 2)]
    found = {}
    for name, threads, more in ways:
        run, began, load = folder / f"reward-{name.replace(' ', '_')}", time.time(), os.getloadavg()[0]
        child(args, run, threads, [], [*words, *more])
        rows = lines(run / "metrics.jsonl")
        curve = [(datetime.fromisoformat(m["time"]).timestamp() - began, m["reward/mean"]) for m in rows]
        means = [fmean(r for _, r in curve[max(i - 2, 0) : i + 1]) for i in range(len(curve))]
        at = next((i for i, mean in enumerate(means) if i >= 2 and mean >= args.target), None)
        found[name] = {"steps": None if at is None else at + 1, "seconds": None if at is None else curve[at][0]}
        found[name] |= {"curve": curve, "load_before": load, "load": os.getloadavg()[0]}
        found[name]["step"] = median(m["time/step"] for m in rows[1:])
        shutil.rmtree(run)
        reached = "never" if at is None else f"{at + 1} steps, {curve[at][0]:.0f} s"
        print(f"reward {args.target:g}, {name}: {reached}; {found[name]['step']:.2f} s a step", flush=True)
    write(args, "async_reward", {"target": args.target, "results": found})
    return 0 if args.quick else int(any(f["seconds"] is None for f in found.values()))


def write(args: argparse.Namespace, name: str, found: dict[str, Any], about: bool = True) -> None:
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        words = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        found = found | ({"options": words, "machine": machine()} if about else {})
        (args.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", default="recipes/data/arithmetic/train.jsonl")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer; of tails the median")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of tails' lengths")
    parser.add_argument("--max-batch", type=int, default=64, help="engine.max_batch")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each run")
    parser.add_argument("--warm", type=int, default=3, help="steps before them")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.9, help="of the part reward")
    parser.add_argument("--most", type=int, default=60, help="steps of the part reward")
    parser.add_argument("--timeout", type=float, default=3600.0, help="of each run [s]")
    parser.add_argument("--quick", action="store_true", help="whether it works: two settings, short waits, no goals")
    parser.add_argument("--out", type=Path, help="folder for the JSON files; none are written without it")
    args = parser.parse_args()
    for name in ("prompts", "group", "tokens", "steps", "warm", "rounds", "most"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.group < 2:
        parser.error("--group must be at least 2: one answer has nothing to be compared with")
    return args


def main() -> int:
    args, code, parts = options(), 0, {}
    folder = Path(tempfile.mkdtemp(prefix="birl-async-"))
    try:
        if "components" in args.parts:
            parts = components(args)
        for part in (p for p in PARTS[1:4] if p in args.parts):
            code |= compare(args, part, folder, parts)
        if "reward" in args.parts:
            code |= learning(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
