"""The loss of a critic with its own backbone, and the figures of any critic."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from birl.algorithms.values import value_loss
from birl.data.pack import Batch
from birl.learner.learner import Learner, Loss, Stats


def critic_figures(predicted: Tensor, returns: Tensor, each: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    return {
        "critic/loss": each,
        "critic/clip_fraction": clipped.float(),
        "critic/value": predicted,
        "critic/error": (predicted - returns).abs(),
    }


def critic_loss(clip: float, weight: float) -> Loss:
    """Loss of a critic with its own backbone: the mean over all 1 / weight tokens of the step."""

    def loss(values: Tensor, _: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        each, clipped = value_loss(values, batch.values, batch.returns, clip=clip)
        return weight * each.sum(), critic_figures(values, batch.returns, each, clipped)

    return loss


def fit(critic: Learner, batches: Sequence[Batch], loss: Loss, passes: int, rate: float) -> Stats:
    """(every rank) Take `passes` steps of a critic with its own backbone. Returns the gradient norm and, as `other`,
    the figures of the last pass, which are means over the same tokens."""
    result = Stats()
    for _ in range(passes):
        own = Stats()
        critic.learn([(batch, loss) for batch in batches], own)
        result.grad_norm = critic.optim_step(rate)
        result.other = {name: own.mean(name) for name in own.sums} | {"critic/grad_norm": result.grad_norm}
    return result
