"""Reward functions of a user, by name and as objects, and what tests do with them."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from birl.rewards.score import Rewards, Score
from birl.types import Outcome

FUNCTIONS = '''
import asyncio, json, os, signal, subprocess, sys, time

constant = 3

def by_length(completions, **_):
    return [len(c) for c in completions]

def columns(completions, prompts, gold, level, **more):
    assert prompts == ["p"] * len(completions) and sorted(more) == ["other"], (prompts, more)
    return [1.0 if g == "7" and l == 2 else 0.0 for g, l in zip(gold, level)]

def only_named(completions, level=None):
    return level

def needs(completions, difficulty):
    return [0.0] * len(completions)

def noisy(completions, **_):
    print('{"values": [99]}')
    os.write(1, b"raw\\n")
    subprocess.run(["echo", "from a child"])
    assert sys.stdin.read() == ""
    return [1.0] * len(completions)

def bad(completions, **_):
    """Does what a completion says. A good one is worth the number of completions in the call."""
    for c in completions:
        if c == "hang":
            while True: pass
        if c == "sleep with child":
            child = subprocess.Popen(["sleep", "300"])
            open("worker.pid", "w").write(str(os.getpid()))
            open("child.pid", "w").write(str(child.pid))
            time.sleep(300)
        if c == "raise": raise KeyError("no such thing")
        if c == "json": json.loads("{")
        if c == "exit": os._exit(3)
        if c == "sys.exit": sys.exit(4)
        if c == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        if c == "memory": raise MemoryError
    return [{"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0"}.get(c, len(completions))
            for c in completions]

def too_few(completions, **_): return [1.0] * (len(completions) - 1)
def one_number(completions, **_): return 1.0
def slow(completions, **_): time.sleep(1.5 * len(completions)); return [1.0] * len(completions)

loops = set()
async def coroutine(completions, **_):
    await asyncio.sleep(0)
    loops.add(asyncio.get_running_loop())
    return [float(len(loops))] * len(completions)
'''


def score(
    functions: list[Any],
    completions: list[str],
    *,
    columns: dict[str, list[Any]] | None = None,
    gold: Sequence[str | None] | None = None,
    **settings: Any,
) -> list[Score]:
    async def main() -> list[Score]:
        async with Rewards(functions, **settings) as rewards:
            n = len(completions)
            return await rewards.score(["p"] * n, completions, columns or {}, list(gold or [None] * n))

    return asyncio.run(main())


def values(scores: list[Score]) -> list[float]:
    assert all(s.outcome is Outcome.OK and not s.detail for s in scores), scores
    return [s.value for s in scores]


def local_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(c)) for c in completions]


async def local_async(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [2.0] * len(completions)


def alive(pid: int) -> bool:
    """Running, zombies not counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers() -> list[int]:
    """This process's children that are workers, zombies included."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            words = (process / "cmdline").read_bytes()
            if parent == os.getpid() and (b"birl.rewards.worker" in words or not words):
                pids.append(int(process.name))
    return sorted(pids)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
