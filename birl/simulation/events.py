"""One split of the GPUs, simulated: the rule of `rollout/pipeline.py` over a `Fleet` and a learner.

    admit    a slot is free        B groups at every end of a training step, after the first (e - n + 2) B - w
    roll     `Fleet`               groups end at their own times
    take     the first groups that are there and at most w places behind the first that was not taken
    train    B groups, then a checkpoint where it is due, then new weights; then their slots are free

B groups a step, e = max_staleness, n = sync.every, w = order_window.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from birl.errors import BirlError
from birl.simulation.draws import Block, Draws, Ints
from birl.simulation.fleet import HOUR, Fleet
from birl.simulation.scenario import Scenario, step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`learners` replicas. `shared`: both are the same GPUs and take turns."""

    engines: int
    learners: int
    max_staleness: int
    prompts: int
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step. Times in seconds since the start; `taken` is group numbers, `staleness` of each in training
    steps. `engines` is what `Fleet.totals` said at `end`, `waited_busy` the engine-seconds of work while the learner
    waited."""

    number: int
    idle_from: float
    start: float
    end: float
    trained: float
    taken: tuple[int, ...]
    staleness: tuple[int, ...]
    answers: int
    tokens: float
    engines: dict[str, float]
    waited_busy: float


@dataclass(slots=True)
class Simulation:
    scenario: Scenario
    split: Split
    draws: Draws
    watch: Callable[[], None] = lambda: None
    steps: list[Step] = field(default_factory=list)
    rolled_back: int = 0  # steps that were done again after a failure
    fleet: Fleet = field(init=False)
    window: int = field(init=False)

    def __post_init__(self) -> None:
        its = self.scenario
        self.fleet = Fleet(
            its.engine,
            self.split.engines,
            its.episodes.prompt,
            its.episodes.observation,
            its.run.route,
            its.failures,
            its.run.seed,
        )
        self.window = window_of(its, self.split)

    def run(self, steps: int) -> list[Step]:
        """Until `steps` training steps are done and stay done."""
        slots = slots_of(self.scenario, self.split, self.window)
        random = np.random.default_rng([self.scenario.run.seed, 2])
        saved: tuple[int, Ints] = (0, np.zeros(0, np.int64))
        now = 0.0
        for _ in range(100 + 20 * steps):
            order = _Order(self.window, *saved)
            life = self._lifetime(random)
            self._admit(order, slots, now, len(self.steps))
            failed = now + life
            while len(self.steps) < steps:
                self.watch()
                step = self._step(order, failed)
                if step is None:
                    break
                self.steps.append(step)
                if step.number % self.scenario.failures.checkpoint_every == 0:
                    saved = order.left()
                self._admit(order, self.split.prompts, step.end, len(self.steps))
            else:
                return self.steps
            now = failed + self.scenario.failures.restart
            kept = len(self.steps) // self.scenario.failures.checkpoint_every * self.scenario.failures.checkpoint_every
            self.rolled_back += len(self.steps) - kept
            del self.steps[kept:]
            self.fleet.clear(now)
        raise BirlError(
            f"failures.hours_between={self.scenario.failures.hours_between:g}: with {self.split.learners} learners of "
            f"{self.scenario.learner.gpus} GPUs the run falls back faster than it gets on; lower "
            "failures.checkpoint_every, or name a longer time."
        )

    def _lifetime(self, random: np.random.Generator) -> float:
        between = self.scenario.failures.hours_between
        gpus = self.split.learners * self.scenario.learner.gpus
        return float(random.exponential(between * HOUR / gpus)) if between else math.inf

    def _admit(self, order: "_Order", count: int, now: float, steps: int) -> None:
        """`steps` are done; the engines hold the weights after the last multiple of sync.every."""
        places, numbers = order.admit(count, steps - steps % self.scenario.sync.every)
        self.fleet.admit(places, self.draws.groups(numbers), now)

    def _step(self, order: "_Order", failed: float) -> Step | None:
        """The next training step, all clocks from its begin to its end. None: a learner failed before that, and the
        clocks stand there."""
        fleet, its, number = self.fleet, self.scenario, len(self.steps) + 1
        begin = self.steps[-1].end if self.steps else float(fleet.state["time"].min())
        begin = max(begin, float(fleet.state["time"].max()))  # after a restart the clocks are later
        before = fleet.totals()["busy"]
        places, ready = self._take(order, begin, failed)
        start = max(begin, ready)
        if start >= failed:
            fleet.advance(failed)
            return None
        fleet.advance(start)
        waited_busy = fleet.totals()["busy"] - before
        block = self.draws.groups(order.numbers(places))
        trained, tokens = learner_seconds(its, self.split.learners, block)
        trained += its.sync.switch if self.split.shared else 0.0
        end = start + trained
        if number % its.failures.checkpoint_every == 0:
            end += its.failures.checkpoint
        syncs = number % its.sync.every == 0 and not self.split.shared  # shared GPUs hold the new weights already
        pause = its.sync.pause if syncs else 0.0
        end += sync_seconds(its, self.split.engines) if syncs else 0.0
        if end + pause > failed:
            fleet.advance(failed)
            return None
        fleet.advance(end)
        if syncs:
            fleet.pause(pause, its.engine.recompute_kv)
            end += pause
            fleet.advance(end)
        versions = order.take(places)
        staleness = tuple(int(number - 1 - v) for v in versions)
        assert min(staleness) >= 0 and max(staleness) <= self.split.max_staleness, "the staleness bound does not hold"
        return Step(
            number=number,
            idle_from=begin,
            start=start,
            end=end,
            trained=trained,
            taken=tuple(order.numbers(places).tolist()),
            staleness=staleness,
            answers=int(block.tokens.sum()),
            tokens=tokens,
            engines=fleet.totals(),
            waited_busy=waited_busy,
        )

    def _take(self, order: "_Order", begin: float, failed: float) -> tuple[Ints, float]:
        """The places of the next step and when the last of them was there."""
        fleet, wanted = self.fleet, self.split.prompts
        if self.window == 0:
            last = order.first + wanted
            fleet.advance(failed, before=last)
            places = np.arange(order.first, last)
            done = fleet.missing[places] == 0
            return places, float(fleet.finished[places].max()) if done.all() else math.inf
        copied = fleet.copy()  # which groups it will be is only known from what comes: look, and go back
        fleet.advance(failed, before=order.furthest(wanted))
        ends = np.where(fleet.missing == 0, fleet.finished, math.inf)
        fleet.restore(copied)
        return order.first_ready(wanted, begin, ends)


@dataclass(slots=True)
class _Order:
    """Places are admissions since the start or the last restart; group numbers are what they hold. After a restart the
    groups below `position` are trained, and those in `done`."""

    window: int
    position: int
    done: Ints
    first: int = 0  # the first place that was not taken,
    ahead: set[int] = field(default_factory=set)  # and those behind it that were
    number: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [places]
    version: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [places]: of the weights at admission

    def admit(self, count: int, version: int) -> tuple[Ints, Ints]:
        start = int(self.number[-1]) + 1 if len(self.number) else self.position
        numbers = np.setdiff1d(np.arange(start, start + count + len(self.done)), self.done)[:count]
        places = np.arange(len(self.number), len(self.number) + count)
        self.number = np.concatenate([self.number, numbers])
        self.version = np.concatenate([self.version, np.full(count, version)])
        return places, numbers

    def numbers(self, places: Ints) -> Ints:
        return self.number[places]

    def take(self, places: Ints) -> Ints:
        """Their versions."""
        if self.window == 0:
            self.first += len(places)
            return self.version[places]
        self.ahead |= set(places.tolist())
        while self.first in self.ahead:
            self.ahead.remove(self.first)
            self.first += 1
        return self.version[places]

    def furthest(self, wanted: int) -> int:
        """Beyond every place that the next `wanted` could be at."""
        return min(self.first + wanted + self.window + len(self.ahead), len(self.number))

    def first_ready(self, wanted: int, begin: float, ends: Any) -> tuple[Ints, float]:
        """Take one after another, as the pipeline does: of those that are there the first, at most `window` places
        behind the first that was not taken; else wait for one."""
        first, taken, now = self.first, list[int](), begin
        gone, seen = set(self.ahead), self.first
        there, coming = list[int](), list[tuple[float, int]]()
        while len(taken) < wanted:
            while seen <= min(first + self.window, len(self.number) - 1):
                if seen not in gone:
                    heapq.heappush(coming, (float(ends[seen]), seen))
                seen += 1
            while coming and coming[0][0] <= now:
                heapq.heappush(there, heapq.heappop(coming)[1])
            if not there:
                now = coming[0][0]
                if now == math.inf:
                    return np.array(taken, np.int64), math.inf
                continue
            place = heapq.heappop(there)
            taken.append(place)
            gone.add(place)
            while first in gone:
                first += 1
        return np.array(taken, np.int64), now

    def left(self) -> tuple[int, Ints]:
        """For a checkpoint: every group before this is trained, and these."""
        position = int(self.number[self.first]) if self.first < len(self.number) else int(self.number[-1]) + 1
        later = np.concatenate([self.number[sorted(self.ahead)].astype(np.int64), self.done])
        return position, np.unique(later[later > position])


def window_of(scenario: Scenario, split: Split) -> int:
    """run.order_window, as far as the staleness leaves room for it."""
    spare = (split.max_staleness - scenario.sync.every + 1) * split.prompts
    return min(scenario.run.order_window, max(spare, 0))


def slots_of(scenario: Scenario, split: Split, window: int) -> int:
    """Groups that may be admitted and not yet trained: the proof is in `rollout/pipeline.py`."""
    return (split.max_staleness - scenario.sync.every + 2) * split.prompts - window


def learner_seconds(scenario: Scenario, replicas: int, block: Block) -> tuple[float, float]:
    """Seconds of a training step on these groups, and its tokens. A sample is not divided, so that the fullest replica
    has at least the longest one; otherwise replicas are balanced."""
    learner, its = scenario.learner, scenario.episodes
    turns = (block.tokens > 0).sum(axis=2)
    answers = block.tokens.sum(axis=2) + its.observation * (turns - 1)
    prompts = block.tokens.shape[0] * (1 if learner.share_prompts else block.tokens.shape[1]) * its.prompt
    tokens = (float(answers.sum()) + prompts) * learner.trained
    fullest = max(tokens / replicas, float(answers.max()) + its.prompt)
    exchange = 2 * (replicas - 1) / replicas * learner.bytes / learner.bandwidth
    return learner.constant + learner.per_token * fullest + exchange, tokens


def sync_seconds(scenario: Scenario, engines: int) -> float:
    """From the learner to all engines, without the pause."""
    sync = scenario.sync
    limit = engines * sync.bytes / sync.source_bandwidth if sync.source_bandwidth else 0.0
    return max(sync.bytes / sync.bandwidth, limit)


def engine_seconds(scenario: Scenario, answers: float, episodes: float, groups: float) -> float:
    """The least engine-seconds for so many answer tokens: always the best number of sequences, contexts at their
    mean, every prompt once."""
    engine, its = scenario.engine, scenario.episodes
    seconds = step_seconds(engine)
    best = min(seconds[n] / n for n in range(1, len(seconds)))
    middle = its.prompt + answers / episodes / 2
    prompts = (groups if engine.share_prompts else episodes) * its.prompt
    return answers * (best + engine.per_context * middle) + prompts / engine.prefill
