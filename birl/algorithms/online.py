"""Preference losses on answers that were just sampled, in the form of a surrogate."""

import torch
from torch import Tensor

from birl.algorithms.preference import dpo
from birl.algorithms.segments import positions, starts, totals
from birl.algorithms.surrogates import LOG_LIMIT, Surrogate


def online_dpo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    sample: Tensor,
    *,
    group: Tensor,
    ref_logp: Tensor,
    beta: float = 0.1,
) -> Surrogate:
    """L_t = -log sigmoid(beta ((logp - ref_logp) summed over the chosen - over the rejected answer)) for each token of
    both (online DPO arXiv:2402.04792; DPO arXiv:2305.18290 eq. 7).

    The chosen answer of a group has a positive advantage, the rejected one a negative; there is one of each. With
    weights 1 / (answers x own tokens), the sum over all tokens is the mean over pairs. [N] each. Raises ValueError
    where a group has no such pair in this call, or more than one.
    """
    first = starts(sample)
    gained = totals(logp - ref_logp, sample)
    sign, of = advantages[first], group[first]
    chosen, rejected = (sign > 0).nonzero()[:, 0], (sign < 0).nonzero()[:, 0]
    chosen, rejected = chosen[of[chosen].argsort()], rejected[of[rejected].argsort()]
    paired = len(chosen) + len(rejected) == len(of) and torch.equal(of[chosen], of[rejected])
    if not paired or bool((of[chosen][1:] == of[chosen][:-1]).any()):
        raise ValueError("online DPO needs one chosen and one rejected answer of each group, in one micro-batch")
    each = dpo(gained[chosen], gained[rejected], beta=beta)
    by_answer = torch.zeros_like(gained).index_add(0, chosen, each).index_add(0, rejected, each)
    ratio = (logp - old_logp).detach().clamp(max=LOG_LIMIT).exp()
    return Surrogate(by_answer[positions(sample)], ratio, torch.zeros_like(sample, dtype=torch.bool))
