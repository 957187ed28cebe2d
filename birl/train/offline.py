"""The loop of SFT, reward models and preference losses: rows -> micro-batches with a loss -> update.

What is learned from the rows is an `Objective`: `sft.py`, `rm.py` and `dpo.py` have one each.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from birl.allocator import keep_memory
from birl.config import schema
from birl.config.load import flatten, run_folder
from birl.config.words import said_capacity, said_needed
from birl.data.examples import Example, Examples
from birl.data.pack import Batch, packing
from birl.data.tasks import split_validation
from birl.engine.policy import Policy, load_policy
from birl.errors import BirlError
from birl.learner.learner import Learner, Loss, Stats
from birl.learner.writer import Writer
from birl.parallel.crew import Crew
from birl.parallel.grid import rank_threads
from birl.parallel.machine import compute_thread, peak_memory
from birl.parallel.ranks import Ranks
from birl.signals import Stop, saving_signals
from birl.spans import done
from birl.track.tracker import Tracker
from birl.train import build, ranks
from birl.train.parts import NOT_HERE
from birl.train.ranks import crew
from birl.train.run import Run
from birl.train.run_folder import claim, find_checkpoint, held
from birl.train.tasks import stream


class Objective(Protocol):
    """What is minimised, and its metrics."""

    capacity: int  # tokens of a micro-batch

    def learner(self, policy: Policy, ranks: Ranks) -> Learner:
        """The model as it is trained."""
        ...

    def before(self, run: Path | None, examples: Sequence[Example]) -> None:
        """Called once on all rows, training and held-out, before anything is trained or resumed; on every rank. `run`:
        the folder where something may be kept; None for --dry-run."""
        ...

    def work(self, examples: Sequence[Example]) -> list[tuple[Batch, Loss]]:
        """The micro-batches of one optimizer step, each with its loss; the weights hold the step's denominator."""
        ...

    def figures(self, stats: Stats) -> dict[str, float]:
        """What the step says about itself, by metric name."""
        ...

    def score(self, figures: dict[str, float]) -> float:
        """How good a validation is; higher is better."""
        ...


#: policy, data section, which, context -> the sources' examples
Load = Callable[[Policy, Any, str, int, Any], list[Examples]]


@dataclass(slots=True, kw_only=True)
class Parts:
    """All objects of one run."""

    config: schema.Stage
    run: Path
    policy: Policy
    learner: Learner
    objective: Objective
    crew: Crew
    # rank 0 alone has these
    train: list[Examples] = field(default_factory=list)
    held_out: list[Example] = field(default_factory=list)
    tracker: Tracker = NOT_HERE
    resume_from: Path | None = None
    total_steps: int = 0
    writer: Writer = field(default_factory=Writer)

    @property
    def compute(self) -> Executor:
        return self.policy.compute

    @property
    def total_updates(self) -> int | None:
        return self.total_steps

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.learner.tensors()

    def loaded(self, version: int) -> None:
        self.learner.loaded(version)

    def rows(self, position: int) -> Iterator[Example]:
        return stream(self.config, self.train, position)


def train(
    config: schema.Stage,
    choices: dict[str, str] | None,
    dry_run: bool,
    given: "build.Given | None",
    load: Load,
    objective: Callable[[Any, Policy, int], Objective],
) -> dict[str, Any]:
    """Run to the end, or to the first Ctrl-C or SIGTERM; returns the summary that is also in the run folder."""
    keep_memory()
    return asyncio.run(_main(config, choices or {}, dry_run, given or build.Given(), load, objective))


async def _main(
    config: schema.Stage,
    choices: dict[str, str],
    dry_run: bool,
    given: "build.Given",
    load: Load,
    objective: Callable[[Any, Policy, int], Objective],
) -> dict[str, Any]:
    stop = Stop()
    folder = Path(run_folder(config, choices)).absolute()
    with (
        nullcontext() if dry_run else saving_signals(stop),
        nullcontext() if dry_run else held(folder),
        crew(config, folder) as together,
        compute_thread(rank_threads(config)) as compute,
    ):
        ready = partial(assembled, config, folder, given, load, objective, compute, dry_run, together)
        parts = await asyncio.get_running_loop().run_in_executor(compute, ready)
        try:
            run = _Run(config=config, parts=parts, stop=stop)
            return await (run.tell() if dry_run else run.to_the_end())
        finally:
            await asyncio.to_thread(parts.writer.finish)
            parts.tracker.close()


