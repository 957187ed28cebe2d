"""Losses on pairs of answers, and the reward model's. Pure functions on 1-D float tensors [P], one number a pair; the
caller takes the mean.

c = logp_chosen - ref_logp_chosen and r = logp_rejected - ref_logp_rejected: log-ratios of whole answers, sums over the
answer's tokens unless the docstring says mean. s is the sigmoid. The dtype follows the input, and P = 0 is allowed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from birl.algorithms.segments import positions, starts, totals
from birl.algorithms.surrogates import LOG_LIMIT, Surrogate


def dpo(c: Tensor, r: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log s(beta (c - r)) - e log s(-beta (c - r)), e = label_smoothing (DPO arXiv:2305.18290 eq. 7; with e >
    0 conservative DPO, https://ericmitchell.ai/cdpo.pdf: labels are wrong with probability e). [P], [P] -> [P]. Raises
    ValueError for e outside [0, 0.5).
    """
    _check_smoothing(label_smoothing)
    margin = beta * (c - r)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(c: Tensor, r: Tensor, *, beta: float) -> Tensor:
    """((c - r) - 1 / (2 beta))^2   (IPO arXiv:2310.12036 eq. 17, tau there is beta here). [P], [P] -> [P].

    The paper's log-ratios are those of whole answers, sums. TRL's `loss_type="ipo"` uses means over tokens in the same
    formula; for that, pass means.
    """
    return ((c - r) - 1 / (2 * beta)).square()


def hinge(c: Tensor, r: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 - beta (c - r)) (SLiC-HF arXiv:2305.10425 with a margin of 1 / beta, times beta, and without its
    regulariser; the reference in c and r is RSO's arXiv:2309.06657, "hinge-norm", as in TRL: SLiC has plain log-probs,
    which are c and r with a reference of 0). [P], [P] -> [P].
    """
    return relu(1 - beta * (c - r))


def robust(c: Tensor, r: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """(-(1 - e) log s(beta (c - r)) + e log s(-beta (c - r))) / (1 - 2 e), e = label_smoothing (robust DPO
    arXiv:2403.00409): unbiased for DPO's loss when labels are wrong with chance e. May be negative. [P], [P] -> [P].
    Raises ValueError for e outside [0, 0.5).
    """
    _check_smoothing(label_smoothing)
    margin = beta * (c - r)
    loss = -(1 - label_smoothing) * logsigmoid(margin) + label_smoothing * logsigmoid(-margin)
    return loss / (1 - 2 * label_smoothing)


def kto(
    ratio: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """w_d (1 - s(beta (ratio - z))) for desirable answers, w_u (1 - s(beta (z - ratio))) for others, z = max(0, kl)
    (KTO arXiv:2402.01306 eq. 8).

    ratio [B]: log-ratio of each answer; desirable [B] bool; kl: one number, the mean log-ratio of answers paired with
    other prompts (birl: those of the next row of the whole batch; TRL: within the batch of a device). z has no
    gradient. -> [B].
    """
    point = torch.as_tensor(kl, dtype=ratio.dtype, device=ratio.device).detach().clamp(min=0)
    sign = torch.where(desirable, torch.ones_like(ratio), -torch.ones_like(ratio))
    weight = torch.full_like(ratio, undesirable_weight).masked_fill(desirable, desirable_weight)
    return weight * torch.sigmoid(-sign * beta * (ratio - point))


def simpo(mean_c: Tensor, mean_r: Tensor, *, beta: float, margin: float) -> Tensor:
    """-log s(beta mean_c - beta mean_r - margin)   (SimPO arXiv:2405.14734 eq. 6, gamma there is margin here).

    mean_c, mean_r [P]: MEAN log-prob of an answer's tokens, no reference -> [P]. TRL's simpo_gamma is this margin too.
    """
    return -logsigmoid(beta * mean_c - beta * mean_r - margin)


def orpo(mean_c: Tensor, mean_r: Tensor, *, beta: float) -> Tensor:
    """-beta log s(log odds_c - log odds_r), odds = p / (1 - p), p = exp(mean log-prob) (ORPO arXiv:2403.07691 eq. 7;
    beta is the paper's lambda in eq. 6).

    The odds-ratio part only: eq. 6 adds the NLL of the chosen answer, which the caller adds (birl: the mean over each
    chosen answer's tokens, then over pairs; TRL: over all tokens of the batch). mean_c, mean_r [P]: MEAN log-prob of an
    answer's tokens, below 0; at 0 the odds are infinite, so it is replaced by the largest negative number of the dtype.
    -> [P].
    """
    return -beta * logsigmoid(_log_odds(mean_c) - _log_odds(mean_r))


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centering: float = 0.0) -> Tensor:
    """-log s(chosen - rejected - margin) + centering (chosen + rejected)^2 (margin: Llama 2 arXiv:2307.09288 eq. 2;
    centering: arXiv:2312.09244 eq. 2, rewards around 0). chosen, rejected [P]: scores; margin a number or [P] -> [P].
    """
    return -logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()


def preferred(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 if the chosen answer has the higher value, 0 if the other has, 0.5 if equal, as before the first step."""
    return (chosen > rejected).float() + 0.5 * (chosen == rejected).float()


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
    weights 1 / (answers x own tokens), the sum over all tokens is the mean over pairs. [N] each. Raises ValueError if a
    group has no such pair in this call, or more than one.
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


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), not {label_smoothing}")


def _log_odds(logp: Tensor) -> Tensor:
    logp = logp.clamp(max=-torch.finfo(logp.dtype).tiny)
    return logp - torch.log(-torch.expm1(logp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A loss and its inputs: `mean` log-probs of a token without a reference, or sums relative to one; answers in
    pairs, or each `alone` with its label. `nll`: coefficient of the chosen answer's NLL; None: set by the caller."""

    loss: Callable[..., Tensor]
    mean: bool = False
    alone: bool = False
    nll: float | None = None


PREFERENCE: dict[str, Preference] = {
    "dpo": Preference(loss=dpo),
    "ipo": Preference(loss=ipo),
    "hinge": Preference(loss=hinge),
    "robust": Preference(loss=robust),
    "kto": Preference(loss=kto, alone=True),
    "simpo": Preference(loss=simpo, mean=True),
    "orpo": Preference(loss=orpo, mean=True, nll=1.0),
}
