"""Rollout and training as two coroutines over bounded slots. Synchronous RL is the case max_staleness = 0.

    produce   acquire a slot, admit a task, start its group    waits for a slot;   unblocked by training's release
    group     n episodes and their rewards, put into Ordered   waits for engines;  unblocked by their own deadlines
    train     take groups, train, publish, release the slots   waits for groups;   unblocked by them, or produce's end

Bound: a group that starts under the weights after v steps is trained in step s (from 0) with s - v <= max_staleness.

Let B be groups_per_step, e = max_staleness, n = sync_every, w = window. There are S = (e - n + 2) B - w slots. The
group at place k (from 0) is admitted when they suffice for k + 1 admissions: after u steps and R refused groups, whose
slots were given back, k + 1 <= S + u B + R. The engines have the weights after v >= u - (n - 1) steps then. A group is
taken before an earlier one only if its place is at most w behind the first that was not taken. So whatever is taken
before the group at place k stands at one of the k + w other places up to k + w; the s B groups of earlier steps and all
refused ones before it are among them: s B + R <= k + w. Together s B <= S + u B + w - 1 = (e - n + 2 + u) B - 1, so
s - u <= e - n + 1, and s - v <= e. Capacity without an order (w unbounded) would bound nothing. A step that gives up
for too many refused groups counts as B all the same: the slots of what it lacks are given back after it, not in R.

With max_staleness = 0 a wave is complete before anything of it is judged, refilled or trained: what is in the engine at
once does not depend on how long a reward took, and a resumed run is bit-identical.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

from birl.types import Group, Task
from birl.waits import event, waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The input of one training step. After it, the tasks before number `position` of the stream and those with the
    numbers `ahead` are consumed. `ready`: groups that are finished and wait; `running`: groups being rolled out."""

    number: int
    groups: list[Group]
    refused: list[Group]
    position: int
    ahead: tuple[int, ...] = ()
    ready: int = 0
    running: int = 0


