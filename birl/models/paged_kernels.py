"""Triton kernels of paged attention. `paged_triton.py` calls them; imported only if Triton is installed.

Cache: keys [pages, K, PAGE, D], values [pages, K, PAGE, E]. One program processes one tile (consecutive rows of one
sequence, or a single row), one key head with its G query heads, and `SPLIT` positions; a second kernel combines the
splits. Blocks of positions are the same for every row, and one that a row does not attend to changes nothing: a row's
bits depend only on its own length and the kind of its tile, not on the rest of the batch.

`DP`, `EP`: D and E rounded up to powers of two; elements beyond D and E are read as 0.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def write_kernel(
    key_ptr, value_ptr, keys_ptr, values_ptr, table_ptr, length_ptr, key_stride, value_stride, table_stride,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Write a row's new keys and values of HEADS heads to position length - 1."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(length_ptr + row) - 1
    page = tl.load(table_ptr + row * table_stride + position // PAGE).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    place = (page * KV_HEADS + head) * PAGE + position % PAGE
    d = tl.arange(0, DP)[None, :]
    e = tl.arange(0, EP)[None, :]
    by_key = (head < KV_HEADS) & (d < D)
    by_value = (head < KV_HEADS) & (e < E)
    key = tl.load(key_ptr + row * key_stride + head * D + d, mask=by_key, other=0.0)
    value = tl.load(value_ptr + row * value_stride + head * E + e, mask=by_value, other=0.0)
    tl.store(keys_ptr + place * D + d, key, mask=by_key)
    tl.store(values_ptr + place * E + e, value, mask=by_value)


@triton.jit
def attend_kernel(
    query_ptr, keys_ptr, values_ptr, table_ptr, length_ptr, tile_ptr, part_ptr, top_ptr, sum_ptr, query_stride,
    table_stride, splits, scale, window,
    KV_HEADS: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Unnormalised attention over one split: part [tiles, TILE, H, splits, E], top and sum [tiles, TILE, H, splits]
    float32. Tile: its first row and its number of rows, at most TILE. Row m of the product is query head m % G of row m
    // G."""
    tile = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start_row = tl.load(tile_ptr + 2 * tile).to(tl.int64)
    count = tl.load(tile_ptr + 2 * tile + 1)
    shortest = tl.load(length_ptr + start_row)
    longest = tl.load(length_ptr + start_row + count - 1)
    first = split * SPLIT
    if first < longest:
        m = tl.arange(0, M)
        real = m // G < count
        row = start_row + m // G
        head = kv_head * G + m % G
        d = tl.arange(0, DP)
        e = tl.arange(0, EP)
        length = tl.load(length_ptr + row, mask=real, other=0)
        query_at = row[:, None] * query_stride + head[:, None] * D + d[None, :]
        query = tl.load(query_ptr + query_at, mask=real[:, None] & (d < D)[None, :], other=0.0)
        top = tl.full([M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([M], dtype=tl.float32)
        part = tl.zeros([M, EP], dtype=tl.float32)
        begin = tl.maximum(first, tl.maximum(shortest - window, 0) // BLOCK * BLOCK)
        for start in range(begin, tl.minimum(first + SPLIT, longest), BLOCK):
            n = start + tl.arange(0, BLOCK)
            inside = n < longest
            page = tl.load(table_ptr + start_row * table_stride + n // PAGE, mask=inside, other=0).to(tl.int64)
            at = ((page * KV_HEADS + kv_head) * PAGE + n % PAGE)[:, None]
            if D == DP:
                key = tl.load(keys_ptr + at * D + d[None, :], mask=inside[:, None], other=0.0)
            else:
                key = tl.load(keys_ptr + at * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
            if E == EP:
                value = tl.load(values_ptr + at * E + e[None, :], mask=inside[:, None], other=0.0)
            else:
                value = tl.load(values_ptr + at * E + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
            seen = (n[None, :] < length[:, None]) & (n[None, :] >= length[:, None] - window)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)  # the row attends to nothing in this block
            p = tl.exp(score - safe[:, None])
            old = tl.exp(top - safe)
            total = total * old + tl.sum(p, axis=1)
            part = part * old[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
            top = higher
        place = ((tile * TILE + m // G) * KV_HEADS * G + head) * splits + split
        tl.store(part_ptr + place[:, None] * E + e[None, :], part, mask=real[:, None] & (e < E)[None, :])
        tl.store(top_ptr + place, top, mask=real)
        tl.store(sum_ptr + place, total, mask=real)


@triton.jit
def combine_kernel(
    part_ptr, top_ptr, sum_ptr, length_ptr, tile_ptr, out_ptr, splits, window,
    HEADS: tl.constexpr, TILE: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row and head -> out [rows, H, E]."""
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    tile = place // TILE
    token = place % TILE
    if token < tl.load(tile_ptr + 2 * tile + 1):
        row = tl.load(tile_ptr + 2 * tile) + token
        length = tl.load(length_ptr + row)
        e = tl.arange(0, EP)
        base = (place * HEADS + head) * splits
        top = float("-inf")
        total = 0.0
        out = tl.zeros([EP], dtype=tl.float32)
        for split in range(tl.maximum(length - window, 0) // SPLIT, tl.cdiv(length, SPLIT)):
            here = tl.load(top_ptr + base + split)
            higher = tl.maximum(top, here)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            old = tl.exp(top - safe)
            new = tl.exp(here - safe)
            total = total * old + tl.load(sum_ptr + base + split) * new
            out = out * old + tl.load(part_ptr + (base + split) * E + e, mask=e < E, other=0.0) * new
            top = higher
        tl.store(out_ptr + (row * HEADS + head) * E + e, (out / total).to(out_ptr.dtype.element_ty), mask=e < E)
