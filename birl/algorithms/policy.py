"""The policy loss of one micro-batch, put together from its four independent parts: surrogate, KL, denominator,
figures."""

import torch
from torch import Tensor

from birl.algorithms import kl as estimators
from birl.algorithms.surrogates import clip


def policy_loss(
    logp: Tensor,
    entropy: Tensor,
    *,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    ref_logp: Tensor | None,
    clip_low: float,
    clip_high: float,
    kl: str,
    kl_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum_t weight_t (L_t + kl_coef KL_t). All [N] float32; the weights hold the global denominator.

    Returns the scalar loss and [N] figures: ratio, clip_fraction, entropy, gap (|logp - old_logp|), and kl with a
    reference.
    """
    surrogate = clip(logp, old_logp, advantages, low=clip_low, high=clip_high)
    per_token = surrogate.loss
    figures = {
        "ratio": surrogate.ratio,
        "clip_fraction": surrogate.clipped.float(),
        "entropy": entropy,
        "gap": (logp - old_logp).abs(),
    }
    if ref_logp is not None:
        penalty = estimators.ESTIMATORS[kl](logp, ref_logp)
        per_token = per_token + kl_coef * penalty
        figures["kl"] = estimators.k3(logp.detach(), ref_logp)
    return torch.sum(per_token * weights), figures
