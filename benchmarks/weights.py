"""Cost of sending new weights from the learner to an engine in another process, by weights.method.

    python -m benchmarks.weights [--rounds 5] [--answers 16] [--dtypes bfloat16 float32] [--json FILE]

One `birl serve` with one thread, and a learner with one thread in this process, as in `birl rl engine.kind=birl`.
Before every round the learner's weights change, so that there is something to send; `--answers` are being sampled
meanwhile (0: the engine is idle). Seconds are medians over the rounds, except the first:

    total    Sender.publish: from the learner's tensors to the proof that the engine has them
    digest   of the learner's tensors                           (learner, its thread)
    expect   the canary's log-probs                             (learner, its thread)
    write    the folder; direct makes copies instead, which are in the total only (learner, its thread)
    load     until the engine confirms it: reading, comparing digests, waiting for the current token
    still    part of load in which the engine samples nothing; volume does not report it (engine, its thread)
    settle   until the router has seen it
    canary   the engine's log-probs, compared

The floor is the weights' bytes divided by the speed at which one thread of this machine copies memory; times the floor
is total / floor: how many times the bytes were in effect copied. `checkpoint` starts a process, and has no such floor.
"""

import argparse
import asyncio
import inspect
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.peers import environment, machine

METHODS = ("reload", "shared", "direct", "nccl", "volume", "checkpoint")
PARTS = ("digest", "expect", "write", "load", "settle", "canary")
DATA = "recipes/data/arithmetic/train.jsonl"


