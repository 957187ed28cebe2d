"""Kernels check what they are given: a wrong type, length, stride or index is an exception, not a write into memory
that belongs to something else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from birl import kernels
from birl.errors import BirlError
from birl.kernels import Kernels
from birl.kernels.tensors import PAGE

ROWS, HEADS, KV_HEADS, SIZE, WIDTH, WORDS, PAGES = 6, 4, 2, 32, 64, 96, 5
SEGMENTS = [[0, 2, -1, 0, 0], [2, 2, 0, 2, 0], [4, 2, -1, 0, 1]]  # a tree with a branch, and a plain sequence


def arguments(k: Kernels) -> dict[str, list[Any]]:
    """Of each method, what it computes without complaint."""
    made = torch.Generator().manual_seed(0)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=made).to(dtype)

    def whole(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    kind = k.dtype
    x, weight, rstd = new(ROWS, WIDTH), new(WIDTH, dtype=kind), new(ROWS).exp()
    angles = new(ROWS, SIZE // 2)
    rows = new(ROWS, HEADS + 2 * KV_HEADS, SIZE, dtype=kind)
    parts = [HEADS, KV_HEADS, KV_HEADS]
    query, key, value = rows.split(parts, 1)
    grads = torch.empty_like(rows).split(parts, 1)
    out, lse = new(ROWS, HEADS * SIZE, dtype=kind), new(ROWS, HEADS)
    segments = whole(*SEGMENTS, dtype=torch.int64)
    keys, values = new(PAGES, KV_HEADS, SIZE, PAGE, dtype=kind), new(PAGES, KV_HEADS, PAGE, SIZE, dtype=kind)
    pages, places = whole(*[i % PAGES for i in range(ROWS)]), whole(*range(ROWS))
    table, lengths = whole(*[[i % PAGES, 1] for i in range(ROWS)]), whole(*[PAGE + 3] * ROWS)
    starts, shared = whole(0, 3, ROWS), whole(0, 0)
    logits, targets = new(ROWS, WORDS), whole(*range(ROWS), dtype=torch.int64)
    turned, each, uniforms = new(WORDS, ROWS), new(ROWS), torch.rand(ROWS, generator=made)
    found: dict[str, list[Any]] = {
        "rms_norm": [x, weight, 1e-6, rstd],
        "rms_norm_backward": [x, weight, rstd, new(ROWS, WIDTH, dtype=kind), x.clone(), new(ROWS, WIDTH, dtype=kind)],
        "rotary": [new(ROWS, 3 * SIZE, dtype=kind), 3, angles.cos(), angles.sin()],
        "swiglu_backward": [new(ROWS, 2 * WIDTH, dtype=kind), new(ROWS, WIDTH, dtype=kind)],
        "tree_attention": [query, key, value, segments, 0.2],
        "tree_attention_backward": [query, key, value, out, lse, out.clone(), grads, segments, 0.2],
        "cache_write": [key, value, keys, values, pages, places],
        "paged_attention": [query, keys, values, table, lengths, starts, shared, 0.2],
        "logprobs": [logits, targets, 1.0],
        "logprobs_backward": [turned, targets, 1.0, each, each.clone(), each.clone(), each.clone(), 0],
        "sample": [logits, torch.ones(ROWS), uniforms],
    }
    if kind == torch.bfloat16:
        hidden, bias = new(ROWS, WIDTH, dtype=kind), new(WORDS, dtype=kind)
        packed = k.pack([new(WORDS, WIDTH, dtype=kind)])
        found |= {
            "pack": [[new(32, WIDTH, dtype=kind), new(32, WIDTH, dtype=kind)]],
            "outer": [new(ROWS, WORDS, dtype=kind), k.pack([hidden], transposed=True), new(WORDS, WIDTH), True],
            "gemm": [hidden, packed, bias],
            "gemm_float": [hidden, packed, bias, new(ROWS, WORDS)],
            "head_logprobs": [hidden, packed, bias, targets, 1.0],
            "head_sample": [hidden, packed, bias, torch.ones(ROWS), uniforms],
        }
    return found


OTHER = {
    torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.int32: torch.int64, torch.int64: torch.int32,
}  # fmt: skip
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "another type": lambda x: x.to(OTHER[x.dtype]),
    "one fewer": lambda x: x[:-1],
    "narrower": lambda x: x[..., :-1],
    "apart": lambda x: torch.stack([x, x], -1)[..., 0],
    "without memory": lambda x: x.to("meta"),
}
#: what may have another length: the number of pages, of segments, of a weight's rows, of words, of a row's heads
FREE = {("cache_write", 2, "one fewer"), ("paged_attention", 1, "one fewer"), ("tree_attention", 3, "one fewer"),
        ("tree_attention_backward", 7, "one fewer"), ("pack", 0, "one fewer"), ("cache_write", 3, "one fewer"),
        ("logprobs_backward", 0, "one fewer"), ("gemm", 0, "one fewer"), ("rotary", 0, "narrower")}  # fmt: skip


def changed(values: list[Any], change: Callable[[Tensor], Tensor]) -> list[tuple[int, list[Any]]]:
    """The arguments, with one of their tensors changed at a time."""
    made = []
    for place, value in enumerate(values):
        inner = value if isinstance(value, list | tuple) else [value]
        for i, each in enumerate(inner):
            if isinstance(each, Tensor):
                now = [change(x) if j == i else x for j, x in enumerate(inner)]
                made.append((place, [*values[:place], now if inner is value else now[0], *values[place + 1 :]]))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHANGES)
def test_every_tensor_is_looked_at(dtype: torch.dtype, name: str) -> None:
    k = loaded(dtype)
    for method, values in arguments(k).items():
        getattr(k, method)(*values)
        for place, wrong in changed(arguments(k)[method], CHANGES[name]):
            if (method, place, name) in FREE:
                continue
            try:
                getattr(k, method)(*wrong)
            except BirlError as error:
                assert "A kernel" in str(error)
            else:
                pytest.fail(f"{method} takes argument {place} that is {name}")


def loaded(dtype: torch.dtype) -> Kernels:
    k = kernels.load(dtype, SIZE)
    if k is None:
        pytest.skip("no kernels here")
    return k


#: method, argument, what it is instead
NUMBERS: list[tuple[str, int, Any]] = [
    ("rotary", 1, 4),
    ("rotary", 1, -1),
    ("tree_attention", 3, torch.tensor([*SEGMENTS[:1], [2, 2, 0, 1, 0], SEGMENTS[2]])),  # not the prefix of its tree
    ("tree_attention", 3, torch.tensor([*SEGMENTS[:2], [4, 2, 0, 4, 1]])),  # a prefix that sees another tree
    ("paged_attention", 4, torch.full((ROWS,), 2 * PAGE + 1, dtype=torch.int32)),
    ("paged_attention", 6, torch.tensor([3, 0], dtype=torch.int32)),
    ("cache_write", 4, torch.full((ROWS,), PAGES, dtype=torch.int32)),
    ("cache_write", 5, torch.full((ROWS,), -1, dtype=torch.int32)),
    ("logprobs", 1, torch.full((ROWS,), WORDS)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "place", "wrong"), NUMBERS, ids=lambda x: str(x)[:20] if x is not None else "")
def test_numbers_that_lead_out_of_memory_are_refused(dtype: torch.dtype, method: str, place: int, wrong: Any) -> None:
    k = loaded(dtype)
    values = arguments(k)[method]
    values[place] = wrong
    with pytest.raises(BirlError, match="A kernel"):
        getattr(k, method)(*values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_do_not_go_together_are_refused(dtype: torch.dtype) -> None:
    k = loaded(dtype)
    query, key, value, segments, scale = arguments(k)["tree_attention"]
    paged = arguments(k)["paged_attention"]
    wrong: list[Callable[[], Any]] = [
        lambda: k.tree_attention(query[:, :3], key, value, segments, scale),
        lambda: k.tree_attention(query, key, value[:, :1], segments, scale),
        lambda: k.tree_attention(query, key[:, :0], value[:, :0], segments, scale),
        lambda: k.tree_attention(query, key, value, segments, scale, window=-1),
        lambda: k.paged_attention(*paged, window=-1),
        lambda: k.paged_attention(query[:, :3], *paged[1:]),
    ]
    for call in wrong:
        with pytest.raises(BirlError, match="A kernel"):
            call()


def test_weights_that_do_not_fill_their_panels_are_refused() -> None:
    k = loaded(torch.bfloat16)

    def new(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    wrong: list[Callable[[], Any]] = [
        lambda: k.pack([new(8, 32), new(16, 32)]),
        lambda: k.pack([new(16, 32), new(32, 32)], transposed=True),
        lambda: k.pack([new(32, 24)], transposed=True),
        lambda: k.pack([new(16, 32), new(32, 32)], halves=True),
        lambda: k.pack([new(16, 32)], into=k.pack([new(32, 32)])),
        lambda: k.gemm(new(2, 32), k.pack([new(24, 32)])),
        lambda: k.gemm(new(2, 48), k.pack([new(16, 48)])),
        lambda: k.swiglu(new(2, 48)),
    ]
    for call in wrong:
        with pytest.raises(BirlError, match="A kernel"):
            call()
