"""How far a training run is, what it was like, and how that survives: the part that every loop shares.

The loops themselves (`rl.py`, `offline.py`) say what a step is.
"""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from birl.config import schema
from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.learner import Learner, Stats
from birl.learner.optimizer import learning_rate
from birl.learner.store import Store, location
from birl.learner.writer import Writer
from birl.parallel.crew import Crew
from birl.signals import Stop
from birl.spans import done
from birl.track.trace import Trace, rank_file
from birl.track.tracker import Tracker
from birl.train.run_folder import next_commands

T = TypeVar("T")
NONFINITE_LIMIT = 3  # optimizer steps in a row without a finite gradient that are skipped before the run stops
REMEMBERED = (
    *("step", "position", "ahead", "best", "best_step", "nonfinite", "spent"),
    *("first_validation", "last_validation", "extra"),
)
IN_STATE = ("version", "totals", "logs")  # also


class Parts(Protocol):
    """What a run needs of its objects."""

    run: Path
    learner: Learner
    tracker: Tracker
    resume_from: Path | None
    crew: Crew
    writer: Writer

    @property
    def compute(self) -> Executor: ...
    @property
    def total_updates(self) -> int | None: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is trained, as a checkpoint holds it."""
        ...

    def loaded(self, version: int) -> None:
        """New values were written into `tensors()`."""
        ...


@dataclass(slots=True)
class Run:
    """What changes while a run goes on. Everything here is in the checkpoint, or follows from it."""

    config: Any  # schema.RL or schema.Stage
    parts: Parts
    stop: Stop
    step: int = 0  # finished steps
    position: int = 0  # all groups or rows before this one are consumed,
    ahead: Sequence[int] = ()  # and these behind it
    best: float | None = None
    best_step: int | None = None
    totals: Counter[str] = field(default_factory=Counter)
    nonfinite: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # small things that only one algorithm remembers
    saving: float = 0.0  # seconds spent on a checkpoint since the last step ended
    rate: float = 0.0  # of the step's last update; where nothing was trained, of the next one
    saved: int | None = None  # step of the newest checkpoint
    store: Store | None = None
    unsaid: list[str] = field(default_factory=list)  # warnings of the thread that writes checkpoints
    first_validation: dict[str, Any] | None = None
    last_validation: dict[str, Any] | None = None
    clock: float = field(default_factory=time.perf_counter)  # when the last step ended
    started: float = field(default_factory=time.perf_counter)
    spent: float = 0.0  # seconds in earlier processes of this run

    @property
    def checkpoints(self) -> Path:
        return self.parts.run / "checkpoints"

    async def on_compute_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.parts.compute, work)

    async def together(self, method: str, *arguments: Any) -> Any:
        """Call a method of the run on every rank, each on its compute thread."""
        return await self.on_compute_thread(partial(self.parts.crew.call, self, method, *arguments))

    def learning_rate(self) -> float:
        optimizer: schema.Optimizer = self.config.optimizer
        return learning_rate(
            self.parts.learner.version,
            peak=optimizer.lr,
            schedule=optimizer.schedule,
            warmup=optimizer.warmup_steps,
            total=self.parts.total_updates,
            min_ratio=optimizer.min_lr_ratio,
        )

    def check_finite(self, stats: Stats, *norms: float) -> None:
        """`norms`: of all gradients of one update, the critic's too. Raises `BirlError` after too many in a row of
        which one is not finite."""
        left_out = sum(not math.isfinite(norm) for norm in norms)
        stats.nonfinite += left_out
        self.nonfinite = self.nonfinite + 1 if left_out else 0
        if self.nonfinite >= NONFINITE_LIMIT:
            raise BirlError(
                f"The gradient was not finite {self.nonfinite} optimizer steps in a row; the weights were left as "
                "they are. Try a lower optimizer.lr, or model.dtype=float32."
            )

    def plans_validation(self) -> bool:
        """Is there anything to validate on, every so many steps?"""
        raise NotImplementedError

    def validation_due(self) -> bool:
        """At a multiple of validation.every whose validation is not done, also after one that a signal cut short."""
        due = self.plans_validation() and self.step % self.config.validation.every == 0
        return due and self.last_validation_step() != self.step

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
        `about` says what was measured."""
        record = {"step": self.step, **(about or {}), "metrics": metrics, "samples": samples}
        self.first_validation = self.first_validation or record
        self.last_validation = record
        self.parts.tracker.validation(self.step, metrics, samples, about)
        if score == score and (self.best is None or score > self.best):
            self.best, self.best_step = score, self.step
            return self.step > 0
        return False

    async def report(self, metrics: dict[str, float], counted: tuple[str, ...], improved: bool) -> None:
        """The end of a step: its figures, and a checkpoint where it is time for one. Raises what the one before failed
        with."""
        keys: schema.Checkpoint = self.config.checkpoint
        self.totals.update({k: int(metrics[k]) for k in counted})
        self.parts.tracker.step(self.step, metrics)
        self.clock, self.saving = time.perf_counter(), 0.0
        self.parts.writer.check()
        self.say()
        if (keys.every and self.step % keys.every == 0) or (improved and keys.keep_best):
            await self.save()

    async def save(self) -> None:
        """With checkpoint.asynchronous it is complete some time later: `save_last` waits for that."""
        parts, keys = self.parts, self.config.checkpoint
        parts.tracker.phase("saving a checkpoint")
        began = time.perf_counter()
        state = {name: getattr(self, name) for name in REMEMBERED} | {
            "version": parts.learner.version,
            "totals": dict(self.totals),
            "spent": self.spent + began - self.started,
            "logs": parts.tracker.offsets(),
        }
        kept = {self.best_step} if keys.keep_best and self.best_step else set()
        await self.together("write", self.step, json.loads(json.dumps(state)), kept)  # as it is now
        ended = time.perf_counter()
        self.saved, self.saving = self.step, ended - began
        done("checkpoint", began, ended=ended)

    async def save_last(self) -> None:
        """The end of the run: everything is saved when this returns."""
        if self.saved != self.step and self.step:
            await self.save()
        await self.together("saving_done")
        self.say()

    def write(self, step: int, state: dict[str, Any], kept: set[int]) -> None:
        """(every rank) A checkpoint; then the old ones go, but for the newest and those of the steps in `kept`."""
        ranks, keys, root = self.parts.crew.ranks, self.config.checkpoint, self.checkpoints

        def work(tensors: dict[str, torch.Tensor], group: Any) -> None:
            checkpoint.save(root, step, tensors, state, ranks, group)
            if keys.store:
                self.copy(root / f"step-{step:06d}", step, kept, group)
            if ranks.rank == 0:
                try:
                    checkpoint.prune(root, keys.keep_last, kept)
                except OSError as error:
                    self.unsaid.append(f"WARNING: an old checkpoint cannot be deleted. {error}")

        if keys.asynchronous:
            self.parts.writer.begin(self.parts.tensors(), work, ranks)
        else:
            work(self.parts.tensors(), None)

    def copy(self, path: Path, step: int, kept: set[int], group: Any) -> None:
        """(every rank) A complete checkpoint to the object store. That it could not be is a warning: the run folder has
        it, and the next one may get through."""
        ranks, keys = self.parts.crew.ranks, self.config.checkpoint
        try:
            store = self.store or Store(location(keys.store, self.parts.run))
            if self.store is None:
                checkpoint.agreed(lambda: store.about(self.parts.run) if ranks.rank == 0 else None, ranks, group)
            self.store = store  # it knows the run by now
            store.put(path, step, ranks, group)
            if ranks.rank == 0:
                store.prune(keys.keep_last, kept)
        except (BirlError, OSError) as error:  # other ranks' come as OSError
            self.unsaid.append(f"WARNING: step {step} is not on the store. {error}")

    def say(self) -> None:
        while self.unsaid:
            self.parts.tracker.message(self.unsaid.pop(0))

    def saving_done(self) -> None:
        """(every rank)"""
        self.parts.writer.wait()

    def read(self, path: Path) -> dict[str, Any]:
        """(every rank) A checkpoint's tensors into ours; gives its state."""
        state = checkpoint.fill(path, self.parts.tensors(), self.parts.crew.ranks)
        self.parts.loaded(state["version"])
        self.extra = state["extra"]
        return state

    def damage(self, path: Path) -> list[str]:
        """(every rank) What is wrong with the files of a checkpoint."""
        damage = checkpoint.verify(path, self.parts.crew.ranks)
        if not damage:
            state = checkpoint.read_state(path)
            damage = [f"state.json has no {name}" for name in (*REMEMBERED, *IN_STATE) if name not in state]
        return damage

    async def resume(self) -> None:
        """Go on from the checkpoint that was chosen, if any: tensors, counters, place in the data, ends of the logs."""
        if self.parts.resume_from is None:
            self.parts.tracker.rewind(None, 0)
            if share := self.parts.learner.rounded_share:
                self.parts.tracker.message(
                    f"{round(100 * share, 2):g} % of the weights were rounded to {self.config.model.dtype}, in which "
                    "the model computes, before training."
                )
            await self.together("trace", str(self.parts.run), 0.0)
            return
        path, warnings = await self.intact(self.parts.resume_from)
        state = await self.together("read", path)
        for name in REMEMBERED:
            setattr(self, name, state[name])
        self.totals.update(state["totals"])
        own = path.resolve().parent == self.checkpoints.resolve()
        self.saved = self.step if own else None
        self.parts.tracker.rewind(state["logs"] if own else None, self.step)
        await self.together("trace", str(self.parts.run), self.parts.tracker.traced if own else 0.0)
        for text in (*warnings, f"Resumed from {path} at step {self.step}."):
            self.parts.tracker.message(text)

    def trace(self, folder: str, until: float) -> None:
        """(every rank) Ranks but 0 write what they do beside rank 0's trace, where they see the run's folder, and go on
        behind what it has kept: `until` [s since 1970]."""
        crew = self.parts.crew
        if self.config.track.trace and not crew.leads and Path(folder).is_dir():
            rank = crew.ranks.rank
            Trace(rank_file(Path(folder), rank), process=f"learner rank {rank}").go_on(until)

    async def intact(self, chosen: Path) -> tuple[Path, list[str]]:
        """The checkpoint to go on from, and warnings: where the newest of a run is damaged, the newest that is not.
        Raises `BirlError` where there is none, or where the damaged one was asked for by name."""
        found = {chosen: await self.together("damage", chosen)}
        if not found[chosen]:
            return chosen, []
        if self.config.resume != "auto":
            raise BirlError(
                f"The checkpoint {chosen} is damaged: {'; '.join(found[chosen])}. Choose an older one: resume=FOLDER."
            )
        for entry in reversed(checkpoint.saved(self.checkpoints)):
            damage = found[entry.path] = found.get(entry.path) or await self.together("damage", entry.path)
            if damage:
                continue
            del found[entry.path]
            aside = {path: checkpoint.set_aside(path) for path in found}
            return entry.path, [
                f"WARNING: the checkpoint {path.name} is damaged ({'; '.join(found[path][:3])}). It is {where.name} "
                f"from now on, and the run goes on from {entry.path.name}."
                for path, where in aside.items()
            ]
        raise BirlError(
            f"All {len(found)} checkpoints of {self.parts.run} are damaged:\n"
            + "\n".join(f"  {path.name}: {'; '.join(damage[:3])}" for path, damage in found.items())
            + "\nNothing can be resumed: begin anew with run=ANOTHER_FOLDER, or put back a copy of a checkpoint."
        )

    def summary(self, finished: bool) -> dict[str, Any]:
        self.spent += time.perf_counter() - self.started
        summary = {
            "finished": finished,
            "signal": None if finished else int(self.stop.number),
            "run": str(self.parts.tracker.shown),
            "step": self.step,
            "seconds": self.spent,
            "before": self.first_validation,
            "after": self.last_validation,
            "best": self.best,
            "best_step": self.best_step,
            "totals": dict(self.totals),
            "next": next_commands(
                self.parts.tracker.shown,
                finished,
                not isinstance(self.config, schema.RM),
                self.config.track.tensorboard,
            ),
        }
        self.parts.tracker.finish(summary)
        return summary
