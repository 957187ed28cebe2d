"""The loop of SFT, reward models and preference losses: rows -> micro-batches with a loss -> update.

What is learned from the rows is an `Objective`: `sft.py`, `rm.py` and `dpo.py` have one each.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from birl.allocator import keep_memory
from birl.config import schema
from birl.config.load import flatten, run_folder
from birl.config.words import said_capacity, said_needed
from birl.data.examples import Example, Examples
from birl.data.pack import Batch, packing
from birl.data.tasks import split_validation
from birl.errors import BirlError
from birl.given import Given
from birl.learner.checkpoints import Checkpoints
from birl.learner.learner import Learner, Loss, Stats
from birl.learner.policy import Policy, load_policy
from birl.parallel.crew import RankGroup
from birl.parallel.grid import rank_threads
from birl.parallel.machine import compute_thread, peak_memory
from birl.parallel.ranks import Ranks
from birl.signals import Stop, saving_signals
from birl.spans import done
from birl.track.folder_lock import held
from birl.track.tracker import Tracker
from birl.train import ranks
from birl.train.ranks import crew
from birl.train.run import Run, stream
from birl.train.run_folder import claim, find_checkpoint
from birl.train.worker import Worker


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What rank 0 alone has: the data."""

    train: Sequence[Examples]
    held_out: Sequence[Example]
    total_steps: int


@dataclass(slots=True, kw_only=True)
class RowsWorker(Worker):
    """What every rank does with the rows that rank 0 hands out."""

    objective: Objective
    shares: int
    pair_cost: float

    def begin(self, folder: Path | None, examples: Sequence[Example], total_updates: int) -> None:
        """`folder`: of the run; None where nothing may be written."""
        self.checkpoints.run, self.total_updates = folder or self.checkpoints.run, total_updates
        self.objective.before(folder, examples)

    def update(self, rows: Sequence[Example]) -> Stats:
        """One optimizer step."""
        self.rate = self.learning_rate()
        stats = self.gradients(rows)
        stats.grad_norm = self.learner.optim_step(self.rate)
        self.check_finite(stats, stats.grad_norm)
        return stats

    def gradients(self, rows: Sequence[Example]) -> Stats:
        stats = Stats()
        work = self.objective.work(rows)
        stats.other = packing([batch for batch, _ in work], self.objective.capacity, self.shares, self.pair_cost)
        self.learner.learn(work, stats)
        return stats

    def measure(self, rows: Sequence[Example], stats: Stats) -> None:
        self.learner.survey(self.objective.work(rows), stats)


def train(
    config: schema.Stage,
    choices: dict[str, str] | None,
    dry_run: bool,
    given: Given | None,
    load: Load,
    objective: Callable[[Any, Policy, int], Objective],
) -> dict[str, Any]:
    """Run to the end, or to the first Ctrl-C or SIGTERM; returns the summary that is also in the run folder."""
    keep_memory()
    return asyncio.run(_main(config, choices or {}, dry_run, given or Given(), load, objective))


