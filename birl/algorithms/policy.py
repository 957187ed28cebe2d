"""The policy loss of one micro-batch, composed of independent parts: surrogate, correction, KL, entropy, denominator,
figures."""

from collections.abc import Callable

import torch
from torch import Tensor

from birl.algorithms import kl as estimators
from birl.algorithms.surrogates import Surrogate


def policy_loss(
    logp: Tensor,
    entropy: Tensor,
    *,
    old_logp: Tensor,
    advantages: Tensor,
    sample: Tensor,
    weights: Tensor,
    surrogate: Callable[[Tensor, Tensor, Tensor, Tensor], Surrogate],
    factor: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl: str = "k3",
    kl_coef: float = 0.0,
    kl_from: Tensor | None = None,
    held: Tensor | None = None,
    held_coef: float | Tensor = 0.0,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum_t weight_t (factor_t L_t + kl_coef KL_t + held_coef held_t |logp_t - old_logp_t| - entropy_coef H_t).

    All [N]; the weights include the global denominator. `surrogate` returns L_t. `factor`: multiplies the surrogate,
    from an off-policy correction or a mask; None: 1. `held` (bool): tokens with a penalty towards the old policy
    (KL-Cov), by `held_coef`, a number or [N]. `kl_from`: the sampler's log-probs, if KL_t is weighted by the ratio to
    them. Returns the scalar loss and [N] figures: ratio, clip_fraction, entropy, gap (|logp - old_logp|), and kl with a
    reference.
    """
    result = surrogate(logp, old_logp, advantages, sample)
    per_token = result.loss if factor is None else result.loss * factor
    figures = {
        "ratio": result.ratio,
        "clip_fraction": result.clipped.float(),
        "entropy": entropy,
        "gap": (logp - old_logp).abs(),
    }
    if ref_logp is not None:
        if kl_coef:
            penalty = estimators.ESTIMATORS[kl](logp, ref_logp)
            if kl_from is not None:
                penalty = estimators.corrected(penalty, logp, kl_from)
            per_token = per_token + kl_coef * penalty
        figures["kl"] = estimators.k3(logp.detach(), ref_logp)
    if held is not None:
        per_token = per_token + held_coef * held * (logp - old_logp).abs()
        figures["held"] = held.float()
    if factor is not None:
        figures["factor"] = factor
    if entropy_coef:
        per_token = per_token - entropy_coef * entropy
    return torch.sum(per_token * weights), figures
