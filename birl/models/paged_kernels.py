"""Triton kernels for decoding over pages. `paged_triton.py` calls them; imported only where Triton is.

Cache: keys and values [pages, K, PAGE, D] each. One program takes one row, one key head with its G query heads, and
`SPLIT` positions; a second kernel combines the splits. How a row is split depends on its own length alone, so its bits
do not depend on what else is in the batch.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def write_kernel(
    key_ptr, value_ptr, keys_ptr, values_ptr, table_ptr, length_ptr, key_stride, value_stride, table_stride,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A row's new key and value go to position length - 1."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(length_ptr + row) - 1
    page = tl.load(table_ptr + row * table_stride + position // PAGE).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D)[None, :]
    inside = (head < KV_HEADS) & (d < D)
    target = ((page * KV_HEADS + head) * PAGE + position % PAGE) * D + d
    key = tl.load(key_ptr + row * key_stride + head * D + d, mask=inside, other=0.0)
    value = tl.load(value_ptr + row * value_stride + head * D + d, mask=inside, other=0.0)
    tl.store(keys_ptr + target, key, mask=inside)
    tl.store(values_ptr + target, value, mask=inside)


@triton.jit
def attend_kernel(
    query_ptr, keys_ptr, values_ptr, table_ptr, length_ptr, part_ptr, top_ptr, sum_ptr, query_stride, table_stride,
    splits, scale, window,
    KV_HEADS: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Unnormalised attention over one split: part [rows, H, splits, D], top and sum [rows, H, splits] float32."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_ptr + row)
    first = split * SPLIT
    if first < length:
        g = tl.arange(0, GROUP)
        d = tl.arange(0, D)
        head = kv_head * G + g
        query = tl.load(
            query_ptr + row * query_stride + head[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0
        )
        top = tl.full([GROUP], float("-inf"), dtype=tl.float32)
        total = tl.zeros([GROUP], dtype=tl.float32)
        part = tl.zeros([GROUP, D], dtype=tl.float32)
        for start in range(first, tl.minimum(first + SPLIT, length), BLOCK):
            n = start + tl.arange(0, BLOCK)
            inside = n < length
            page = tl.load(table_ptr + row * table_stride + n // PAGE, mask=inside, other=0).to(tl.int64)
            at = ((page * KV_HEADS + kv_head) * PAGE + n % PAGE)[:, None] * D + d[None, :]
            key = tl.load(keys_ptr + at, mask=inside[:, None], other=0.0)
            value = tl.load(values_ptr + at, mask=inside[:, None], other=0.0)
            seen = inside & (n >= length - window)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            score = tl.where(seen[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)  # a block wholly outside of the window
            p = tl.exp(score - safe[:, None])
            old = tl.exp(top - safe)
            total = total * old + tl.sum(p, axis=1)
            part = part * old[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
            top = higher
        place = (row * KV_HEADS * G + head) * splits + split
        tl.store(part_ptr + place[:, None] * D + d[None, :], part, mask=(g < G)[:, None])
        tl.store(top_ptr + place, top, mask=g < G)
        tl.store(sum_ptr + place, total, mask=g < G)


@triton.jit
def combine_kernel(
    part_ptr, top_ptr, sum_ptr, length_ptr, out_ptr, splits, HEADS: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr
):
    """The splits of one row and head -> out [rows, H, D]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    used = tl.cdiv(tl.load(length_ptr + row), SPLIT)
    base = (row * HEADS + head) * splits
    top = float("-inf")
    total = 0.0
    out = tl.zeros([D], dtype=tl.float32)
    for split in range(0, used):
        here = tl.load(top_ptr + base + split)
        higher = tl.maximum(top, here)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        old = tl.exp(top - safe)
        new = tl.exp(here - safe)
        total = total * old + tl.load(sum_ptr + base + split) * new
        out = out * old + tl.load(part_ptr + (base + split) * D + d) * new
        top = higher
    tl.store(out_ptr + (row * HEADS + head) * D + d, (out / total).to(out_ptr.dtype.element_ty))
