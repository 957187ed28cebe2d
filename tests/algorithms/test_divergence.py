"""Divergences over a whole small vocabulary, word by word in plain floats, with their gradients by the logits."""

import math
import random

import pytest
import torch

from birl.algorithms.divergence import DIVERGENCES, divergence
from tests.algorithms.cases import EXACT, VALUE, close, differences, double

BETA = 0.3


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(x) for x in logits]
    return [x / sum(powers) for x in powers]


def kl(a: list[float], b: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


def reference(name: str, q: list[float], p: list[float], beta: float = BETA) -> float:
    """GKD arXiv:2306.13649, with p the teacher's."""
    if name != "jsd":
        return kl(q, p) if name == "reverse_kl" else kl(p, q)
    m = [beta * y + (1 - beta) * x for x, y in zip(q, p, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DIVERGENCES)
def test_value_and_gradient_are_the_definition(name: str, seed: int) -> None:
    rng = random.Random(seed)
    logits, teacher = ([rng.uniform(-3, 3) for _ in range(7)] for _ in range(2))
    p = softmax(teacher)
    logq = double(logits).log_softmax(0)
    terms, flow = divergence(name, BETA)(logq, double(teacher).log_softmax(0))
    assert terms.sum().item() == pytest.approx(reference(name, softmax(logits), p), abs=VALUE)
    by_logits = flow - logq.exp() * flow.sum()
    close(by_logits, differences(lambda at: reference(name, softmax(at), p), logits), EXACT)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_of_equal_distributions_it_is_nothing(name: str) -> None:
    logp = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    terms, flow = divergence(name, BETA)(logp, logp)
    close(terms.sum(-1), [0.0] * 5)
    close((flow - logp.exp() * flow.sum(-1, keepdim=True)).flatten(), [0.0] * 45)


@pytest.mark.parametrize(("beta", "limit"), [(1e-5, "forward_kl"), (1 - 1e-5, "reverse_kl")])
def test_jsd_goes_from_forward_to_reverse_kl(beta: float, limit: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logq, logp = (torch.randn(9, dtype=torch.float64, generator=generator).log_softmax(-1) for _ in range(2))
    found = divergence("jsd", beta)(logq, logp).terms.sum() / min(beta, 1 - beta)
    torch.testing.assert_close(found, divergence(limit, 0.0)(logq, logp).terms.sum(), rtol=1e-3, atol=0)
