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
s - u <= e - n + 1, and s - v <= e. Capacity without an order (w unbounded) would bound nothing.

With max_staleness = 0 a wave is complete before anything of it is judged, refilled or trained: what is in the engine at
once does not depend on how long a reward took, and a resumed run is bit-identical.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from math import inf

from birl.types import Group, Task
from birl.waits import event, waiting


@dataclass(slots=True)
class Ordered:
    """Finished groups, handed out in order of admission, or up to `window` places ahead of the first that is not
    finished. None: there will be no more."""

    window: int = 0
    finished: dict[int, Group] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    admitted: int = 0
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
        """How many admitted groups are not finished. A group's coroutine ends only after it was put here."""
        return self.admitted - self.first - len(self.ahead) - len(self.finished)

    def ready(self) -> int | None:
        """The first place from which a group can be taken now."""
        return next((p for p in range(self.first, self.first + self.window + 1) if p in self.finished), None)

    async def take(self) -> Group | None:
        async with self.changed:
            await self.changed.wait_for(
                lambda: self.ready() is not None or (self.closed and self.first == self.admitted)
            )
            place = self.ready()
            if place is None:
                return None
            self.ahead.add(place)
            while self.first in self.ahead:
                self.ahead.remove(self.first)
                self.first += 1
            return self.finished.pop(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one training step gets. Every task before number `position` of the stream is consumed after it, and those
    with the numbers `ahead`. `ready` groups are finished and wait, `running` ones are being rolled out."""

    number: int
    groups: list[Group]
    refused: list[Group]
    position: int
    ahead: tuple[int, ...] = ()
    ready: int = 0
    running: int = 0


def slots(groups_per_step: int, max_staleness: int, sync_every: int = 1, window: int = 0) -> int:
    """How many groups may be admitted and not yet trained: see the proof above."""
    found = (max_staleness - sync_every + 2) * groups_per_step - window
    if found < groups_per_step or window < 0 or sync_every < 1:
        raise ValueError(f"no step could ever be filled with {max_staleness=}, {sync_every=}, {window=}")
    return found


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
    """Until the tasks run out, `steps` is reached, or `stop` is set: then what is being rolled out is abandoned (it is
    rolled out again after a resume, as `position` and `ahead` only count groups that were trained or refused in a
    finished step). `tasks` begins at number `position` of the stream; those in `done` are passed over.

    A last step with fewer groups is trained like any other; nothing is dropped. `max_refill` bounds the refused groups
    of a step to that many times groups_per_step: then the step is handed over as it is. With `steps`, no group is begun
    that none of them could train.
    """
    room = slots(groups_per_step, max_staleness, sync_every, window)
    wanted = inf if steps is None else (steps - first_step + 1) * groups_per_step
    free = asyncio.Semaphore(int(min(room, max(wanted, groups_per_step))))
    later = wanted - room  # groups that the last steps still want beyond the first slots
    numbers: list[int] = []  # of the task at each place
    order = Ordered(window)
    running: set[asyncio.Task[None]] = set()
    stop = stop or asyncio.Event()
    async with asyncio.TaskGroup() as everything:  # an error on any side cancels the others

        async def produce() -> None:
            for number, task in enumerate(tasks, start=position):
                if number in done:
                    continue
                with waiting("rollout", "a free slot", "the next training step"):
                    await free.acquire()
                group = everything.create_task(one(len(numbers), number, task))
                running.add(group)
                group.add_done_callback(running.discard)
                numbers.append(number)
                order.admitted += 1
            await order.close()

        async def one(place: int, number: int, task: Task) -> None:
            await order.put(place, await rollout(number, task))
            event(f"group {number} rolled out")

        def handed_over(number: int, kept: list[Group], refused: list[Group]) -> Step:
            start = numbers[order.first] if order.first < len(numbers) else _end(numbers, position, done)
            return Step(
                number=number,
                groups=kept,
                refused=refused,
                position=start,
                ahead=tuple(sorted(n for n in {*(numbers[p] for p in order.ahead), *done} if n > start)),
                ready=len(order.finished),
                running=order.running,
            )

        producer = everything.create_task(produce())
        stopped = everything.create_task(stop.wait())
        number = first_step
        while steps is None or number <= steps:
            wave = groups_per_step if max_staleness == 0 else 1
            collecting = everything.create_task(_collect(order, free, keep, groups_per_step, max_refill, wave))
            with waiting("training", f"{groups_per_step} groups for step {number}", "rollout"):
                await asyncio.wait((collecting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                running.add(collecting)  # pyright: ignore[reportArgumentType]
                break
            kept, refused = collecting.result()
            if not kept and not refused:
                break
            await train(handed_over(number, kept, refused))
            event(f"step {number} trained")
            number += 1
            if stop.is_set():
                break
            for _ in kept:
                if later > 0:
                    free.release()
                later -= 1
        for task in (producer, stopped, *running):
            task.cancel()


def _end(numbers: list[int], position: int, done: Collection[int]) -> int:
    """The first task that was not admitted, where everything that was is consumed."""
    found = numbers[-1] + 1 if numbers else position
    while found in done:
        found += 1
    return found


async def _collect(
    order: Ordered,
    free: asyncio.Semaphore,
    keep: Callable[[Group], bool],
    wanted: int,
    max_refill: float,
    wave_size: int,
) -> tuple[list[Group], list[Group]]:
    """Kept and refused groups. In waves: take as many groups as are missing, at most `wave_size`, then judge them, then
    ask for as many as were refused."""
    kept: list[Group] = []
    refused: list[Group] = []
    while len(kept) < wanted and len(refused) <= max_refill * wanted:
        missing = min(wanted - len(kept), wave_size)
        wave = [g for _ in range(missing) if (g := await order.take()) is not None]
        if not wave:
            break
        kept += [g for g in wave if keep(g)]
        bad = [g for g in wave if not keep(g)]
        refused += bad
        for _ in bad:
            free.release()
    return kept, refused
