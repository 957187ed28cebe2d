"""Off-policy corrections: weights and masks for tokens that were sampled with other weights, or by another program. [N]
tensors as in surrogates.py, no gradient.

log_ratio = proximal_logp - behaviour_logp: the proximal policy is the denominator of the surrogate's ratio (the
learner's log-probs before the step), the behaviour policy is the one that sampled (the engine's log-probs).
`importance` multiplies the loss; masks are True for kept tokens, rejections for rejected ones. A masked token still
counts in the denominator.
"""

from collections.abc import Callable
from math import inf, isfinite, log

import torch
from torch import Tensor

from birl.algorithms.segments import segment_mean, segment_sum
from birl.algorithms.surrogates import LOG_LIMIT

LEVELS = ("token", "geometric", "sequence")
MODES = ("truncate", "mask")


def importance(log_ratio: Tensor, sample: Tensor, *, level: str, mode: str, low: float, high: float) -> Tensor:
    """min(w, high) ("truncate": truncated importance sampling), or w inside [low, high] and 0 outside ("mask": masked
    importance sampling, IcePop arXiv:2510.18855), with w = exp of

    - "token": log_ratio_t
    - "geometric": 1/|o| sum_t log_ratio_t, the same for all tokens of a sample
    - "sequence": sum_t log_ratio_t, the same for all tokens of a sample

    [N], [N] -> [N] without gradient. Bounds are compared in log space, so that nothing overflows; low is not used under
    "truncate". Raises ValueError for another level or mode, high not finite and above 0, or low not in [0, high].
    """
    if not (isfinite(high) and 0 <= low <= high and high > 0):
        raise ValueError(f"importance bounds must be 0 <= low <= high, high finite and above 0, not {low} and {high}")
    log_ratio = log_ratio.detach()
    if level == "geometric":
        log_ratio = segment_mean(log_ratio, sample)
    elif level == "sequence":
        log_ratio = segment_sum(log_ratio, sample)
    elif level != "token":
        raise ValueError(f"unknown level {level!r}, known are {', '.join(LEVELS)}")
    weight = log_ratio.clamp(max=log(high)).exp()
    if mode == "truncate":
        return weight
    if mode == "mask":
        inside = (log_ratio >= (log(low) if low else -inf)) & (log_ratio <= log(high))
        return torch.where(inside, weight, 0)
    raise ValueError(f"unknown mode {mode!r}, known are {', '.join(MODES)}")


def second_moment_mask(log_ratio: Tensor, advantages: Tensor, limit: float) -> Tensor:
    """M_t = 0 for the fewest, largest log_ratio_t^2 without which the mean of log_ratio^2 over the rest of T is <=
    limit (M2PO arXiv:2510.01161 algorithm 1, limit 0.04 there).

    T are the tokens a PPO clip could bind: A > 0 and ratio > 1, or A < 0 and ratio < 1; all others are kept and not in
    the mean. If even the smallest of T is above the limit, all of T are masked. The paper's log_ratio is that of the
    weights being trained against the behaviour. Of equal values the later ones are kept. [N], [N] -> [N] bool, True:
    kept. AReaL applies it to all tokens and always keeps one; the authors' code bounds ratios (docs/papers.md). Pass
    all tokens of the step: the mean is over the batch.
    """
    log_ratio = log_ratio.detach()
    binding = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    where = binding.nonzero().squeeze(1)
    moment, order = log_ratio[where].double().square().sort(descending=True, stable=True)
    rest = moment.flip(0).cumsum(0).flip(0) / torch.arange(len(moment), 0, -1, device=moment.device)
    keep = torch.ones_like(binding)
    keep[where[order[rest > limit]]] = False  # the remaining mean only falls, so these are the first ones
    return keep


def rejected_by_divergence(log_ratio: Tensor, sample: Tensor, advantages: Tensor, *, limit: float) -> Tensor:
    """R_t = 1/|o| sum_t (exp(l_t) - l_t - 1) > limit, l = log_ratio: the mean k3 estimate of KL(behaviour || proximal)
    of the token's sample.

    Rejects whole samples, whatever their advantage (the argument makes both rejections' signatures equal). [N] x 3 ->
    [N] bool, True: rejected.
    """
    bounded = log_ratio.detach().clamp(max=LOG_LIMIT)
    return segment_mean(bounded.exp() - bounded - 1, sample) > limit


def rejected_off_policy(log_ratio: Tensor, sample: Tensor, advantages: Tensor, *, limit: float) -> Tensor:
    """R_t = A_t < 0 and 1/|o| sum_t -log_ratio_t > limit: rejects bad answers that the policy has moved away from
    (DeepSeek-V3.2 arXiv:2512.02556 eq. 9, off-policy sequence masking).

    The paper's mean is of log(pi_old / pi_theta): pi_old the sampling policy, pi_theta the weights being trained. [N] x
    3 -> [N] bool, True: rejected.
    """
    return (advantages < 0) & (-segment_mean(log_ratio.detach(), sample) > limit)


REJECTIONS: dict[str, Callable[..., Tensor]] = {"divergence": rejected_by_divergence, "off_policy": rejected_off_policy}


def proximal(behaviour: Tensor, current: Tensor, versions: Tensor, now: int | Tensor) -> Tensor:
    """a_t behaviour_t + (1 - a_t) current_t, a_t = 1 / d_t with d_t = now - versions_t, and a_t = 0 if d_t = 0 (A-3PO
    arXiv:2512.06547: log-linear interpolation by staleness, instead of a forward pass).

    behaviour [N] log-probs at sampling, current [N] those of the weights being trained, versions [N] int64 of the
    weights that sampled each token, now: the version being trained -> [N] without gradient. At d = 1 it is the
    behaviour policy. AReaL has behaviour, not current, at d = 0. Raises ValueError for a version above a `now` that is
    a number; a tensor [] is not compared, which would sync with its device.
    """
    staleness = now - versions
    if isinstance(now, int) and bool((staleness < 0).any()):
        raise ValueError(f"a token of version {int(versions.max())} in a step of version {now}")
    share = torch.where(staleness > 0, 1 / staleness.clamp(min=1).to(behaviour.dtype), 0)
    return share * behaviour + (1 - share) * current.detach()
