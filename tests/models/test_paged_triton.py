"""Attention over pages by the Triton kernels: on a GPU, or in Triton's interpreter (`make check-gpu`)."""

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from birl.kernels.tensors import PAGE
from birl.models import paged, paged_triton, varlen
from birl.models.paged import Cache, Paged, Slot
from birl.models.paged_triton import SCRATCH, Pages, Rows, Tiling
from birl.models.states import States
from tests.models.test_fused import CUDA, DEVICE, triton
from tests.models.test_varlen import reference

#: first row, rows, position of the first: decoding, a fresh prompt, a chunk behind a context, decoding, a short chunk
SPANS = [(0, 1, 399), (1, 37, 0), (38, 41, 70), (79, 1, 0), (80, 2, 31)]
Spans = Sequence[tuple[int, int, int]]


def case(spans: Spans, heads: int, kv_heads: int, size: int, wide: int) -> tuple[list[Tensor], Pages]:
    """Queries, keys and values of the rows of these spans, and a cache in which each sequence has pages of its own."""
    generator = torch.Generator().manual_seed(0)
    width = max(start + n for _, n, start in spans) // PAGE + 1
    order = torch.randperm(len(spans) * width, generator=generator).view(len(spans), width).int()
    table = order.repeat_interleave(torch.tensor([n for _, n, _ in spans]), 0)
    lengths = torch.tensor([start + i + 1 for _, n, start in spans for i in range(n)], dtype=torch.int32)
    new = [torch.randn(len(table), h, s, generator=generator) for h, s in
           ((heads, size), (kv_heads, size), (kv_heads, wide))]  # fmt: skip
    keys, values = (torch.randn(order.numel(), kv_heads, PAGE, s, generator=generator) for s in (size, wide))
    return new, Pages(keys, values, table, lengths)


def attention(new: Sequence[Tensor], pages: Pages, scale: float, window: int | None, rows: Rows) -> Tensor:
    query, key, value = (x.to(DEVICE) for x in new)
    return paged_triton.paged_attention(query, key, value, pages, scale, window, rows)


