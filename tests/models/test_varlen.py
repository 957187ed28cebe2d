"""The segments and the gather of the CUDA path, with FlashAttention written out in plain PyTorch in its place."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from birl.data.trees import Tree
from birl.models import fused, varlen
from birl.models.attention import Packed
from birl.models.tree_attention import tree_attention
from tests.gpu.card import CUDA as CUDA_0
from tests.gpu.card import card
from tests.models.test_fused import DEVICE, triton

ROWS = {
    "plain": [Tree.of(7), Tree.of(1), Tree.of(5)],
    "trees": [Tree.of(5, (4, 3, 1)), Tree.of(6), Tree.of(3, (2, 2))],
    "deep": [Tree.of(3, ((2, (4, (1, (5, 2)))), 6)), Tree.of(4)],
    "one branch is a plain sequence": [Tree.of(4, (3,)), Tree.of(2, (1, 6))],
    "no prefix, empty branches": [Tree.of(0, (4, 3)), Tree.of(3, (0, 2, 5))],
}


def reference(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """What torch.nn.attention.varlen documents, masks aligned bottom-right as in FlashAttention from 2.1 on."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    groups = query.shape[1] // key.shape[1]
    outputs, q_starts, k_starts = [], cu_seq_q.tolist(), cu_seq_k.tolist()
    assert len(q_starts) == len(k_starts) and q_starts[-1] == len(query) and k_starts[-1] == len(key)
    assert max_q == max(b - a for a, b in pairwise(q_starts))
    assert max_k == max(b - a for a, b in pairwise(k_starts))
    for i in range(len(q_starts) - 1):
        q, k, v = query[q_starts[i] : q_starts[i + 1]], *(x[k_starts[i] : k_starts[i + 1]] for x in (key, value))
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        place = torch.arange(len(q))[:, None] + len(k) - len(q)
        column = torch.arange(len(k))
        hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
        hidden |= column > place
        if window is not None:
            hidden |= column <= place - window
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden.to(q.device), float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("name", ROWS)
def test_segments_are_the_trees(
    monkeypatch: pytest.MonkeyPatch, name: str, heads: tuple[int, int], window: int | None
) -> None:
    monkeypatch.setattr(varlen, "flash", reference)
    generator = torch.Generator().manual_seed(0)
    layout = Packed(ROWS[name])
    tokens = sum(map(len, layout.trees))
    shapes = [(tokens, heads[0], 8), (tokens, heads[1], 8), (tokens, heads[1], 8)]
    ours, theirs = (
        [torch.randn(s, generator=generator.manual_seed(i)).requires_grad_() for i, s in enumerate(shapes)]
        for _ in range(2)
    )
    found = varlen.attend(layout.cut, ours[0], ours[1], ours[2], 0.4, window)
    q, k, v = (x.transpose(0, 1) for x in theirs)
    expected = tree_attention(q, k, v, layout.areas(window), 0.4)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    grad = torch.randn(found.shape, generator=generator)
    found.backward(grad)
    expected.backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)


def test_nothing_is_gathered_where_nothing_branches() -> None:
    cut = varlen.segments([Tree.of(4), Tree.of(5)], torch.device("cpu"))
    assert cut.index is None and cut.starts_q.tolist() == cut.starts_k.tolist() == [0, 4, 9]
    assert (cut.longest_q, cut.longest_k) == (5, 5)


def gathered(index: list[int], device: torch.device | str = "cpu") -> varlen.Segments:
    none = torch.zeros(2, dtype=torch.int32)
    return varlen.Segments(none, none, 0, 0, torch.tensor(index, device=device))


def test_a_shared_rows_gradient_is_summed_in_float32() -> None:
    """256 + 1 + 1 + ... in bfloat16 would stay 256."""
    x = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.ones(10, 1, 1, dtype=torch.bfloat16)
    grad[0] = 256
    varlen._Gather.apply(x, gathered([0] * 9 + [1])).backward(grad)  # type: ignore[union-attr]
    assert x.grad is not None and x.grad.flatten().tolist() == [264, 1]


@triton
@pytest.mark.parametrize("shape", [(2, 16), (3, 5), (9, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_sums_the_copies_of_each_row(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows with many copies, with one, and the fourth and the last with none."""
    index = [2, 0, 1, 1, 4, 1, 0, 1, 2, 5, 1]
    cut, grad = gathered(index, DEVICE), torch.randn(len(index), *shape).to(DEVICE, dtype)
    expected = torch.zeros(7, *shape, dtype=torch.float64)
    expected.index_add_(0, torch.tensor(index), grad.cpu().double())
    result = fused.launch_sum_copies(grad, *cut.copies(7))
    assert result.dtype == dtype and result.is_contiguous()
    torch.testing.assert_close(
        result.cpu().double(), expected, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=0.01
    )


@pytest.mark.parametrize("window", [None, 3])
def test_this_pytorch_has_the_operator_and_its_derivative(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card that is not there: a PyTorch with other parameters would fail on a card only."""
    with card(monkeypatch, lambda name, args: None), CUDA_0, torch.enable_grad():
        q, k, v = (torch.empty(10, h, 64, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
        starts = torch.zeros(3, dtype=torch.int32)
        result = varlen.flash(q, k, v, starts, starts, 6, 7, 0.1, window)
        assert result.shape == q.shape and result.dtype == q.dtype
        assert "FlashAttention" in type(result.grad_fn).__name__


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ROWS)
def test_on_the_card_it_equals_masked_attention(name: str) -> None:
    device = torch.device("cuda")
    layout, plain = Packed(ROWS[name], device), Packed(ROWS[name])
    tokens = sum(map(len, layout.trees))
    ours: list[Any] = [
        torch.randn(1, h, tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)
    ]
    theirs = [x.detach().float().cpu().requires_grad_() for x in ours]
    assert varlen.takes(ours[0], ours[2])
    found, expected = layout.attend(0, *ours, 0.1, None), plain.attend(0, *theirs, 0.1, None)  # type: ignore[call-arg]
    torch.testing.assert_close(found.float().cpu(), expected, atol=2e-2, rtol=2e-2)
    grad = torch.randn_like(expected)
    found.backward(grad.to(device, torch.bfloat16))
    expected.backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.float().cpu(), b.grad, atol=2e-2, rtol=2e-2)