async def _main(
    config: schema.Stage,
    choices: dict[str, str],
    dry_run: bool,
    given: Given,
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
        ready = partial(assembled, config, folder, given, load, objective, compute, dry_run, together, stop)
        loop = await asyncio.get_running_loop().run_in_executor(compute, ready)
        try:
            return await (loop.tell() if dry_run else loop.to_the_end())
        finally:
            await asyncio.to_thread(loop.worker.checkpoints.writer.finish)
            loop.run.tracker.close()


def follow(config: schema.Stage, objective: Callable[[Any, Policy, int], Objective]) -> None:
    """Every rank but 0: the same learner, and none of the data."""

    def make(together: RankGroup, compute: Executor) -> RowsWorker:
        policy = load_policy(config.model, compute, together.ranks)
        return worker_of(config, policy, objective(config, policy, 0), together, Path(config.run))

    ranks.follow(config, make)


def worker_of(
    config: schema.Stage, policy: Policy, objective: Objective, together: RankGroup, folder: Path
) -> RowsWorker:
    return RowsWorker(
        optimizer=config.optimizer,
        learner=objective.learner(policy, together.ranks),
        crew=together,
        checkpoints=Checkpoints(run=folder, keys=config.checkpoint, ranks=together.ranks),
        objective=objective,
        shares=config.parallel.shares,
        pair_cost=policy.pair_cost,
    )


def assembled(
    config: schema.Stage,
    run: Path,
    given: Given,
    load: Load,
    make: Callable[[Any, Policy, int], Objective],
    compute: Executor,
    dry_run: bool,
    together: RankGroup,
    stop: Stop,
) -> "_Loop":
    """Load and check everything, cheapest first; claims the run folder when nothing is left that could be wrong."""
    resume_from = find_checkpoint(config, run)
    policy = load_policy(config.model, compute, together.ranks)
    limit = min(config.model.max_length or policy.context, policy.context)
    train = load(policy, config.data, "train", limit, given.train)
    held_out = load(policy, config.data, "validation", limit, given.validation)
    if config.data.validation_split > 0 and not held_out:
        train, held_out = split_validation(train, config.data.validation_split, config.seed, key=lambda e: e.key)
    objective = make(config, policy, max(e.room for s in (*train, *held_out) for e in s))
    total = config.steps or -(-config.epochs * sum(map(len, train)) // config.batch_size)
    worker = worker_of(config, policy, objective, together, run)
    if not dry_run:
        claim(run, config, policy)
    tracker = Tracker(run, config.track, title=run.name, total_steps=total, config=flatten(config))
    rows = Rows(train=train, held_out=[e for s in held_out for e in s], total_steps=total)
    return _Loop(
        config=config,
        rows=rows,
        worker=worker,
        run=Run(
            config=config,
            worker=worker,
            tracker=tracker,
            compute=compute,
            stop=stop,
            resume_from=resume_from,
            validates=config.validation.every > 0 and bool(rows.held_out),
        ),
    )


def fitting(config: schema.Stage, longest: int, what: str) -> int:
    """Tokens of a micro-batch, which must hold the longest example; what is compared stays in one micro-batch."""
    if longest > config.capacity:
        raise BirlError(
            f"{said_capacity(config)} cannot hold the longest {what}, {longest} tokens. Set "
            f"{said_needed(config, longest)}, or a smaller model.max_length, beyond which rows are dropped."
        )
    return config.capacity


@dataclass(slots=True, kw_only=True)
class _Loop:
    """The algorithm, on rank 0."""

    config: schema.Stage
    rows: Rows
    worker: RowsWorker
    run: Run

    async def to_the_end(self) -> dict[str, Any]:
        run, total = self.run, self.rows.total_steps
        every = [e for s in self.rows.train for e in s] + [*self.rows.held_out]
        await run.ranks(RowsWorker.begin, self.worker.checkpoints.run, every, total)
        await run.resume()
        if run.validation_due() and (run.step > 0 or self.config.validation.at_start):
            await self.validate()
        run.clock = time.perf_counter()
        rows = stream(self.config, self.rows.train, run.position)
        while run.step < total and not run.stop.is_set():
            await self.train(list(islice(rows, self.config.batch_size)))
        finished = not run.stop.is_set()
        if finished and run.validates and run.last_validation_step() != run.step:
            await self.validate()
        await run.save_last()
        return run.summary(finished)

    async def tell(self) -> dict[str, Any]:
        """--dry-run: the first batch goes through the model, nothing is written."""
        config, every = self.config, self.rows
        rows = list(islice(stream(config, every.train, 0), config.batch_size))
        sizes = [len(s) for t in every.train for e in t for s in e.sequences]
        before = time.perf_counter()
        result: dict[str, Any] = {
            "rows": sum(map(len, every.train)),
            "held_out": len(every.held_out),
            "tokens": sum(sizes),
            "longest": max(sizes),
            "steps": every.total_steps,
        }
        await self.run.ranks(RowsWorker.begin, None, rows, every.total_steps)
        stats = await self.run.ranks(RowsWorker.gradients, rows)
        result |= {
            **self.worker.objective.figures(stats),
            "seconds": time.perf_counter() - before,
            "memory": peak_memory(),
        }
        for name, value in result.items():
            print(f"{name:<24} {value:,.4g}" if isinstance(value, float) else f"{name:<24} {value:,}")
        return result

    async def train(self, rows: list[Example]) -> None:
        """One optimizer step on some rows, then its report."""
        run, worker, began = self.run, self.worker, time.perf_counter()
        run.tracker.phase("training")
        stats = await run.ranks(RowsWorker.update, rows)
        run.step, run.position = run.step + 1, run.position + len(rows)
        trained, tokens = time.perf_counter(), sum(len(s) for e in rows for s in e.sequences)
        done("train", began, ended=trained, version=worker.learner.version, tokens=tokens)
        improved = await self.validate() if run.validation_due() else False
        validated = time.perf_counter()
        metrics = worker.objective.figures(stats) | {
            "grad_norm": stats.grad_norm,
            "lr": worker.rate,
            "rows": float(len(rows)),
            "updates/nonfinite": float(stats.nonfinite),
            "tokens/trained": float(tokens),
            "speed/train": tokens / max(trained - began, 1e-9),
            "time/train": trained - began,
            "time/checkpoint": run.saving,
            "time/validate": validated - trained,
            "time/step": validated - run.clock,
            "memory/peak": peak_memory(),
            **stats.other,
        }
        await run.report(metrics, ("tokens/trained",), improved)

    async def validate(self) -> bool:
        """Measure the weights as they are now; True when they are the best so far. A signal abandons it."""
        run, rows, objective = self.run, self.rows.held_out, self.worker.objective
        run.tracker.phase("validating")
        stats, size = Stats(), self.config.batch_size
        began = time.perf_counter()
        pieces = [rows[i : i + size] for i in range(0, len(rows), size)]
        total = 0.0
        for piece in pieces:
            if run.stop.is_set():
                return False
            stats.loss = 0.0  # the mean over one piece, which may be smaller than the others
            await run.ranks(RowsWorker.measure, piece, stats)
            total += stats.loss * len(piece)
        stats.loss = total / len(rows)
        done("validate", began, version=self.worker.learner.version)
        figures = objective.figures(stats)
        metrics = {f"validation/{name}": value for name, value in figures.items()}
        score = objective.score(figures)
        return run.validated(metrics, [], score if math.isfinite(score) else math.nan)
