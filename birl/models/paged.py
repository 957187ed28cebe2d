"""Paged KV cache, and attention of new tokens over it. `engine/pages.py` assigns pages to sequences; pages shared by
several sequences are stored once and, by the kernels, read once.

A slot stores the keys and values of one call of attention; most models have one slot for each layer, some call
attention several times in a layer, or run a layer several times. A page holds 32 positions. For each slot: keys [pages,
K, D, 32] (positions last: 32 scores at a time), values [pages, K, 32, D]. The CPU kernels use another order within a
page (kernels/attention.c). On a GPU keys have the shape of values, which its kernels read in order (paged_kernels.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from birl import kernels
from birl.data.support import uploaded
from birl.errors import BirlError
from birl.kernels import Kernels
from birl.kernels.tensors import PAGE
from birl.models import paged_triton
from birl.models.attention import Mutual, Variant, bias, visible
from birl.models.matrix import LastingMemory
from birl.models.states import States, Step, Stretch
from birl.models.tree_attention import Area, capped, softmax_beside, tree_attention


@dataclass(frozen=True, slots=True)
class Slot:
    """KV cache sizes of one call of attention: its layer's number, key heads, and the width of a key and a value;
    `heads` is the number of query heads, `extras` the variants that it adds to plain attention, as fields of
    `attention.Variant`. `models/slots.py` finds them from a model's layers."""

    layer: int
    heads: int
    kv_heads: int
    key: int
    value: int
    extras: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return self.kv_heads * (self.key + self.value)


