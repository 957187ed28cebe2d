"""Engines that fail when they are told to, and a clock that does not wait: hours of deadlines pass in milliseconds."""

import asyncio
import heapq
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import numpy as np

from birl.engines.router import Router
from birl.engines.wire import Info
from birl.errors import EngineDown, WeightsFailed
from birl.samples import Support
from birl.types import Completion, Held, SamplingParams, Stop, Update


class Loop(asyncio.SelectorEventLoop):
    """Time jumps to whatever comes next. Not for threads and sockets."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        waiting: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while waiting and waiting[0]._cancelled:
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            heapq.heappop(waiting)._scheduled = False
        if not self._ready and waiting:  # type: ignore[attr-defined]
            self.now = max(self.now, waiting[0]._when)
        super()._run_once()  # type: ignore[misc]


def play(work: Callable[[], Coroutine[Any, Any, Any]], limit: float = 100_000.0) -> Any:
    """Run it in made-up seconds."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(asyncio.wait_for(work(), limit))


def word(prompt: tuple[int, ...], seed: int | None, place: int) -> int:
    """The token at a place of an answer: a function of prompt and seed alone, like that of an engine."""
    return hash((prompt, seed, place)) % 1000


def expected(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    return tuple(word(prompt, params.seed, place) for place in range(params.max_tokens))


class Fake:
    """An engine that takes `pace` seconds for a token. `truth` is what it really samples with, `version` what it says.

    `dead` refuses everything; `frozen` never answers; `garbage` answers what is no completion.
    """

    def __init__(self, name: str, *, pace: float = 0.1, digest: bool = True, engine: str = "birl") -> None:
        self.address, self.pace, self.tells, self.engine = name, pace, digest, engine
        self.version = self.truth = 0
        self.pid, self.dead, self.frozen, self.garbage, self.full = 1, False, False, False, False
        self.paused = self.asleep = self.closed = False
        self.refuses = ""  # why it takes no weights
        self.slow_load, self.slow_info = 1.0, 0.0
        self.log: list[tuple[str, Any]] = []
        self.running: dict[object, str] = {}  # request -> session
        self.aborted: set[object] = set()
        self.most = 0
        self._changed = asyncio.Event()

    def change(self, **keys: Any) -> None:
        for key, value in keys.items():
            setattr(self, key, value)
        self._changed.set()
        self._changed = asyncio.Event()

    def crash(self) -> None:
        self.change(dead=True, frozen=False, garbage=False)

    def restart(self, version: int = 0) -> None:
        """Comes back as another process with other weights."""
        self.change(dead=False, frozen=False, garbage=False, pid=self.pid + 1, version=version, truth=version)
        self.change(paused=False, asleep=False)

    async def _alive(self, pid: int | None = None) -> None:
        await asyncio.sleep(0.001)
        while self.frozen:
            await self._changed.wait()
        if self.dead or pid not in (None, self.pid):
            raise EngineDown(f"{self.address}: connection refused")

    def digest_of(self, version: int) -> str:
        return digest_of(version) if self.tells else ""

    async def info(self) -> Info:
        await self._alive()
        told = Info(
            **{"engine": self.engine, "model": "fake", "dtype": "float32", "context": 512, "vocabulary": 1000},
            **{"running": len(self.running), "waiting": 0, "paused": self.paused, "asleep": self.asleep},
            **{"version": self.version, "digest": self.digest_of(self.truth), "pid": self.pid},
        )
        await asyncio.sleep(self.slow_info)
        return told

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        pid, me = self.pid, object()
        self.log.append(("generate", session))
        self.running[me] = session
        self.most = max(self.most, len(self.running))
        try:
            return await self._generate(pid, me, prompt_ids, params)
        finally:
            del self.running[me]

    async def _generate(self, pid: int, me: object, prompt: tuple[int, ...], params: SamplingParams) -> Completion:
        await self._alive(pid)
        if self.full:
            raise EngineDown(f"{self.address} is full", retry_after=2.0)
        tokens: list[int] = []
        versions: list[int] = []
        while len(tokens) < params.max_tokens:
            await asyncio.sleep(self.pace)
            await self._alive(pid)
            while self.paused and me not in self.aborted:
                await self._changed.wait()
            if me in self.aborted:
                break
            place = len(tokens)
            tokens.append(params.forced[place] if place < len(params.forced) else word(prompt, params.seed, place))
            versions.append(self.truth)
        if self.garbage:
            raise EngineDown(f"{self.address} returned no completion: <html>")
        stop = Stop.LENGTH if len(tokens) == params.max_tokens else Stop.ABORT
        support = Support.of([np.array([token]) for token in tokens]) if params.told else None
        return Completion.of(tokens, (-1.0,) * len(tokens), versions, stop, support=support)

    async def load(self, update: Update) -> Held:
        pid = self.pid
        self.log.append(("load", update.version))
        await self._alive()
        await asyncio.sleep(self.slow_load)
        await self._alive(pid)
        if self.refuses:
            raise WeightsFailed(self.refuses, f"{self.address} refuses")
        if update.version < self.version and not update.anew:
            raise WeightsFailed("stale", f"{self.address} has {self.version}")
        self.version = self.truth = update.version
        return Held(version=update.version, digest=self.digest_of(self.truth), seconds=self.slow_load, bytes=10)

    async def pause(self, abort: bool = False) -> None:
        await self._alive()
        if abort:
            await self.abort()
        self.change(paused=True)

    async def resume(self) -> None:
        await self._alive()
        self.change(paused=False)

    async def abort(self, sessions: Collection[str] | None = None) -> int:
        await self._alive()
        chosen = [r for r, s in self.running.items() if sessions is None or s in sessions]
        self.aborted |= set(chosen)
        self.change()
        return len(chosen)

    async def sleep(self) -> None:
        await self.pause()
        self.change(asleep=True)

    async def wake(self) -> None:
        self.change(asleep=False)

    async def close(self) -> None:
        self.closed = True


def update(version: int) -> Update:
    return Update(version=version, digests={"w": f"digest of {version}"}, folder=f"v{version}")


def digest_of(version: int) -> str:
    from birl.models.digests import whole

    return whole(update(version).digests)


PROMPT = (1, 9, 4)


def fakes(n: int, **keys: Any) -> list[Fake]:
    return [Fake(f"engine{i}", **keys) for i in range(n)]


async def started(engines: list[Fake], **keys: Any) -> tuple[list[Fake], Router]:
    router = Router(engines, **keys)
    await router.start()
    return engines, router


def params(n: int = 20, seed: int | None = 7, **keys: Any) -> SamplingParams:
    return SamplingParams(max_tokens=n, seed=seed, **keys)


def states(router: Router) -> list[str]:
    return [row.state for row in router.table()]


async def until(done: Any, limit: float = 1000.0) -> None:
    async with asyncio.timeout(limit):
        while not done():
            await asyncio.sleep(0.05)
