"""Divergences of the learner's next-token distribution q from a teacher's p, over all tokens of the vocabulary, or over
the teacher's k most likely tokens and one bucket for the rest.

A function returns, for each token (or bucket) v, its term of the value and flow_v = q_v dD/dq_v. The value is the sum
of the terms, and its derivative with respect to the learner's logit of v is flow_v - q_v sum(flow): q =
softmax(logits). So both passes can go over the vocabulary in pieces. Log-probs [..., V] -> [..., V]; the dtype is kept.
"""

from collections.abc import Callable
from functools import partial
from math import log
from typing import NamedTuple

import torch
from torch import Tensor


class Divergence(NamedTuple):
    terms: Tensor
    flow: Tensor


def reverse_kl(logq: Tensor, logp: Tensor) -> Divergence:
    """q (log q - log p): KL(learner || teacher) (MiniLLM arXiv:2306.08543 eq. 1)."""
    terms = logq.exp().mul_(logq - logp)
    return Divergence(terms, terms)


def forward_kl(logq: Tensor, logp: Tensor) -> Divergence:
    """p (log p - log q): KL(teacher || learner) (Hinton et al. arXiv:1503.02531; GKD arXiv:2306.13649 section 2)."""
    p = logp.exp()
    return Divergence(p * (logp - logq), p.neg())


def jsd(logq: Tensor, logp: Tensor, *, beta: float) -> Divergence:
    """beta p (log p - log m) + (1 - beta) q (log q - log m), m = beta p + (1 - beta) q: the generalised Jensen-Shannon
    divergence (GKD arXiv:2306.13649 eq. 1), whose limits at beta = 0 and 1, over beta and 1 - beta, are forward and
    reverse KL. 0 < beta < 1."""
    logm = torch.logaddexp(logp + log(beta), logq + log(1 - beta))
    flow = logq.exp().mul_(logq - logm).mul_(1 - beta)
    return Divergence((logp - logm).mul_(logp.exp()).mul_(beta).add_(flow), flow)


DIVERGENCES: dict[str, Callable[..., Divergence]] = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd}


def divergence(name: str, beta: float) -> Callable[[Tensor, Tensor], Divergence]:
    """Return the divergence of that name, with its option bound."""
    return partial(jsd, beta=beta) if name == "jsd" else DIVERGENCES[name]
