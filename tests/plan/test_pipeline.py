"""What is simulated against the real pipeline, with sleeps for work, on a clock that only sleeps move."""

import asyncio
import selectors
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from birl.plan.fleet import Draws
from birl.plan.simulate_command import read
from birl.rollout import pipeline
from birl.types import Group, Task
from tests.plan.plain import simulated

BASE, EACH = 0.008, 0.001  # seconds of a decode step: always, and for each sequence


class SleepingLoop(asyncio.SelectorEventLoop):
    """An event loop on which what waits takes no time and what computes takes none either.

    Its clock is not the machine's: where the loop would wait for its next timer, the clock jumps there. A busy machine
    changes nothing, and a run of seconds takes milliseconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(selectors.DefaultSelector())
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            assert timeout is not None, "nothing will ever happen"
            self.now += max(timeout, 0)
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class SleepingEngine:
    """Continuous batching with sleeps for steps."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch, self.running, self.waiting = max_batch, [], []
        self.pump: asyncio.Task[None] | None = None

    @property
    def open(self) -> int:
        return len(self.running) + len(self.waiting)

    def generate(self, tokens: int) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self.waiting.append([tokens, future])
        if self.pump is None or self.pump.done():
            self.pump = asyncio.create_task(self.decode())
        return future

    async def decode(self) -> None:
        while self.open:
            while self.waiting and len(self.running) < self.max_batch:
                self.running.append(self.waiting.pop(0))
            await asyncio.sleep(BASE + EACH * len(self.running))
            for one in self.running:
                one[0] -= 1
            for one in [one for one in self.running if one[0] == 0]:
                self.running.remove(one)
                if not one[1].done():  # the pipeline has ended, and cancelled it
                    one[1].set_result(None)
            await asyncio.sleep(0)  # whoever waits for that may ask again


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("learner", [0.05, 0.2, 0.8])  # it waits, it is as fast as the engine, the engine waits
def test_it_predicts_the_real_pipeline(staleness: int, learner: float) -> None:
    steps, prompts, size, batch = 7, 3, 3, 8
    words = ["episodes.mean=14", "episodes.max=40", "episodes.prompt=0", f"run.group_size={size}"]
    words += [f"engine.base={BASE}", f"engine.per_sequence={EACH}", f"engine.max_batch={batch}", "engine.prefill=1e12"]
    words += [f"learner.constant={learner}", "learner.per_token=0", "sync.pause=0", "sync.bytes=0"]
    scenario = read([*words, "engine.recompute_kv=false"])
    draws, engine = Draws(scenario.episodes, size), SleepingEngine(batch)
    ends, stop = list[float](), asyncio.Event()

    def tasks() -> Iterator[Task]:
        while True:
            yield Task(id="", prompt="x")

    async def rollout(index: int, task: Task) -> Group:
        lengths = draws.groups(np.array([index])).tokens[0, :, 0].tolist()
        await asyncio.gather(*(engine.generate(tokens) for tokens in lengths))
        return Group(index=index, task=task, trajectories=(), start_version=0)

    async def train(step: pipeline.Step) -> None:
        await asyncio.sleep(learner)
        ends.append(asyncio.get_running_loop().time())
        if len(ends) == steps:  # of a longer run: one that knows its last step begins less before it
            stop.set()

    with asyncio.Runner(loop_factory=SleepingLoop) as runner:
        runner.run(pipeline.run(tasks(), rollout, train, groups_per_step=prompts, max_staleness=staleness, stop=stop))
    found = [step.end for step in simulated(scenario, steps, prompts=prompts, max_staleness=staleness).steps]
    assert found == pytest.approx(ends, rel=0.005)  # of a step, the simulation knows parts
