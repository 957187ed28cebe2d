"""Logits -> one token a row, and its exact log-prob under the distribution it was sampled from.

Inverse-CDF sampling: one uniform number a row, the cumulative sum, a search. It needs one random number where Gumbel
noise needs one for each word of the vocabulary, and the number can be counted instead of drawn (`Request.uniforms`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from birl.errors import BirlError
from birl.kernels import Kernels
from birl.models.fused import on_gpu, triton_kernels
from birl.types import SamplingParams


def sample(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], kernels: Kernels | None = None
) -> tuple[Tensor, Tensor]:
    """logits [B, V] float32 (overwritten) -> tokens [B], logprobs [B] float32.

    A row with temperature 0 is greedy; its log-prob is that of the model itself (temperature 1), since greedy choice
    has none. Raises `BirlError` where a row on a CPU has NaN.
    """
    temperatures = [p.temperature for p in params]
    for row, p in enumerate(params):
        if not plain(p):
            logits[row] = restrict(logits[row] / p.temperature, p)
            temperatures[row] = 1.0
    numbers = (torch.tensor(x, dtype=torch.float32, device=logits.device) for x in (temperatures, uniforms))
    return checked(*(draw if kernels is None else kernels.sample)(logits, *numbers))


def checked(tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """What was drawn. Raises `BirlError` where a row on a CPU has NaN; other devices are not waited for."""
    if logprobs.device.type == "cpu" and logprobs.isnan().any():
        raise BirlError("The model's logits are not numbers any more: its weights are not finite, or too large.")
    return tokens, logprobs


def given(logits: Tensor, tokens: Sequence[int], params: SamplingParams, kernels: Kernels | None = None) -> Tensor:
    """logits [B, V] float32, tokens [B] -> log-probs [B] float32 of these tokens under what `sample` draws from, with
    bit-identical where there are kernels."""
    targets = torch.tensor(tokens, device=logits.device, dtype=torch.int64)
    temperature = params.temperature or 1.0
    if not plain(params):
        logits = torch.stack([restrict(row / temperature, params) for row in logits])
        temperature = 1.0
    if kernels is not None:
        return kernels.logprobs(logits.contiguous(), targets, temperature)[0]
    logits = logits.float() / temperature
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def likeliest(logits: Tensor, drawn: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """logits [B, V], B tokens with their log-probs -> the likeliest token of each row, with its log-prob at temperature
    1; that of the token itself where it is the one."""
    logits = logits.float()
    top, ids = logits.max(-1)
    result = zip(ids.tolist(), (top - logits.logsumexp(-1)).tolist(), drawn, strict=True)
    return [own if own[0] == token else (token, logprob) for token, logprob, own in result]


def plain(params: SamplingParams) -> bool:
    """From the whole distribution, or greedy?"""
    return not params.temperature or not (params.top_k or params.top_p < 1 or params.min_p)


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V], temperatures and uniforms float32 [B] -> tokens [B] int64, logprobs [B] float32. Never waits for
    the device. Logits may be overwritten."""
    if on_gpu(logits):
        return launch_sample(logits, temperatures, uniforms)
    greedy = temperatures == 0
    logits = logits.float().div_(torch.where(greedy, 1.0, temperatures)[:, None])
    best = logits.argmax(-1)
    shifted = logits.sub_(logits.amax(-1, keepdim=True))
    cumulative = shifted.exp().cumsum(-1)
    norm = cumulative[:, -1:].contiguous()
    # The first place whose cumulative sum exceeds the point; at the far end, rounding must not lead past the last
    # possible token.
    last = torch.searchsorted(cumulative, norm, right=False)
    tokens = torch.minimum(torch.searchsorted(cumulative, uniforms[:, None] * norm, right=True), last)[:, 0]
    tokens = torch.where(greedy, best, tokens).clamp(max=logits.shape[1] - 1)  # of NaN nothing is found
    return tokens, shifted.gather(1, tokens[:, None])[:, 0] - shifted.logsumexp(-1)


def launch_sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The same by one kernel that reads the logits three times and writes two numbers a row."""
    rows, words = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    triton_kernels().sample_kernel[(rows,)](
        logits.contiguous(), temperatures, uniforms, tokens, logprobs, words, BLOCK=8192, num_warps=16
    )
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
        keep &= ranked >= ranked[0] + torch.tensor(params.min_p, dtype=torch.float32).log()
    return torch.full_like(logits, float("-inf")).scatter(0, order[keep], ranked[keep])
