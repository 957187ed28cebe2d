"""Logits -> one token a row, and its exact log-prob under the distribution it was sampled from.

Inverse-CDF sampling: one uniform number a row, the cumulative sum, a search. It needs one random number where Gumbel
noise needs one for each token of the vocabulary, and the number can be counted instead of drawn (`Request.uniforms`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from birl.data.support import upload, uploaded
from birl.engine.truncation import kept, launch_sample, limits_of, restrict, room_of
from birl.kernels import Kernels
from birl.models.fused import on_gpu
from birl.types import SamplingParams


class Drawn(NamedTuple):
    """Sampled tokens [B] int64, logprobs [B] float32; `kept`: as returned by `truncation.kept`, if a row requests
    it."""

    tokens: Tensor
    logprobs: Tensor
    kept: Tensor | None = None


def sample(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], kernels: Kernels | None = None
) -> Drawn:
    """logits [B, V] float32 (overwritten) -> sampled tokens, log-probs, and the kept tokens.

    A row with temperature 0 is greedy; its log-prob is that of the model itself (temperature 1), since greedy choice
    has none.
    """
    numbers = ([p.temperature for p in params], uniforms)
    temperatures, points = (uploaded(x, torch.float32, logits.device) for x in numbers)
    limits, room = limits_of(params), min(room_of(params), logits.shape[1])
    if kernels is None:
        limits = None if limits is None else upload(limits, logits.device)
        return draw(logits, temperatures, points, limits, room)
    if limits is not None:
        rows = [row for row, p in enumerate(params) if not p.plain]
        logits[rows] = restrict(logits[rows] / temperatures[rows, None], limits[rows])
        temperatures[rows] = 1.0
    left = kept(logits, room) if room else None
    return Drawn(*kernels.sample(logits, temperatures, points), left)


def given(logits: Tensor, tokens: Sequence[int], params: SamplingParams, kernels: Kernels | None = None) -> Tensor:
    """logits [B, V] float32, tokens [B] -> log-probs [B] float32 of these tokens under the distribution of `sample`,
    bit-identical on the CPU kernels."""
    targets = torch.tensor(tokens, device=logits.device, dtype=torch.int64)
    temperature = params.temperature or 1.0
    limits = limits_of([params])
    if limits is not None and on_gpu(logits):
        temperatures = logits.new_full((len(logits),), temperature)
        rows = limits.expand(len(logits), 3).to(logits.device)
        return launch_sample(logits, temperatures, None, rows, targets)[1]
    if limits is not None:
        logits, temperature = restrict(logits / temperature, limits.to(logits.device)), 1.0
    if kernels is not None:
        return kernels.logprobs(logits.contiguous(), targets, temperature)[0]
    logits = logits.float() / temperature
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def shaped(logits: Tensor, params: SamplingParams) -> Tensor:
    """logits [B, V] -> logits of the sampling distribution at temperature 1 [B, V] float32; a copy."""
    limits = limits_of([params])
    result = logits.float() / (params.temperature or 1.0)
    return result if limits is None else restrict(result, limits.to(logits.device))


def top_logprobs(
    logits: Tensor, drawn: Sequence[tuple[int, float]], count: int
) -> list[tuple[list[tuple[int, float]], int]]:
    """logits [B, V], B tokens with their log-probs -> the `count` most likely tokens of each row with their log-probs
    at temperature 1, or the given one for the token itself; and the token's rank, from 1."""
    logits = logits.float()
    own = torch.tensor([token for token, _ in drawn], dtype=torch.int64, device=logits.device)
    ranks = (logits > logits.gather(1, own[:, None])).sum(-1) + 1
    top, ids = logits.topk(min(count, logits.shape[1]))
    logprobs = (top - logits.logsumexp(-1, keepdim=True)).tolist()
    rows = [list(zip(tokens, values, strict=True)) for tokens, values in zip(ids.tolist(), logprobs, strict=True)]
    told = [[given if pair[0] == given[0] else pair for pair in row] for row, given in zip(rows, drawn, strict=True)]
    return list(zip(told, ranks.tolist(), strict=True))


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor, limits: Tensor | None = None, room: int = 0) -> Drawn:
    """logits [B, V], temperatures and uniforms float32 [B], limits as in `limits_of` -> tokens, log-probs; with `room`,
    as in `room_of`, also the kept tokens. Never synchronises with the device. Logits may be overwritten."""
    if on_gpu(logits):
        return Drawn(*launch_sample(logits, temperatures, uniforms, limits, room=room))
    greedy = temperatures == 0
    logits = logits.float().div_(torch.where(greedy, 1.0, temperatures)[:, None])
    if limits is not None:
        logits = restrict(logits, limits)
    left = kept(logits, room) if room else None
    best = logits.argmax(-1)
    shifted = logits.sub_(logits.amax(-1, keepdim=True))
    cumulative = shifted.exp().cumsum(-1)
    norm = cumulative[:, -1:].contiguous()
    # The first place whose cumulative sum exceeds the point; at the far end, rounding must not lead past the last
    # possible token.
    last = torch.searchsorted(cumulative, norm, right=False)
    tokens = torch.minimum(torch.searchsorted(cumulative, uniforms[:, None] * norm, right=True), last)[:, 0]
    tokens = torch.where(greedy, best, tokens).clamp(max=logits.shape[1] - 1)  # all-NaN logits give no place
    return Drawn(tokens, shifted.gather(1, tokens[:, None])[:, 0] - shifted.logsumexp(-1), left)
