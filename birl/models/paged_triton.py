"""Attention of new tokens over a cache of pages, on a GPU: two Triton kernels (`paged_kernels.py`).

PyTorch's `varlen_attn` takes a block table since 2.13, but with its own FlashAttention 2 only pages of 256 positions or
none at all; these kernels take birl's pages of 32 and every PyTorch from 2.11 on.
"""

from typing import Any

import torch
from torch import Tensor

from birl.errors import BirlError
from birl.kernels import PAGE
from birl.models.fused import has_triton, power_of_two

SPLIT = 256  # positions of one program
BLOCK = 64  # positions of one step of it


def usable(query: Tensor) -> bool:
    """query [..., D]: does the kernel take it?"""
    size = query.shape[-1]
    return query.is_cuda and has_triton() and size == power_of_two(size) and 16 <= size <= 256


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Write each row's key and value to its last position, then attend to everything before `lengths`.

    query [B, H, D], key and value [B, K, D] (heads adjacent in memory, rows at any distance), keys and values
    [pages, K, PAGE, D], table int32 [B, width], lengths int32 [B] -> [B, H, D].
    """
    from birl.models import paged_kernels

    kernels: Any = paged_kernels  # type-checked without Triton
    rows, heads, size = query.shape
    kv_heads = key.shape[1]
    if keys.shape[1:] != (kv_heads, PAGE, size) or values.shape != keys.shape or value.shape != key.shape:
        raise BirlError(
            f"A kernel was given keys {list(key.shape)} and values {list(value.shape)} for cache pages "
            f"{list(keys.shape)}, {list(values.shape)}."
        )
    group = heads // kv_heads
    splits = -(-table.shape[1] * PAGE // SPLIT)
    query, key, value = (x if x.stride(1) == size and x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    kernels.write_kernel[(rows,)](
        key, value, keys, values, table, lengths, key.stride(0), value.stride(0), table.stride(0),
        KV_HEADS=kv_heads, HEADS=power_of_two(kv_heads), PAGE=PAGE, D=size, num_warps=1,
    )  # fmt: skip
    part = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=query.device)
    top, total = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=query.device).unbind()
    kernels.attend_kernel[(rows, kv_heads, splits)](
        query, keys, values, table, lengths, part, top, total, query.stride(0), table.stride(0), splits, scale,
        2**30 if window is None else window,
        KV_HEADS=kv_heads, G=group, GROUP=max(power_of_two(group), 16), PAGE=PAGE, D=size, SPLIT=SPLIT, BLOCK=BLOCK,
        num_warps=4, num_stages=3 if size <= 128 else 2,
    )  # fmt: skip
    out = torch.empty(rows, heads, size, dtype=query.dtype, device=query.device)
    kernels.combine_kernel[(rows, heads)](
        part, top, total, lengths, out, splits, HEADS=heads, D=size, SPLIT=SPLIT, num_warps=1
    )
    return out
