"""Thousands of episodes are open at once: they do not hold up the engine or one another, each has its own deadline, and
nothing of them stays."""

import asyncio
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from birl import waits
from birl.engine.engine import EmbeddedEngine
from birl.envs import calls
from birl.envs.calls import Threads, called
from birl.models.load import load_model, load_tokenizer
from birl.rollout.episode import run_episode
from birl.rollout.session import Limits, Session
from birl.types import Feedback, Message, Outcome, SamplingParams, Trajectory
from tests.rollout.scripted import CHAT, Scripted

MANY = 2000


class World:
    """Two turns; counts what was opened and closed. `sleep` seconds for each step: in the event loop, or a thread."""

    opened = closed = 0

    def __init__(self, sleep: float) -> None:
        self.sleep, self.turn = sleep, 0

    async def start(self) -> tuple[Message, ...]:
        World.opened += 1
        return (Message(role="user", content="Hi"),)

    async def step(self, reply: Message) -> Feedback:
        await asyncio.sleep(self.sleep)
        return self._next()

    def _next(self) -> Feedback:
        self.turn += 1
        return Feedback(messages=(Message(role="user", content="On"),), reward=0.5, done=self.turn == 2)

    async def close(self) -> None:
        await asyncio.sleep(0)
        World.closed += 1


free = threading.Event()  # ends what sleeps in threads


class Plain(World):
    def step(self, reply: Message) -> Feedback:  # type: ignore[override]
        free.wait(self.sleep)
        return self._next()


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    World.opened = World.closed = 0
    free.clear()
    yield
    free.set()


def episode(env: Any, engine: Any, timeout: float = 60.0, tokens: int = 4) -> Awaitable[Trajectory]:
    session = Session(
        engine, CHAT, SamplingParams(max_tokens=tokens, ignore_eos=True), Limits(timeout=timeout), lambda t: t
    )
    return run_episode(env, session)


async def ticking(gaps: list[float]) -> None:
    """How long the event loop let a sleeper of 5 ms wait [s]."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.005)
        gaps.append(time.perf_counter() - before - 0.005)


def test_two_thousand_at_once_take_as_long_as_one() -> None:
    """Each sleeps for a second; one after the other that were half an hour."""

    async def main() -> tuple[list[Trajectory], float]:
        began = time.perf_counter()
        found = await asyncio.gather(*(episode(World(0.5), Scripted(lambda _: "x")) for _ in range(MANY)))
        return found, time.perf_counter() - began

    found, seconds = asyncio.run(asyncio.wait_for(main(), 600))
    assert Counter((t.outcome, t.reward) for t in found) == {(Outcome.OK, 1.0): MANY}
    assert World.opened == World.closed == MANY and seconds < 600


def engine_of(folder: Path, compute: ThreadPoolExecutor) -> EmbeddedEngine:
    return EmbeddedEngine(
        load_model(folder), load_tokenizer(folder), end_ids=frozenset({2}), context=256, compute=compute,
        version=lambda: 0, kv_cache_gb=0.05, max_batch=64,
    )  # fmt: skip


def test_slow_worlds_do_not_hold_up_the_engine(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """Two thousand slow episodes are open, half of them in threads; a hundred quick ones come and are as fast as alone,
    within a factor that leaves room for the noise of a shared machine."""

    async def main() -> tuple[float, float, list[float]]:
        engine, gaps = engine_of(tiny, compute), []
        gc.collect()
        gc.freeze()  # as a run does

        async def quick() -> float:
            began = time.perf_counter()
            found = await asyncio.gather(*(episode(World(0.0), engine, tokens=16) for _ in range(100)))
            assert all(len(t.turns) >= 1 for t in found)
            return time.perf_counter() - began

        await quick()
        alone = min([await quick() for _ in range(3)])
        slow = [asyncio.ensure_future(episode((World, Plain)[i % 2](60.0), engine, tokens=1)) for i in range(MANY)]
        while World.opened - World.closed < MANY or engine.scheduler.busy:
            await asyncio.sleep(0.05)
        watch = asyncio.ensure_future(ticking(gaps))
        beside = min([await quick() for _ in range(3)])
        watch.cancel()
        for task in slow:
            task.cancel()
        ended = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(e, asyncio.CancelledError) for e in ended)
        await engine.close()
        gc.unfreeze()
        return alone, beside, gaps

    alone, beside, gaps = asyncio.run(asyncio.wait_for(main(), 100))
    longest = sorted(round(1e3 * g) for g in gaps)[-4:]
    print(f"alone {alone:.3f} s, beside {MANY} open ones {beside:.3f} s, longest of {len(gaps)} gaps {longest} ms")
    assert World.opened == World.closed and not waits.TABLE.waits
    assert beside < 10 * alone + 3 and max(gaps) < 10


def test_deadlines_cancellations_and_failures_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand that hang, fail or are quick, in the event loop and in threads; a third of them are cancelled."""
    monkeypatch.setattr(calls, "IDLE", 0.2)
    random = Random(0)

    class Hangs(World):
        async def step(self, reply: Message) -> Feedback:
            await asyncio.Event().wait()
            raise AssertionError

    class Fails(World):
        async def step(self, reply: Message) -> Feedback:
            raise (ValueError, StopIteration, SystemExit, asyncio.CancelledError)[random.randrange(4)]("no")

    class PlainFails(Plain):
        def step(self, reply: Message) -> Feedback:
            raise (ValueError, StopIteration, SystemExit, KeyboardInterrupt)[random.randrange(4)]("no")

    kinds: list[Callable[[], World]] = [lambda: World(0.01), lambda: Plain(0.01), lambda: Hangs(0), lambda: Fails(0)]
    kinds += [lambda: PlainFails(0)]

    async def main() -> list[Any]:
        engine = Scripted(lambda _: "x")
        tasks = [
            asyncio.ensure_future(episode(kinds[i % 5](), engine, timeout=1.0 if i % 5 == 2 else 60.0))
            for i in range(MANY)
        ]
        for task in random.sample(tasks, MANY // 3):
            asyncio.get_running_loop().call_later(random.uniform(0, 2), task.cancel)
        return await asyncio.gather(*tasks, return_exceptions=True)

    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    found = asyncio.run(asyncio.wait_for(main(), 600))
    for i, one in enumerate(found):
        if not isinstance(one, asyncio.CancelledError):
            expected = [Outcome.OK, Outcome.OK, Outcome.TIMEOUT, Outcome.ENV_ERROR, Outcome.ENV_ERROR][i % 5]
            assert one.outcome is expected, one
    assert World.opened == World.closed > MANY / 2 and not waits.TABLE.waits
    until(lambda: threading.active_count() <= threads)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.01)


