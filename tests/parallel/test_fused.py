"""Fused layers on several ranks, computed by their plain definitions: the numbers are those of transformers' layers on
one rank."""

from typing import Any

import pytest
import torch

from birl.models import forward, fused_decoder
from birl.models.fused_layers import Joined
from birl.parallel.ranks import Grid, Ranks
from tests.families import family
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import Outcome, same, trained

MODELS: dict[str, Any] = {"qwen2": {}, "gemma3_text": {"tie_word_embeddings": True}, "qwen3_moe": {}}


def fused(ranks: Ranks, kind: str, options: dict[str, Any], whole: bool = False) -> tuple[Outcome, int]:
    """And how many times a fused layer was computed. Not `whole`: transformers' layers."""
    calls, compute = 0, fused_decoder.FusedDecoder.forward

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return compute(*arguments)

    patch = pytest.MonkeyPatch()
    with patch.context() as m:
        m.setattr(fused_decoder, "on_card", lambda model: not whole)
        m.setattr(fused_decoder.FusedDecoder, "forward", counted)
        m.setattr(forward, "decoder_for", lambda model: None)
        # with a small eps AdamW makes a whole step of the rounding of a gradient that is almost 0
        return trained(ranks, {"model": family(kind, **MODELS[kind]), "eps": 1e-3, **options}), calls


CASES = [
    ("qwen2", Grid(), {}),
    ("qwen2", Grid(fsdp=2), {}),
    ("qwen2", Grid(fsdp=2, cp=2), {"gradient_checkpointing": True}),
    ("qwen2", Grid(tp=2), {}),
    ("qwen2", Grid(fsdp=2, tp=2, sequence=False), {"gradient_checkpointing": True}),
    ("gemma3_text", Grid(cp=2, context="ulysses"), {}),
    ("gemma3_text", Grid(tp=2), {"gradient_checkpointing": True}),
    ("qwen3_moe", Grid(fsdp=2, ep=2), {}),
]


@pytest.mark.parametrize(("kind", "grid", "options"), CASES, ids=str)
def test_fused_layers_on_ranks_change_no_number(kind: str, grid: Grid, options: dict[str, Any]) -> None:
    wanted, _ = fused(Ranks(), kind, {}, whole=True)
    for result, calls in on_ranks(grid, fused, kind, options) if grid.size > 1 else [fused(Ranks(), kind, options)]:
        same(result, wanted, 1e-5)
        assert calls > 0


def test_the_backward_pass_keeps_no_copy_of_weights() -> None:
    """FSDP's own weights are given back after a layer; of what is joined nothing may stay in their place."""
    layers = [torch.nn.Linear(8, n) for n in (6, 4, 2)]
    x = torch.randn(5, 8, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        result = Joined(layers)(x)
    places = {t.untyped_storage()._cdata for t in (x, *(m.weight for m in layers))}
    assert {t.untyped_storage()._cdata for t in kept} <= places
    expected = torch.cat([m(x) for m in layers], 1)
    torch.testing.assert_close(result, expected)
    inputs = [x, *(p for m in layers for p in m.parameters())]
    grad = torch.randn(5, 12)
    for a, b in zip(
        torch.autograd.grad(result, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(a, b)
