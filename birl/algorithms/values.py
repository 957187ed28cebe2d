"""PPO's critic: rewards and values of tokens -> advantages, returns, and the critic's loss. [N] tensors as in
surrogates.py; the dtype follows the input. Advantages and returns are targets without gradient.

A sample's next token is its next TRAINED token: tokens of a tool or a user in between are not steps. All of a sample
must be in one call.
"""

import torch
from torch import Tensor

from birl.algorithms.advantages import EPS
from birl.algorithms.segments import ends, positions, segment_sum, starts, totals


def token_rewards(earned: Tensor, kl: Tensor, coef: float) -> Tensor:
    """r_t = e_t - coef kl_t, e_t the score at an answer's last token   (arXiv:1909.08593 eq. 2, arXiv:2203.02155).

    earned [N]: reward of each token, 0 except at the end of a turn; kl [N] (k1 for the papers' penalty) -> [N] without
    gradient.
    """
    return earned.detach() + kl_rewards(kl, coef).to(earned.dtype)


def kl_rewards(kl: Tensor, coef: float) -> Tensor:
    """r_t = -coef kl_t: the KL as part of the reward, not of the loss. [N] -> [N] without gradient."""
    return -coef * kl.detach()


def gae(
    rewards: Tensor, values: Tensor, sample: Tensor, *, gamma: float, lam: float, alpha: float = 0.0
) -> tuple[Tensor, Tensor]:
    """A_t = d_t + gamma lam A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t, return_t = A_t + V_t (GAE arXiv:1506.02438 eq.
    16). With `alpha` a sample of l tokens has lam = max(1 - 1 / (alpha l), 0) for its advantages and lam = 1 for its
    returns (VAPO arXiv:2504.05118 sections 4.1 and 4.2).

    After a sample's last token V and A are 0: an episode ends there, or is taken to. [N], [N], [N] -> advantages [N],
    returns [N]. Computed in Python floats.
    """
    if alpha > 0:
        one = torch.ones_like(values, dtype=torch.float64)
        advantage, _ = _gae(rewards, values, sample, gamma, (1 - 1 / (alpha * segment_sum(one, sample))).clamp_min(0))
        _, returns = _gae(rewards, values, sample, gamma, one)
        return advantage, returns
    return _gae(rewards, values, sample, gamma, torch.full_like(values, lam, dtype=torch.float64))


def _gae(rewards: Tensor, values: Tensor, sample: Tensor, gamma: float, lam: Tensor) -> tuple[Tensor, Tensor]:
    """`lam` [N] float64."""
    advantages: list[float] = []
    following, value_after = 0.0, 0.0
    columns = [rewards.detach().double(), values.detach().double(), ends(sample).double(), lam]
    backwards: list[list[float]] = torch.stack(columns).flip(1).T.tolist()  # pyright: ignore
    for reward, value, end, share in backwards:
        if end:
            following, value_after = 0.0, 0.0
        following = reward + gamma * value_after - value + gamma * share * following
        value_after = value
        advantages.append(following)
    advantage = values.new_tensor(advantages[::-1])
    return advantage, advantage + values.detach()


def turn_gae(
    rewards: Tensor, values: Tensor, sample: Tensor, turn: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE with one step a turn: r_k = sum of turn k's token rewards, V_k = value of its first token; every token of the
    turn has A_k and the return A_k + V_k (arXiv:1506.02438 eq. 16, the time step being a turn).

    turn [N] int64: contiguous runs within a sample, any numbers. gamma and lam apply once a turn, not once a token. [N]
    x 4 -> [N], [N].
    """
    first = starts(sample)
    first[1:] |= turn[1:] != turn[:-1]
    run = first.cumsum(0)
    advantages, returns = gae(totals(rewards.detach(), run), values[first], sample[first], gamma=gamma, lam=lam)
    position = positions(run)
    return advantages[position], returns[position]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """L_t = 0.5 max((v - R)^2, (old + clamp(v - old, -clip, clip) - R)^2) (PPO's code, openai/baselines; not in
    arXiv:1707.06347, whose eq. 9 has (v - R)^2). clip 0: 0.5 (v - R)^2.

    values [N] with gradient, old_values [N], returns [N] -> loss [N], clipped [N] bool: the token has no gradient. The
    0.5 is verl's.
    """
    plain = (values - returns).square()
    if not clip:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    moved = values - old_values
    bounded = (old_values + moved.clamp(-clip, clip) - returns).square()
    clipped = ((bounded > plain) & (moved.abs() > clip)).detach()  # within the bound both are equal up to rounding
    return 0.5 * torch.where(clipped, bounded, plain), clipped


def whiten(x: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(x - mean) / (std + EPS), plus mean without shift_mean.

    The statistics are the population's over all inputs: pass all tokens of the step, before it is split into
    micro-batches. verl divides by sqrt(var + 1e-8) with the sample variance. Equal values give 0 (or the mean), as does
    one value. [N] -> [N].
    """
    if not len(x):
        return x
    lowest = x.min()
    above = x - lowest
    mean = above.mean()
    centred = above - mean
    white = centred / (centred.square().mean().sqrt() + EPS)
    return white if shift_mean else white + mean + lowest
