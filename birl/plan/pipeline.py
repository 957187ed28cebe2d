"""Simulation of one split of the GPUs: the rules of `rollout/pipeline.py` with a `Fleet` and a learner.

    admit    a slot is free        B groups at every end of a training step, after the first (e - n + 2) B - w
    roll     `Fleet`               groups end at their own times
    take     the first finished groups at most w places after the first untaken one
    train    B groups, then new weights; then their slots are free

B groups a step, e = max_staleness, n = sync.every, w = order_window.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from birl.plan.fleet import Block, Draws, Fleet
from birl.plan.scenario import Scenario, step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`learners`: number of replicas. `shared`: engines and learners are on the same GPUs and alternate."""

    engines: int
    learners: int
    max_staleness: int
    prompts: int
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One training step. Times in seconds since the start; `taken`: numbers of its groups, `staleness`: of each, in
    training steps; `engines`: `Fleet.totals` at `end`; `waited_busy`: engine-seconds of work while the learner
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
    steps: list[SimulatedStep] = field(default_factory=list[SimulatedStep])
    versions: list[int] = field(default_factory=list[int])  # place -> version of the weights at its admission
    taken: set[int] = field(default_factory=set[int])  # places after `first` that are trained
    first: int = 0  # the first place that is not trained
    fleet: Fleet = field(init=False)

    def __post_init__(self) -> None:
        its = self.scenario
        self.fleet = Fleet(its.engine, its.episodes, self.split.engines, its.run.route)

    def run(self, steps: int) -> list[SimulatedStep]:
        self._admit(slots_of(self.scenario, self.split), 0.0)
        while len(self.steps) < steps:
            self.steps.append(self._step())
            self._admit(self.split.prompts, self.steps[-1].end)
        return self.steps

    def _admit(self, count: int, now: float) -> None:
        """Start groups with the current weights of the engines, those of the last multiple of sync.every."""
        place, done = len(self.versions), len(self.steps)
        self.versions += [done - done % self.scenario.sync.every] * count
        self.fleet.admit(place, self.draws.groups(np.arange(place, place + count)), now)

    def _step(self) -> SimulatedStep:
        """Simulate the next training step, from its begin to its end."""
        fleet, its, number = self.fleet, self.scenario, len(self.steps) + 1
        begin = self.steps[-1].end if self.steps else 0.0
        before = fleet.totals()["busy"]
        places, start = self._take(begin)
        fleet.advance(start)
        waited_busy = fleet.totals()["busy"] - before
        block = self.draws.groups(np.array(places))
        trained, tokens = learner_seconds(its, self.split.learners, block)
        trained += its.sync.switch if self.split.shared else 0.0
        end = start + trained
        if number % its.sync.every == 0 and not self.split.shared:  # shared GPUs have the new weights already
            fleet.advance(end + sync_seconds(its, self.split.engines))
            fleet.pause(its.sync.pause)
            end += sync_seconds(its, self.split.engines) + its.sync.pause
        fleet.advance(end)
        staleness = tuple(number - 1 - self.versions[place] for place in places)
        assert min(staleness) >= 0 and max(staleness) <= self.split.max_staleness, "the staleness bound does not hold"
        return SimulatedStep(
            number=number,
            idle_from=begin,
            start=start,
            end=end,
            trained=trained,
            taken=tuple(places),
            staleness=staleness,
            answers=int(block.tokens.sum()),
            tokens=tokens,
            engines=fleet.totals(),
            waited_busy=waited_busy,
        )

    def _take(self, now: float) -> tuple[list[int], float]:
        """The places of the next step's groups, and the time at which it has all. As in the pipeline: the first
        finished groups at most the window after the first untaken place; waits for more if there are too few."""
        window, finished, chosen = window_of(self.scenario, self.split), self.fleet.finished, list[int]()
        while len(chosen) < self.split.prompts:
            near = [p for p in range(self.first, self.first + window + 1) if p not in self.taken and p in finished]
            place = next((p for p in near if finished[p] <= now), -1)
            if place < 0:  # a later event may finish a group before the earliest of these
                soonest = min((finished[p] for p in near), default=math.inf)
                if self.fleet.next() <= soonest:
                    self.fleet.step()
                else:
                    now = soonest
                continue
            chosen.append(place)
            self.taken.add(place)
            while self.first in self.taken:
                self.taken.remove(self.first)
                self.first += 1
        return chosen, now


def window_of(scenario: Scenario, split: Split) -> int:
    """run.order_window, limited by the staleness that is left."""
    spare = (split.max_staleness - scenario.sync.every + 1) * split.prompts
    return min(scenario.run.order_window, max(spare, 0))


def slots_of(scenario: Scenario, split: Split) -> int:
    """Groups that may be admitted and not yet trained; the proof is in `rollout/pipeline.py`."""
    return (split.max_staleness - scenario.sync.every + 2) * split.prompts - window_of(scenario, split)


def learner_seconds(scenario: Scenario, replicas: int, block: Block) -> tuple[float, float]:
    """Seconds of a training step on these groups, and its tokens. Replicas are balanced, but samples are not divided:
    the fullest replica has at least the longest sample."""
    learner, its = scenario.learner, scenario.episodes
    turns = (block.tokens > 0).sum(axis=2)
    answers = block.tokens.sum(axis=2) + its.observation * (turns - 1)
    prompts = block.tokens.shape[0] * (1 if learner.share_prompts else block.tokens.shape[1]) * its.prompt
    tokens = (float(answers.sum()) + prompts) * learner.trained
    fullest = max(tokens / replicas, float(answers.max()) + its.prompt)
    exchange = 2 * (replicas - 1) / replicas * learner.bytes / learner.bandwidth
    return learner.constant + learner.per_token * fullest + exchange, tokens


def sync_seconds(scenario: Scenario, engines: int) -> float:
    """Seconds of a transfer of the weights to all engines, without the pause."""
    sync = scenario.sync
    limit = engines * sync.bytes / sync.source_bandwidth if sync.source_bandwidth else 0.0
    return max(sync.bytes / sync.bandwidth, limit)


def engine_seconds(scenario: Scenario, answers: float, episodes: float, groups: float) -> float:
    """The least engine-seconds for so many answer tokens: always with the best number of sequences, mean context, and
    every prompt computed once."""
    engine, its = scenario.engine, scenario.episodes
    seconds = step_seconds(engine)
    best = min(seconds[n] / n for n in range(1, len(seconds)))
    middle = its.prompt + answers / episodes / 2
    prompts = (groups if engine.share_prompts else episodes) * its.prompt
    return answers * (best + engine.per_context * middle) + prompts / engine.prefill
