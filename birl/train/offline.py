"""The loop of SFT, reward models and preference losses: rows -> micro-batches with a loss -> update.

What is learned from the rows is an `Objective`: `sft.py`, `rm.py` and `dpo.py` have one each.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from birl.data.examples import Example
from birl.data.pack import Batch, packing
from birl.learner.learner import Loss, Stats
from birl.parallel.machine import peak_memory
from birl.spans import done
from birl.train.run import Run
from birl.train.worker import Worker


class Objective(Protocol):
    """What is minimised, and its metrics."""

    @property
    def capacity(self) -> int:
        """Of a micro-batch [tokens]."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What rank 0 alone has: the data. `stream`: position -> rows of training from there on."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    stream: Callable[[int], Iterator[Example]]
    batch_size: int
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


@dataclass(slots=True, kw_only=True)
class Loop:
    """The algorithm, on rank 0. `at_start`: validate before the first step, too."""

    rows: Rows
    worker: RowsWorker
    run: Run
    at_start: bool

    async def to_the_end(self) -> dict[str, Any]:
        run, total = self.run, self.rows.total_steps
        every = [*self.rows.train, *self.rows.held_out]
        await run.ranks(RowsWorker.begin, self.worker.checkpoints.run, every, total)
        await run.resume()
        if run.validation_due() and (run.step > 0 or self.at_start):
            await self.validate()
        run.clock = time.perf_counter()
        rows = self.rows.stream(run.position)
        while run.step < total and not run.stop.is_set():
            await self.train(list(islice(rows, self.rows.batch_size)))
        finished = not run.stop.is_set()
        if finished and run.validate_every and run.last_validation_step() != run.step:
            await self.validate()
        await run.save_last()
        return run.summary(finished)

    async def tell(self) -> dict[str, Any]:
        """--dry-run: the first batch goes through the model, nothing is written."""
        every = self.rows
        rows = list(islice(every.stream(0), every.batch_size))
        sizes = [len(s) for e in every.train for s in e.sequences]
        before = time.perf_counter()
        result: dict[str, Any] = {
            "rows": len(every.train),
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
            "tokens/computed": float(stats.computed),
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
        stats, size = Stats(), self.rows.batch_size
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
