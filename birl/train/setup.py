"""What a run consists of before the objects of its loop are built, and constructors that all loops share."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from birl import run_folder
from birl.config import schema
from birl.config.decided import total_steps
from birl.config.file import flatten
from birl.data.stream import Source, Stream
from birl.learner.checkpoints import Checkpoints
from birl.learner.optimizer import learning_rate
from birl.learner.policy import Policy
from birl.named import Given
from birl.parallel.crew import RankGroup
from birl.parallel.ranks import Packer, Ranks
from birl.signals import Stop
from birl.track.tracker import Tracker
from birl.train.run import Run
from birl.train.worker import Worker

C = TypeVar("C", bound=schema.RL | schema.Stage)
S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Generic[C]):
    """`folder`: of the run; `compute`: the thread that has the model; `crew`: its ranks; `stop`: set by a signal."""

    config: C
    folder: Path
    given: Given
    dry_run: bool
    card: str  # the kind of GPU that a dry run is for; empty: what there is
    compute: Executor
    crew: RankGroup
    stop: Stop

    def claim(self, policy: Policy) -> None:
        """Write the configuration and the model's files into the run folder."""
        run_folder.claim(self.folder, self.config, policy)

    def tracker(self, rows: int) -> Tracker:
        config, folder, total = self.config, self.folder, total_steps(self.config, rows)
        return Tracker(folder, config.track, title=folder.name, total_steps=total, config=flatten(config))

    def stream(self, sources: Sequence[Source[S]]) -> Callable[[int], Iterator[S]]:
        """position -> rows from there on: `epochs` times the data, or without end if the run counts steps."""
        config = self.config
        rows = partial(
            Stream[S],
            sources,
            weights=config.data.weights,
            seed=config.seed,
            shuffle=config.data.shuffle,
            epochs=None if config.steps else config.epochs,
        )
        rows(start=0)  # raises for wrong weights, before anything is generated
        return lambda position: rows(start=position)

    def run(self, worker: Worker, tracker: Tracker, rows: int, validates: bool, resume_from: Path | None) -> Run:
        """`rows`: of training; `validates`: there is something to validate on."""
        config = self.config
        return Run(
            worker=worker,
            tracker=tracker,
            compute=self.compute,
            stop=self.stop,
            steps_of=partial(total_steps, config, rows),
            resume_from=resume_from,
            resumes_newest=config.resume == "auto",
            validate_every=config.validation.every if validates else 0,
            save_every=config.checkpoint.every,
            keep_best=config.checkpoint.keep_best,
            traces=config.track.trace,
            dtype=config.model.dtype,
            next_commands=partial(
                run_folder.next_commands,
                tracker.shown,
                talks=not isinstance(config, schema.RM),
                tensorboard=config.track.tensorboard,
            ),
        )


def packer_of(config: schema.RL | schema.Stage, pair_cost: float = 0.0) -> Packer:
    return Packer(capacity=config.capacity, shares=config.parallel.shares, pair_cost=pair_cost)


def worker_fields(config: schema.RL | schema.Stage, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """(every rank) Arguments of `Worker` that come from the configuration."""
    keys = config.optimizer
    return {
        "checkpoints": Checkpoints(run=folder, keys=config.checkpoint, ranks=ranks),
        "rate_of": partial(
            learning_rate, peak=keys.lr, schedule=keys.schedule, warmup=keys.warmup_steps, min_ratio=keys.min_lr_ratio
        ),
    }
