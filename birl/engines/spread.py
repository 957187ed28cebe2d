"""The engines of a learner's ranks as one: each gets its weights from the rank in its process.

    generate -> the engine of its session, else of its prompt, else the least loaded one -> answer

A group's answers have one prompt, whose KV cache is then computed once. There are no retries: a lost rank ends the run
(`parallel/crew.py`).
"""

import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace

from birl.engine.engine import EmbeddedEngine
from birl.engine.steps import Counters
from birl.engines.client import Client
from birl.engines.prefixes import Sessions
from birl.spans import answered, engine_name
from birl.types import Completion, Engine, SamplingParams
from birl.waits import alive


@dataclass(slots=True, kw_only=True)
class Counting:
    """Counts the answers of engines in other processes; `counters.seconds`: time with at least one open request."""

    done: Counters = field(default_factory=Counters)  # as of the last answer
    _open: int = 0
    _since: float = 0.0

    @property
    def counters(self) -> Counters:
        now = time.perf_counter() - self._since if self._open else 0.0
        return replace(self.done, seconds=self.done.seconds + now)

    async def counted(self, answer: Awaitable[Completion]) -> Completion:
        self._open += 1
        if self._open == 1:
            self._since = time.perf_counter()
        try:
            result = await answer
        finally:
            self._open -= 1
            if self._open == 0:
                self.done.seconds += time.perf_counter() - self._since
        alive()
        self.done.tokens += len(result.tokens)
        self.done.finished += 1
        return result


@dataclass(slots=True, kw_only=True)
class Spread(Counting):
    """Implements `birl.types.Engine` over several ranks. `own`: engine of this process."""

    own: EmbeddedEngine
    others: Sequence[Client]
    _load: Counter[int] = field(default_factory=Counter[int])  # open requests, by engine
    _prompts: Counter[tuple[tuple[int, ...], int]] = field(default_factory=Counter[tuple[tuple[int, ...], int]])
    _sessions: Sessions[int] = field(default_factory=Sessions[int])

    @property
    def version(self) -> int:
        return self.own.version

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        """See `Engine.generate`."""
        engines: list[Engine] = [self.own, *self.others]
        chosen = self._choose(prompt_ids, session, len(engines))
        self._load[chosen] += 1
        self._prompts[prompt_ids, chosen] += 1
        began = time.perf_counter()
        try:
            result = await self.counted(engines[chosen].generate(prompt_ids, params, session))
            if chosen:  # the embedded engine reports its own
                answered(result, began, session, engine_name(self.others[chosen - 1].address))
            return result
        finally:
            self._load[chosen] -= 1
            self._prompts[prompt_ids, chosen] -= 1
            if not self._prompts[prompt_ids, chosen]:
                del self._prompts[prompt_ids, chosen]

    def _choose(self, prompt: tuple[int, ...], session: str, engines: int) -> int:
        result = self._sessions.get(session)
        if result is None:
            result = next((n for n in range(engines) if self._prompts[prompt, n]), None)
        if result is None:
            result = min(range(engines), key=lambda n: self._load[n])
        self._sessions.keep(session, result)
        return result

    async def close(self) -> None:
        await self.own.close()
        for client in self.others:
            await client.close()
