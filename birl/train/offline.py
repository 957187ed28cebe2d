"""The loop of SFT, reward models and preference losses: rows -> micro-batches with a loss -> update.

The loss is an `Objective`; `sft.py`, `rm.py` and `dpo.py` define one each.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from birl.data.examples import Example
from birl.data.pack import Batch
from birl.learner.learner import Loss, Stats
from birl.parallel.machine import peak_memory
from birl.parallel.ranks import Packer, Ranks, Shared
from birl.spans import done
from birl.train.run import Run
from birl.train.worker import Worker


class Objective(Protocol):
    """A loss over rows, and its metrics."""

    @property
    def pack(self) -> Packer: ...

    def prepare(self, run: Path | None, examples: Sequence[Example]) -> None:
        """(rank 0) Called once with all rows, training and held-out, before training or resuming. `run`: folder for
        files; None for --dry-run."""
        ...

    def micro_batches(self, examples: Sequence[Example]) -> tuple[Shared[Batch], Shared[Any]]:
        """(rank 0) The micro-batches of one optimizer step, and further inputs of each one's loss. The weights of the
        tokens include the step's denominator."""
        ...

    def loss_for(self, known: Any) -> Loss:
        """(every rank) The loss of one micro-batch, given its further inputs."""
        ...

    def figures(self, stats: Stats) -> dict[str, float]:
        """Metrics of a step, by name."""
        ...

    def score(self, figures: dict[str, float]) -> float:
        """The score of a validation, of its metrics; higher is better."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The data, on rank 0. `stream`: position -> rows of training from there on."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    stream: Callable[[int], Iterator[Example]]
    batch_size: int


@dataclass(slots=True, kw_only=True)
class RowsWorker(Worker):
    """The learner with its objective."""

    objective: Objective

    def begin(self, folder: Path) -> None:
        self.checkpoints.run = folder

    def learn(self, rows: Sequence[Example], moves: bool = True) -> Stats:
        """(rank 0) One optimizer step; with `moves=False` only its gradients."""
        self.rate, work = self.learning_rate(), self.objective.micro_batches(rows)
        stats = self.crew.call(self, RowsWorker.update, *work, self.rate if moves else None)
        stats.other = self.objective.pack.figures(work[0]) | stats.other
        self.check_finite(stats, stats.grad_norm)
        return stats

    def survey(self, rows: Sequence[Example]) -> Stats:
        """(rank 0) The figures of some rows, without gradients."""
        return self.crew.call(self, RowsWorker.measure, *self.objective.micro_batches(rows))

    def update(self, batches: Sequence[Batch], known: Sequence[Any], rate: float | None) -> Stats:
        """(every rank) Gradients of its micro-batches, then the optimizer step. Figures are of all ranks."""
        stats = self._figures(self.learner.learn, batches, known)
        stats.grad_norm = 0.0 if rate is None else self.learner.optim_step(rate)
        return stats

    def measure(self, batches: Sequence[Batch], known: Sequence[Any]) -> Stats:
        return self._figures(self.learner.survey, batches, known)

    def _figures(self, verb: Callable[..., None], batches: Sequence[Batch], known: Sequence[Any]) -> Stats:
        stats = Stats()
        verb(list(zip(batches, map(self.objective.loss_for, known), strict=True)), stats)
        return stats


@dataclass(slots=True, kw_only=True)
class Loop:
    """The training loop, on rank 0. `at_start`: validate before the first step, too."""

    rows: Rows
    worker: RowsWorker
    run: Run
    at_start: bool

    async def fit(self) -> dict[str, Any]:
        run, folder = self.run, self.worker.checkpoints.run
        await run.ranks(RowsWorker.begin, folder)
        await run.on_compute_thread(self.worker.objective.prepare, folder, [*self.rows.train, *self.rows.held_out])
        await run.resume()
        self.worker.total_updates = total = run.steps or 0
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

    async def dry_run(self) -> dict[str, Any]:
        """--dry-run: computes the gradients of the first batch and prints its metrics; writes nothing."""
        every = self.rows
        rows = list(islice(every.stream(0), every.batch_size))
        sizes = [len(s) for e in every.train for s in e.sequences]
        before = time.perf_counter()
        result: dict[str, Any] = {
            "rows": len(every.train),
            "held_out": len(every.held_out),
            "tokens": sum(sizes),
            "longest": max(sizes),
            "steps": self.run.steps or 0,
        }
        await self.run.on_compute_thread(self.worker.objective.prepare, None, rows)
        stats = await self.run.on_compute_thread(self.worker.learn, rows, False)
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
        stats = await run.on_compute_thread(worker.learn, rows)
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
        """Evaluate the current weights; True if they are the best so far. A signal abandons the validation."""
        run, rows, objective = self.run, self.rows.held_out, self.worker.objective
        run.tracker.phase("validating")
        stats, size = Stats(), self.rows.batch_size
        began = time.perf_counter()
        pieces = [rows[i : i + size] for i in range(0, len(rows), size)]
        total = 0.0
        for piece in pieces:
            if run.stop.is_set():
                return False
            own = await run.on_compute_thread(self.worker.survey, piece)
            stats.merge(own, Ranks())
            total += own.loss * len(piece)  # the mean over one piece, which may be smaller than the others
        stats.loss = total / len(rows)
        done("validate", began, version=self.worker.learner.version)
        figures = objective.figures(stats)
        metrics = {f"validation/{name}": value for name, value in figures.items()}
        score = objective.score(figures)
        return run.validated(metrics, [], score if math.isfinite(score) else math.nan)
