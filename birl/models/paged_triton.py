"""Attention of new tokens over a paged KV cache, on a GPU: Triton kernels (`paged_kernels.py`), and FlashAttention for
prompts that have nothing in the cache yet.

In decode each row reads the context of its own sequence. In prefill consecutive rows of one sequence are processed in
tiles, whose context is read once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from birl.data.support import uploaded
from birl.errors import BirlError
from birl.kernels.tensors import PAGE
from birl.models import varlen
from birl.models.fused import has_triton, power_of_two, triton_kernels

SCRATCH = 2**24  # float32 elements of one launch's partial results, unless two tiles need more
WRITTEN = 8  # heads that one program writes


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one launch of the kernel divides its work, by head sizes and dtype: keys and values of a step fit 64 KiB of
    shared memory, the smallest of the GPUs that `make check-gpu` compiles for."""

    tile: int  # rows
    lines: int  # of the product: rows x query heads of a key head, rounded up
    split: int  # positions of a program
    block: int  # positions of a step
    warps: int
    stages: int

    @classmethod
    def of(cls, group: int, size: int, wide: int, bytes_: int, single: bool) -> "Tiling":
        width = max(padded(size), padded(wide))
        if single:
            lines = 16
        elif bytes_ == 4:
            lines = 32
        else:
            lines = 128 if width <= 128 else 64
        lines = max(lines, power_of_two(group))
        room = 16_384 if bytes_ == 2 else 8_192  # bytes of keys: float32 is multiplied in registers
        block = max(min(64, room // (width * bytes_)), 16)
        warps = 8 if lines * width * bytes_ >= 16_384 else 4
        stages = 3 if single and width <= 128 else 2
        return cls(1 if single else lines // group, lines, 256 if single else 4096, block, warps, stages)


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows are consecutive in a sequence. `spans`: first row, number of rows, and position of the first, of each
    sequence; None: every row is a sequence of its own."""

    spans: Sequence[tuple[int, int, int]] | None = None
    made: dict[Any, Any] = field(default_factory=dict)

    def singles(self, lengths: Tensor) -> Tensor | None:
        """Tiles (first row, rows) of one row: int32 [n, 2]."""
        if self.spans is not None:
            return self._tiles("singles", ((row, 1) for row, count, _ in self.spans if count == 1), lengths.device)
        if "singles" not in self.made:
            row = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
            self.made["singles"] = torch.stack([row, torch.ones_like(row)], 1)
        return self.made["singles"]

    def tiles(self, size: int, fresh: bool, device: torch.device) -> Tensor | None:
        """Tiles of at most `size` rows; of prompts without a context only if `fresh`."""
        spans = ((row, n) for row, n, start in self.spans or () if n > 1 and (fresh or start))
        pieces = ((row + i, min(size, n - i)) for row, n in spans for i in range(0, n, size))
        return self._tiles((size, fresh), pieces, device)

    def fresh(self, device: torch.device) -> tuple[Tensor, varlen.Segments] | None:
        """Row numbers of the prompts without a context, int64 [n], and their segments."""
        if "fresh" not in self.made:
            self.made["fresh"] = None
            spans = [range(row, row + n) for row, n, start in self.spans or () if n > 1 and not start]
            if spans:
                rows = uploaded([i for span in spans for i in span], torch.int64, device)
                cut = varlen.cut([(len(span), [span]) for span in spans], device, gathered=False)
                self.made["fresh"] = (rows, cut)
        return self.made["fresh"]

    def _tiles(self, key: Any, pieces: Iterable[tuple[int, int]], device: torch.device) -> Tensor | None:
        if key not in self.made:
            listed = [*pieces]
            self.made[key] = uploaded(listed, torch.int32, device) if listed else None
        return self.made[key]


@dataclass(frozen=True, slots=True)
class Pages:
    """Inputs of the kernels beside queries: keys [pages, K, PAGE, D], values [pages, K, PAGE, E], page table int32 [B,
    width], lengths int32 [B]."""

    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor


def usable(query: Tensor, value: Tensor) -> bool:
    """query [..., D], value [..., E]: whether the kernels support them. Tiles of 16-bit types need up to 96 KiB of
    shared memory, and a T4 has 64."""
    if not (query.is_cuda and has_triton() and max(query.shape[-1], value.shape[-1]) <= 256):
        return False
    return query.dtype == torch.float32 or torch.cuda.get_device_capability(query.device) >= (8, 0)


def padded(size: int) -> int:
    return max(power_of_two(size), 16)


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, pages: Pages, scale: float, window: int | None, rows: Rows
) -> Tensor:
    """Write each row's key and value to its last position, then attend to everything before its length.

    query [B, H, D], key [B, K, D], value [B, K, E] (heads adjacent in memory, rows at any distance) -> [B, H, E].
    """
    heads, size, wide = query.shape[1], query.shape[2], value.shape[2]
    fits = all(x.shape[1:] == (y.shape[1], PAGE, y.shape[2]) for x, y in ((pages.keys, key), (pages.values, value)))
    if not fits or key.shape[1:] != (value.shape[1], size):
        raise BirlError(
            f"A kernel was given keys {list(key.shape)} and values {list(value.shape)} for cache pages "
            f"{list(pages.keys.shape)}, {list(pages.values.shape)}."
        )
    query, key, value = (
        x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous() for x in (query, key, value)
    )
    write(key, value, pages)
    out = torch.empty(len(query), heads, wide, dtype=query.dtype, device=query.device)
    fresh = None
    if varlen.takes(query, value):
        fresh = rows.fresh(query.device)
    if fresh is not None:
        index, cut = fresh
        q, k, v = (x.index_select(0, index) for x in (query, key, value))
        out.index_copy_(0, index, varlen.attend(cut, q, k, v, scale, window))
    group, bytes_ = heads // key.shape[1], query.element_size()
    single, several = (Tiling.of(group, size, wide, bytes_, single=s) for s in (True, False))
    for tiles, tiling in (
        (rows.singles(pages.lengths), single),
        (rows.tiles(several.tile, fresh is None, query.device), several),
    ):
        if tiles is not None:
            attend(tiles, tiling, query, pages, scale, window, out)
    return out


def write(key: Tensor, value: Tensor, pages: Pages) -> None:
    rows, kv_heads, size = key.shape
    wide, written = value.shape[2], min(power_of_two(kv_heads), WRITTEN)
    triton_kernels("paged").write_kernel[(rows, -(-kv_heads // written))](
        key, value, pages.keys, pages.values, pages.table, pages.lengths, key.stride(0), value.stride(0),
        pages.table.stride(0),
        KV_HEADS=kv_heads, HEADS=written, PAGE=PAGE, D=size, DP=padded(size), E=wide, EP=padded(wide), num_warps=1,
    )  # fmt: skip


def attend(
    tiles: Tensor, tiling: Tiling, query: Tensor, pages: Pages, scale: float, window: int | None, out: Tensor
) -> None:
    """Compute the rows of these tiles into out [B, H, E], in as many launches as `SCRATCH` requires."""
    kernels = triton_kernels("paged")
    heads, size, wide, kv_heads = query.shape[1], query.shape[2], out.shape[2], pages.keys.shape[1]
    splits = -(-pages.table.shape[1] * PAGE // tiling.split)
    # even, so that each launch's first tile is 16-byte aligned, as the compiled kernel assumes
    step = max(SCRATCH // (tiling.tile * heads * splits * wide) // 2 * 2, 2)
    for piece in tiles.split(step):
        shape = (len(piece), tiling.tile, heads, splits)
        part = torch.empty(*shape, wide, dtype=torch.float32, device=query.device)
        top, total = torch.empty(2, *shape, dtype=torch.float32, device=query.device).unbind()
        reach = 2**30 if window is None else window
        kernels.attend_kernel[(len(piece), kv_heads, splits)](
            query, pages.keys, pages.values, pages.table, pages.lengths, piece, part, top, total, query.stride(0),
            pages.table.stride(0), splits, scale, reach,
            KV_HEADS=kv_heads, G=heads // kv_heads, TILE=tiling.tile, M=tiling.lines, PAGE=PAGE, D=size,
            DP=padded(size), E=wide, EP=padded(wide), SPLIT=tiling.split, BLOCK=tiling.block,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
        kernels.combine_kernel[(len(piece) * tiling.tile, heads)](
            part, top, total, pages.lengths, piece, out, splits, reach,
            HEADS=heads, TILE=tiling.tile, E=wide, EP=padded(wide), SPLIT=tiling.split, num_warps=1,
        )  # fmt: skip
