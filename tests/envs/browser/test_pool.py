"""Browsers that crash, hang, wear out or are given up: nothing is scored that did not happen, and nothing is left."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from birl.envs.browser.pool import Pool
from birl.envs.browser.process import Lost, Worker
from birl.envs.open import World
from tests.envs.browser.browsers import made, needs_browser, nothing_left, processes, said, with_world

TASKS = {"tasks": "[click-test]"}
pytestmark = needs_browser


def workers(pool: Pool) -> list[Worker]:
    return [b.worker for b in pool.browsers if b.worker is not None and b.worker.alive]


def chromium(pool: Pool) -> list[int]:
    """The main process of each browser."""
    found = []
    for pid in {pid for w in workers(pool) for pid in processes(Path(w.folder))}:
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"--user-data-dir" in line and b"--type=" not in line and not line.startswith(b"/bin/sh"):
                found.append(pid)
    return found


def run(use: Any, **options: Any) -> Any:
    with nothing_left():
        return asyncio.run(asyncio.wait_for(with_world("miniwob", {**TASKS, **options}, use), 60))


async def play(world: World, seed: int = 0) -> float:
    env = made(world, "click-test", seed)
    try:
        await env.start()
        return (await said(env, "click('13')")).reward
    finally:
        await env.close()


def test_chaos() -> None:
    """Browsers and workers are killed and frozen, episodes are given up, at random. Whoever gets a reward earned it."""
    draw = random.Random(0)

    async def one(world: World, seed: int) -> str:
        await asyncio.sleep(draw.random() * 4)
        try:
            async with asyncio.timeout(draw.choice([0.2, 30, 30, 30])):
                return "right" if await play(world, seed) == 1.0 else "wrong"
        except (Lost, RuntimeError) as error:
            return type(error).__name__
        except TimeoutError:
            return "given up"

    async def hurt(world: World) -> None:
        for way in ("browser", "worker", "freeze"):
            await asyncio.sleep(1.5)
            pool = world.shared
            victims = chromium(pool) if way == "browser" else [w.process.pid for w in workers(pool)]
            if victims:
                os.kill(draw.choice(victims), signal.SIGSTOP if way == "freeze" else signal.SIGKILL)

    async def use(world: World) -> Counter[str]:
        hurting = asyncio.create_task(hurt(world))
        found = Counter(await asyncio.gather(*(one(world, i) for i in range(40))))
        await hurting
        assert await play(world, 99) == 1.0  # all is well again
        assert not any(b.open for b in world.shared.browsers) and not world.shared.waiting
        return found

    found = run(use, contexts="4", call_timeout="4")
    assert set(found) <= {"right", "Lost", "RuntimeError", "given up"}, found
    assert found["right"] >= 10 and found["Lost"] >= 1 and found["given up"] >= 1, found


def test_a_browser_is_replaced_when_it_is_worn_or_late() -> None:
    async def use(world: World) -> None:
        pids = []
        for seed in range(4):
            assert await play(world, seed) == 1.0
            pids.append(workers(world.shared)[0].process.pid)
        assert pids[0] == pids[1] != pids[2] == pids[3]
        env = made(world, "click-test")
        await env.start()
        os.kill(chromium(world.shared)[0], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(Lost, match=r"step took longer than env\.call_timeout=4 s"):
            await said(env, "click('13')")
        assert time.monotonic() - began < 60
        await env.close()
        assert await play(world) == 1.0

    run(use, workers="1", restart_every="2", call_timeout="4")


def test_many_episodes_wait_in_order_and_hold_up_nobody() -> None:
    async def use(world: World) -> None:
        beats, ended = 0, []

        async def one(seed: int) -> None:
            assert await play(world, seed) == 1.0
            ended.append(seed)

        episodes = [asyncio.create_task(one(i)) for i in range(12)]
        cancelled = asyncio.create_task(one(99))
        while not all(e.done() for e in episodes):
            await asyncio.sleep(0.01)
            beats += 1
            assert len(world.shared.browsers[0].open) <= 2
            if beats == 5:
                cancelled.cancel()
        assert all(e.exception() is None for e in episodes) and 99 not in ended
        assert ended[:2] != [11, 10] and sum(a > b for a, b in pairwise(ended)) <= 4
        assert beats > 50

    run(use, workers="1", contexts="2")


def test_workers_end_when_nobody_is_there_any_more() -> None:
    """As after `kill -9` of the run: the other end of stdin is gone."""

    async def use(world: World) -> None:
        browser = workers(world.shared)[0]
        env = made(world, "click-test")
        await env.start()
        browser.process.stdin.close()
        await asyncio.wait_for(browser.process.wait(), 10)
        assert not Path(browser.folder).exists()
        with suppress(Lost):
            await env.close()

    run(use, workers="1")
