"""A reward model: pairs of answers -> one score for each -> the chosen one's must be higher (Bradley-Terry)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from birl.algorithms.preference import bradley_terry, preferred
from birl.data.examples import Example
from birl.data.pack import Batch, pack
from birl.data.sequences import scored
from birl.learner.learner import Loss, Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Each row is a pair; both sides are in one micro-batch, their prompt is computed once. `centering`: coefficient of
    `bradley_terry`; `capacity`: tokens of a micro-batch; `shares`: data-parallel ranks; `pair_cost`: of `pack`."""

    centering: float
    capacity: int
    shares: int
    pair_cost: float

    def before(self, run: Path | None, examples: Sequence[Example]) -> None:
        pass

    def work(self, examples: Sequence[Example]) -> list[tuple[Batch, Loss]]:
        samples = [scored(s, group=i) for i, e in enumerate(examples) for s in e.sequences]
        margins = torch.tensor([e.margin for e in examples], dtype=torch.float32)
        weights = [1 / len(examples)] * len(samples)
        batches = pack(samples, weights, self.capacity, self.shares, self.pair_cost)
        return [(batch, self._loss(margins)) for batch in batches]

    def _loss(self, margins: Tensor) -> Loss:
        def loss(scores: Tensor, _: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            """One score a sample; samples 2i and 2i + 1 are the chosen and the rejected answer of row i."""
            chosen, rejected = scores[0::2], scores[1::2]
            margin = margins.to(scores.device)[batch.sample[0::2] // 2]
            each = bradley_terry(chosen, rejected, margin=margin, centering=self.centering)
            figures = {
                "bt": each.detach(),
                "accuracy": preferred(chosen, rejected),
                "margin": (chosen - rejected).detach(),
                "chosen": chosen.detach(),
                "rejected": rejected.detach(),
            }
            return (each * batch.weights[0::2]).sum(), figures

        return loss

    def figures(self, stats: Stats) -> dict[str, float]:
        return {
            "loss": stats.mean("bt"),
            "accuracy": stats.mean("accuracy"),
            "score/chosen": stats.mean("chosen"),
            "score/rejected": stats.mean("rejected"),
            "score/margin": stats.mean("margin"),
        }

    def score(self, figures: dict[str, float]) -> float:
        return figures["accuracy"]
