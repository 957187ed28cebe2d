"""Monte-Carlo estimators of KL(policy || reference) from log-probs of tokens sampled by the policy (Schulman 2020,
http://joschu.net/blog/kl-approx.html). [N] -> [N], differentiable in logp."""

from torch import Tensor


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """logp - ref_logp: unbiased as a value. As a loss its expected gradient is zero; useful as a penalty in the
    reward."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """(logp - ref_logp)^2 / 2: biased and low in variance as a value; as a loss its expected gradient is that of the
    KL."""
    return (logp - ref_logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref_logp - logp: unbiased, never negative (GRPO arXiv:2402.03300 eq. 4)."""
    d = ref_logp - logp
    return d.exp() - d - 1


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
