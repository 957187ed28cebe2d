"""A slow average of the weights that are trained, as a teacher: phi <- phi + rate (theta - phi) after every step of the
optimizer (SDFT arXiv:2601.19897 algorithm 1, SDPO arXiv:2601.20802). Of LoRA the matrices are averaged."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from birl.parallel.layout import drop_gathered

if TYPE_CHECKING:
    from birl.learner.learner import Learner


@dataclass(frozen=True, slots=True)
class Average:
    """(every rank) `teacher`: a learner that takes no step; its float32 masters are the average."""

    teacher: "Learner"
    rate: float

    @torch.no_grad()
    def follow(self, learner: "Learner") -> None:
        drop_gathered(self.teacher.outputs)
        own, trained = self.teacher.masters, learner.masters.tensors
        torch._foreach_lerp_(list(own.tensors.values()), [trained[name].data for name in own.tensors], self.rate)
        own.publish()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of it, by name, as the live tensors."""
        own = self.teacher.masters
        return {f"average.{name}": own.whole(name, master.data) for name, master in own.tensors.items()}
