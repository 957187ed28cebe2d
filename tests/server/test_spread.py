"""One engine for each data-parallel group of a learner: who gets which request, and what is counted."""

import asyncio
from typing import Any

import pytest

from birl.engine.steps import Counters
from birl.engines.spread import Spread
from birl.errors import EngineDown
from birl.types import Completion, SamplingParams, Stop

PARAMS = SamplingParams(max_tokens=2)


class Fake:
    """Answers when it is let; remembers what it was asked."""

    version = 3
    counters = Counters()

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.gate = asyncio.Event()
        self.closed = False

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        self.asked.append(prompt_ids)
        await self.gate.wait()
        if prompt_ids == (9,):
            raise EngineDown("gone")
        return Completion(tokens=(1, 2), logprobs=(0.0, 0.0), versions=(3, 3), stop=Stop.LENGTH)

    async def close(self) -> None:
        self.closed = True


async def played(turns: list[list[tuple[tuple[int, ...], str]]]) -> tuple[list[Fake], Spread]:
    """Rounds of requests (prompt, session); those of a round are open at once."""
    fakes: Any = [Fake(), Fake(), Fake()]
    spread = Spread(own=fakes[0], others=fakes[1:])
    for requests in turns:
        for fake in fakes:
            fake.gate.clear()
        tasks = [asyncio.create_task(spread.generate(p, PARAMS, s)) for p, s in requests]
        await asyncio.sleep(0)
        for fake in fakes:
            fake.gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
    await spread.close()
    return fakes, spread


def test_a_group_goes_where_its_prompt_is_and_a_new_prompt_to_the_least_loaded() -> None:
    groups = [((n,), f"group {n} episode {e}") for n in range(1, 5) for e in range(4)]
    fakes, spread = asyncio.run(played([groups]))
    assert [sorted(set(fake.asked)) for fake in fakes] == [[(1,), (4,)], [(2,)], [(3,)]]
    assert spread.counters.tokens == 32 and spread.counters.finished == 16 and spread.version == 3
    assert all(fake.closed for fake in fakes)


def test_a_session_stays_when_its_prompt_has_grown() -> None:
    first = [((n,), f"session {n}") for n in range(1, 4)]
    later = [((n, 5, 6), f"session {n}") for n in (3, 2, 1)]
    fakes, _ = asyncio.run(played([first, later]))
    assert [fake.asked for fake in fakes] == [[(n,), (n, 5, 6)] for n in (1, 2, 3)]


def test_a_failure_is_told_and_takes_no_place() -> None:
    fakes, spread = asyncio.run(played([[((9,), "a")], [((8,), "b")]]))
    assert fakes[0].asked == [(9,), (8,)] and spread.counters.finished == 1

    async def fail() -> None:
        spread = Spread(own=fakes[0], others=[])  # pyright: ignore[reportArgumentType]
        fakes[0].gate = asyncio.Event()
        fakes[0].gate.set()
        await spread.generate((9,), PARAMS)

    with pytest.raises(EngineDown, match="gone"):
        asyncio.run(fail())
