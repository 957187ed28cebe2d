"""The state of a training run that all loops share: progress, validations, checkpoints, resuming.

The loops (`rl.py`, `offline.py`) define what a step is.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from birl.errors import BirlError
from birl.kernels.compiling import problem
from birl.learner import step_folders
from birl.signals import Stop
from birl.spans import done
from birl.track.tracker import Tracker
from birl.train.worker import Worker

T = TypeVar("T")
P = ParamSpec("P")
REMEMBERED = (*("step", "position", "ahead", "spent"), *("best", "best_step", "first_validation", "last_validation"))
IN_STATE = (*REMEMBERED, "nonfinite", "extra", "version", "totals", "logs")


@dataclass(slots=True, kw_only=True)
class Run:
    """The mutable state of a run, on rank 0. A checkpoint contains it, or it follows from the checkpoint."""

    worker: Worker
    tracker: Tracker
    compute: Executor
    stop: Stop
    steps_of: Callable[[int, int], int | None]  # finished steps, consumed rows -> steps of the run; None: unknown
    resume_from: Path | None
    resumes_newest: bool  # no checkpoint was named, so an older one may take the place of a damaged one
    validate_every: int  # steps; 0: never
    save_every: int  # steps; 0: at the end alone
    keep_best: bool
    traces: bool
    dtype: str  # in which the model computes
    next_commands: Callable[[bool], list[str]]  # what the user may call next; argument: the run is finished
    given: Mapping[str, str] = field(default_factory=dict[str, str])  # see `run_folder.given`
    step: int = 0  # finished steps
    position: int = 0  # all groups or rows before this one are consumed,
    ahead: Sequence[int] = ()  # and these behind it
    best: float | None = None
    best_step: int | None = None
    totals: Counter[str] = field(default_factory=Counter[str])
    saving: float = 0.0  # seconds spent on a checkpoint since the last step ended
    saved: int | None = None  # step of the newest checkpoint
    first_validation: dict[str, Any] | None = None
    last_validation: dict[str, Any] | None = None
    clock: float = field(default_factory=time.perf_counter)  # when the last step ended
    started: float = field(default_factory=time.perf_counter)
    spent: float = 0.0  # seconds in earlier processes of this run

    async def on_compute_thread(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.compute, partial(work, *arguments, **options))

    async def ranks(self, verb: Callable[Concatenate[Any, P], T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a method of the worker on the compute thread of every rank; returns rank 0's result."""
        return await self.on_compute_thread(self.worker.crew.call, self.worker, verb, *arguments, **options)

    def validation_due(self) -> bool:
        """At a multiple of validation.every whose validation is not done, also after one that a signal cut short."""
        due = self.validate_every > 0 and self.step % self.validate_every == 0
        return due and self.last_validation_step() != self.step

    @property
    def steps(self) -> int | None:
        """Number of steps of the run; None: unknown."""
        return self.steps_of(self.step, self.position + len(self.ahead))

    def last_validation_step(self) -> int | None:
        return None if self.last_validation is None else self.last_validation["step"]

    def validated(
        self,
        metrics: dict[str, float],
        samples: list[dict[str, Any]],
        score: float,
        about: dict[str, Any] | None = None,
    ) -> bool:
        """Report a validation; True when it is the best so far. `score`: higher is better, NaN is not comparable.
        `about`: further keys of the record."""
        record = {"step": self.step, **(about or {}), "metrics": metrics, "samples": samples}
        self.first_validation = self.first_validation or record
        self.last_validation = record
        self.tracker.validation(self.step, metrics, samples, about)
        if score == score and (self.best is None or score > self.best):
            self.best, self.best_step = score, self.step
            return self.step > 0
        return False

    async def report(self, metrics: dict[str, float], counted: tuple[str, ...], improved: bool) -> None:
        """End a step: record its metrics, and save a checkpoint if one is due. Raises the error of the previous
        checkpoint, if it failed."""
        self.totals.update({k: int(metrics[k]) for k in counted})
        self.tracker.step(self.step, metrics)
        self.clock, self.saving = time.perf_counter(), 0.0
        self.worker.checkpoints.writer.check()
        self.say()
        if (self.save_every and self.step % self.save_every == 0) or (improved and self.keep_best):
            await self.save()

    async def save(self) -> None:
        """Save a checkpoint. With checkpoint.asynchronous it is written in the background; `save_last` waits."""
        self.tracker.phase("saving a checkpoint")
        began = time.perf_counter()
        state = {name: getattr(self, name) for name in REMEMBERED} | {
            "version": self.worker.learner.version,
            "nonfinite": self.worker.nonfinite,
            "extra": self.worker.extra,
            "totals": dict(self.totals),
            "spent": self.spent + began - self.started,
            "logs": self.tracker.offsets(),
            "given": self.given,
        }
        kept = {self.best_step} if self.keep_best and self.best_step else set()
        await self.ranks(Worker.write, self.step, json.loads(json.dumps(state)), kept)  # as it is now
        ended = time.perf_counter()
        self.saved, self.saving = self.step, ended - began
        done("checkpoint", began, ended=ended)

    async def save_last(self) -> None:
        """Save the last step and wait until all checkpoints are written."""
        if self.saved != self.step and self.step:
            await self.save()
        await self.ranks(Worker.saving_done)
        self.say()

    def say(self) -> None:
        while self.worker.checkpoints.warnings:
            self.tracker.message(self.worker.checkpoints.warnings.pop(0))

    async def resume(self) -> None:
        """Restore tensors, counters, data position and log lengths from the chosen checkpoint, if there is one."""
        if self.resume_from is None:
            self.tracker.rewind(None, 0)
            if share := self.worker.learner.rounded_share:
                self.tracker.message(
                    f"{round(100 * share, 2):g} % of the model's weights were rounded to {self.dtype}, the compute "
                    "type (model.dtype=float32 keeps them)."
                )
            if self.worker.learner.device.type == "cpu" and (why := problem()) and "BIRL_KERNELS" not in why:
                self.tracker.message(f"Training is slower without birl's kernels: {why}.")
            await self.trace(0.0)
            return
        from birl.run_folder import changed

        path, warnings = await self.intact(self.resume_from)
        state = await self.ranks(Worker.read, path)
        own = path.resolve().parent == self.worker.checkpoints.folder.resolve()
        for name in REMEMBERED if own else REMEMBERED[:4]:  # another run's scores may be of other data and rewards
            setattr(self, name, state[name])
        self.totals.update(state["totals"])
        self.saved = self.step if own else None
        self.tracker.expect(self.steps)
        self.tracker.rewind(state["logs"] if own else None, self.step)
        await self.trace(self.tracker.traced if own else 0.0)
        warnings += changed(state.get("given", {}), self.given, own)
        for text in (*warnings, f"Resumed from {path} at step {self.step}."):
            self.tracker.message(text)

    async def trace(self, until: float) -> None:
        if self.traces:
            await self.ranks(Worker.trace, str(self.worker.checkpoints.run), until)

    async def intact(self, chosen: Path) -> tuple[Path, list[str]]:
        """The checkpoint to resume from, and warnings. If the newest one is damaged, the newest intact one is taken.
        Raises `BirlError` if no checkpoint is intact, or if the damaged one was chosen by name."""
        result = {chosen: await self.ranks(Worker.damage, chosen, IN_STATE)}
        if not result[chosen]:
            return chosen, []
        if not self.resumes_newest:
            raise BirlError(
                f"The checkpoint {chosen} is damaged: {'; '.join(result[chosen])}. Choose an older one: resume=FOLDER."
            )
        for entry in reversed(step_folders.saved(self.worker.checkpoints.folder)):
            damage = result[entry.path] = result.get(entry.path) or await self.ranks(
                Worker.damage, entry.path, IN_STATE
            )
            if damage:
                continue
            del result[entry.path]
            aside = {path: step_folders.set_aside(path) for path in result}
            return entry.path, [
                f"WARNING: the checkpoint {path.name} is damaged ({'; '.join(result[path][:3])}). It is {where.name} "
                f"now, and the run resumes from {entry.path.name}."
                for path, where in aside.items()
            ]
        raise BirlError(
            f"All {len(result)} checkpoints of {self.worker.checkpoints.run} are damaged:\n"
            + "\n".join(f"  {path.name}: {'; '.join(damage[:3])}" for path, damage in result.items())
            + "\nStart a new run with run=ANOTHER_FOLDER, or restore a copy of a checkpoint."
        )

    def summary(self, finished: bool) -> dict[str, Any]:
        self.spent += time.perf_counter() - self.started
        summary = {
            "finished": finished,
            "signal": None if finished else int(self.stop.number),
            "run": str(self.tracker.shown),
            "step": self.step,
            "seconds": self.spent,
            "before": self.first_validation,
            "after": self.last_validation,
            "best": self.best,
            "best_step": self.best_step,
            "totals": dict(self.totals),
            "next": self.next_commands(finished),
        }
        self.tracker.finish(summary)
        return summary
