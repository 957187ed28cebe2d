"""Invariant 3, the staleness bound, and that nothing is lost or waits for ever. Fakes with virtual tasks, no model."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from birl.rollout import pipeline
from birl.types import Group, Task


def tasks(n: int | None) -> Iterator[Task]:
    number = 0
    while n is None or number < n:
        yield Task(id=str(number), prompt="x")
        number += 1


class Fake:
    """Groups that take a random number of event-loop turns, and a policy whose version is the number of finished
    steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.version = 0
        self.trained: list[list[int]] = []
        self.staleness: list[int] = []
        self.started_while_training = 0
        self.training = False

    async def rollout(self, index: int, task: Task) -> Group:
        self.started_while_training += self.training
        version = self.version
        for _ in range(self.random.randint(0, 30)):
            await asyncio.sleep(0)
        return Group(index=index, task=task, trajectories=(), start_version=version)

    async def train(self, step: pipeline.Step) -> None:
        self.training = True
        self.staleness += [self.version - g.start_version for g in step.groups]
        self.trained.append([g.index for g in step.groups])
        for _ in range(self.random.randint(0, 30)):
            await asyncio.sleep(0)
        self.version += 1
        self.training = False

    def run(self, **options: object) -> None:
        source = tasks(options.pop("tasks", None))  # type: ignore[arg-type]
        asyncio.run(asyncio.wait_for(pipeline.run(source, self.rollout, self.train, **options), 20))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_synchronous_is_the_plain_loop(seed: int) -> None:
    fake = Fake(seed)
    fake.run(groups_per_step=3, steps=4)
    assert fake.trained == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert set(fake.staleness) == {0} and fake.started_while_training == 0


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_staleness_is_bounded(bound: int, seed: int) -> None:
    fake = Fake(seed)
    fake.run(groups_per_step=3, steps=30, max_staleness=bound)
    assert max(fake.staleness) <= bound
    assert [i for step in fake.trained for i in step] == list(range(90))


def test_a_last_small_step_is_trained() -> None:
    """A defect of the seeds: the last partial batch was dropped without a word."""
    fake = Fake(0)
    fake.run(groups_per_step=4, tasks=10)
    assert fake.trained == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("bound", [0, 2])
def test_refused_groups_are_replaced(bound: int) -> None:
    fake = Fake(1)
    fake.run(groups_per_step=3, steps=3, max_staleness=bound, keep=lambda g: g.index % 2 == 0)
    assert fake.trained == [[0, 2, 4], [6, 8, 10], [12, 14, 16]]
    assert max(fake.staleness) <= bound


def test_when_everything_is_refused_the_step_comes_back_empty_and_the_run_goes_on() -> None:
    """RL2's defect: all groups filtered crashes the step. Here it is bounded and visible."""
    fake = Fake(1)
    fake.run(groups_per_step=2, steps=3, keep=lambda g: False, max_refill=2)
    assert fake.trained == [[], [], []]
    fake = Fake(1)
    fake.run(groups_per_step=2, tasks=5, keep=lambda g: False)
    assert fake.trained == [[]]


def test_position_counts_refused_groups_and_a_resumed_run_starts_there() -> None:
    whole, positions = Fake(2), []

    async def train(step: pipeline.Step) -> None:
        positions.append(step.position)

    asyncio.run(
        pipeline.run(tasks(None), whole.rollout, train, groups_per_step=3, steps=2, keep=lambda g: g.index % 2 == 0)
    )
    assert positions == [5, 11]
    resumed = Fake(3)
    resumed.run(groups_per_step=3, steps=2, first_step=2, position=5, keep=lambda g: g.index % 2 == 0)
    assert resumed.trained == [[6, 8, 10]]


@pytest.mark.parametrize("where", ["rollout", "train", "tasks"])
def test_an_error_anywhere_ends_the_run(where: str) -> None:
    fake = Fake(4)

    async def broken(*args: object) -> Group:
        raise ZeroDivisionError

    def endless() -> Iterator[Task]:
        yield from tasks(4)
        raise ZeroDivisionError

    source = endless() if where == "tasks" else tasks(None)
    rollout = broken if where == "rollout" else fake.rollout
    train = broken if where == "train" else fake.train
    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(asyncio.wait_for(pipeline.run(source, rollout, train, groups_per_step=2), 20))  # type: ignore[arg-type]
    assert caught.group_contains(ZeroDivisionError, depth=None)


@pytest.mark.parametrize("bound", [0, 3])
def test_stop_abandons_what_is_being_rolled_out(bound: int) -> None:
    async def main() -> list[int]:
        stop, trained = asyncio.Event(), []

        async def rollout(index: int, task: Task) -> Group:
            if index >= 4:
                stop.set()
                await asyncio.sleep(3600)
            return Group(index=index, task=task, trajectories=(), start_version=0)

        async def train(step: pipeline.Step) -> None:
            trained.append(step.number)

        await pipeline.run(tasks(None), rollout, train, groups_per_step=2, max_staleness=bound, stop=stop)
        return trained

    assert len(asyncio.run(asyncio.wait_for(main(), 20))) <= 2
