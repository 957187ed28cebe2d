"""A Triton kernel around `truncated`, which writes where what is kept ends."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from birl.models.sample_kernels import truncated


@triton.jit
def ends_kernel(logits_ptr, limits_ptr, result_ptr, words, BLOCK: tl.constexpr):
    """One row, at temperature 1."""
    peak = float("-inf")
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.max(tl.load(logits_ptr + at, mask=at < words, other=float("-inf")), axis=0))
    top_k = tl.load(limits_ptr).to(tl.int32)
    least, end = truncated(logits_ptr, words, 1.0, peak, top_k, tl.load(limits_ptr + 1), tl.load(limits_ptr + 2), BLOCK)
    tl.store(result_ptr, least)
    tl.store(result_ptr + 1, end.to(tl.float32))
