# Lists of tensors are handed on by their star:
# pyright: reportCallIssue=false
import pytest
import torch
import torch.nn.functional as F

from birl.data.trees import Tree
from birl.models import tree_attention as module
from birl.models.attention import Packed, tree_mask

TREES = [Tree.of(5, (3, (1, (4, (2, (3, 1)))), 7)), Tree.of(9), Tree.of(1, (4, 2)), Tree.of(6, (2,))]
HEADS, KV_HEADS, SIZE = 6, 2, 8


def inputs(total: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, HEADS, total, SIZE), (1, KV_HEADS, total, SIZE), (1, KV_HEADS, total, SIZE))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """PyTorch's own attention with one mask over the whole row."""
    mask = torch.block_diag(*(tree_mask(tree, window).int() for tree in TREES)).bool()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scores", [2**22, 60])
def test_values_and_gradients_are_pytorchs(window: int | None, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 60 scores at once, the rows of a tree go through in several pieces."""
    monkeypatch.setattr(module, "SCORES", scores)
    tensors = inputs(sum(map(len, TREES)))
    weight = torch.randn(reference(*tensors, window).shape, generator=torch.Generator().manual_seed(4))
    results = []
    for attend in (lambda: Packed(TREES).attend(0, *tensors, 0.3, window), lambda: reference(*tensors, window)):
        out = attend()
        results.append([out, *torch.autograd.grad((out * weight).sum(), tensors)])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


def test_bfloat16_loses_less_than_pytorchs_kernel() -> None:
    """Scores and probabilities stay in float32; only what goes in and out is rounded."""
    tensors = [t.detach() for t in inputs(sum(map(len, TREES)))]
    halves = [t.bfloat16() for t in tensors]
    exact = reference(*(t.float() for t in halves), None)
    ours = Packed(TREES).attend(0, *halves, 0.3, None)
    assert ours.dtype is torch.bfloat16
    assert (ours.float() - exact).abs().max() <= (reference(*halves, None).float() - exact).abs().max()


def test_scores_never_exist_for_a_whole_long_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCORES", 1000)
    sizes = []
    plain = module.probabilities
    monkeypatch.setattr(module, "probabilities", lambda *a: sizes.append((r := plain(*a))[0].numel()) or r)
    q, k, v = inputs(64)
    Packed([Tree.of(64)]).attend(0, q, k, v, 0.3, None).sum().backward()
    assert len(sizes) > 20 and max(sizes) <= 1000
