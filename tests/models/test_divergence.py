"""Divergences in pieces are those of whole tables of logits, and no tensor has logits of all tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from birl.algorithms.divergence import DIVERGENCES, divergence
from birl.models import shape
from birl.models.divergence import Full, Head, TopK, token_divergence
from birl.models.divergence import top_k as top_k_of
from birl.models.heads import AfterHead
from tests.held import Held

BETA, TEMPERATURE = 0.3, 0.7


def plain(name: str, logq: Tensor, logp: Tensor) -> Tensor:
    """By autograd, from the definition."""
    q, p = logq.exp(), logp.exp()
    if name == "jsd":
        logm = (BETA * p + (1 - BETA) * q).log()
        return (BETA * p * (logp - logm) + (1 - BETA) * q * (logq - logm)).sum(-1)
    return (q * (logq - logp) if name == "reverse_kl" else p * (logp - logq)).sum(-1)


def buckets(logp: Tensor, vocab: Tensor) -> Tensor:
    named = torch.zeros_like(logp, dtype=torch.bool).scatter(1, vocab, True)
    rest = logp.masked_fill(named, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(1, vocab), rest], -1)


@pytest.mark.parametrize("top_k", [0, 1, 5])
@pytest.mark.parametrize(("own", "theirs"), [(37, 37), (37, 30), (30, 37)])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_pieces_give_value_and_gradient_of_the_whole(name: str, own: int, theirs: int, top_k: int) -> None:
    """Hidden sizes differ, and so may the rows of the heads: the tokens that both have are compared."""
    torch.manual_seed(0)
    known: list[Any] = [torch.randn(11, 8), torch.randn(own, 8), torch.randn(own)]
    hidden, weight, bias = (t.requires_grad_() for t in known)
    teacher = Full(torch.randn(11, 6), Head(torch.randn(theirs, 6), torch.randn(theirs), None, TEMPERATURE))
    after, size = AfterHead(scale=0.8, cap=4.0), min(own, theirs)
    logits = 4.0 * torch.tanh(0.8 * (hidden @ weight.T + bias) / 4.0) / TEMPERATURE
    logp = ((teacher.hidden @ teacher.head.weight.T + teacher.head.bias)[:, :size] / TEMPERATURE).log_softmax(-1)
    target: Full | TopK = teacher
    if top_k:
        target = top_k_of(teacher, top_k, size)
        torch.testing.assert_close(target.logprobs, buckets(logp, target.ids))
        assert torch.equal(target.ids, logp.topk(top_k).indices)
        wanted = plain(name, buckets(logits.log_softmax(-1), target.ids), buckets(logp, target.ids))
    else:
        wanted = plain(name, logits[:, :size].log_softmax(-1), logp)
    head = Head(weight, bias, after, TEMPERATURE)
    result = token_divergence(hidden, head, target, divergence(name, BETA), chunk=4 * own)
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)
    up = torch.randn(11)
    gradients = [torch.autograd.grad((x * up).sum(), (hidden, weight, bias)) for x in (result, wanted)]
    torch.testing.assert_close(*gradients, atol=2e-5, rtol=1e-4)


def test_the_top_k_give_a_lower_bound_that_rises_to_the_whole() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(7, 8), Head(torch.randn(40, 8), None, None, 1.0)
    teacher = Full(torch.randn(7, 8), Head(torch.randn(40, 8), None, None, 1.0))
    for name in DIVERGENCES:
        whole = token_divergence(hidden, head, teacher, divergence(name, BETA))
        parts = [token_divergence(hidden, head, top_k_of(teacher, k, 40), divergence(name, BETA)) for k in (1, 8, 39)]
        assert (parts[0] <= parts[1] + 1e-6).all() and (parts[1] <= whole + 1e-6).all()
        torch.testing.assert_close(parts[2], whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("top_k", [0, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["forward_kl", "jsd"])
def test_the_peak_does_not_grow_with_the_tokens(
    name: str, dtype: torch.dtype, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed at once is a piece of logits, forward and backward, of the learner and of the teacher."""
    monkeypatch.setattr(shape, "CHUNK", 2**18)
    monkeypatch.setattr(shape, "WIDENED", 2**14)
    vocab, width, tokens = 4096, 64, 768
    layer: Any = nn.Linear(width, vocab, bias=False).to(dtype)
    if dtype != torch.float32:
        layer.weight.master = layer.weight.detach().float()
    their = Head((torch.randn(vocab, width) / 8).to(dtype), None, None, 1.0)
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    teacher = Full(torch.randn(tokens, width).to(dtype), their)
    given = hidden, layer.weight, *teacher.hidden, their.weight
    with Held(*given) as forward:
        target = top_k_of(teacher, top_k, vocab) if top_k else teacher
        result = token_divergence(hidden, Head(layer.weight, None, None, 1.0), target, divergence(name, BETA))
    up = torch.ones(tokens)
    with Held(*given, result, up) as backward:
        result.backward(up)
    gradient, rows, piece = 4 * vocab * width, 4 * tokens * width, 4 * 2**18
    assert max(forward.largest, backward.largest) <= max(gradient, rows, piece) < 4 * tokens * vocab / 10
    assert forward.peak < piece + 2 * rows and backward.peak < gradient + piece + 4 * rows
    grad = layer.weight.grad if dtype == torch.float32 else layer.weight.master.grad
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("k", [0, 4])
def test_no_shape_depends_on_values(k: int) -> None:
    """On a GPU the host would wait for them in every piece; tensors without contents have no values."""
    with FakeTensorMode():
        hidden, weight = torch.randn(9, 8).requires_grad_(), torch.randn(50, 8).requires_grad_()
        teacher = Full(torch.randn(9, 6), Head(torch.randn(50, 6), None, None, 1.0))
        target = top_k_of(teacher, k, 50) if k else teacher
        value = token_divergence(hidden, Head(weight, None, None, 1.0), target, divergence("jsd", BETA), chunk=60)
        value.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
