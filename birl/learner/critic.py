"""The loss of a critic with a backbone of its own, and what any critic reports."""

from typing import Any

from torch import Tensor

from birl.algorithms.values import value_loss
from birl.data.pack import Batch
from birl.learner.learner import Loss


def critic_figures(predicted: Tensor, returns: Tensor, each: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    return {
        "critic/loss": each,
        "critic/clip_fraction": clipped.float(),
        "critic/value": predicted,
        "critic/error": (predicted - returns).abs(),
    }


def critic_loss(clip: float, weight: float) -> Loss:
    """The loss of a critic with a backbone of its own: a mean over all tokens of the step, 1 / weight of them."""

    def loss(values: Tensor, _: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        each, clipped = value_loss(values, batch.values, batch.returns, clip=clip)
        return weight * each.sum(), critic_figures(values, batch.returns, each, clipped)

    return loss
