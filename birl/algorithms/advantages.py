"""Rewards -> advantages, one number an episode. Pure functions on 1-D float tensors [E]; the dtype follows the input.

`group`: the prompt of each episode (int64, 0..G-1); failed episodes are not in the input, so they are in no baseline.
Standard deviations are the population's (divided by n), so a group of one has 0 and not NaN. E may be 0.
"""

from math import comb, sqrt

import torch
from torch import Tensor

EPS = 1e-6  # added to a standard deviation

BASELINES = ("group", "leave_one_out", "batch", "optimal", "greedy", "none")
SCALES = ("none", "group", "batch", "rewards", "mean")


def centre(
    rewards: Tensor, group: Tensor, baseline: str, *, lengths: Tensor | None = None, greedy: Tensor | None = None
) -> Tensor:
    """A_i = r_i - b_i with the baseline b_i

    - "group": mean of i's group (GRPO arXiv:2402.03300 section 4.1)
    - "leave_one_out": mean of the others of i's group; a group of one has A = 0 (RLOO arXiv:2402.14740)
    - "batch": mean of all (REINFORCE++ arXiv:2501.03262, which then divides by the batch's deviation: `scale` "batch")
    - "optimal": sum_j n_j r_j / sum_j n_j over i's group, n_j its tokens (OPO arXiv:2505.23585: the baseline of least
      variance, if the squared gradient of an answer grows with its length); a group without tokens has the plain mean
    - "greedy": reward of the greedy answer to i's prompt (ReMax arXiv:2310.10505)
    - "none": 0

    rewards [E], group [E], lengths [E] for "optimal", greedy [G] for "greedy" -> [E]. Equal rewards give exactly 0 with
    the first four. Raises ValueError for an unknown baseline, or if lengths or greedy are needed and missing.
    """
    if baseline == "none":
        return rewards.clone()
    if baseline == "greedy":
        if greedy is None:
            raise ValueError("baseline greedy needs the reward of each prompt's greedy answer")
        return rewards - greedy.to(rewards.dtype)[group]
    if baseline == "batch":
        return _from_mean(rewards, torch.zeros_like(group))
    if baseline == "group":
        return _from_mean(rewards, group)
    if baseline == "leave_one_out":
        size = _sizes(group)[group].to(rewards.dtype)
        return _from_mean(rewards, group) * size / (size - 1).clamp(min=1)
    if baseline == "optimal":
        if lengths is None:
            raise ValueError("baseline optimal needs the length of each answer")
        weight = lengths.to(rewards.dtype)
        empty = _group_sum(weight, group)[group] == 0
        weight = torch.where(empty, torch.ones_like(weight), weight)
        above = rewards - _group_min(rewards, group)
        return above - (_group_sum(weight * above, group) / _group_sum(weight, group))[group]
    raise ValueError(f"unknown baseline {baseline!r}, known are {', '.join(BASELINES)}")


def scale(advantages: Tensor, group: Tensor, by: str, *, rewards: Tensor | None = None) -> Tensor:
    """A_i / d_i with the divisor d_i

    - "none": 1 (Dr. GRPO arXiv:2503.20783)
    - "group": standard deviation of A in i's group + EPS (GRPO arXiv:2402.03300 section 4.1)
    - "batch": standard deviation of all A + EPS (REINFORCE++ arXiv:2501.03262; with its baseline, A is r - mean of the
      group, so that differences between prompts are not in it)
    - "rewards": standard deviation of all rewards + EPS (Lite PPO arXiv:2508.08221, as in its authors' ROLL and in TRL)
    - "mean": mean reward of i's group; if it is not above 0, the result is 0 (MaxRL arXiv:2602.02710, which has
      rewards of 0 and 1)

    The result is also 0 if A_i is more than 1 / EPS deviations: a batch of equal rewards, without a baseline that
    subtracts them, has no information about its answers and must not be multiplied by a million.

    advantages [E], group [E], rewards [E] for "rewards" and "mean" -> [E]. Raises ValueError for an unknown divisor, or
    if rewards are needed and missing.
    """
    if by == "none":
        return advantages
    if by == "group":
        variance = group_mean(_from_mean(advantages, group).square(), group)
        return _over(advantages, variance.sqrt()[group])
    if by == "batch":
        return _over(advantages, _deviation(advantages))
    if by in ("rewards", "mean"):
        if rewards is None:
            raise ValueError(f"scale {by} needs the rewards")
        if by == "rewards":
            return _over(advantages, _deviation(rewards))
        mean = group_mean(rewards, group)[group]
        positive = mean > 0
        return torch.where(positive, advantages / torch.where(positive, mean, torch.ones_like(mean)), 0)
    raise ValueError(f"unknown scale {by!r}, known are {', '.join(SCALES)}")


def rewards_to_go(rewards: Tensor, discount: float) -> Tensor:
    """G_t = r_t + discount G_{t+1}: return of a turn and those after it (Sutton and Barto, eq. 3.9; for turn-level
    credit cf. arXiv:2505.11821).

    rewards [T], one for each turn of an episode -> [T].
    """
    result = rewards.clone()
    for t in range(len(result) - 2, -1, -1):
        result[t] += discount * result[t + 1]
    return result


