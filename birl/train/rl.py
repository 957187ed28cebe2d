"""Reinforcement learning: groups -> advantages -> samples -> batches -> update -> weights to the engines, over the
pipeline of `rollout/pipeline.py`.

Read `_Run.train` first: it is the algorithm, synchronous or not. `birl rl`, `Trainer.train()` and the tests all come
through `train()`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

from torch import Tensor

from birl import foreign
from birl.algorithms.kl import AdaptiveKL, FixedKL
from birl.algorithms.reduce import DENOMINATORS
from birl.allocator import keep_memory
from birl.blocked import interrupting
from birl.config import schema
from birl.config.load import run_folder
from birl.data.pack import Batch, pack, packing
from birl.engine.policy import load_policy
from birl.engines.servers import learner_threads
from birl.errors import BirlError
from birl.learner.learner import Learner, Stats
from birl.learner.past import Past
from birl.models.digests import digests, whole
from birl.parallel.crew import Crew
from birl.parallel.machine import compute_thread
from birl.rollout import assemble, pipeline
from birl.rollout.ages import Ages
from birl.rollout.ledger import Ledger, settle
from birl.rollout.replay import replay, resample, row_of
from birl.seeds import derive_seed
from birl.signals import Stop, saving_signals
from birl.spans import done
from birl.track.units import counted
from birl.train import build, checks, ranks
from birl.train import plan as planning
from birl.train.comparison import KEPT, compare
from birl.train.credit import Credited
from birl.train.evaluate import answers, evaluate, versions_of
from birl.train.metrics import episode_records, step_metrics
from birl.train.objective import critic_loss
from birl.train.parts import Parts
from birl.train.ranks import crew
from birl.train.run import Run
from birl.train.run_folder import held
from birl.train.token_figures import Key, Watch, token_figures
from birl.types import Group, Sample, Task
from birl.waits import Watchdog, exit_at_once, spent
from birl.weights.publish import Sender, Sent, published


def train(
    config: schema.RL, choices: dict[str, str] | None = None, dry_run: bool = False, given: build.Given | None = None
) -> dict[str, Any]:
    """Run to the end, or to the first Ctrl-C or SIGTERM; returns the summary that is also in the run folder.

    Raises `BirlError` for anything the user can mend.
    """
    keep_memory()
    try:
        with foreign.undone():
            return asyncio.run(_main(config, choices or {}, dry_run, given or build.Given()))
    except BaseExceptionGroup as group:
        raise _first(group) from None


async def _main(config: schema.RL, choices: dict[str, str], dry_run: bool, given: build.Given) -> dict[str, Any]:
    stop = Stop()
    folder = Path(run_folder(config, choices)).absolute()
    with (
        nullcontext() if dry_run else saving_signals(stop),
        nullcontext() if dry_run else held(folder),
        crew(config, folder) as together,
        compute_thread(learner_threads(config)) as compute,
    ):
        parts = await build.training(config, folder, given, dry_run, compute, together)
        try:
            if dry_run:
                return planning.dry_run(parts)
            run = _Run(config=config, parts=parts, stop=stop)
            with Watchdog(config.watchdog or inf, exit_at_once, folder / "stall.txt"), interrupting(config.env.timeout):
                return await run.to_the_end()
        finally:
            await parts.close()
            await foreign.stop(*(asyncio.all_tasks() - {asyncio.current_task()}))


def follow(config: schema.RL) -> None:
    """Every rank but 0: the same learner, and none of the data."""

    def make(together: Crew, compute: Executor) -> _Run:
        parts = build.learning(config, load_policy(config.model, compute, together.ranks), together)
        return _Run(config=config, parts=parts, stop=Stop())

    ranks.follow(config, make)


@dataclass(slots=True)
class _Run(Run):
    """The algorithm, over what every run has."""

    config: schema.RL
    parts: Parts
    greedy: dict[int, float] = field(default_factory=dict)  # reward of the greedy answer, by group, until it is used
    kl: FixedKL | AdaptiveKL = field(init=False)
    past: Past = field(init=False)
    sampling: bool = True  # engines have the weights that the step begins with
    ages: Ages = field(default_factory=Ages)
    ledger: Ledger = field(init=False)
    last_metrics: dict[str, float] = field(default_factory=dict)
    seen: dict[Key, Tensor] = field(default_factory=dict)  # what the learner said of the step's tokens
    sent: Sent = field(default_factory=Sent)  # the last weights that the engines were given
    waited: float = 0.0  # seconds that training has waited for groups, up to the last step

    def __post_init__(self) -> None:
        self.past = Past(self.parts.learner, min(self.config.rollout.max_staleness, KEPT))
        keys = self.config.algorithm
        target = keys.kl_target
        self.kl = AdaptiveKL(keys.kl_coef, target, keys.kl_horizon) if target else FixedKL(keys.kl_coef)

    async def to_the_end(self) -> dict[str, Any]:
        config, parts = self.config, self.parts
        await self.together("begin", parts.total_steps, parts.credit.weights)
        await self.resume()
        self.tell_rewards()
        self.ledger = Ledger(parts.run, self.step)
        await self.publish()
        if self.plans_validation() and (plan := parts.plan_validation) and plan.greedy_repeats:
            parts.tracker.message(f"warning: {plan.greedy_repeats}")
        if self.validation_due() and (self.step > 0 or config.validation.at_start):
            await self.validate()
        self.clock, self.waited = time.perf_counter(), spent("training", "rollout")
        if config.debug.replay:
            await self.replay()
        else:
            await pipeline.run(
                parts.stream(self.position),
                self.rollout,
                self.train,
                keep=self.keep,
                groups_per_step=config.rollout.prompts,
                max_staleness=config.rollout.max_staleness,
                sync_every=config.weights.sync_every,
                window=config.rollout.order_window,
                max_refill=config.algorithm.max_refill,
                first_step=self.step + 1,
                steps=config.steps or None,
                position=self.position,
                done=frozenset(self.ahead),
                stop=self.stop,
            )
        self.ledger.close()
        finished = not self.stop.is_set()
        if finished and self.plans_validation() and self.last_validation_step() != self.step:
            await self.validate()
        await self.save_last()
        return self.summary(finished)

    async def rollout(self, index: int, task: Task) -> Group:
        config, parts = self.config, self.parts
        began = time.perf_counter()
        wanted = parts.rollout.group(
            index, task, config.rollout.group_size, parts.params, extra=config.rollout.oversample
        )
        if config.algorithm.baseline == "greedy":
            greedy = replace(parts.params, temperature=0.0)
            group, alone = await asyncio.gather(wanted, parts.rollout.group(index, task, 1, greedy))
            if parts.usage.usable(alone):
                self.greedy[index] = alone.trajectories[0].reward
        else:
            group = await wanted
        tokens = self.ledger.rolled_out(group)
        version = group.start_version
        done("group", began, process="rollout", lane="groups", version=version, tokens=tokens, group=index)
        return group

    def keep(self, group: Group) -> bool:
        """Dynamic sampling (DAPO): a group without signal is replaced by another prompt."""
        return not self.config.algorithm.dynamic_sampling or assemble.has_signal(group, self.parts.usage)

    async def train(self, step: pipeline.Step) -> None:
        """One step: rewards to advantages, advantages to updates, new weights to the engines, then reports."""
        rolled_out = time.perf_counter()
        self.parts.tracker.phase("training")
        checks.failures(step, self.config.rollout.max_failure_rate)
        if few := checks.refill(step, self.config):
            self.parts.tracker.message(few)
        if self.parts.engine.version in versions_of(step.groups):
            await self.parts.publisher.proved()
        await self.parts.publisher.rest()
        sampling = self.parts.engine.version == self.parts.learner.version
        greedy = self.take_greedy(step.groups)
        credited, stats = await self.together("learn", self.step, step.groups, greedy, sampling)
        self.parts.tracker.record(row_of(step))
        self.step, self.position, self.ahead = step.number, step.position, step.ahead
        self.tell_rewards()
        trained = time.perf_counter()
        if self.step % self.config.weights.sync_every == 0:
            await self.publish(wait=False)
        waited, self.waited = spent("training", "rollout") - self.waited, spent("training", "rollout")
        metrics = step_metrics(self, step, credited, stats, waited, trained - rolled_out)
        version, tokens = self.parts.learner.version, int(metrics["tokens/trained"])
        done("train", rolled_out, ended=trained, version=version, tokens=tokens)
        self.settle(step, credited)
        self.last_metrics = metrics
        if self.config.track.rollouts:
            figures = token_figures(credited.samples, self.seen)
            records = episode_records(step, self.parts.chat, credited.by_episode, figures, self.parts.run)
            self.parts.tracker.rollouts(self.step, records)
        await self.finish_step(metrics, time.perf_counter())

    def tell_rewards(self) -> None:
        """How far the run is, for reward functions with a schedule."""
        progress, rows = self.parts.progress, sum(map(len, self.parts.train))
        progress.steps, progress.total = self.step, self.parts.total_steps or 0
        progress.epoch = self.position / max(rows, 1)

    async def replay(self) -> None:
        """Train on what another run trained on (`replay.py`)."""
        config, parts = self.config, self.parts
        again = partial(resample, engine=parts.engine, params=parts.params, seed=config.seed)
        steps, tokens = await replay(
            Path(config.debug.replay),
            self.train,
            lambda: self.last_metrics,
            lambda: parts.learner.version,
            again if config.debug.resample else None,
        )
        more = f", {tokens:,} tokens sampled again, bit-identical" if config.debug.resample else ""
        replayed = counted(steps, "step")
        parts.tracker.message(f"Replayed {replayed} of {config.debug.replay}: every figure is equal{more}.")

    async def publish(self, wait: bool = True) -> None:
        """The engines get the weights as they are now, and prove that they have them; without `wait` the proof may come
        later, but before anything is trained on that they sampled."""
        began = time.perf_counter()
        self.sent = await self.parts.publisher.publish(wait)
        if self.sent.seconds:
            done("sync", began, version=self.sent.version)

    def settle(self, step: pipeline.Step, credited: Credited) -> None:
        """Every token of the step goes into the ledger."""
        trained = [(s, self.parts.has_gradient(s)) for s in credited.samples]
        self.ledger.settle(step.number, step.groups, step.refused, settle(step.groups, self.parts.usage, trained))

    def begin(self, total_steps: int | None, weights: Mapping[str, float]) -> None:
        """(every rank) What only rank 0 knows, as it has the data and the rewards."""
        self.parts.total_steps, self.parts.credit.weights = total_steps, weights

    def read(self, path: Path) -> dict[str, Any]:
        """(every rank)"""
        state = Run.read(self, path)
        self.kl.coef = self.extra.get("kl_coef", self.kl.coef)
        self.ages.starts = self.extra.get("versions", [])
        return state

    def take_greedy(self, groups: Sequence[Group]) -> dict[int, float]:
        """The rewards of the greedy answers to these groups' prompts."""
        return {g.index: self.greedy.pop(g.index) for g in groups if g.index in self.greedy}

    def learn(
        self, step: int, groups: Sequence[Group], greedy: dict[int, float], sampling: bool
    ) -> tuple[Credited, Stats]:
        """(every rank) Rewards to advantages, advantages to optimizer steps; `step` are finished. `sampling`: engines
        have the weights of now."""
        self.step, self.seen, self.sampling = step, {}, sampling
        self.ages.begin(self.parts.learner.version, self.config.rollout.max_staleness + 1)
        self.extra["versions"] = self.ages.starts
        checks.staleness(max((self.ages.of(g.start_version) for g in groups), default=0), self.config.rollout)
        credited = self.parts.credit.of(groups, greedy, self.kl.coef)
        stats = Stats() if self.config.debug.only_rollout else self.update(credited.samples)
        if credited.kl == credited.kl:
            self.kl.update(credited.kl, credited.episodes)
            self.extra["kl_coef"] = self.kl.coef
        return credited, stats

    def update(self, samples: list[Sample]) -> Stats:
        """Optimizer steps on one batch of rollouts."""
        stats = Stats()
        self.rate = self.learning_rate()
        parts = split_by_group(samples, self.config.algorithm.updates_per_batch)
        for part in parts * self.config.algorithm.passes:
            self.update_once(part, stats, samples)
        return stats

    def update_once(self, samples: list[Sample], stats: Stats, everything: list[Sample]) -> None:
        """One optimizer step. Samples whose advantages are 0 count in the denominator, but have no gradient, so they
        are not computed (with a KL term, an entropy bonus or a critic they have one). A batch without any gradient
        moves nothing, the optimizer's momentum included."""
        config, parts = self.config, self.parts
        lengths = assemble.trained_lengths(samples)
        denominator = DENOMINATORS[config.algorithm.denominator]
        weights = denominator(lengths, [s.group for s in samples], config.rollout.max_tokens)
        useful = [(s, w) for s, w in zip(samples, weights, strict=True) if parts.has_gradient(s)]
        if not useful:
            stats.skipped += 1
            return
        self.rate = self.learning_rate()
        size, shares = config.capacity, config.parallel.shares
        pair_cost = parts.policy.pair_cost
        batches = pack([s for s, _ in useful], [w for _, w in useful], size, shares, pair_cost)
        stats.other |= packing(batches, size, shares, pair_cost)
        value_weight = 1 / max(sum(lengths), 1)
        norms = [] if parts.critic is None else [self.update_critic(parts.critic, batches, value_weight, stats)]
        if parts.critic is None or self.step >= config.critic.freeze_steps:
            known = parts.objective.look(batches, derive_seed(config.seed, self.step, stats.updates))
            losses = [parts.objective.loss(of, self.kl.coef, value_weight) for of in known]
            watch = Watch() if config.track.rollouts and config.track.token_figures else None
            watched = losses if watch is None else watch.over(losses)
            parts.learner.learn(list(zip(batches, watched, strict=True)), stats)
            if watch is not None:
                self.seen = watch.found(batches, [s for s, _ in useful], parts.learner.ranks) | self.seen
            if stats.updates == 0:
                self.compare(everything, sum(len(b.tokens) for b in batches), stats)
            stats.grad_norm = parts.learner.optim_step(self.rate)
            stats.updates += 1
            norms.append(stats.grad_norm)
        self.check_finite(stats, *norms)

    def compare(self, samples: list[Sample], computed: int, stats: Stats) -> None:
        """(every rank) Engine against learner on the step's samples, before the weights move. Raises `BirlError` where
        the log-probs of any version are too far apart."""
        config, fresh = self.config, stats.sums["fresh"]
        gaps = {self.parts.learner.version: (stats.sums["gap"] / fresh, int(fresh))} if fresh else {}
        if config.rollout.max_staleness > 0:
            found = compare(self.past, samples, computed, gaps, config.capacity)
            gaps |= found.gaps
            stats.other["mismatch/unheld"] = found.unheld / max(sum(map(sum, (s.mask for s in samples))), 1)
        stats.other["mismatch/tokens"] = float(sum(n for _, n in gaps.values()))
        stats.first_gap = sum(gap * n for gap, n in gaps.values()) / stats.other["mismatch/tokens"] if gaps else nan
        for version, (mean, _) in gaps.items():
            checks.gap(mean, version, config)
        if self.sampling:
            self.past.keep()

    def update_critic(self, critic: Learner, batches: Sequence[Batch], weight: float, stats: Stats) -> float:
        """The same for a critic with a model of its own; gives its gradient norm. Its figures are means over the same
        tokens."""
        own, loss = Stats(), critic_loss(self.config.critic.clip, weight)
        critic.learn([(batch, loss) for batch in batches], own)
        norm = critic.optim_step(self.config.critic.lr)
        stats.other |= {name: own.mean(name) for name in own.sums} | {"critic/grad_norm": norm}
        return norm

    async def finish_step(self, metrics: dict[str, float], reported: float) -> None:
        """Validate where it is time, then report."""
        improved = await self.validate() if self.validation_due() else False
        validated = time.perf_counter()
        metrics["time/validate"] = validated - reported
        metrics["time/step"] = validated - self.clock
        await self.report(metrics, ("tokens/generated", "tokens/trained", "outcome/asked"), improved)

    def plans_validation(self) -> bool:
        return self.config.validation.every > 0 and self.parts.plan_validation is not None

    async def validate(self) -> bool:
        """Measure the weights as they are now; True when they are the best so far. A signal abandons it.

        The learner rests meanwhile, so this is one snapshot: every answer must come from its version, and the record
        names its digest. A checkpoint of this step holds the same weights."""
        assert self.parts.plan_validation is not None
        if self.parts.engine.version != self.parts.learner.version:
            await self.publish()
        self.parts.tracker.phase("validating")
        began = time.perf_counter()
        work = asyncio.create_task(evaluate(self.parts.plan_validation, self.parts.validation_rollout))
        stopped = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also where something else ends the run
            stopped.cancel()
            work.cancel()
        if not work.done():
            await asyncio.wait({work})
            return False
        metrics, groups = work.result()
        self.parts.take_counters()  # the next step counts its own tokens only
        failed = Counter(t.detail for g in groups for t in g.trajectories if not t.outcome.scored)
        if failed:
            (why, n), asked = failed.most_common(1)[0], sum(len(g.trajectories) for g in groups)
            self.parts.tracker.message(f"Validation: {failed.total()} of {asked} answers failed, {n} of them: {why}")
        samples = answers(groups, self.parts.rollout, 32)
        about = await self.on_compute_thread(partial(self.measured, groups))
        done("validate", began, version=self.parts.learner.version)
        return self.validated(metrics, samples, metrics["validation/all/score"], about)

    def sent_digest(self) -> str:
        """Of the weights that engines elsewhere have, where no rank has all of them; else empty."""
        publisher = self.parts.publisher
        return publisher.digest if isinstance(publisher, Sender) and publisher.gathered is not None else ""

    def measured(self, groups: Sequence[Group]) -> dict[str, Any]:
        """What a validation says about itself. Raises `BirlError` where its answers are not from one snapshot."""
        version, plan = self.parts.learner.version, self.parts.plan_validation
        if others := versions_of(groups) - {version}:
            raise BirlError(
                f"Validation of step {self.step}: answers come from version {sorted(others)} of the weights instead "
                f"of {version} alone, so the result would belong to no policy."
            )
        assert plan is not None
        return {
            "version": version,
            "weights": self.sent_digest() or whole(digests(published(self.parts.sampled))),
            "data": self.parts.validation_digest,
            "seed": self.parts.validation_rollout.seed,
            "n": plan.samples,
            **({"threshold": plan.threshold} if plan.threshold else {}),
        }


def split_by_group(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Samples in at most `parts` pieces of about equally many groups, in order; the samples of a group stay
    together."""
    groups = list(dict.fromkeys(s.group for s in samples))
    pieces = min(parts, len(groups))
    piece_of = {g: n * pieces // len(groups) for n, g in enumerate(groups)}
    return [[s for s in samples if piece_of[s.group] == piece] for piece in range(pieces)]


def _first(group: BaseExceptionGroup) -> BaseException:
    """The error itself, without the task groups around it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