def test_threads_that_hang_leave_their_place() -> None:
    """As many calls hang as there are threads; once their callers gave up, others get their turn."""
    threads = Threads(2, "test")

    async def main() -> list[int]:
        for _ in range(3):
            stuck = [asyncio.ensure_future(called(free.wait, 30, threads=threads)) for _ in range(2)]
            await asyncio.sleep(0.05)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
        return await asyncio.gather(*(called(lambda i=i: i, threads=threads) for i in range(20)))

    assert asyncio.run(asyncio.wait_for(main(), 10)) == list(range(20))
    assert threads.started == 8 and len(threads.left) == 6
    free.set()
    until(lambda: threads.started == 2 and not threads.left)


def test_no_more_threads_than_allowed() -> None:
    threads, at_work, most = Threads(3, "test"), Counter[str](), []

    def work() -> None:
        at_work["n"] += 1
        most.append(at_work["n"])
        time.sleep(0.01)
        at_work["n"] -= 1

    async def main() -> None:
        await asyncio.gather(*(called(work, threads=threads) for _ in range(30)))

    asyncio.run(main())
    assert max(most) <= 3 == threads.started and len(most) == 30


def test_a_second_cancellation_does_not_keep_a_world_open() -> None:
    class Slow(World):
        async def close(self) -> None:
            await asyncio.sleep(0.2)
            World.closed += 1

    async def main() -> None:
        task = asyncio.ensure_future(episode(Slow(60), Scripted(lambda _: "x")))
        await asyncio.sleep(0.05)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.02)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert World.opened == World.closed == 1


def test_a_place_is_waited_for_before_the_clock_starts() -> None:
    places = asyncio.Semaphore(2)

    class Scarce(World):
        async def admit(self) -> None:
            await places.acquire()

        async def close(self) -> None:
            await super().close()
            places.release()

    async def main() -> list[Trajectory]:
        return await asyncio.gather(*(episode(Scarce(0.1), Scripted(lambda _: "x"), timeout=0.5) for _ in range(10)))

    assert {t.outcome for t in asyncio.run(main())} == {Outcome.OK}
