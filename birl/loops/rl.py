"""Reinforcement learning: groups -> advantages -> samples -> batches -> update, over the pipeline of
`rollout/pipeline.py`.

Read `_Run.train` first: it is the algorithm. `birl rl`, `Trainer.train()` and the tests all come through `train()`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch

from birl.algorithms import advantages as credit
from birl.algorithms.policy import policy_loss
from birl.algorithms.reduce import DENOMINATORS
from birl.allocator import keep_memory
from birl.config import schema
from birl.config.load import run_folder
from birl.data.pack import Batch, pack
from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.learner import Stats
from birl.learner.optimizer import learning_rate
from birl.loops import build
from birl.loops import plan as planning
from birl.loops.evaluate import answers, evaluate
from birl.loops.machine import compute_thread, peak_memory
from birl.loops.metrics import outcome_metrics, reward_metrics
from birl.loops.run_folder import held, next_commands
from birl.loops.signals import saving_signals
from birl.rollout import assemble, pipeline
from birl.types import Group, Outcome, Sample, Task

NONFINITE_LIMIT = 3  # optimizer steps in a row without a finite gradient that are skipped before the run stops


def train(
    config: schema.RL, choices: dict[str, str] | None = None, dry_run: bool = False, given: build.Given | None = None
) -> dict[str, Any]:
    """Run to the end, or to the first Ctrl-C or SIGTERM; returns the summary that is also in the run folder.

    Raises `BirlError` for anything the user can mend.
    """
    keep_memory()
    try:
        return asyncio.run(_main(config, choices or {}, dry_run, given or build.Given()))
    except BaseExceptionGroup as group:
        raise _first(group) from None


async def _main(config: schema.RL, choices: dict[str, str], dry_run: bool, given: build.Given) -> dict[str, Any]:
    stop = asyncio.Event()
    folder = Path(run_folder(config, choices))
    with (
        saving_signals(stop),
        nullcontext() if dry_run else held(folder),
        compute_thread(config.threads) as compute,
    ):
        parts = await build.training(config, choices, given, dry_run, compute)
        try:
            if dry_run:
                return planning.dry_run(parts)
            run = _Run(config=config, parts=parts, stop=stop)
            return await run.to_the_end()
        finally:
            await parts.close()


@dataclass(slots=True)
class _Run:
    """What changes while a run goes on. Everything here is in the checkpoint, or follows from it."""

    config: schema.RL
    parts: "build.Parts"
    stop: asyncio.Event
    step: int = 0  # finished steps
    position: int = 0  # groups consumed since the run's start
    best: float | None = None
    best_step: int | None = None
    totals: Counter[str] = field(default_factory=Counter)
    nonfinite: int = 0
    saving: float = 0.0  # seconds spent on a checkpoint since the last step ended
    rate: float = 0.0  # of the step's last update; where nothing was trained, of the next one
    saved: int | None = None  # step of the newest checkpoint
    first_validation: dict[str, Any] | None = None
    last_validation: dict[str, Any] | None = None
    clock: float = field(default_factory=time.perf_counter)  # when the last step ended
    spent: float = 0.0  # seconds in earlier processes of this run

    async def to_the_end(self) -> dict[str, Any]:
        self.resume()
        config, parts = self.config, self.parts
        started = time.perf_counter()
        if self.validation_due() and (self.step > 0 or config.validation.at_start):
            await self.validate()
        self.clock = time.perf_counter()
        await pipeline.run(
            parts.stream(self.position),
            self.rollout,
            self.train,
            keep=self.keep,
            groups_per_step=config.rollout.prompts,
            max_staleness=config.rollout.max_staleness,
            max_refill=config.algorithm.max_refill,
            first_step=self.step + 1,
            steps=config.steps or None,
            position=self.position,
            stop=self.stop,
        )
        finished = not self.stop.is_set()
        if finished and config.validation.every and parts.plan_validation and self.last_validation_step() != self.step:
            await self.validate()
        self.spent += time.perf_counter() - started
        if self.saved != self.step and self.step:
            await self.save()
        return self.summary(finished)

    async def rollout(self, index: int, task: Task) -> Group:
        return await self.parts.rollout.group(index, task, self.config.rollout.group_size, self.parts.params)

    def keep(self, group: Group) -> bool:
        """Dynamic sampling (DAPO): a group without signal is replaced by another prompt."""
        return not self.config.algorithm.dynamic_sampling or assemble.has_signal(group, self.parts.usage)

    async def train(self, step: pipeline.Step) -> None:
        """One step: rewards to advantages, advantages to samples, samples to updates, then reports."""
        rolled_out = time.perf_counter()
        self.parts.tracker.phase("training")
        self.check_failures(step)
        self.report_refill(step)
        samples, by_episode = self.credit(step.groups)
        stats = await self.parts.on_compute_thread(partial(self.update, samples))
        self.step, self.position = step.number, step.position
        trained = time.perf_counter()
        metrics = self.metrics(step, samples, stats, rolled_out - self.clock, trained - rolled_out)
        if self.config.track.rollouts:
            self.parts.tracker.rollouts(self.step, self.records(step, by_episode))
        await self.finish_step(metrics, trained)

    def credit(self, groups: Sequence[Group]) -> tuple[list[Sample], dict[tuple[int, int], float]]:
        """Samples with their advantages, and the advantage of each (group, episode) that counted."""
        algorithm, usage = self.config.algorithm, self.parts.usage
        kept = [(g, i) for g in groups for i in usage.usable(g)]
        if not kept:
            return [], {}
        places = {index: n for n, index in enumerate(dict.fromkeys(g.index for g, _ in kept))}
        group = torch.tensor([places[g.index] for g, _ in kept])
        rewards = torch.tensor([g.trajectories[i].reward for g, i in kept])
        lengths = torch.tensor([float(len(g.trajectories[i].turns[-1].completion.tokens)) for g, i in kept])
        rewards = rewards + credit.overlong_penalty(
            lengths,
            limit=self.config.rollout.max_tokens,
            buffer=algorithm.overlong_buffer,
            penalty=algorithm.overlong_penalty,
        )
        centred = credit.centre(rewards, group, algorithm.baseline)
        scaled = credit.scale(centred, group, algorithm.scale_rewards).tolist()
        by_episode = {(g.index, i): a for (g, i), a in zip(kept, scaled, strict=True)}
        samples = [
            sample
            for g, i in kept
            if not (algorithm.mask_truncated and g.trajectories[i].outcome is Outcome.TRUNCATED)
            for sample in assemble.samples(g.trajectories[i], by_episode[g.index, i], g.index, i)
        ]
        return samples, by_episode

    def update(self, samples: list[Sample]) -> Stats:
        """Optimizer steps on one batch of rollouts (compute thread)."""
        stats = Stats()
        oldest = min((v for s in samples for v in s.versions if v >= 0), default=self.parts.learner.version)
        stats.staleness = self.parts.learner.version - oldest
        self.rate = self.learning_rate()
        for part in split_by_group(samples, self.config.algorithm.updates_per_batch):
            self.update_once(part, stats)
        return stats

    def update_once(self, samples: list[Sample], stats: Stats) -> None:
        """One optimizer step. Samples whose advantage is 0 count in the denominator, but have no gradient, so they are
        not computed (with a KL term they have one). A batch without any gradient moves nothing, the optimizer's
        momentum included."""
        config, learner, reference = self.config.algorithm, self.parts.learner, self.parts.reference
        weights = DENOMINATORS[config.denominator](assemble.trained_lengths(samples), self.config.rollout.max_tokens)
        useful = [(s, w) for s, w in zip(samples, weights, strict=True) if reference is not None or s.advantage != 0]
        if not useful:
            stats.skipped += 1
            return
        self.rate = self.learning_rate()
        batches = pack([s for s, _ in useful], [w for _, w in useful], self.config.learner.tokens_per_microbatch)
        for batch in batches:
            ref_logp = None if reference is None else reference.forward(batch)
            learner.forward_backward(batch, partial(self.loss, ref_logp=ref_logp), stats)
        if stats.updates == 0:
            stats.first_gap = stats.mean("gap")
            self.check_gap(stats)
        stats.grad_norm = learner.optim_step(self.rate)
        stats.updates += 1
        self.check_finite(stats)

    def loss(
        self, logp: torch.Tensor, entropy: torch.Tensor, batch: Batch, *, ref_logp: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The old log-probs are the engine's own: those of the policy that sampled."""
        algorithm = self.config.algorithm
        return policy_loss(
            logp,
            entropy,
            old_logp=batch.logprobs,
            advantages=batch.advantages,
            weights=batch.weights,
            ref_logp=ref_logp,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl=algorithm.kl,
            kl_coef=algorithm.kl_coef,
        )

    def learning_rate(self) -> float:
        optimizer, total = self.config.optimizer, self.parts.total_steps
        return learning_rate(
            self.parts.learner.version,
            peak=optimizer.lr,
            schedule=optimizer.schedule,
            warmup=optimizer.warmup_steps,
            total=total * self.config.algorithm.updates_per_batch if total else None,
            min_ratio=optimizer.min_lr_ratio,
        )

    def check_failures(self, step: pipeline.Step) -> None:
        episodes = [t for g in (*step.groups, *step.refused) for t in g.trajectories]
        failed = [t for t in episodes if not t.outcome.scored]
        if len(failed) > self.config.rollout.max_failure_rate * len(episodes):
            kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(str(t.outcome) for t in failed).most_common())
            reasons = "\n".join(f"  {n} x {why}" for why, n in Counter(t.detail for t in failed).most_common(3))
            raise BirlError(
                f"Step {step.number}: {len(failed)} of {len(episodes)} episodes failed ({kinds}), more than "
                f"rollout.max_failure_rate={self.config.rollout.max_failure_rate:g} allows. Most frequent "
                f"reasons:\n{reasons}"
            )

    def report_refill(self, step: pipeline.Step) -> None:
        """The pipeline gives up after max_refill and hands over what it has; the step goes on with that."""
        wanted, asked = self.config.rollout.prompts, len(step.groups) + len(step.refused)
        if len(step.groups) < wanted and len(step.refused) > self.config.algorithm.max_refill * wanted:
            self.parts.tracker.message(
                f"Step {step.number}: only {len(step.groups)} of {asked} groups have rewards that differ "
                f"(algorithm.max_refill={self.config.algorithm.max_refill:g}). Where that lasts, the prompts are too "
                "easy or too hard by now."
            )

    def check_gap(self, stats: Stats) -> None:
        limit = self.config.learner.max_logprob_gap
        if not stats.first_gap <= limit:
            raise BirlError(
                f"The engine's log-probs differ from the learner's by {stats.first_gap:.3g} nats a token on average; "
                f"learner.max_logprob_gap={limit:g} is allowed. The engine does not sample from the weights that are "
                "trained."
            )

    def check_finite(self, stats: Stats) -> None:
        self.nonfinite = 0 if torch.tensor(stats.grad_norm).isfinite() else self.nonfinite + 1
        stats.nonfinite += self.nonfinite > 0
        if self.nonfinite >= NONFINITE_LIMIT:
            raise BirlError(
                f"The gradient was not finite {self.nonfinite} optimizer steps in a row; the weights were left as "
                "they are. Try a lower optimizer.lr, or model.dtype=float32."
            )

    async def finish_step(self, metrics: dict[str, float], trained: float) -> None:
        """Validate and save where it is time, then report."""
        config = self.config
        improved = False
        if self.validation_due():
            improved = await self.validate()
        validated = time.perf_counter()
        self.totals.update({k: int(metrics[k]) for k in ("tokens/generated", "tokens/trained", "outcome/asked")})
        metrics["time/validate"] = validated - trained
        metrics["time/step"] = validated - self.clock
        self.parts.tracker.step(self.step, metrics)
        self.clock, self.saving = time.perf_counter(), 0.0
        if (config.checkpoint.every and self.step % config.checkpoint.every == 0) or (
            improved and config.checkpoint.keep_best
        ):
            await self.save()

    def validation_due(self) -> bool:
        """At a multiple of validation.every whose validation is not done, also after one that a signal cut short."""
        every, last = self.config.validation.every, self.last_validation
        planned = every > 0 and self.parts.plan_validation is not None and self.step % every == 0
        return planned and (last is None or last["step"] != self.step)

    async def validate(self) -> bool:
        """Measure the weights as they are now; True when they are the best so far. A signal abandons it."""
        assert self.parts.plan_validation is not None
        self.parts.tracker.phase("validating")
        work = asyncio.create_task(evaluate(self.parts.plan_validation, self.parts.validation_rollout))
        stopped = asyncio.create_task(self.stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            return False
        metrics, groups = work.result()
        self.parts.take_counters()  # the next step counts its own tokens only
        record = {"step": self.step, "metrics": metrics, "samples": answers(groups, self.parts.rollout, 32)}
        self.first_validation = self.first_validation or record
        self.last_validation = record
        self.parts.tracker.validation(self.step, metrics, record["samples"])
        failed = Counter(t.detail for g in groups for t in g.trajectories if not t.outcome.scored)
        if failed:
            (why, n), asked = failed.most_common(1)[0], sum(len(g.trajectories) for g in groups)
            self.parts.tracker.message(f"Validation: {failed.total()} of {asked} answers failed, {n} of them: {why}")
        score = metrics["validation/all/score"]
        if not isnan(score) and (self.best is None or score > self.best):
            self.best, self.best_step = score, self.step
            return self.step > 0
        return False

    def last_validation_step(self) -> int | None:
        return None if self.last_validation is None else self.last_validation["step"]

    def metrics(
        self, step: pipeline.Step, samples: Sequence[Sample], stats: Stats, rolling: float, training: float
    ) -> dict[str, float]:
        everything = (*step.groups, *step.refused)
        metrics = outcome_metrics(everything) | reward_metrics(everything)
        counters = self.parts.take_counters()
        trained = sum(len(s.tokens) for s in samples if self.parts.reference is not None or s.advantage != 0)
        metrics |= {
            "groups/kept": float(len(step.groups)),
            "groups/refilled": float(len(step.refused)),
            "groups/no_signal": float(sum(not assemble.has_signal(g, self.parts.usage) for g in everything)),
            "loss": stats.loss,
            "entropy": stats.mean("entropy"),
            "clip_fraction": stats.mean("clip_fraction"),
            "ratio/mean": stats.mean("ratio"),
            "ratio/max": stats.maxima.get("ratio", nan),
            "mismatch/mean": stats.first_gap,
            "grad_norm": stats.grad_norm,
            "lr": self.rate,
            "updates/done": float(stats.updates),
            "updates/skipped": float(stats.skipped),
            "updates/nonfinite": float(stats.nonfinite),
            "staleness/max": float(stats.staleness),
            "tokens/generated": float(counters.tokens),
            "tokens/trained": float(trained),
            "speed/generate": counters.tokens / max(counters.seconds, 1e-9),
            "speed/guessed": counters.accepted / counters.tokens if counters.tokens else nan,
            "speed/train": trained / max(training, 1e-9),
            "time/generate": counters.seconds,
            "time/reward": max(rolling - self.saving - counters.seconds, 0.0),
            "time/train": training,
            "time/checkpoint": self.saving,
            "memory/peak": peak_memory(),
        }
        if "kl" in stats.sums:
            metrics["kl"] = stats.mean("kl")
        return metrics

    def records(self, step: pipeline.Step, by_episode: dict[tuple[int, int], float]) -> list[dict[str, Any]]:
        """Every episode of the step as rollouts.jsonl holds it."""
        return [
            {
                "group": g.index,
                "episode": i,
                "task": g.task.id,
                "answer": g.task.answer,
                "outcome": str(t.outcome),
                "detail": t.detail,
                "reward": t.reward,
                "score": t.score,
                "parts": dict(t.parts),
                "advantage": by_episode.get((g.index, i)),
                "text": "".join(self.parts.chat.decode(turn.completion.tokens) for turn in t.turns),
                "samples": [
                    {
                        "tokens": s.tokens,
                        "mask": [int(m) for m in s.mask],
                        "logprobs": s.logprobs,
                        "versions": s.versions,
                    }
                    for s in assemble.samples(t, 0.0, g.index, i)
                ],
            }
            for g in (*step.groups, *step.refused)
            for i, t in enumerate(g.trajectories)
        ]

    async def save(self) -> None:
        config, parts = self.config, self.parts
        parts.tracker.phase("saving a checkpoint")
        began = time.perf_counter()
        state = {
            "position": self.position,
            "version": parts.learner.version,
            "best": self.best,
            "best_step": self.best_step,
            "totals": dict(self.totals),
            "nonfinite": self.nonfinite,
            "spent": self.spent + time.perf_counter() - parts.started,
            "first_validation": self.first_validation,
            "last_validation": self.last_validation,
            "logs": parts.tracker.offsets(),
        }
        await parts.on_compute_thread(
            lambda: checkpoint.save(parts.checkpoints, self.step, parts.learner.tensors(), state)
        )
        self.saved, self.saving = self.step, time.perf_counter() - began
        best = {self.best_step} if config.checkpoint.keep_best and self.best_step else set()
        checkpoint.prune(parts.checkpoints, config.checkpoint.keep_last, best - {None})  # pyright: ignore

    def resume(self) -> None:
        """Go on from the checkpoint that `build` chose, if any: tensors, counters, place in the data, ends of the
        logs."""
        path = self.parts.resume_from
        if path is None:
            self.parts.tracker.rewind(None, 0)
            return
        state = checkpoint.load(path, self.parts.learner.tensors())
        self.parts.learner.loaded(state["version"])
        for name in (
            "step",
            "position",
            "best",
            "best_step",
            "nonfinite",
            "spent",
            "first_validation",
            "last_validation",
        ):
            setattr(self, name, state[name])
        self.totals.update(state["totals"])
        own = path.resolve().parent == self.parts.checkpoints.resolve()
        self.saved = self.step if own else None
        self.parts.tracker.rewind(state["logs"] if own else None, self.step)
        self.parts.tracker.message(f"Resumed from {path} at step {self.step}.")

    def summary(self, finished: bool) -> dict[str, Any]:
        parts = self.parts
        summary = {
            "finished": finished,
            "run": str(parts.run),
            "step": self.step,
            "seconds": self.spent,
            "before": self.first_validation,
            "after": self.last_validation,
            "best": self.best,
            "best_step": self.best_step,
            "totals": dict(self.totals),
            "next": next_commands(parts.run, finished),
        }
        parts.tracker.finish(summary)
        return summary


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
