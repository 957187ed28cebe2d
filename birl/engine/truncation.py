"""Top-k, top-p and min-p: the support that a token is sampled from.

The tokens of a row are ranked by logit / temperature, equal ones by their ids. The first `top_k` are kept; of these all
tokens before which less than `top_p` of their mass lies, so one always remains; of these all with at least `min_p`
times the highest probability. The kept tokens are a prefix of the ranking. `restrict` sorts, and is the definition; on
a GPU the end of the prefix is searched (`birl/models/sample_kernels.py`): `launch_sample`, whose kernels read the
logits once, then two numbers of each chunk, and the few chunks that can hold kept tokens at each step of the search.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birl.models.fused import power_of_two, triton_kernels
from birl.types import SamplingParams

CHUNK = 64  # tokens per chunk, of which the kernels store two numbers
BLOCK = 4096  # tokens that one program reads
SEARCHED = 4096  # tokens that a search reads at once


def room_of(params: Sequence[SamplingParams]) -> int:
    """Size of the largest support that is reported for any of these rows; 0 if none is."""
    return max((p.top_k for p in params if p.told), default=0)


def limits_of(params: Sequence[SamplingParams]) -> Tensor | None:
    """[B, 3] float32 on the CPU: top_k, top_p and log min_p of each row; 0, 1 and -inf for a row without truncation.
    None if no row has any."""
    if all(p.plain for p in params):
        return None
    rows = [(0, 1, 0) if p.plain else (p.top_k, p.top_p, p.min_p) for p in params]
    result = torch.tensor(rows, dtype=torch.float32)
    result[:, 2].log_()
    return result


def restrict(logits: Tensor, limits: Tensor) -> Tensor:
    """Set the logits of tokens that are not kept to -inf. logits [B, V], after temperature; limits [B, 3], or [1, 3]
    for all rows. Never synchronises with the device."""
    top_k, top_p, min_p = limits.T.unsqueeze(-1)
    order = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = logits.gather(-1, order)
    keep = (torch.arange(logits.shape[1], device=logits.device) < top_k) | (top_k == 0)
    probability = ranked.where(keep, float("-inf")).softmax(-1)
    keep = keep & ((probability.cumsum(-1) - probability < top_p) | (top_p == 1))  # with [1, 3] limits it was [1, V]
    keep &= ranked >= ranked[:, :1] + min_p
    return torch.empty_like(logits).scatter_(-1, order, ranked.where(keep, float("-inf")))


def kept(logits: Tensor, room: int) -> Tensor:
    """Output of `restrict` [B, V] -> [B, 1 + room] int32: number of kept tokens, and their ids in rising order. A row
    with more than `room` only has the number. Never synchronises with the device."""
    left = logits > float("-inf")
    place = left.cumsum(-1, dtype=torch.int32)
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device).expand(logits.shape)
    result = torch.zeros(len(logits), room + 2, dtype=torch.int32, device=logits.device)
    # the others are written to the last column, which is dropped
    result.scatter_(1, place.where(left & (place <= room), room + 1).to(torch.int64), ids)
    result[:, 0] = place[:, -1]
    return result[:, : room + 1]


def supports(kept: Tensor | None, params: Sequence[SamplingParams]) -> list[NDArray[np.int32] | None]:
    """[B, 1 + room] -> support of each row's token; None if it is the whole vocabulary, or not requested."""
    if kept is None:
        return [None] * len(params)
    rows = zip(kept.cpu().numpy(), params, strict=True)
    return [row[1 : 1 + row[0]].copy() if p.told else None for row, p in rows]


def launch_sample(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor | None, limits: Tensor | None = None,
    given: Tensor | None = None, room: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Tokens [B] int64, log-probs [B] float32, and with `room` [B, 1 + room] int32 the kept tokens, as returned by
    `birl.engine.sampler.draw`. A row's bits do not depend on other rows. `given` tokens [B] are only scored, not
    sampled. `room` is for rows with limits."""
    kernels = triton_kernels("sample")
    rows, vocab = logits.shape
    where, chunks = logits.device, -(-vocab // CHUNK)
    logits, every = logits.contiguous(), max(16, power_of_two(chunks))
    warps = 8 if every > 1024 else 4
    tokens = torch.empty(rows, dtype=torch.int64, device=where) if given is None else given
    logprobs = torch.empty(rows, dtype=torch.float32, device=where)
    peaks, masses = (torch.empty(rows, chunks, dtype=torch.float32, device=where) for _ in range(2))
    kernels.chunks_kernel[(rows, -(-vocab // BLOCK))](
        logits, temperatures, peaks, masses, vocab, chunks, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8
    )
    floats, counts, left = logprobs, tokens, None
    if limits is not None:
        own = torch.empty(rows, chunks, dtype=torch.int32, device=where)
        floats = torch.empty(rows, 3, dtype=torch.float32, device=where)
        counts = torch.empty(rows, 2, dtype=torch.int32, device=where)
        limits = limits.contiguous()
        kernels.bound_kernel[(rows,)](
            limits, peaks, masses, own, floats, counts, vocab, chunks, CHUNK=CHUNK, CHUNKS=every, num_warps=warps
        )
        kernels.ends_kernel[(rows,)](
            logits, temperatures, limits, peaks, masses, own, floats, counts, vocab, chunks,
            CHUNK=CHUNK, BLOCK=SEARCHED, num_warps=16,
        )  # fmt: skip
        if room:
            left = torch.zeros(rows, room + 1, dtype=torch.int32, device=where)
            kernels.tell_kernel[(rows,)](
                logits, temperatures, own, floats, counts, left, vocab, chunks, room,
                CHUNK=CHUNK, BLOCK=SEARCHED, num_warps=16,
            )  # fmt: skip
    kernels.sample_kernel[(rows,)](
        logits, temperatures, temperatures if uniforms is None else uniforms, peaks, masses, floats, counts, tokens,
        logprobs, vocab, chunks, LIMITS=limits is not None, GIVEN=given is not None, CHUNK=CHUNK, CHUNKS=every,
        num_warps=warps,
    )  # fmt: skip
    return tokens, logprobs, left
