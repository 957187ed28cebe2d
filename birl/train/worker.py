"""The part of a run that every rank has: the weights that are trained, and their checkpoints. Rank 0 calls these
methods on all ranks (`birl/parallel/crew.py`). `step.py` and `offline.py` add what a training step is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.checkpoints import Checkpoints
from birl.learner.learner import Learner, Stats
from birl.parallel.crew import RankGroup
from birl.track.trace import Trace, rank_file

NONFINITE_LIMIT = 3  # optimizer steps in a row without a finite gradient that are skipped before the run stops


@dataclass(slots=True, kw_only=True)
class Worker:
    """The trained weights of one rank, and their checkpoints."""

    learner: Learner
    crew: RankGroup
    critic: Learner | None = None  # with a model of its own
    checkpoints: Checkpoints
    rate_of: Callable[..., float]  # update, total updates -> learning rate
    total_updates: int | None = None  # (rank 0) optimizer steps of the run
    nonfinite: int = 0
    rate: float = 0.0  # of the step's last update; where nothing was trained, of the next one
    extra: dict[str, Any] = field(
        default_factory=dict[str, Any]
    )  # state of single algorithms (KL coefficient, order of data)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All trained tensors by name, as in a checkpoint."""
        own = dict(self.learner.tensors())
        if self.critic is not None:
            own |= {f"critic.{name}": tensor for name, tensor in self.critic.tensors().items()}
        return own

    def learning_rate(self) -> float:
        return self.rate_of(self.learner.version, total=self.total_updates)

    def check_finite(self, stats: Stats, *norms: float) -> None:
        """Count updates whose gradient is not finite. `norms`: of the policy's and the critic's gradients. Raises
        `BirlError` after `NONFINITE_LIMIT` such updates in a row."""
        left_out = sum(not math.isfinite(norm) for norm in norms)
        stats.nonfinite += left_out
        self.nonfinite = self.nonfinite + 1 if left_out else 0
        if self.nonfinite >= NONFINITE_LIMIT:
            raise BirlError(
                f"The gradient was not finite {self.nonfinite} optimizer steps in a row; the weights are "
                "unchanged. Try a lower optimizer.lr, or model.dtype=float32."
            )

    def write(self, step: int, state: dict[str, Any], kept: set[int]) -> None:
        self.checkpoints.write(step, self.tensors(), state, kept)

    def saving_done(self) -> None:
        self.checkpoints.writer.wait()

    def read(self, path: Path) -> dict[str, Any]:
        """Load the tensors of a checkpoint; returns its state."""
        state = checkpoint.fill(path, self.tensors(), self.crew.ranks)
        for each in (self.learner, self.critic):
            if each is not None:
                each.loaded(state["version"])
        self.nonfinite, self.extra = state["nonfinite"], state["extra"]
        return state

    def damage(self, path: Path, wanted: Sequence[str]) -> list[str]:
        return self.checkpoints.damage(path, wanted)

    def trace(self, folder: str, until: float) -> None:
        """Ranks other than 0 start their own trace file if they see the run's folder. On resuming, records later than
        `until` [s since 1970] are dropped."""
        crew = self.crew
        if not crew.leads and Path(folder).is_dir():
            rank = crew.ranks.rank
            Trace(rank_file(Path(folder), rank), process=f"learner rank {rank}").go_on(until)
