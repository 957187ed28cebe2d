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

    def __init__(self, seed: int, sync_every: int = 1, straggler: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.sync_every, self.straggler = sync_every, straggler
        self.steps = self.version = 0  # trained, and what the engines have of it
        self.trained: list[list[int]] = []
        self.staleness: list[int] = []
        self.left: list[int] = []  # admitted groups that are not of this step
        self.started_while_training = 0
        self.training = False

    async def rollout(self, index: int, task: Task) -> Group:
        self.started_while_training += self.training
        version = self.version
        for _ in range(self.random.randint(0, 30) * (20 if self.random.random() < self.straggler else 1)):
            await asyncio.sleep(0)
        return Group(index=index, task=task, trajectories=(), start_version=version)

    async def train(self, step: pipeline.Step) -> None:
        self.training = True
        self.staleness += [self.steps - g.start_version for g in step.groups]
        self.trained.append([g.index for g in step.groups])
        self.left.append(step.ready + step.running)
        for _ in range(self.random.randint(0, 30)):
            await asyncio.sleep(0)
        self.steps += 1
        if self.steps % self.sync_every == 0:
            self.version = self.steps
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


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_task_is_chosen_when_its_slot_is_there(bound: int) -> None:
    """So that the choice knows all that was trained by then: as many steps as the bound allows, and no fewer."""
    fake, known = Fake(0), []

    def source() -> Iterator[Task]:
        for task in tasks(None):
            known.append(fake.steps)
            yield task

    asyncio.run(pipeline.run(source(), fake.rollout, fake.train, groups_per_step=3, max_staleness=bound, steps=8))
    assert known[:24] == [max(number // 3 - bound, 0) for number in range(24)]


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_staleness_is_bounded(bound: int, seed: int) -> None:
    fake = Fake(seed)
    fake.run(groups_per_step=3, steps=30, max_staleness=bound)
    assert max(fake.staleness) <= bound
    assert [i for step in fake.trained for i in step] == list(range(90))
    assert fake.left[0] == 3 * bound, "a group is either ready or running, on any schedule"


def test_the_bound_holds_on_thousands_of_schedules() -> None:
    """Stragglers, refused groups, order windows, weights that are sent every few steps; and nothing is lost."""
    chosen, reached, overtaken = random.Random(0), set(), 0
    for seed in range(2000):
        groups, bound = chosen.randint(1, 4), chosen.choice([0, 1, 1, 2, 3, 6])
        every = chosen.randint(1, bound + 1)
        window = chosen.randint(0, (bound - every + 1) * groups)
        share = chosen.choice([0.0, 0.0, 0.3, 0.7])
        fake = Fake(seed, every, straggler=0.1)
        steps: list[pipeline.Step] = []

        async def train(step: pipeline.Step, fake: Fake = fake, steps: list[pipeline.Step] = steps) -> None:
            steps.append(step)
            await fake.train(step)

        options = {"max_staleness": bound, "sync_every": every, "window": window, "steps": chosen.randint(1, 8)}
        keep = lambda g, seed=seed, share=share: random.Random(seed * 1000 + g.index).random() >= share  # noqa: E731
        asyncio.run(
            pipeline.run(tasks(None), fake.rollout, train, keep=keep, groups_per_step=groups, **options)  # type: ignore[arg-type]
        )
        assert max(fake.staleness) <= bound, options
        reached.add((bound, max(fake.staleness)))
        consumed = [g.index for s in steps for g in (*s.groups, *s.refused)]
        overtaken += consumed != sorted(consumed)
        last = steps[-1]
        assert len(set(consumed)) == len(consumed) and set(consumed) == {*range(last.position), *last.ahead}
        assert all(len(s.groups) == groups for s in steps)
    assert {(b, b) for b in (0, 1, 2, 3)} <= reached and overtaken > 100  # the bound is tight, the window is used


@pytest.mark.parametrize(("bound", "every", "window"), [(0, 2, 0), (1, 3, 0), (1, 1, 4), (0, 1, 1)])
def test_what_could_never_fill_a_step_is_refused(bound: int, every: int, window: int) -> None:
    with pytest.raises(ValueError, match="no step could ever be filled"):
        pipeline.slots(3, bound, every, window)


def test_a_straggler_is_overtaken_within_the_window_only() -> None:
    async def main(window: int) -> list[list[int]]:
        released, trained = asyncio.Event(), []

        async def rollout(index: int, task: Task) -> Group:
            if index == 0:
                await released.wait()
            return Group(index=index, task=task, trajectories=(), start_version=0)

        async def train(step: pipeline.Step) -> None:
            trained.append([g.index for g in step.groups])

        async def release() -> None:
            for _ in range(200):
                await asyncio.sleep(0)
            trained.append([])
            released.set()

        options = {"groups_per_step": 2, "max_staleness": 2, "window": window, "steps": 3}
        await asyncio.gather(release(), pipeline.run(tasks(None), rollout, train, **options))  # type: ignore[arg-type]
        return trained

    assert asyncio.run(main(0)) == [[], [0, 1], [2, 3], [4, 5]]
    assert asyncio.run(main(3)) == [[1, 2], [], [3, 0], [4, 5]]


def test_a_resumed_run_passes_over_what_was_trained_ahead() -> None:
    """AReaL #1388 and TRL #5911: after a resume, prompts were lost or trained twice."""
    for seed in range(50):
        fake, seen, place = Fake(seed, straggler=0.3), [], (0, ())
        options = {"groups_per_step": 3, "max_staleness": 2, "window": 4}
        for life in range(4):
            steps: list[pipeline.Step] = []

            async def train(step: pipeline.Step, steps: list[pipeline.Step] = steps) -> None:
                steps.append(step)

            def rest(start: int = place[0]) -> Iterator[Task]:
                for task in tasks(100):
                    if int(task.id) >= start:
                        yield task

            keys = {**options, "position": place[0], "done": place[1], "steps": 2 + life, "first_step": 1}
            asyncio.run(pipeline.run(rest(), fake.rollout, train, **keys))  # type: ignore[arg-type]
            seen += [g.index for s in steps for g in s.groups]
            place = steps[-1].position, steps[-1].ahead
        assert sorted(seen) == sorted({*range(place[0]), *place[1]})


def test_a_last_small_step_is_trained() -> None:
    """A defect of the seeds: the last partial batch was dropped without a word."""
    fake = Fake(0)
    fake.run(groups_per_step=4, tasks=10)
    assert fake.trained == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("first", [1, 3])
def test_no_group_is_begun_that_no_step_could_train(bound: int, first: int) -> None:
    fake, begun = Fake(2), []

    async def rollout(index: int, task: Task) -> Group:
        begun.append(index)
        return await Fake.rollout(fake, index, task)

    refused = [1, 5]
    options = {"groups_per_step": 3, "first_step": first, "steps": 4, "max_staleness": bound}
    asyncio.run(pipeline.run(tasks(None), rollout, fake.train, keep=lambda g: g.index not in refused, **options))
    trained = [i for step in fake.trained for i in step]
    assert len(trained) == (5 - first) * 3 and sorted(begun) == sorted({*trained, *refused})


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


def test_a_step_that_gives_up_begins_nothing_that_would_be_too_old() -> None:
    """Slots of groups that were refused last were given back before the step was trained: with max_staleness=0 other
    groups began under the weights of before it, and the next step ended the run with "a mistake in birl"."""
    chosen, partial, reached = random.Random(0), 0, set()
    for seed in range(150):
        groups, bound = chosen.randint(1, 4), chosen.choice([0, 0, 1, 2, 3])
        every, refill, share = chosen.randint(1, bound + 1), chosen.choice([0.4, 1.0, 1.5, 4.0]), chosen.random()
        window = chosen.randint(0, (bound - every + 1) * groups)
        fake = Fake(seed, every, straggler=0.1)
        keep = lambda g, seed=seed, share=share: random.Random(seed * 1000 + g.index).random() >= share  # noqa: E731
        options = {"max_staleness": bound, "sync_every": every, "window": window, "max_refill": refill}
        fake.run(groups_per_step=groups, steps=8, keep=keep, **options)
        assert len(fake.trained) == 8 and max(fake.staleness, default=0) <= bound, options
        assert bound or not fake.started_while_training
        partial += any(0 < len(step) < groups for step in fake.trained)
        reached.add((bound, max(fake.staleness, default=0)))
    assert partial > 40 and {(b, b) for b in (0, 1, 2)} <= reached


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
