"""Reinforcement learning: groups -> advantages -> samples -> batches -> update -> weights to the engines, over the
pipeline of `rollout/pipeline.py`.

Read `Loop.train` first: it is the algorithm, synchronous or not. `build.py` makes a `Loop` of a configuration.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from birl.engine.steps import Counters
from birl.errors import BirlError
from birl.learner.token_figures import token_figures
from birl.models.digests import digests, whole
from birl.rollout import assemble, failures, pipeline
from birl.rollout.assemble import Usage
from birl.rollout.evaluate import evaluate, versions_of
from birl.rollout.ledger import Ledger, settle
from birl.rollout.records import answers, episode_records
from birl.rollout.replay import replay, resample, row_of, take_pictures
from birl.spans import done
from birl.track.units import counted
from birl.train.credit import Credited
from birl.train.metrics import step_metrics
from birl.train.parts import Parts
from birl.train.run import Run
from birl.train.step import RLWorker
from birl.types import Group, Task
from birl.waits import spent
from birl.weights.publisher import Sent, published


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How many groups and answers a step takes, and when things happen. `steps` None: until the data end; `greedy`:
    each prompt also gets a greedy answer; `replay`: folder of the run to train again; `notes`: shown at the start."""

    groups: int
    answers: int
    oversample: int
    max_staleness: int
    window: int
    max_refill: float
    max_failure_rate: float
    steps: int | None
    sync_every: int
    greedy: bool
    dynamic_sampling: bool
    validate_at_start: bool
    records: bool
    replay: str
    resample: bool
    notes: Sequence[str]


