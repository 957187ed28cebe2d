"""Rollout and training as two coroutines over bounded slots. Synchronous RL is the case max_staleness = 0.

    produce:  acquire a slot, admit a task, start its group          (waits for a slot;    unblocked by learn's release)
    group:    n episodes and their rewards, put into `Ordered`       (waits for an engine; unblocked by its own
    deadlines) learn:    take the oldest groups, train, publish, release slots  (waits for a group;   unblocked by group
    or produce's end)

Bound: a group that starts under version v is trained at step s with s - v <= max_staleness. With B groups a step there
are (max_staleness + 1) * B slots; at the k-th admission (from 0) at least k + 1 - (max_staleness + 1) * B slots were
given back, so v >= floor(k / B) - max_staleness, and first-in-first-out order trains group k at step floor(k / B). A
capacity without an order would not bound it. Groups that `keep` refuses move both sides by the same number.

With max_staleness = 0 a wave is complete before anything of it is judged, refilled or trained: what is in the engine at
once does not depend on how long a reward took, and a resumed run computes the same bits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from birl.types import Group, Task


@dataclass(slots=True)
class Ordered:
    """Finished groups, handed out in order of admission. None: there will be no more."""

    finished: dict[int, Group] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    admitted: int = 0
    taken: int = 0
    closed: bool = False

    async def put(self, place: int, group: Group) -> None:
        async with self.changed:
            self.finished[place] = group
            self.changed.notify_all()

    async def close(self) -> None:
        async with self.changed:
            self.closed = True
            self.changed.notify_all()

    async def take(self) -> Group | None:
        async with self.changed:
            await self.changed.wait_for(
                lambda: self.taken in self.finished or (self.closed and self.taken == self.admitted)
            )
            if self.taken not in self.finished:
                return None
            self.taken += 1
            return self.finished.pop(self.taken - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one training step gets. `position` counts all groups consumed since the run's start, so the next one to roll
    out."""

    number: int
    groups: list[Group]
    refused: list[Group]
    position: int


async def run(
    tasks: Iterator[Task],
    rollout: Callable[[int, Task], Awaitable[Group]],
    train: Callable[[Step], Awaitable[None]],
    *,
    keep: Callable[[Group], bool] = lambda group: True,
    groups_per_step: int,
    max_staleness: int = 0,
    max_refill: float = float("inf"),
    first_step: int = 1,
    steps: int | None = None,
    position: int = 0,
    stop: asyncio.Event | None = None,
) -> None:
    """Until the tasks run out, `steps` is reached, or `stop` is set: then what is being rolled out is abandoned (it is
    rolled out again after a resume, as `position` only counts groups that were trained or refused in a finished step).

    A last step with fewer groups is trained like any other; nothing is dropped. `max_refill` bounds the refused groups
    of a step to that many times groups_per_step: then the step is handed over as it is.
    """
    slots = asyncio.Semaphore((max_staleness + 1) * groups_per_step)
    done = Ordered()
    running: set[asyncio.Task[None]] = set()
    stop = stop or asyncio.Event()
    async with asyncio.TaskGroup() as everything:  # an error on any side cancels the others

        async def produce() -> None:
            for index, task in enumerate(tasks, start=position):
                await slots.acquire()
                group = everything.create_task(one(done.admitted, index, task))
                running.add(group)
                group.add_done_callback(running.discard)
                done.admitted += 1
            await done.close()

        async def one(place: int, index: int, task: Task) -> None:
            await done.put(place, await rollout(index, task))

        producer = everything.create_task(produce())
        stopped = everything.create_task(stop.wait())
        consumed, number = position, first_step
        while steps is None or number <= steps:
            collecting = everything.create_task(
                _collect(done, slots, keep, groups_per_step, max_refill, number, consumed)
            )
            await asyncio.wait((collecting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                running.add(collecting)  # pyright: ignore[reportArgumentType]
                break
            step = collecting.result()
            if not step.groups and not step.refused:
                break
            await train(step)
            consumed, number = step.position, number + 1
            if stop.is_set():
                break
            for _ in range(len(step.groups)):
                slots.release()
        for task in (producer, stopped, *running):
            task.cancel()


async def _collect(
    done: Ordered,
    slots: asyncio.Semaphore,
    keep: Callable[[Group], bool],
    wanted: int,
    max_refill: float,
    number: int,
    position: int,
) -> Step:
    """Whole waves: take as many groups as are missing, then judge them, then ask for as many as were refused."""
    kept: list[Group] = []
    refused: list[Group] = []
    while len(kept) < wanted and len(refused) <= max_refill * wanted:
        wave = [g for _ in range(wanted - len(kept)) if (g := await done.take()) is not None]
        if not wave:
            break
        kept += [g for g in wave if keep(g)]
        bad = [g for g in wave if not keep(g)]
        refused += bad
        for _ in bad:
            slots.release()
    return Step(number=number, groups=kept, refused=refused, position=position + len(kept) + len(refused))