@dataclass(slots=True)
class Ordered:
    """Finished groups, returned in order of admission, or up to `window` places ahead of the first unfinished one."""

    window: int = 0
    position: int = 0  # of the first task in the stream,
    done: Collection[int] = ()  # and those behind it that are passed over
    numbers: list[int] = field(default_factory=list[int])  # of the task at each place
    finished: dict[int, Group] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    first: int = 0  # the first place that was not taken,
    ahead: set[int] = field(default_factory=set)  # and those behind it that were
    closed: bool = False

    async def put(self, place: int, group: Group) -> None:
        async with self.changed:
            self.finished[place] = group
            self.changed.notify_all()

    async def close(self) -> None:
        async with self.changed:
            self.closed = True
            self.changed.notify_all()

    @property
    def running(self) -> int:
        """Number of admitted groups that are not finished."""
        return len(self.numbers) - self.first - len(self.ahead) - len(self.finished)

    def step(self, number: int, kept: list[Group], refused: list[Group]) -> Step:
        """The input of training step `number` after these groups were taken."""
        start = self.numbers[self.first] if self.first < len(self.numbers) else self.end()
        return Step(
            number=number,
            groups=kept,
            refused=refused,
            position=start,
            ahead=tuple(sorted(n for n in {*(self.numbers[p] for p in self.ahead), *self.done} if n > start)),
            ready=len(self.finished),
            running=self.running,
        )

    def end(self) -> int:
        """Number of the first task that was not admitted, if all admitted ones are consumed."""
        last = self.numbers[-1] + 1 if self.numbers else self.position
        while last in self.done:
            last += 1
        return last

    def ready(self) -> int | None:
        """The first place from which a group can be taken now."""
        return next((p for p in range(self.first, self.first + self.window + 1) if p in self.finished), None)

    async def take(self) -> Group | None:
        """The next group; None if there will be no more."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: self.ready() is not None or (self.closed and self.first == len(self.numbers))
            )
            place = self.ready()
            if place is None:
                return None
            self.ahead.add(place)
            while self.first in self.ahead:
                self.ahead.remove(self.first)
                self.first += 1
            return self.finished.pop(place)


def slots(groups_per_step: int, max_staleness: int, sync_every: int = 1, window: int = 0) -> int:
    """Largest number of admitted groups that are not trained yet: see the proof above."""
    result = (max_staleness - sync_every + 2) * groups_per_step - window
    if result < groups_per_step or window < 0 or sync_every < 1:
        raise ValueError(f"no step could ever be filled with {max_staleness=}, {sync_every=}, {window=}")
    return result


class Slots(asyncio.Semaphore):
    """`room` slots. No more than `wanted` groups are admitted in all, so the last steps give back fewer slots."""

    def __init__(self, room: int, wanted: float, groups_per_step: int) -> None:
        super().__init__(int(min(room, max(wanted, groups_per_step))))
        self.later = wanted - room  # groups that are wanted beyond the first slots

    def trained(self, groups: int) -> None:
        for _ in range(groups):
            if self.later > 0:
                self.release()
            self.later -= 1


async def run(
    tasks: Iterator[Task],
    rollout: Callable[[int, Task], Awaitable[Group]],
    train: Callable[[Step], Awaitable[None]],
    *,
    keep: Callable[[Group], bool] = lambda group: True,
    groups_per_step: int,
    max_staleness: int = 0,
    sync_every: int = 1,
    window: int = 0,
    max_refill: float = float("inf"),
    first_step: int = 1,
    steps: int | None = None,
    position: int = 0,
    done: Collection[int] = (),
    stop: asyncio.Event | None = None,
) -> None:
    """Run until the tasks run out, `steps` is reached, or `stop` is set. Groups that are being rolled out then are
    abandoned, and rolled out again after a resume: `position` and `ahead` count only groups that a finished step has
    trained or refused. `tasks` begins at number `position` of the stream; those in `done` are skipped.

    A last step with fewer groups is trained like any other; nothing is dropped. A step takes at most `max_refill` times
    groups_per_step refused groups, then it is trained as it is. With `steps`, no group is started that none of them
    could train.
    """
    wanted = inf if steps is None else (steps - first_step + 1) * groups_per_step
    free = Slots(slots(groups_per_step, max_staleness, sync_every, window), wanted, groups_per_step)
    order = Ordered(window, position, done)
    running, stop = set[asyncio.Task[Any]](), stop or asyncio.Event()
    async with asyncio.TaskGroup() as everything:  # an error on any side cancels the others

        async def one(place: int, number: int, task: Task) -> None:
            await order.put(place, await rollout(number, task))
            event(f"group {number} rolled out")

        def begin(place: int, number: int, task: Task) -> None:
            group = everything.create_task(one(place, number, task))
            running.add(group)
            group.add_done_callback(running.discard)

        producer = everything.create_task(_produce(tasks, order, free, begin))
        stopped = everything.create_task(stop.wait())
        wave = groups_per_step if max_staleness == 0 else 1
        for number in count(first_step) if steps is None else range(first_step, steps + 1):
            collecting = everything.create_task(_collect(order, free, keep, groups_per_step, max_refill, wave))
            with waiting("training", f"{groups_per_step} groups for step {number}", "rollout"):
                await asyncio.wait((collecting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                running.add(collecting)
                break
            kept, refused = collecting.result()
            if not kept and not refused:
                break
            await train(order.step(number, kept, refused))
            event(f"step {number} trained")
            if stop.is_set():
                break
            free.trained(groups_per_step)  # one that gave up has held back the slots of what it lacks
        for task in (producer, stopped, *running):
            task.cancel()


async def _produce(
    tasks: Iterator[Task], order: Ordered, free: asyncio.Semaphore, begin: Callable[[int, int, Task], None]
) -> None:
    """Admit a task for each free slot: `begin(place, number, task)`. The task is taken when the slot is free, as the
    choice may depend on what was trained by then."""
    for number in count(order.position):
        if number not in order.done:
            with waiting("rollout", "a free slot", "the next training step"):
                await free.acquire()
        task = next(tasks, None)
        if task is None:
            break
        if number not in order.done:
            begin(len(order.numbers), number, task)
            order.numbers.append(number)
    await order.close()


async def _collect(
    order: Ordered,
    free: asyncio.Semaphore,
    keep: Callable[[Group], bool],
    wanted: int,
    max_refill: float,
    wave_size: int,
) -> tuple[list[Group], list[Group]]:
    """Kept and refused groups, taken in waves: as many as are missing, at most `wave_size`, then those that replace the
    refused ones. A step that may reach `max_refill` holds back as many slots of refused groups as it may lack, so that
    it always uses up `wanted` slots, which the proof above assumes."""
    kept: list[Group] = []
    refused: list[Group] = []
    held = 0  # slots of refused groups that are not given back yet
    while len(kept) < wanted and (len(refused) <= max_refill * wanted or len(kept) + len(refused) < wanted):
        asked = min(wanted - len(kept), wave_size)
        wave = [g for _ in range(asked) if (g := await order.take()) is not None]
        if not wave:
            break
        kept += [g for g in wave if keep(g)]
        bad = [g for g in wave if not keep(g)]
        refused += bad
        missing = wanted - len(kept)
        left, untaken = max_refill * wanted - len(refused), missing - len(refused)
        later = max(left, untaken, wave_size) if left >= 0 or untaken > 0 else 0  # that it may still take
        before, held = held + len(bad), int(max(0, missing - later))
        for _ in range(before - held):
            free.release()
    return kept, refused
