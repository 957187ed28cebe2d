"""Monte-Carlo estimators of KL(policy || reference) from log-probs of sampled tokens (Schulman 2020,
http://joschu.net/blog/kl-approx.html), and controllers of its coefficient. [N] -> [N], differentiable in logp."""

from dataclasses import dataclass

from torch import Tensor

from birl.algorithms.surrogates import LOG_LIMIT


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """logp - ref_logp: unbiased as a value. As a loss its expected gradient is zero; useful as a penalty in the
    reward."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """(logp - ref_logp)^2 / 2: biased and low in variance as a value; as a loss its expected gradient is that of the
    KL."""
    return (logp - ref_logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(d) - d - 1, d = min(ref_logp - logp, LOG_LIMIT): unbiased, never negative (GRPO arXiv:2402.03300 eq. 4)."""
    d = (ref_logp - logp).clamp(max=LOG_LIMIT)
    return d.exp() - d - 1


def absolute(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """|logp - ref_logp|: an upper bound of k1; estimates no divergence without bias (verl's "abs")."""
    return (logp - ref_logp).abs()


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def corrected(estimate: Tensor, logp: Tensor, old_logp: Tensor) -> Tensor:
    """w_t estimate_t, w_t = exp(logp_t - old_logp_t) (DeepSeek-V3.2 arXiv:2512.02556 section 3.1, "unbiased KL
    estimate", with k3).

    The gradient goes through the estimate AND through w. Tokens come from the old policy, so the expectation of w k is
    sum_v pi(v) k(v) = KL for k1 and k3, and only the derivative of that whole sum is the KL's: sum_v pi k d(log pi) +
    pi dk. With w held fixed only the second term remains, for k3 the gradient of KL(reference || policy). TRL
    (`use_bias_correction_kl`) does not hold it fixed either. On-policy w is 1, but its gradient still matters. All [N].
    w's logarithm is clamped at LOG_LIMIT.
    """
    return (logp - old_logp).clamp(max=LOG_LIMIT).exp() * estimate


@dataclass(slots=True)
class AdaptiveKL:
    """coef <- coef (1 + e n / horizon), e = clip(kl / target - 1, -0.2, 0.2), n episodes (arXiv:1909.08593 section
    2.2). With a target of 0 the coefficient is constant.

    The paper writes K_beta = 0.1 for n / horizon: the division is its code's. Its kl is the mean over episodes of the
    KL summed over their tokens, and target is in the same unit. The state is `coef` alone.
    """

    coef: float
    target: float
    horizon: int

    def update(self, kl: float, episodes: int) -> None:
        """kl: as measured on `episodes` episodes. Raises ValueError if the step could make coef 0 or negative."""
        if self.target == 0:
            return
        if 0.2 * episodes >= self.horizon:
            raise ValueError(f"a horizon of {self.horizon} is too short for {episodes} episodes a step")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * episodes / self.horizon
