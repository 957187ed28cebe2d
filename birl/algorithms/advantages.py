"""Rewards -> advantages, one number an episode. Pure functions on 1-D float32 tensors.

`group` says which prompt an episode belongs to; a failed episode is not in the input at all, so it is in no baseline.
"""

import torch
from torch import Tensor

EPS = 1e-6  # added to a standard deviation


def centre(rewards: Tensor, group: Tensor, baseline: str) -> Tensor:
    """A_i = r_i - mean of i's group (baseline "group", GRPO arXiv:2402.03300 section 4.1), or r_i itself ("none").

    rewards [E], group [E] with values 0..number of groups - 1 -> [E].
    """
    if baseline == "none":
        return rewards.clone()
    return rewards - group_mean(rewards, group)[group]


def scale(advantages: Tensor, group: Tensor, by: str) -> Tensor:
    """A_i / std, std of i's group (GRPO) or of the whole batch (Lite-PPO arXiv:2508.08221), or A_i itself ("none", Dr.
    GRPO arXiv:2503.20783). Standard deviations are the population's, so a group of one has 0 and its advantage stays 0,
    not NaN.
    """
    if by == "none":
        return advantages
    if by == "batch":
        return advantages / (advantages.std(correction=0) + EPS)
    variance = group_mean(advantages.square(), group) - group_mean(advantages, group).square()
    return advantages / (variance.clamp(min=0).sqrt()[group] + EPS)


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    """Mean of each group: [E], [E] -> [number of groups]."""
    groups = int(group.max()) + 1
    total = torch.zeros(groups, dtype=values.dtype).index_add_(0, group, values)
    return total / torch.bincount(group, minlength=groups)


def overlong_penalty(lengths: Tensor, *, limit: int, buffer: int, penalty: float) -> Tensor:
    """0 up to limit - buffer tokens, then linearly to -penalty at limit (DAPO arXiv:2503.14476 eq. 13). [E] -> [E]."""
    if buffer == 0:
        return torch.zeros_like(lengths, dtype=torch.float32)
    return -penalty * ((lengths - (limit - buffer)) / buffer).clamp(0, 1)
