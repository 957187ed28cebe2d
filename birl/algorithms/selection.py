"""Selection of tokens to train, or to hold back, to keep the entropy up. [N] tensors as in surrogates.py, no gradient.

All of these rank tokens against each other: pass all tokens of the step, before it is split into micro-batches.
"""

from math import ceil, floor

import torch
from torch import Tensor

ROUNDING = 1e-9  # share * N is not exact: 0.07 * 100 is 7.000000000000001
SAME = 1e-5  # nats, difference of one state's entropy when it is computed in other micro-batches


def top_entropy(entropy: Tensor, share: float) -> Tensor:
    """H_t >= tau, tau the ceil(share N)-th largest entropy (80/20, arXiv:2506.01939: the policy gradient of the top 20
    % of all tokens).

    Tokens whose entropy equals tau up to rounding (`SAME`) are all included, e.g. the first tokens of all answers to a
    prompt: the count exceeds ceil(share N) by at most the number of tokens that tie there, minus one. So the result
    does not depend on the order of the tokens, nor on the micro-batches. share 0: none, 1: all. [N] -> [N] bool, True:
    trained. TRL takes an interpolated quantile as tau. Raises ValueError for a share outside [0, 1].
    """
    count = ceil(_checked(share) * len(entropy) - ROUNDING)
    if count <= 0:
        return torch.zeros_like(entropy, dtype=torch.bool)
    return entropy.detach() >= entropy.detach().topk(count).values[-1] - SAME


def covariance(logp: Tensor, advantages: Tensor) -> Tensor:
    """(logp_t - mean logp) (A_t - mean A) (arXiv:2505.22617 section 4.2): a token's contribution to the decrease of the
    entropy. [N], [N] -> [N]."""
    if not len(logp):
        return logp.detach()
    logp = logp.detach()
    return (logp - logp.mean()) * (advantages - advantages.mean())


def clip_cov(cov: Tensor, *, share: float, low: float, high: float, generator: torch.Generator) -> Tensor:
    """floor(share N) tokens, or all there are, drawn without replacement from those with low <= cov_t <= high (Clip-Cov
    arXiv:2505.22617 section 4.2): the tokens without gradient.

    [N] -> [N] bool, True: no gradient. The generator lives on the CPU. verl draws at least one token, has the bounds
    themselves outside, and draws only among tokens that PPO's clip leaves.
    """
    pool = ((cov >= low) & (cov <= high)).nonzero().squeeze(1)
    count = floor(_checked(share) * len(cov) + ROUNDING)
    drawn = torch.randperm(len(pool), generator=generator)[:count].to(pool.device)
    held = torch.zeros_like(cov, dtype=torch.bool)
    held[pool[drawn]] = True
    return held


def kl_cov(cov: Tensor, *, share: float) -> Tensor:
    """The floor(share N) tokens of largest cov_t (KL-Cov arXiv:2505.22617 section 4.2): the tokens that get a KL
    penalty to the old policy.

    Of equal values the earlier ones are taken. [N] -> [N] bool, True: penalised. verl takes at least one token. Its
    penalty is coef |logp - old_logp| on top of -ratio A, as in `kl.absolute`.
    """
    count = floor(_checked(share) * len(cov) + ROUNDING)
    chosen = torch.zeros_like(cov, dtype=torch.bool)
    chosen[cov.detach().sort(descending=True, stable=True).indices[:count]] = True
    return chosen


def _checked(share: float) -> float:
    if not 0 <= share <= 1:
        raise ValueError(f"a share of tokens must be in [0, 1], not {share}")
    return share