def timed(spent: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its seconds added to `spent`."""

    async def waits(*args: Any, **keys: Any) -> Any:
        began = time.perf_counter()
        try:
            return await function(*args, **keys)
        finally:
            spent[name] += time.perf_counter() - began

    def works(*args: Any, **keys: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **keys)
        finally:
            spent[name] += time.perf_counter() - began

    return waits if inspect.iscoroutinefunction(function) else works


@contextmanager
def watched(sender: Any) -> Iterator[dict[str, float]]:
    """Record the seconds of the parts of `sender.publish`."""
    from birl.weights import folder, publish

    spent: dict[str, float] = defaultdict(float)
    fleet, canary = sender.fleet, type(sender.canary)
    places = [(publish, "digests", "digest"), (canary, "compute", "expect"), (folder, "write", "write")]
    places += [(fleet, "load", "load"), (fleet, "settle", "settle"), (canary, "check", "canary")]
    places += [(sender, "recreate", "load")] if sender.recreate else []
    patches = [patch.object(owner, name, timed(spent, part, getattr(owner, name))) for owner, name, part in places]
    for one in patches:
        one.start()
    try:
        yield spent
    finally:
        for one in patches:
            one.stop()


def move(learner: Any) -> None:
    """One optimizer step in a random direction."""
    import torch

    generator = torch.Generator().manual_seed(learner.version)
    for master in learner.masters.tensors.values():
        master.grad = torch.randn(master.shape, generator=generator)
    learner.optim_step(1e-7)


def copied(gigabytes: float = 0.25) -> float:
    """Bytes a second that one thread copies from memory to memory."""
    import torch

    a = torch.zeros(int(gigabytes * 2**28))
    b = torch.zeros_like(a)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        b.copy_(a)
        seconds.append(time.perf_counter() - began)
    return a.nbytes / min(seconds)


async def busy(engine: Any, prompt: tuple[int, ...], tokens: int, number: int) -> None:
    """One answer after another, until cancelled."""
    from birl.types import SamplingParams

    while True:
        await engine.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number))


async def measure(args: argparse.Namespace, method: str, dtype: str, folder: Path, compute: Any) -> dict[str, Any]:
    from birl.config import schema
    from birl.config.load import load
    from birl.named import Given
    from birl.parallel.crew import RankGroup
    from birl.parallel.ranks import Ranks
    from birl.signals import Stop
    from birl.train import build
    from birl.train.setup import Setup
    from birl.weights.publish import Sender

    words = [f"model.path={args.model}", f"model.dtype={dtype}", f"data.train={args.data}", f"run={folder}"]
    words += ["engine.kind=birl", "engine.threads=1", f"weights.method={method}", "steps=1", "track.console=off"]
    words += ["track.tensorboard=false", "threads=1", f"rollout.max_tokens={args.tokens}", "rollout.max_staleness=1"]
    alone = RankGroup(Ranks())
    setup = Setup(
        config=load(schema.RL, words),
        folder=folder,
        given=Given(),
        dry_run=False,
        card="",
        compute=compute,
        crew=alone,
        stop=Stop(),
    )
    parts = await build.training(setup)
    loop, rows = asyncio.get_running_loop(), []
    answers: list[asyncio.Task[None]] = []
    try:
        sender = parts.publisher
        assert isinstance(sender, Sender)
        prompt = parts.chat.render(parts.train[0][0].prompt)
        await sender.publish()
        answers = [asyncio.create_task(busy(parts.engine, prompt, args.tokens, i)) for i in range(args.answers)]
        for _ in range(args.rounds + 1):
            await loop.run_in_executor(compute, move, parts.worker.learner)
            with watched(sender) as spent:
                sent = await sender.publish()
            if method in ("direct", "nccl"):
                spent["write"] = 0.0
            still = {"checkpoint": spent["load"], "volume": None}.get(method, sent.paused)
            found = {"total": sent.seconds, **{part: spent[part] for part in PARTS}, "still": still}
            rows.append(found | {"bytes": sent.bytes, "gap": sent.gap})
            print(f"{method} {dtype}: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    finally:
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await parts.close()
    return {"method": method, "dtype": dtype, "rounds": rows[1:]}


def report(results: list[dict[str, Any]], bandwidth: float) -> list[dict[str, Any]]:
    columns = ("total", *PARTS, "still")
    names = ["method", "type", "MB", *(f"{c} [s]" for c in columns), "floor [s]", "times the floor", "gap"]
    print(f"| {' | '.join(names)} |")
    print("| --- " * (len(columns) + 6) + "|")
    rows = []
    for result in results:
        told = [c for c in (*columns, "bytes", "gap") if result["rounds"][0][c] is not None]
        mid = {c: median(r[c] for r in result["rounds"]) for c in told}
        floor = mid["bytes"] / bandwidth
        rows.append({"method": result["method"], "dtype": result["dtype"], **mid, "floor": floor})
        figures = " | ".join(f"{mid[c]:.3f}" if c in mid else "" for c in columns)
        ratio = mid["total"] / floor if floor else 0.0
        name, dtype, size = result["method"], result["dtype"], mid["bytes"] / 1e6
        print(f"| {name} | {dtype} | {size:.1f} | {figures} | {floor:.3f} | {ratio:.1f} | {mid['gap']:.2g} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answers", type=int, default=0, help="that are being sampled meanwhile")
    parser.add_argument("--tokens", type=int, default=256, help="of each of them")
    parser.add_argument("--data", default=DATA, help="where the canary's prompts come from")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    if args.rounds < 1 or args.answers < 0:
        parser.error("--rounds must be at least 1, --answers at least 0")
    os.environ.update(environment(1))
    from birl.allocator import keep_memory
    from birl.errors import BirlError
    from birl.parallel.machine import compute_thread

    keep_memory()
    before, bandwidth = machine(), copied()
    print(f"one thread copies {bandwidth / 1e9:.1f} GB/s; load {before['load'][0]:.1f}")
    folder = Path(tempfile.mkdtemp(prefix="birl-weights-"))
    results = []
    try:
        with compute_thread(1) as compute:
            for dtype in args.dtypes:
                for method in args.methods:
                    results.append(asyncio.run(measure(args, method, dtype, folder / f"{dtype}-{method}", compute)))
    except BirlError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = report(results, bandwidth)
    if args.json:
        words = {k: v for k, v in vars(args).items() if k != "json"}
        found = {**words, "copied": bandwidth, "table": table, "results": results, "before": before}
        Path(args.json).write_text(json.dumps(found | {"machine": machine()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
