"""What is simulated against the real pipeline, with sleeps for work."""

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import pytest

from birl.rollout import pipeline
from birl.simulation.draws import Draws
from birl.simulation.read import read
from birl.simulation.run_figures import nonnegative
from birl.types import Group, Task
from tests.simulation.plain import simulated


class SleepingEngine:
    """Continuous batching with sleeps for steps. `steps`: (sequences, seconds it really took)."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch, self.running, self.waiting = max_batch, [], []
        self.steps: list[tuple[int, float]] = []
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
            began, running = time.perf_counter(), len(self.running)
            await asyncio.sleep(0.008 + 0.001 * running)
            for one in self.running:
                one[0] -= 1
            for one in [one for one in self.running if one[0] == 0]:
                self.running.remove(one)
                if not one[1].done():  # the pipeline has ended, and cancelled it
                    one[1].set_result(None)
            await asyncio.sleep(0)  # whoever waits for that may ask again
            self.steps.append((running, time.perf_counter() - began))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_it_predicts_the_real_pipeline(staleness: int) -> None:
    """Component times are measured in the run itself, so that a busy machine does not matter."""
    steps, prompts, size, batch = 7, 3, 3, 8
    words = ["episodes.mean=14", "episodes.max=40", "episodes.prompt=0", f"run.group_size={size}"]
    draws = Draws(read(words).episodes, size)
    engine, trained, stop = SleepingEngine(batch), list[float](), asyncio.Event()

    def tasks() -> Iterator[Task]:
        while True:
            yield Task(id="", prompt="x")

    async def rollout(index: int, task: Task) -> Group:
        lengths = draws.groups(np.array([index])).tokens[0, :, 0].tolist()
        await asyncio.gather(*(engine.generate(tokens) for tokens in lengths))
        return Group(index=index, task=task, trajectories=(), start_version=0)

    async def train(step: pipeline.Step) -> None:
        began = time.perf_counter()
        await asyncio.sleep(0.2)
        trained.append(time.perf_counter() - began)
        if len(trained) == steps:  # of a longer run: one that knows its last step begins less before it
            stop.set()

    async def real() -> float:
        began = time.perf_counter()
        async with asyncio.timeout(30):
            await pipeline.run(tasks(), rollout, train, groups_per_step=prompts, max_staleness=staleness, stop=stop)
        return time.perf_counter() - began

    seconds = asyncio.run(real())
    took = np.array(engine.steps)
    (base, each), _ = nonnegative(np.stack([np.ones(len(took)), took[:, 0]], axis=1), took[:, 1])
    words += [f"engine.base={base}", f"engine.per_sequence={each}", f"engine.max_batch={batch}", "sync.pause=0"]
    words += [f"learner.constant={np.mean(trained)}", "learner.per_token=0", "sync.bytes=0", "engine.prefill=1e12"]
    words += ["engine.recompute_kv=false"]
    predicted = simulated(read(words), steps, prompts=prompts, max_staleness=staleness).steps[-1].end
    assert predicted == pytest.approx(seconds, rel=0.05)