def expected(new: Sequence[Tensor], pages: Pages, scale: float, window: int | None) -> Tensor:
    """By the definition, in float64. Writes to the cache, too."""
    query, key, value = new
    group = query.shape[1] // key.shape[1]
    page, place = pages.table.gather(1, ((pages.lengths - 1) // PAGE).long()[:, None])[:, 0], (pages.lengths - 1) % PAGE
    pages.keys[page, :, place], pages.values[page, :, place] = key, value
    result = []
    for row, length in enumerate(pages.lengths.tolist()):
        n = torch.arange(0 if window is None else max(0, length - window), length)
        k, v = (
            s[pages.table[row, n // PAGE].long(), :, n % PAGE].double().repeat_interleave(group, 1)
            for s in (pages.keys, pages.values)
        )  # fmt: skip
        p = (torch.einsum("hd,nhd->hn", query[row].double(), k) * scale).softmax(-1)
        result.append(torch.einsum("hn,nhd->hd", p, v))
    return torch.stack(result)


def there(pages: Pages, kind: torch.dtype) -> Pages:
    keys, values = (x.to(DEVICE, kind, copy=True) for x in (pages.keys, pages.values))
    return Pages(keys, values, pages.table.to(DEVICE), pages.lengths.to(DEVICE))


@triton
@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        ((4, 2, 16, 16), None), ((4, 2, 16, 16), 5), ((4, 2, 16, 16), 300), ((3, 1, 32, 32), 5), ((7, 1, 80, 80), None),
        ((2, 2, 96, 96), 300), ((2, 2, 24, 16), None),
    ],
)  # fmt: skip
def test_attention_over_pages(sizes: tuple[int, int, int, int], window: int | None) -> None:
    new, pages = case(SPANS, *sizes)
    ours = there(pages, torch.float32)
    result = attention(new, ours, 0.3, window, Rows(SPANS))
    torch.testing.assert_close(result.cpu().double(), expected(new, pages, 0.3, window), atol=1e-5, rtol=1e-4)
    assert (ours.keys.cpu() == pages.keys).all() and (ours.values.cpu() == pages.values).all()


@triton
def test_in_halves_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiles of bfloat16, which the interpreter cannot multiply."""
    new, pages = case(SPANS, 4, 1, 80, 80)
    new = [x.half().float() for x in new]
    pages = Pages(pages.keys.half().float(), pages.values.half().float(), pages.table, pages.lengths)
    exact = expected(new, pages, 0.1, None)
    of = Tiling.of
    for scratch, split in ((SCRATCH, 256), (1, 64)):
        monkeypatch.setattr(paged_triton, "SCRATCH", scratch)
        monkeypatch.setattr(Tiling, "of", lambda *sizes, n=split, **kind: replace(of(*sizes, **kind), split=n))
        result = attention([x.half() for x in new], there(pages, torch.half), 0.1, None, Rows(SPANS))
        torch.testing.assert_close(result.cpu().double(), exact, atol=3e-3, rtol=3e-3)


@triton
def test_a_fresh_prompt_is_left_to_varlen_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "takes", lambda query, value: True)
    monkeypatch.setattr(varlen, "flash", reference)
    new, pages = case(SPANS, 4, 2, 16, 16)
    taken: list[int] = []
    attend = paged_triton.attend
    monkeypatch.setattr(
        paged_triton, "attend", lambda tiles, *rest: (taken.extend(tiles[:, 0].tolist()), attend(tiles, *rest))
    )
    for window in (None, 5):
        result = attention(new, there(pages, torch.float32), 0.3, window, Rows(SPANS))
        torch.testing.assert_close(result.cpu().double(), expected(new, pages, 0.3, window), atol=1e-5, rtol=1e-4)
    assert not set(taken) & set(range(1, 38)) and set(taken) == {0, 38, 54, 70, 79, 80}


@triton
@pytest.mark.skipif(CUDA, reason="counted in Triton's interpreter")
def test_a_tile_reads_its_context_once() -> None:
    spans = [(0, 40, 100)]
    new, pages = case(spans, 4, 2, 16, 16)
    one = sum(x[0, :, 0].nbytes for x in (pages.keys, pages.values))  # of a position
    with counting(pages.keys, pages.values) as alone:
        attention(new, pages, 0.3, None, Rows())
    assert sum(alone) == one * sum(range(101, 141))
    with counting(pages.keys, pages.values) as tiled:
        attention(new, pages, 0.3, None, Rows(spans))
    assert sum(tiled) == one * (116 + 132 + 140)  # 16 rows a tile: its last row's context
    with counting(pages.keys, pages.values) as windowed:
        attention(new, pages, 0.3, 10, Rows(spans))
    assert sum(windowed) == one * (116 - 64 + 132 - 64 + 140 - 64)  # from the block on in which the window begins


@contextmanager
def counting(*stores: Tensor) -> Iterator[list[int]]:
    """Bytes that kernels load from these tensors, load by load."""
    from triton.runtime.interpreter import InterpreterBuilder  # pyright: ignore[reportMissingImports]

    counted: list[int] = []
    load = InterpreterBuilder.create_masked_load

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        at = ptrs.data[mask.data]
        for x in stores:
            counted.append(int(((at >= x.data_ptr()) & (at < x.data_ptr() + x.nbytes)).sum()) * x.element_size())
        return load(self, ptrs, mask, *rest)

    InterpreterBuilder.create_masked_load = create_masked_load
    try:
        yield counted
    finally:
        InterpreterBuilder.create_masked_load = load


@triton
@pytest.mark.parametrize("slot", [Slot(0, 4, 4, 96, 96), Slot(0, 4, 4, 24, 16)])
def test_a_layer_over_the_cache_of_a_gpu(monkeypatch: pytest.MonkeyPatch, slot: Slot) -> None:
    monkeypatch.setattr(paged.kernels, "load", lambda *kind: None)
    monkeypatch.setattr(Cache, "positions_first", property(lambda cache: True))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 43, s, generator=generator) for s in (slot.key, slot.key, slot.value))
    results = []
    for by_kernel in (False, True):
        monkeypatch.setattr(paged_triton, "usable", lambda query, value, on=by_kernel: on)
        keys, values = (torch.zeros(4, 4, PAGE, s, device=DEVICE) for s in (slot.key, slot.value))
        cache = Cache([keys], [values], {0: [0]}, States(1))
        layout = Paged.repeated(cache, [[2, 1], [3]], [40, 3], [*range(1, 41), *range(1, 4)])
        results.append(layout.attend(0, q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), 0.2, None))
    assert layout.rows.spans == [(0, 40, 0), (40, 3, 0)]
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("alone", [True, False])
def test_scratch_is_bounded(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """Llama 8B, 2,048 rows, 128k positions: 17 GB if every row had its own."""
    largest: list[int] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: largest.append(
                max(x.numel() for x in given if isinstance(x, Tensor) and x.dtype == torch.float32)
            )

    fake: Any = types.ModuleType("birl.models.paged_kernels")
    fake.write_kernel = type("", (), {"__getitem__": lambda self, grid: lambda *given, **options: None})()
    fake.attend_kernel = fake.combine_kernel = Kernel()
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr("birl.models.paged_kernels", fake, raising=False)
    with torch.device("meta"):
        q, k = torch.empty(2048, 32, 128), torch.empty(2048, 8, 128)
        keys, table = torch.empty(4, 8, PAGE, 128), torch.empty(2048, 4096, dtype=torch.int32)
    q, k, keys = q.bfloat16(), k.bfloat16(), keys.bfloat16()
    pages = Pages(keys, keys, table, table[:, 0])
    paged_triton.paged_attention(q, k, k, pages, 0.1, None, Rows() if alone else Rows([(0, 2048, 129_000)]))
    assert 0 < max(largest) <= SCRATCH