@dataclass(slots=True)
class Cache:
    """The KV cache's memory. It is reserved at once, and committed by the system as pages are written. `slots_of`:
    slots of each layer, in the order of its calls."""

    keys: list[Tensor]
    values: list[Tensor]
    slots_of: dict[int, list[int]]
    states: States  # of layers with recurrent states

    @classmethod
    def make(
        cls, pages: int, slots: Sequence[Slot], dtype: torch.dtype, device: torch.device, sequences: int = 1
    ) -> "Cache":
        keys, values, memory = [], [], LastingMemory()

        def made(*shape: int, lazy: bool) -> Tensor:
            if lazy:
                return memory.take(math.prod(shape), dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=device)

        for s in slots:
            # the kernels never read unwritten memory; PyTorch's attention does, and 0 * NaN would be NaN
            plain = device.type == "cpu" and s.key == s.value and not s.extras
            lazy = plain and kernels.load(dtype, s.key) is not None
            key_page = (s.key, PAGE) if device.type == "cpu" else (PAGE, s.key)
            keys.append(made(pages, s.kv_heads, *key_page, lazy=lazy))
            values.append(made(pages, s.kv_heads, PAGE, s.value, lazy=lazy))
        slots_of: dict[int, list[int]] = {}
        for i, s in enumerate(slots):
            slots_of.setdefault(s.layer, []).append(i)
        return cls(keys, values, slots_of, States(sequences))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values)) + self.states.nbytes

    @property
    def positions_first(self) -> bool:
        """Whether the keys of a page are [32, D]."""
        return self.keys[0].device.type != "cpu"

    def in_order(self, keys: Tensor, values: Tensor, pages: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of a slot in these pages [n], by position: [K, 32 n, D]. `packed`: stored in the kernels'
        order, tiles of 16 rows (or columns) by 32, in bfloat16 in pairs (kernels/tile.h)."""
        k, v = keys[pages].transpose(0, 1), values[pages].transpose(0, 1)
        heads, n, size = k.shape[0], len(pages), v.shape[3]
        if packed:
            word = 4 // k.itemsize
            k = k.reshape(heads, n, 2, size // 32, 32 // word, 16, word).permute(0, 1, 2, 5, 3, 4, 6)
            v = v.reshape(heads, n, size // 16, 32 // word, 16, word).permute(0, 1, 3, 5, 2, 4)
        elif not self.positions_first:
            k = k.transpose(2, 3)
        return k.reshape(heads, n * PAGE, -1), v.reshape(heads, n * PAGE, -1)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages by (from, to) pairs; no page is both."""
        if not pairs:
            return
        sources, targets = uploaded(pairs, torch.int64, self.keys[0].device).unbind(1)
        for layer in (*self.keys, *self.values):
            layer.index_copy_(0, targets, layer.index_select(0, sources))


@dataclass(frozen=True)
class Paged:
    """B rows, each the next token of a sequence; several rows may belong to one sequence, in order. A row's key and
    value are written first, then it attends to every position before `lengths[b]`, its own included.

    table [B, pages], lengths [B]; rows starts[g] to starts[g + 1] have their first shared[g] pages in common.
    """

    cache: Cache
    table: Tensor
    lengths: Tensor
    starts: Tensor
    shared: Tensor
    apart: bool = False  # every row belongs to a different sequence
    rows: paged_triton.Rows = field(default_factory=paged_triton.Rows)
    masks: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)  # number of calls of each layer so far
    stretches: list[Stretch] = field(default_factory=list)  # of each sequence, for layers with a state
    states: Tensor | None = None  # [B] int64: index of each row's state, if all sequences have one; then no stretches
    mutual: Mutual | None = None

    @classmethod
    def of(cls, cache: Cache, tables: Sequence[Sequence[int]], lengths: Sequence[int], groups: Sequence[int],
           shared: Sequence[int], apart: bool = False) -> "Paged":  # fmt: skip
        """`groups`: number of rows of each group."""
        width = max(map(len, tables))
        starts = [0, *accumulate(groups)]
        own = {id(t): t for t in tables}  # a sequence's rows have the same list, long where its history is
        padded, place = [[*t, *[0] * (width - len(t))] for t in own.values()], {at: i for i, at in enumerate(own)}
        table, device = torch.tensor(padded, dtype=torch.int32)[[place[id(t)] for t in tables]], cache.keys[0].device
        rest = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths, starts, shared))
        return cls(cache, table.to(device), *rest, apart=apart)  # pyright: ignore

    @classmethod
    def repeated(
        cls, cache: Cache, tables: Sequence[Sequence[int]], counts: Sequence[int], lengths: Sequence[int]
    ) -> "Paged":
        """`of` without groups, which only the CPU kernels use: tables[i] is that of counts[i] consecutive rows."""
        device = cache.keys[0].device
        width = max(map(len, tables))
        table = uploaded([[*t, *[0] * (width - len(t))] for t in tables], torch.int32, device)
        sequence = uploaded([i for i, n in enumerate(counts) for _ in range(n)], torch.int64, device)
        firsts = [0, *accumulate(counts)][:-1]
        spans = [(row, n, lengths[row] - 1) for row, n in zip(firsts, counts, strict=True)]
        given = uploaded(lengths, torch.int32, device)
        return cls.plain(cache, table[sequence], given, paged_triton.Rows(spans))

    @classmethod
    def plain(cls, cache: Cache, table: Tensor, lengths: Tensor, rows: paged_triton.Rows | None = None) -> "Paged":
        return cls(cache, table, lengths, starts=lengths, shared=lengths, rows=rows or paged_triton.Rows())

    @cached_property
    def pages(self) -> Tensor:
        """Index of the page that each row is written to."""
        last = (self.lengths.long() - 1) // PAGE
        return self.table.gather(1, last[:, None])[:, 0].contiguous()

    @cached_property
    def places(self) -> Tensor:
        return (self.lengths - 1) % PAGE

    def slot(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Cached keys and values of this call of a layer, for new ones [T, K, D]. Raises `BirlError` if they do not
        fit."""
        slots = self.cache.slots_of.get(layer)
        if slots is None:
            known = [*self.cache.slots_of]
            raise BirlError(f"Layer {layer} calls attention, but the cache was made for the layers {known}.")
        call = self.calls.get(layer, 0)
        self.calls[layer] = (call + 1) % len(slots)
        keys, values = self.cache.keys[slots[call]], self.cache.values[slots[call]]
        size = keys.shape[3] if self.cache.positions_first else keys.shape[2]
        have, given = (keys.shape[1], size, values.shape[3]), (*key.shape[1:], value.shape[2])
        if have != given or value.shape[1] != key.shape[1]:
            raise BirlError(
                f"Layer {layer} gives keys and values of other sizes than the cache was made for: (heads, key, value) "
                f"{given} instead of {have}. birl does not support this architecture."
            )
        return keys, values

    def carry(self, layer: int, rows: Tensor, step: Step) -> Tensor:
        if self.states is not None:
            return self.cache.states.carry_next(layer, rows, self.states, step)
        return self.cache.states.carry(layer, rows, self.stretches, step)

    def attend_rows(
        self, layer: int, kernels: Kernels, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.slot(layer, key, value)
        kernels.cache_write(key, value, keys, values, self.pages, self.places)
        out = kernels.paged_attention(
            query, keys, values, self.table, self.lengths, self.starts, self.shared, scale, window
        )
        self.look_ahead(out.view(query.shape), query, (keys, values), scale, window or None, packed=True)
        return out, out

    def look_ahead(
        self, out: Tensor, query: Tensor, kept: tuple[Tensor, Tensor], scale: float, window: int | None,
        variant: Variant | None = None, packed: bool = False,
    ) -> None:  # fmt: skip
        """Recompute attention, into out [B, H, D'], for rows of bidirectional pictures: query [B, H, D]."""
        variant = variant or Variant()
        for first, count in () if self.mutual is None else self.mutual.of(window):
            end = int(self.lengths[first + count - 1])
            pages = self.table[first, : -(-end // PAGE)].long()
            keys, values = self.cache.in_order(*kept, pages, packed)
            mask = visible(count, end, window, variant.chunk, [(0, count)])
            own = Area(0, slice(0, end), bias(mask.to(query.device)), causal=False)
            rows = query[first : first + count].transpose(0, 1)
            out[first : first + count] = tree_attention(
                rows, keys[:, :end], values[:, :end], [own], scale, variant.cap, variant.sinks
            )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        variant: Variant | None = None,
    ) -> Tensor:  # fmt: skip
        """For models that use transformers' own forward."""
        rows, heads, size = query.shape[2], query.shape[1], query.shape[3]
        fits = query.device.type == "cpu" and size == value.shape[3] and variant is None
        compiled = kernels.load(query.dtype, size) if fits else None
        if compiled is not None:
            q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
            k = F.pad(k, (0, 0, 0, heads - k.shape[1])) if k.shape[1] < heads else k  # equal strides
            v = F.pad(v, (0, 0, 0, heads - v.shape[1])) if v.shape[1] < heads else v
            n = key.shape[1]
            out, _ = self.attend_rows(layer, compiled, q, k[:, :n], v[:, :n], scale, window or 0)
            return out.view(1, rows, heads, size)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        keys, values = self.slot(layer, k, v)
        if variant is None and paged_triton.usable(query, value):
            pages = paged_triton.Pages(keys, values, self.table, self.lengths)
            out = paged_triton.paged_attention(q, k, v, pages, scale, window, self.rows)
        else:
            out = self.by_torch(q, k, v, (keys, values), scale, window, variant)
        self.look_ahead(out, q, (keys, values), scale, window, variant)
        return out[None]

    def by_torch(
        self, query: Tensor, key: Tensor, value: Tensor, kept: tuple[Tensor, Tensor], scale: float, window: int | None,
        variant: Variant | None,
    ) -> Tensor:  # fmt: skip
        """query [B, H, D], key and value [B, K, D] -> [B, H, D']."""
        keys, values = kept
        rows, heads, size = query.shape
        wide = value.shape[2]
        pages, places = self.pages.long(), self.places.long()
        by_row = keys if self.cache.positions_first else keys.transpose(2, 3)
        by_row[pages, :, places] = key
        values[pages, :, places] = value
        table, kv_heads = self.table.long(), keys.shape[1]
        all_keys = by_row[table].transpose(1, 2).reshape(rows, kv_heads, -1, size)
        all_values = values[table].transpose(1, 2).reshape(rows, kv_heads, -1, wide)
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, size)
        if variant is not None:
            mask = self.mask(window, torch.float32, all_keys.shape[2], variant.chunk)
            scores = (grouped.float() * scale) @ all_keys.float().transpose(2, 3)
            scores = capped(scores, variant.cap)[0] + mask
            if variant.sinks is None:
                p = scores.softmax(-1)
            else:
                p = softmax_beside(scores, variant.sinks.float().view(kv_heads, -1, 1).expand(*scores.shape[:3], 1))
            return (p @ all_values.float()).to(value.dtype).reshape(rows, heads, wide)
        mask = self.mask(window, query.dtype, all_keys.shape[2])
        return F.scaled_dot_product_attention(grouped, all_keys, all_values, attn_mask=mask, scale=scale).reshape(
            rows, heads, wide
        )

    def mask(self, window: int | None, dtype: torch.dtype, width: int, chunk: int | None = None) -> Tensor:
        """0 where a row may attend, -inf elsewhere: [B, 1, 1, width]."""
        if (window, chunk) not in self.masks:
            column = torch.arange(width, device=self.lengths.device)
            hidden = column >= self.lengths[:, None]
            if window is not None:
                hidden |= column < self.lengths[:, None] - window
            if chunk is not None:
                hidden |= column // chunk < (self.lengths[:, None] - 1) // chunk
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self.masks[window, chunk] = mask[:, None, None]
        return self.masks[window, chunk]