@dataclass(slots=True, kw_only=True)
class Loop:
    """The training loop, on rank 0."""

    parts: Parts
    run: Run
    schedule: Schedule
    greedy: dict[int, float] = field(default_factory=dict[int, float])  # group index -> reward of its greedy answer
    ledger: Ledger = field(init=False)
    told: set[str] = field(default_factory=set[str])  # reasons of failed episodes that were shown already
    last_metrics: dict[str, float] = field(default_factory=dict[str, float])
    sent: Sent = field(default_factory=Sent)  # the last weights sent to the engines
    waited: float = 0.0  # for groups, up to the last step [s]
    counted: Counters = field(default_factory=Counters)  # of the engine, at the last step

    @property
    def worker(self) -> RLWorker:
        return self.parts.worker

    @property
    def usage(self) -> Usage:
        return self.worker.credit.usage

    async def fit(self) -> dict[str, Any]:
        """Train until the data or `steps` end, or a signal stops the run; returns the summary."""
        schedule, parts, run = self.schedule, self.parts, self.run
        await run.ranks(RLWorker.begin, parts.run, parts.reward_weights)
        await self.run.resume()
        self.worker.expect(run.steps)
        self.report_progress()
        self.ledger = Ledger(parts.run, self.run.step)
        await self.publish()
        if self.run.validate_every and (plan := parts.plan_validation) and plan.greedy_repeats:
            parts.tracker.message(f"warning: {plan.greedy_repeats}")
        for note in schedule.notes:
            parts.tracker.message(f"note: {note}")
        if self.run.validation_due() and (self.run.step > 0 or schedule.validate_at_start):
            await self.validate()
        self.run.clock, self.waited = time.perf_counter(), spent("training", "rollout")
        if schedule.replay:
            await self.replay()
        else:
            await pipeline.run(
                self.tasks(),
                self.rollout,
                self.train,
                keep=self.keep,
                groups_per_step=schedule.groups,
                max_staleness=schedule.max_staleness,
                sync_every=schedule.sync_every,
                window=schedule.window,
                max_refill=schedule.max_refill,
                first_step=self.run.step + 1,
                steps=schedule.steps,
                position=self.run.position,
                done=frozenset(self.run.ahead),
                stop=self.run.stop,
            )
        self.ledger.close()
        finished = not self.run.stop.is_set()
        if finished and self.run.validate_every and self.run.last_validation_step() != self.run.step:
            await self.validate()
            finished = self.run.last_validation_step() == self.run.step  # unless a signal has cut it short
        await self.run.save_last()
        return self.run.summary(finished)

    def tasks(self) -> Iterator[Task]:
        """The tasks from the run's position on. A `data.order` other than uniform has its state in the checkpoint."""
        order, run, extra = self.parts.order, self.run, self.worker.extra
        if order is None:
            return self.parts.stream(run.position)
        order.restore(extra.get("order"), run.step, run.position)
        extra["order"] = order.state
        return order.tasks(run.position, frozenset(run.ahead))

    def observe(self, step: pipeline.Step) -> dict[str, float]:
        """Report the step's results to `data.order`, which chooses the next tasks; returns its metrics."""
        if self.parts.order is None:
            return {}
        groups = (*step.groups, *step.refused)
        results = [(g, self.usage.usable(g), assemble.has_signal(g, self.usage)) for g in groups]
        return self.parts.order.observe(step.number, step.position, results)

    async def rollout(self, index: int, task: Task) -> Group:
        schedule, parts = self.schedule, self.parts
        began = time.perf_counter()
        wanted = parts.rollout.group(index, task, schedule.answers, parts.params, extra=schedule.oversample)
        if schedule.greedy:
            greedy = replace(parts.params, temperature=0.0)
            group, alone = await asyncio.gather(wanted, parts.rollout.group(index, task, 1, greedy))
            if self.usage.usable(alone):
                self.greedy[index] = alone.trajectories[0].reward
        else:
            group = await wanted
        tokens = self.ledger.rolled_out(group)
        version = group.start_version
        done("group", began, process="rollout", lane="groups", version=version, tokens=tokens, group=index)
        return group

    def keep(self, group: Group) -> bool:
        """False if dynamic sampling (DAPO) replaces the group by one of another prompt."""
        return not self.schedule.dynamic_sampling or assemble.has_signal(group, self.usage)

    async def train(self, step: pipeline.Step) -> None:
        """One step: rewards -> advantages -> optimizer steps -> weights to the engines -> reports."""
        run, schedule, rolled_out = self.run, self.schedule, time.perf_counter()
        self.parts.tracker.phase("training")
        warning = failures.check(step, schedule.max_failure_rate, self.told)
        for text in filter(None, (warning, failures.refill(step, schedule.groups, schedule.max_refill))):
            self.parts.tracker.message(text)
        if self.parts.engine.version in versions_of(step.groups):
            await self.parts.publisher.proved()
        await self.parts.publisher.rest()
        sampling = self.parts.engine.version == self.worker.learner.version
        greedy = self.take_greedy(step.groups)
        credited, stats = await run.on_compute_thread(self.worker.learn, run.step, step.groups, greedy, sampling)
        self.parts.tracker.record(row_of(step, greedy))
        self.run.step, self.run.position, self.run.ahead = step.number, step.position, step.ahead
        chosen = self.observe(step)
        self.report_progress()
        trained = time.perf_counter()
        if self.run.step % schedule.sync_every == 0:
            await self.publish(wait=False)
        waited, self.waited = spent("training", "rollout") - self.waited, spent("training", "rollout")
        metrics = step_metrics(self, step, credited, stats, waited, trained - rolled_out) | chosen
        version, tokens = self.worker.learner.version, int(metrics["tokens/trained"])
        done("train", rolled_out, ended=trained, version=version, tokens=tokens)
        self.settle(step, credited)
        self.last_metrics = metrics
        if schedule.records:
            figures = token_figures(credited.samples, self.worker.seen)
            records = episode_records(step, self.parts.chat, credited.by_episode, figures, self.parts.run)
            self.parts.tracker.rollouts(self.run.step, records)
        await self.finish_step(metrics, time.perf_counter())

    def report_progress(self) -> None:
        """Tell reward functions with a schedule how far the run is."""
        progress, rows = self.parts.progress, sum(map(len, self.parts.train))
        progress.steps, progress.total = self.run.step, self.run.steps or 0
        progress.epoch = self.run.position / max(rows, 1)

    async def replay(self) -> None:
        """Train on the recorded groups of another run (`replay.py`)."""
        schedule, parts = self.schedule, self.parts
        take_pictures(Path(schedule.replay), parts.run)
        again = partial(resample, engine=parts.engine, params=parts.params, seed=parts.rollout.seed)
        steps, tokens = await replay(
            Path(schedule.replay),
            self.train,
            self.greedy,
            lambda: self.last_metrics,
            lambda: self.worker.learner.version,
            again if schedule.resample else None,
            finished=self.run.step,
            stop=self.run.stop,
        )
        more = f", {tokens:,} tokens sampled again, bit-identical" if schedule.resample else ""
        replayed = counted(steps, "step")
        parts.tracker.message(f"Replayed {replayed} of {schedule.replay}: every figure is equal{more}.")

    async def publish(self, wait: bool = True) -> None:
        """Send the current weights to the engines, which prove that they have them. Without `wait` the proof may come
        later, but always before training on anything that they sampled."""
        began = time.perf_counter()
        self.sent = await self.parts.publisher.publish(wait)
        if self.sent.seconds:
            done("sync", began, version=self.sent.version)

    def settle(self, step: pipeline.Step, credited: Credited) -> None:
        """Record in the ledger what became of every token of the step."""
        trained = [(s, self.worker.has_gradient(s)) for s in credited.samples]
        self.ledger.settle(step.number, step.groups, step.refused, settle(step.groups, self.usage, trained))

    def take_greedy(self, groups: Sequence[Group]) -> dict[int, float]:
        """Group index -> reward of the greedy answer to its prompt."""
        return {g.index: self.greedy.pop(g.index) for g in groups if g.index in self.greedy}

    def take_counters(self) -> Counters:
        """The engine's counters since the last call."""
        before, self.counted = self.counted, replace(self.parts.engine.counters)
        return self.counted.since(before)

    async def finish_step(self, metrics: dict[str, float], reported: float) -> None:
        """Validate if it is due, then report."""
        improved = await self.validate() if self.run.validation_due() else False
        validated = time.perf_counter()
        metrics["time/validate"] = validated - reported
        metrics["time/step"] = validated - self.run.clock
        await self.run.report(metrics, ("tokens/generated", "tokens/trained", "outcome/asked"), improved)

    async def validate(self) -> bool:
        """Evaluate the current weights; True if they are the best so far. A signal abandons the validation.

        The learner is idle meanwhile, so this is one snapshot: every answer must come from its version, and the record
        has its digest. A checkpoint of this step has the same weights."""
        assert self.parts.plan_validation is not None
        if self.parts.engine.version != self.worker.learner.version:
            await self.publish()
        self.parts.tracker.phase("validating")
        began = time.perf_counter()
        work = asyncio.create_task(evaluate(self.parts.plan_validation, self.parts.validation_rollout))
        stopped = asyncio.create_task(self.run.stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also where something else ends the run
            stopped.cancel()
            work.cancel()
        if not work.done():
            await asyncio.wait({work})
            return False
        metrics, groups = work.result()
        self.take_counters()  # the next step counts its own tokens only
        failed = Counter(t.detail for g in groups for t in g.trajectories if not t.outcome.scored)
        if failed:
            (why, n), asked = failed.most_common(1)[0], sum(len(g.trajectories) for g in groups)
            self.parts.tracker.message(f"Validation: {failed.total()} of {asked} answers failed, {n} of them: {why}")
        samples = answers(groups, self.parts.rollout, 32)
        about = await self.run.on_compute_thread(self.validation_record, groups)
        done("validate", began, version=self.worker.learner.version)
        return self.run.validated(metrics, samples, metrics["validation/all/score"], about)

    def validation_record(self, groups: Sequence[Group]) -> dict[str, Any]:
        """What was evaluated: version and digest of the weights, data, seed. Raises `BirlError` if the answers do not
        come from one snapshot."""
        version, plan = self.worker.learner.version, self.parts.plan_validation
        if others := versions_of(groups) - {version}:
            raise BirlError(
                f"Validation of step {self.run.step}: answers come from version {sorted(others)} of the weights "
                f"instead of {version} alone; all answers of a validation must come from one version."
            )
        assert plan is not None
        apart = {} if (policies := self.worker.learner.policies) is None else policies.weights()
        return {
            "version": version,
            "weights": self.parts.publisher.sent_digest or whole(digests(published(self.worker.sampled.model) | apart)),
            "data": self.parts.validation_digest,
            "seed": self.parts.validation_rollout.seed,
            "n": plan.samples,
            **({"threshold": plan.threshold} if plan.threshold else {}),
        }
