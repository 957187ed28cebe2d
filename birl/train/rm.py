"""Reward models: pairs of answers -> one score for each -> Bradley-Terry loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from birl.algorithms.preference import bradley_terry, preferred
from birl.data.examples import Example
from birl.data.pack import Batch
from birl.data.sequences import scored
from birl.learner.learner import Loss, Stats
from birl.parallel.ranks import Packer, Shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Each row is a pair; both sides are in one micro-batch, their prompt is computed once. `centering`: coefficient of
    `bradley_terry`."""

    pack: Packer
    centering: float

    def prepare(self, run: Path | None, examples: Sequence[Example]) -> None:
        pass

    def micro_batches(self, examples: Sequence[Example]) -> tuple[Shared[Batch], Shared[Tensor]]:
        samples = [scored(s, group=i) for i, e in enumerate(examples) for s in e.sequences]
        margins = torch.tensor([e.margin for e in examples], dtype=torch.float32)
        batches = self.pack(samples, [1 / len(examples)] * len(samples))
        return batches, Shared(margins[b.sample[0::2] // 2] for b in batches)

    def loss_for(self, known: Tensor) -> Loss:
        return partial(self._loss, known)

    def _loss(self, margin: Tensor, scores: Tensor, _: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """One score a sample; samples 2i and 2i + 1 are the chosen and the rejected answer of a row."""
        chosen, rejected = scores[0::2], scores[1::2]
        each = bradley_terry(chosen, rejected, margin=margin.to(scores.device), centering=self.centering)
        figures = {"bt": each, "accuracy": preferred(chosen, rejected), "margin": chosen - rejected}
        figures |= {"chosen": chosen, "rejected": rejected}
        return (each * batch.weights[0::2]).sum(), {name: value.detach() for name, value in figures.items()}

    def figures(self, stats: Stats) -> dict[str, float]:
        scores = {f"score/{name}": stats.mean(name) for name in ("chosen", "rejected", "margin")}
        return {"loss": stats.mean("bt"), "accuracy": stats.mean("accuracy"), **scores}

    def score(self, figures: dict[str, float]) -> float:
        return figures["accuracy"]
