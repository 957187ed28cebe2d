"""Launches the kernels of sampling (`sample_kernels.py`), which read the logits once, then two numbers of each chunk
of them; with limits also the few chunks that can hold what is kept, for each step of the search."""

from typing import Any

import torch
from torch import Tensor

from birl.models.fused import power_of_two

CHUNK = 64  # tokens of which the kernels keep two numbers
BLOCK = 4096  # tokens that one program reads
SEARCHED = 4096  # tokens that a search looks at in one go


def launch_sample(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor | None, limits: Tensor | None = None,
    given: Tensor | None = None, room: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Tokens [B] int64, log-probs [B] float32, and with `room` [B, 1 + room] int32 the tokens that were kept, as
    `birl.engine.sampler.draw` gives them. A row's bits do not depend on the other rows. Tokens that are `given` [B] are
    not drawn. `room` is for rows with limits."""
    from birl.models import sample_kernels

    kernels: Any = sample_kernels  # type-checked without Triton
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
