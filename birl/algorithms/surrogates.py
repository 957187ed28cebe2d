"""Per-token policy losses. Pure functions on packed 1-D float tensors [N]: trained tokens of all samples, one sample
after another.

They are independent of masks, packing and denominators: the weights include those, and the loss is `(surrogate.loss *
weights).sum()`. If all tokens of a sample have the same weight, that sum is the paper's objective. All take `(logp,
old_logp, advantages, sample)`: logp has the gradient, `sample` [N] is the sample of each token. w_t = exp(logp_t -
old_logp_t). On-policy (old_logp = logp) the gradient of each is REINFORCE's: -A_t for token t. The dtype follows the
input, and N = 0 is allowed.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from birl.algorithms.segments import segment_mean

# logp - old_logp is clamped to this, gradient too: exp overflows float32 at 88, and 0 * inf would be NaN.
LOG_LIMIT = 20.0


class Surrogate(NamedTuple):
    loss: Tensor  # [N]
    ratio: Tensor  # [N] factor of the token in the loss, before any clip (gmpo: after it); no gradient
    clipped: Tensor  # [N] bool: the bound is active. The token has no gradient; in cispo it has one, of bounded weight


def clip(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    sample: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """L_t = -min(w_t A_t, clip(w_t, 1 - low, 1 + high) A_t), and at most -c A_t if A_t < 0, with c = dual_clip (PPO
    arXiv:1707.06347 eq. 7; dual clip arXiv:1912.09729 eq. 5).

    high > low is DAPO's clip-higher (arXiv:2503.14476). dual_clip 0 is off; a value in (0, 1], or below 0, raises
    ValueError.
    """
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, or 0 for none, not {dual_clip}")
    ratio = _ratio(logp, old_logp)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = _outside(ratio, advantages, clip_low, clip_high) | _cut(logp, old_logp)
    if dual_clip:
        floor = dual_clip * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
        clipped = clipped | ((advantages < 0) & (ratio > dual_clip))
    return Surrogate(-objective, ratio.detach(), clipped)


def gspo(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, sample: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """L_t = -min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t), s_t = sg[s] pi_t / sg[pi_t], s = exp(1/|o| sum_t (logp_t -
    old_logp_t)) (GSPO arXiv:2507.18071, the token form, eq. 13-14).

    The value is that of the sequence's ratio s; the gradient goes through each token. Needs all of a sample. With one
    advantage a sample and equal weights, loss and gradient are those of the sequence form (eq. 5).
    """
    bounded = (logp - old_logp).detach().clamp(max=LOG_LIMIT)
    ratio = segment_mean(bounded, sample).exp() * _one(logp)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return Surrogate(-objective, ratio.detach(), _outside(ratio, advantages, clip_low, clip_high))


def gmpo(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, sample: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """L_t = -A_t g_t, g_t = sg[g] e^{b_t} / sg[e^{b_t}], g = exp(1/|o| sum_t b_t), b_t = min(logp_t - old_logp_t, high)
    if A_t >= 0 and max(logp_t - old_logp_t, -low) if A_t < 0 (GMPO arXiv:2507.20673: geometric mean of the token
    ratios, each clipped on the side of its advantage's sign).

    clip_low and clip_high are LOG units: the paper's range (e^-0.4, e^0.4) is 0.4 and 0.4. The paper writes one loss
    for a sequence, -A g; here each token has that value and its own share of the gradient, so with equal weights in a
    sample both are the same. Needs all of a sample.
    """
    difference = (logp - old_logp).clamp(max=LOG_LIMIT)
    bounded = torch.where(advantages < 0, difference.clamp(min=-clip_low), difference.clamp(max=clip_high))
    mean = segment_mean(bounded.detach(), sample).exp()
    clipped = ((advantages < 0) & (difference < -clip_low)) | ((advantages > 0) & (difference > clip_high))
    return Surrogate(-advantages * mean * _one(bounded), mean, clipped | _cut(logp, old_logp))


def cispo(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, sample: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """L_t = -sg[clip(w_t, 1 - low, 1 + high)] A_t logp_t   (CISPO, MiniMax-M1 arXiv:2506.13585 eq. 4-5).

    No token loses its gradient; `clipped` are those whose weight is bounded. The paper sets no lower bound in practice:
    clip_low >= 1. TRL bounds by epsilon_high itself, not 1 + epsilon_high, and never from below.
    """
    ratio = _ratio(logp, old_logp).detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(-bounded * advantages * logp, ratio, bounded != ratio)


def sapo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    sample: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Surrogate:
    """L_t = -4/tau sigmoid(tau (w_t - 1)) A_t, tau = tau_positive if A_t > 0, else tau_negative (SAPO
    arXiv:2511.20347).

    A soft gate instead of a clip: the gradient's weight is 4 p (1 - p) w_t with p the sigmoid, 1 on-policy. `clipped`
    is all False.
    """
    ratio = _ratio(logp, old_logp)
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    return Surrogate(loss, ratio.detach(), torch.zeros_like(sample, dtype=torch.bool))


def reinforce(logp: Tensor, old_logp: Tensor, advantages: Tensor, sample: Tensor) -> Surrogate:
    """L_t = -logp_t A_t   (REINFORCE, Williams 1992). old_logp is only used for the figure `ratio`."""
    ratio = _ratio(logp, old_logp).detach()
    return Surrogate(-logp * advantages, ratio, torch.zeros_like(sample, dtype=torch.bool))


def importance(logp: Tensor, old_logp: Tensor, advantages: Tensor, sample: Tensor) -> Surrogate:
    """L_t = -w_t A_t   (PPO arXiv:1707.06347 eq. 6, conservative policy iteration, without a bound).

    `clipped` are the tokens whose log-ratio is above LOG_LIMIT.
    """
    ratio = _ratio(logp, old_logp)
    return Surrogate(-ratio * advantages, ratio.detach(), _cut(logp, old_logp))


def dppo(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, sample: Tensor, *, divergence: str = "tv", threshold: float
) -> Surrogate:
    """L_t = -M_t w_t A_t, M_t = 0 if A_t (w_t - 1) > 0 and D_t > threshold, else 1 (DPPO arXiv:2602.04879, binary
    approximation).

    D_t compares the sampled token with all others: p = exp(old_logp), q = exp(logp); "tv": |p - q|; "kl": p log(p/q) +
    (1-p) log((1-p)/(1-q)). A masked token has loss 0. verl writes the same gradient as -M sg[min(w, c)] A logp, with c
    = 3 by its configuration (1e4 in the authors' script) and a threshold for each direction; here c is e^20. Raises
    ValueError for another divergence.
    """
    ratio = _ratio(logp, old_logp)
    p, q = old_logp.exp(), logp.detach().exp()
    if divergence == "tv":
        distance = (p - q).abs()
    elif divergence == "kl":
        rest, rest_now = -torch.expm1(old_logp), -torch.expm1(logp.detach())
        distance = p * (old_logp - logp.detach()) + torch.xlogy(rest, rest) - torch.xlogy(rest, rest_now)
    else:
        raise ValueError(f"unknown divergence {divergence!r}, known are tv, kl")
    away = ((advantages > 0) & (q > p)) | ((advantages < 0) & (q < p))
    masked = away & (distance > threshold)
    loss = torch.where(masked, 0, -ratio * advantages)
    return Surrogate(loss, ratio.detach(), masked | _cut(logp, old_logp))


def _ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    return (logp - old_logp).clamp(max=LOG_LIMIT).exp()


def _cut(logp: Tensor, old_logp: Tensor) -> Tensor:
    return (logp - old_logp).detach() > LOG_LIMIT


def _outside(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    ratio = ratio.detach()
    return ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))


def _one(logp: Tensor) -> Tensor:
    """pi / sg[pi]: the value 1, the gradient of logp."""
    return (logp - logp.detach()).exp()


SURROGATES: dict[str, Callable[..., Surrogate]] = {
    "clip": clip,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "importance": importance,
    "dppo": dppo,
}
SEQUENCE = frozenset({"gspo", "gmpo"})  # need all trained tokens of a sample in one call
