"""Whose answers are sampled next, where one tenant asks for more than the engine has room for."""

import asyncio
from typing import Any, cast

import numpy as np

from birl.server.tinker import wire
from birl.server.tinker.requests import Sample
from birl.server.tinker.sampling import Sampling
from birl.server.tinker.tenants import Tenant, Turns
from birl.types import Completion, SamplingParams, Stop


class Engine:
    """Answers one after the other, as they were begun; `given`: whose, in order."""

    def __init__(self, room: int, reserve: int = 0) -> None:
        self.turns, self.given, self.running, self.most = Turns(room, reserve), list[str](), 0, 0
        self.steps = asyncio.Semaphore(0)

    async def answer(self, tenant: Tenant, tokens: int = 10) -> None:
        async with self.turns.turn(tenant):
            self.given.append(tenant.name)
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.steps.acquire()
            finally:
                self.running -= 1
            tenant.sampled += tokens


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_that_asks_for_little_waits_for_one_answer_of_another_that_asks_for_much() -> None:
    engine, busy, new = Engine(3), Tenant(name="busy", sampled=5.0), Tenant(name="new")
    many = [asyncio.create_task(engine.answer(busy)) for _ in range(20)]
    await settle()
    few = [asyncio.create_task(engine.answer(new)) for _ in range(2)]
    await settle()
    assert engine.given == ["busy"] * 3
    engine.steps.release()
    await settle()
    assert engine.given[3:] == ["new"]
    for _ in range(21):
        engine.steps.release()
    await asyncio.gather(*many, *few)
    assert "new" in engine.given[4:7] and engine.most == 3 and engine.turns.free == 3


async def test_a_part_of_the_room_is_for_tenants_that_have_nothing_under_way() -> None:
    engine, busy, new = Engine(4, reserve=1), Tenant(name="busy"), Tenant(name="new", sampled=9.0)
    tasks = [asyncio.create_task(engine.answer(busy)) for _ in range(9)]
    await settle()
    assert engine.given == ["busy"] * 3
    tasks += [asyncio.create_task(engine.answer(new)) for _ in range(2)]
    await settle()
    assert engine.given[3:] == ["new"]  # at once, and one
    for _ in range(11):
        engine.steps.release()
    await asyncio.gather(*tasks)
    assert engine.most == 4 and engine.turns.free == 4 and not any(engine.turns.running.values())


async def test_what_is_cancelled_leaves_its_room_to_others() -> None:
    engine, alice, bob = Engine(2), Tenant(name="alice"), Tenant(name="bob")
    own = [asyncio.create_task(engine.answer(alice)) for _ in range(9)]
    await settle()
    other = asyncio.create_task(engine.answer(bob))
    await settle()
    for task in own[:1] + own[4:]:  # one that has room, and some that wait
        task.cancel()
    await settle()
    assert len(engine.given) == 3
    for _ in range(9):
        engine.steps.release()
    await asyncio.gather(other, *own[1:4])
    assert sorted(engine.given) == ["alice"] * 4 + ["bob"] and engine.turns.free == 2
    assert not engine.turns.waiting


def test_an_answer_about_whose_prompt_nothing_is_asked_waits_for_no_pass_of_training() -> None:
    class Drawn:
        async def generate(self, *_: Any, **__: Any) -> Completion:
            none = np.zeros(0, np.int64)
            return Completion(tokens=none, logprobs=none.astype(np.float32), versions=none, stop=Stop.STOP)

    sampling = Sampling(
        cast("Any", None), cast("Any", Drawn()), cast("Any", None), Turns(1)
    )  # there is no compute thread
    sample = Sample(prompt=(5, 6), count=2, params=SamplingParams(max_tokens=1))
    body = asyncio.run(sampling.answer(Tenant(name="alice"), sample, None, 1))
    assert [number for number, _ in wire.fields(body)] == [1, 1, 4]