def gdpo(parts: Tensor, group: Tensor, weights: Tensor) -> Tensor:
    """A_i = (S_i - mean S) / (std S + EPS), S_i = sum_k w_k (r_ik - mean_k) / (std_k + EPS) with the mean and deviation
    of reward k in i's group (GDPO arXiv:2601.05242: each reward is normalised separately, then the sum over the batch).

    parts [E, K]: the K rewards of each episode, NaN from one that does not judge it; group [E]; weights [K] -> [E].
    """
    total = torch.zeros_like(group, dtype=parts.dtype)
    for reward, weight in zip(parts.unbind(1), weights.to(parts.dtype).unbind(0), strict=True):
        judged = (~reward.isnan()).nonzero()[:, 0]
        of = group[judged]
        total.index_add_(0, judged, weight * scale(centre(reward[judged], of, "group"), of, "group"))
    return scale(centre(total, group, "batch"), group, "batch")


def pass_at_k(rewards: Tensor, group: Tensor, k: int) -> Tensor:
    """A+ = (1 - R) / s and A- = (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / s with R = 1 - C(m, k) / C(n, k), s =
    sqrt(R (1 - R)); n answers in the group, m of them wrong (Pass@k training arXiv:2508.10751 eq. 11-15, the analytic
    version: the mean, over all sets of k answers that contain an answer, of the set's normalised reward). If s = 0 all
    advantages of the group are 0.

    rewards [E] of 0 and 1, group [E] -> [E]. Nothing is added to s. A group of fewer than k, because others failed, has
    no such set: its advantages are 0. Raises ValueError for other rewards.
    """
    if not bool(((rewards == 0) | (rewards == 1)).all()):
        raise ValueError("pass@k training needs rewards of 0 and 1")
    sizes: list[int] = _sizes(group).tolist()  # pyright: ignore
    wrong: list[float] = _group_sum(1 - rewards, group).tolist()  # pyright: ignore
    table: list[tuple[float, float]] = []
    for n, m in zip(sizes, (round(m) for m in wrong), strict=True):
        miss = comb(m, k) / comb(n, k) if n >= k else 0.0
        deviation = sqrt(miss * (1 - miss))
        if deviation == 0:
            table.append((0.0, 0.0))
        else:
            table.append(((miss - comb(m - 1, k - 1) / comb(n - 1, k - 1)) / deviation, miss / deviation))
    return rewards.new_tensor(table).reshape(-1, 2)[group, rewards.long()]


def length_penalty(lengths: Tensor, correct: Tensor, group: Tensor) -> Tensor:
    """l_i = 0.5 - (n_i - min n) / (max n - min n) over i's group; a right answer gets l_i, a wrong one min(0, l_i); 0
    if all lengths are equal (Kimi k1.5 arXiv:2501.12599 section 2.3.3). To be added to the reward.

    lengths [E], correct [E] bool, group [E] -> [E], float32 if the lengths are integers.
    """
    lengths = _floating(lengths)
    shortest = _group_min(lengths, group)
    spread = -_group_min(-lengths, group) - shortest
    penalty = 0.5 - (lengths - shortest) / spread.clamp(min=1e-12)
    penalty = torch.where(correct, penalty, penalty.clamp(max=0))
    return torch.where(spread > 0, penalty, 0)


def overlong_penalty(lengths: Tensor, *, limit: int, buffer: int, penalty: float) -> Tensor:
    """0 up to limit - buffer tokens, then linearly to -penalty at limit (DAPO arXiv:2503.14476 eq. 13). [E] -> [E]."""
    lengths = _floating(lengths)
    if buffer == 0:
        return torch.zeros_like(lengths)
    return -penalty * ((lengths - (limit - buffer)) / buffer).clamp(0, 1)


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    """Mean of each group: [E], [E] -> [G]."""
    return _group_sum(values, group) / _sizes(group).clamp(min=1).to(values.dtype)


def _from_mean(values: Tensor, group: Tensor) -> Tensor:
    """values_i - mean of i's group. Distances from the group's smallest value are averaged, so that equal values give
    exactly 0: dividing by the deviation would amplify a rounding error."""
    above = values - _group_min(values, group)
    return above - group_mean(above, group)[group]


def _over(advantages: Tensor, deviation: Tensor) -> Tensor:
    return torch.where(EPS * advantages.abs() <= deviation, advantages / (deviation + EPS), 0)


def _deviation(values: Tensor) -> Tensor:
    """Standard deviation of all values. [E] -> []"""
    return _from_mean(values, torch.zeros(len(values), dtype=torch.int64, device=values.device)).square().mean().sqrt()


def _sizes(group: Tensor) -> Tensor:
    return torch.bincount(group)


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    return values.new_zeros(len(_sizes(group))).index_add(0, group, values)


def _group_min(values: Tensor, group: Tensor) -> Tensor:
    """Smallest value of i's group: [E], [E] -> [E]."""
    return values.new_zeros(len(_sizes(group))).scatter_reduce(0, group, values, "amin", include_self=False)[group]


def _floating(lengths: Tensor) -> Tensor:
    return lengths if lengths.is_floating_point() else lengths.float()
