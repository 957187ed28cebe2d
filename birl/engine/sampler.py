"""Logits -> one token a row, and its exact log-prob under the distribution it was sampled from.

Inverse-CDF sampling: one uniform number a row, the cumulative sum, a search. It needs one random number where Gumbel
noise needs one for each word of the vocabulary, and the number can be counted instead of drawn (`Request.uniform`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from birl.kernels import Kernels
from birl.types import SamplingParams


def sample(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], kernels: Kernels | None = None
) -> tuple[Tensor, Tensor]:
    """logits [B, V] float32 (overwritten) -> tokens [B], logprobs [B] float32.

    A row with temperature 0 is greedy; its log-prob is that of the model itself (temperature 1), since greedy choice
    has none.
    """
    if kernels is not None:
        temperatures = [p.temperature for p in params]
        for row, p in enumerate(params):
            if p.temperature and (p.top_k or p.top_p < 1 or p.min_p):
                logits[row] = restrict(logits[row] / p.temperature, p)
                temperatures[row] = 1.0
        return kernels.sample(logits, torch.tensor(temperatures), torch.tensor(uniforms, dtype=torch.float32))
    greedy = torch.tensor([p.temperature == 0 for p in params])
    if any(p.temperature not in (0.0, 1.0) for p in params):
        logits.div_(torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)[:, None])
    for row, p in enumerate(params):
        if p.temperature and (p.top_k or p.top_p < 1 or p.min_p):
            logits[row] = restrict(logits[row], p)
    best = logits.argmax(-1) if greedy.any() else None
    peak = logits.amax(-1, keepdim=True)
    shifted = logits.sub_(peak)
    cumulative = shifted.exp().cumsum(-1)
    norm = cumulative[:, -1:].contiguous()
    point = torch.tensor(uniforms, dtype=torch.float32, device=logits.device)[:, None] * norm
    # The first place whose cumulative sum exceeds the point; at the far end, rounding must not lead past the last
    # possible token.
    last = torch.searchsorted(cumulative, norm, right=False)
    tokens = torch.minimum(torch.searchsorted(cumulative, point, right=True), last)[:, 0]
    if best is not None:
        tokens = torch.where(greedy.to(tokens.device), best, tokens)
    logprobs = shifted.gather(1, tokens[:, None])[:, 0] - shifted.logsumexp(-1)
    return tokens, logprobs


def restrict(logits: Tensor, params: SamplingParams) -> Tensor:
    """-inf outside the support: the top_k likeliest, then of these the smallest set with mass top_p, then those with at
    least min_p times the likeliest one's probability. logits [V] -> [V]."""
    order = logits.argsort(descending=True, stable=True)
    ranked = logits[order]
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if params.top_k:
        keep[params.top_k :] = False
    if params.top_p < 1:
        probability = torch.where(keep, ranked, float("-inf")).softmax(-1)
        keep &= probability.cumsum(-1) - probability < params.top_p  # the mass before a token, so one always remains
    if params.min_p:
        keep &= ranked >= ranked[0] + torch.tensor(params.min_p).log()
    return torch.full_like(logits, float("-inf")).scatter(0, order[keep], ranked[keep])
