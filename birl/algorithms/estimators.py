"""Advantage estimators by name: rewards [E] and the group of each [E] -> one advantage for each episode [E].

Further inputs of an estimator (`TENSORS`, options of the algorithm) are keyword parameters.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from birl.algorithms import advantages as estimate

BY_TOKEN = ("returns", "gae", "turn_gae")  # one advantage a token: computed by `Credit`


def relative(rewards: Tensor, group: Tensor, *, lengths: Tensor, greedy: Tensor, baseline: str, scale_rewards: str):
    """(r - baseline) / scale: algorithm.baseline and algorithm.scale_rewards."""
    centred = estimate.centre(rewards, group, baseline, lengths=lengths, greedy=greedy)
    return estimate.scale(centred, group, scale_rewards, rewards=rewards)


def gdpo(rewards: Tensor, group: Tensor, *, parts: Tensor, weights: Tensor) -> Tensor:
    return estimate.gdpo(parts, group, weights)


def pass_at_k(rewards: Tensor, group: Tensor, *, pass_k: int) -> Tensor:
    return estimate.pass_at_k(rewards, group, pass_k)


def best_and_worst(rewards: Tensor, group: Tensor) -> Tensor:
    """+1 for the first of the best, -1 for the first of the worst of a group, 0 for the others: the pairs of online DPO
    (arXiv:2402.04792). A group of equal rewards has none."""
    signs = torch.zeros_like(rewards)
    places: list[int] = group.tolist()  # pyright: ignore
    for g in dict.fromkeys(places):
        where = torch.arange(len(group))[group == g]
        if rewards[where].max() > rewards[where].min():
            signs[where[rewards[where].argmax()]] = 1.0
            signs[where[rewards[where].argmin()]] = -1.0
    return signs


def zero(rewards: Tensor, group: Tensor) -> Tensor:
    """Advantages of 0: rewards are only reported (distillation)."""
    return torch.zeros_like(rewards)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "relative": relative,
    "gdpo": gdpo,
    "pass_at_k": pass_at_k,
    "best_and_worst": best_and_worst,
    "zero": zero,
}
TENSORS = ("lengths", "greedy", "parts", "weights", "right")  # tensors that an advantage may take by name