def follow(config: schema.Stage, objective: Callable[[Any, Policy, int], Objective]) -> None:
    """Every rank but 0: the same learner, and none of the data."""

    def make(together: Crew, compute: Executor) -> _Run:
        policy = load_policy(config.model, compute, together.ranks)
        objective_ = objective(config, policy, 0)
        parts = Parts(
            config=config,
            run=Path(config.run),
            policy=policy,
            learner=objective_.learner(policy, together.ranks),
            objective=objective_,
            crew=together,
        )
        return _Run(config=config, parts=parts, stop=Stop())

    ranks.follow(config, make)


def assembled(
    config: schema.Stage,
    run: Path,
    given: "build.Given",
    load: Load,
    make: Callable[[Any, Policy, int], Objective],
    compute: Executor,
    dry_run: bool,
    together: Crew,
) -> Parts:
    """Load and check everything, cheapest first; claims the run folder when nothing is left that could be wrong."""
    resume_from = find_checkpoint(config, run)
    policy = load_policy(config.model, compute, together.ranks)
    limit = min(config.model.max_length or policy.context, policy.context)
    train = load(policy, config.data, "train", limit, given.train)
    held_out = load(policy, config.data, "validation", limit, given.validation)
    if config.data.validation_split > 0 and not held_out:
        train, held_out = split_validation(train, config.data.validation_split, config.seed, key=lambda e: e.key)
    objective = make(config, policy, max(_size(e) for s in (*train, *held_out) for e in s))
    total = config.steps or -(-config.epochs * sum(map(len, train)) // config.batch_size)
    parts = Parts(
        config=config,
        run=run,
        policy=policy,
        learner=objective.learner(policy, together.ranks),
        objective=objective,
        crew=together,
        train=train,
        held_out=[e for s in held_out for e in s],
        tracker=Tracker(run, config.track, title=run.name, total_steps=total, config=flatten(config)),
        resume_from=resume_from,
        total_steps=total,
    )
    if not dry_run:
        claim(run, config, policy)
    return parts


def _size(example: Example) -> int:
    """Tokens that an example takes in a micro-batch, at most: its prompt once, both answers, and a place for the score
    of each."""
    sides = example.sequences
    together = sum(map(len, sides)) + len(sides)
    if len(sides) == 1:
        return together
    start = min(s.mask.index(1) for s in sides)
    shared = next((i for i, (a, b) in enumerate(zip(*(s.ids for s in sides), strict=False)) if a != b), start)
    return together - min(shared, start)


def fitting(config: schema.Stage, longest: int, what: str) -> int:
    """Tokens of a micro-batch, which must hold the longest example; what is compared stays in one micro-batch."""
    if longest > config.capacity:
        raise BirlError(
            f"{said_capacity(config)} cannot hold the longest {what}, {longest} tokens. Set "
            f"{said_needed(config, longest)}, or a smaller model.max_length, beyond which rows are dropped."
        )
    return config.capacity


@dataclass(slots=True)
class _Run(Run):
    """The algorithm, over what every run has."""

    config: schema.Stage
    parts: Parts

    async def to_the_end(self) -> dict[str, Any]:
        every = [e for s in self.parts.train for e in s] + self.parts.held_out
        await self.together("begin", str(self.parts.run), every, self.parts.total_steps)
        await self.resume()
        if self.validation_due() and (self.step > 0 or self.config.validation.at_start):
            await self.validate()
        self.clock = time.perf_counter()
        rows = self.parts.rows(self.position)
        while self.step < self.parts.total_steps and not self.stop.is_set():
            await self.train(list(islice(rows, self.config.batch_size)))
        finished = not self.stop.is_set()
        if finished and self.plans_validation() and self.last_validation_step() != self.step:
            await self.validate()
        await self.save_last()
        return self.summary(finished)

    async def tell(self) -> dict[str, Any]:
        """--dry-run: the first batch goes through the model, nothing is written."""
        config, parts = self.config, self.parts
        rows = list(islice(parts.rows(0), config.batch_size))
        sizes = [len(s) for t in parts.train for e in t for s in e.sequences]
        before = time.perf_counter()
        found: dict[str, Any] = {
            "rows": sum(map(len, parts.train)),
            "held_out": len(parts.held_out),
            "tokens": sum(sizes),
            "longest": max(sizes),
            "steps": parts.total_steps,
        }
        await self.together("begin", "", rows, parts.total_steps)
        stats = await self.together("gradients", rows)
        found |= {**parts.objective.figures(stats), "seconds": time.perf_counter() - before, "memory": peak_memory()}
        for name, value in found.items():
            print(f"{name:<24} {value:,.4g}" if isinstance(value, float) else f"{name:<24} {value:,}")
        return found

    def begin(self, folder: str, examples: Sequence[Example], total_steps: int) -> None:
        """(every rank) `folder`: of the run; empty where nothing may be written."""
        self.parts.run, self.parts.total_steps = Path(folder), total_steps
        self.parts.objective.before(Path(folder) if folder else None, examples)

    async def train(self, rows: list[Example]) -> None:
        """One optimizer step on some rows, then its report."""
        began = time.perf_counter()
        self.parts.tracker.phase("training")
        stats = await self.together("update", rows)
        self.step, self.position = self.step + 1, self.position + len(rows)
        trained, tokens = time.perf_counter(), sum(len(s) for e in rows for s in e.sequences)
        done("train", began, ended=trained, version=self.parts.learner.version, tokens=tokens)
        improved = await self.validate() if self.validation_due() else False
        validated = time.perf_counter()
        metrics = self.parts.objective.figures(stats) | {
            "grad_norm": stats.grad_norm,
            "lr": self.rate,
            "rows": float(len(rows)),
            "updates/nonfinite": float(stats.nonfinite),
            "tokens/trained": float(tokens),
            "speed/train": tokens / max(trained - began, 1e-9),
            "time/train": trained - began,
            "time/checkpoint": self.saving,
            "time/validate": validated - trained,
            "time/step": validated - self.clock,
            "memory/peak": peak_memory(),
            **stats.other,
        }
        await self.report(metrics, ("tokens/trained",), improved)

    def update(self, rows: Sequence[Example]) -> Stats:
        """(every rank)"""
        self.rate = self.learning_rate()
        stats = self.gradients(rows)
        stats.grad_norm = self.parts.learner.optim_step(self.rate)
        self.check_finite(stats, stats.grad_norm)
        return stats

    def gradients(self, rows: Sequence[Example]) -> Stats:
        """(every rank)"""
        stats, parts = Stats(), self.parts
        work = parts.objective.work(rows)
        shares, batches = self.config.parallel.shares, [batch for batch, _ in work]
        stats.other = packing(batches, parts.objective.capacity, shares, parts.policy.pair_cost)
        parts.learner.learn(work, stats)
        return stats

    def plans_validation(self) -> bool:
        return self.config.validation.every > 0 and bool(self.parts.held_out)

    async def validate(self) -> bool:
        """Measure the weights as they are now; True when they are the best so far. A signal abandons it."""
        self.parts.tracker.phase("validating")
        parts, stats, size = self.parts, Stats(), self.config.batch_size
        began = time.perf_counter()
        pieces = [parts.held_out[i : i + size] for i in range(0, len(parts.held_out), size)]
        total = 0.0
        for piece in pieces:
            if self.stop.is_set():
                return False
            stats.loss = 0.0  # the mean over one piece, which may be smaller than the others
            await self.together("measure", piece, stats)
            total += stats.loss * len(piece)
        stats.loss = total / len(parts.held_out)
        done("validate", began, version=parts.learner.version)
        figures = parts.objective.figures(stats)
        metrics = {f"validation/{name}": value for name, value in figures.items()}
        score = parts.objective.score(figures)
        return self.validated(metrics, [], score if math.isfinite(score) else math.nan)

    def measure(self, rows: Sequence[Example], stats: Stats) -> None:
        """(every rank)"""
        self.parts.learner.survey(self.parts.objective.work(rows), stats)
