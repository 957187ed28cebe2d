"""Each preference loss against plain Python floats, with the gradients of both answers by finite differences."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birl.algorithms.preference import PREFERENCE, bradley_terry, dpo, kto, orpo, robust
from tests.algorithms.cases import EXACT, close, differences, double, gradient_of


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(logp: float) -> float:
    return math.exp(logp) / (1 - math.exp(logp))


PAIRS: dict[str, tuple[dict[str, Any], Callable[[float, float], float]]] = {
    "dpo": ({"beta": 0.3}, lambda c, r: -math.log(s(0.3 * (c - r)))),
    "ipo": ({"beta": 0.3}, lambda c, r: ((c - r) - 1 / 0.6) ** 2),
    "hinge": ({"beta": 0.3}, lambda c, r: max(0.0, 1 - 0.3 * (c - r))),
    "robust": (
        {"beta": 0.3, "label_smoothing": 0.1},
        lambda c, r: (-0.9 * math.log(s(0.3 * (c - r))) + 0.1 * math.log(s(0.3 * (r - c)))) / 0.8,
    ),
    "simpo": ({"beta": 2.0, "margin": 0.7}, lambda c, r: -math.log(s(2.0 * c - 2.0 * r - 0.7))),
    "orpo": ({"beta": 0.4}, lambda c, r: -0.4 * math.log(s(math.log(odds(c) / odds(r))))),
}
SMOOTHED = (
    {"beta": 0.3, "label_smoothing": 0.1},
    lambda c, r: -0.9 * math.log(s(0.3 * (c - r))) - 0.1 * math.log(s(0.3 * (r - c))),
)
TERRY = ({"margin": 0.5, "centering": 0.2}, lambda c, r: -math.log(s(c - r - 0.5)) + 0.2 * (c + r) ** 2)
EACH = [(PREFERENCE[name].loss, *rest) for name, rest in PAIRS.items()]
EACH += [(dpo, *SMOOTHED), (bradley_terry, *TERRY), (bradley_terry, {}, lambda c, r: -math.log(s(c - r)))]


def logps(seed: int, count: int, low: float = -4.0, high: float = -0.1) -> list[float]:
    rng = random.Random(seed)
    return [rng.uniform(low, high) for _ in range(count)]


@pytest.mark.parametrize(("function", "options", "reference"), EACH)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 4))
def test_value_and_gradient_are_the_definition(
    function: Callable[..., torch.Tensor],
    options: dict[str, Any],
    reference: Callable[[float, float], float],
    seed: int,
    count: int,
) -> None:
    chosen, rejected = logps(seed, count), logps(seed + 1, count)
    c, r = double(chosen).requires_grad_(), double(rejected).requires_grad_()
    found = function(c, r, **options)
    close(found, [reference(x, y) for x, y in zip(chosen, rejected, strict=True)])

    def total(left: list[float], right: list[float]) -> float:
        return sum(reference(x, y) for x, y in zip(left, right, strict=True))

    close(gradient_of(found, c), differences(lambda at: total(at, rejected), chosen), EXACT)
    close(gradient_of(found, r), differences(lambda at: total(chosen, at), rejected), EXACT)


@given(seed=st.integers(0, 10**6), count=st.integers(0, 5), kl=st.floats(-1, 2))
def test_kto_is_equation_8(seed: int, count: int, kl: float) -> None:
    ratio, wanted = logps(seed, count, -3, 3), [random.Random(seed + i).random() < 0.5 for i in range(count)]

    def terms(at: list[float]) -> list[float]:
        z = max(0.0, kl)
        return [
            1.3 * (1 - s(0.2 * (x - z))) if good else 0.7 * (1 - s(0.2 * (z - x)))
            for x, good in zip(at, wanted, strict=True)
        ]

    x, z = double(ratio).requires_grad_(), torch.tensor(kl, dtype=torch.float64, requires_grad=True)
    options = {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    found = kto(x, torch.tensor(wanted, dtype=torch.bool), z, **options)
    close(found, terms(ratio))
    close(gradient_of(found, x), differences(lambda at: sum(terms(at)), ratio), EXACT)
    assert z.grad is None and torch.autograd.grad(found.sum(), z, allow_unused=True)[0] is None if count else True


def test_a_margin_for_each_pair() -> None:
    found = bradley_terry(double([1.0, 2.0]), double([0.0, 0.5]), margin=double([0.0, 1.0]))
    close(found, [-math.log(s(1.0)), -math.log(s(0.5))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PREFERENCE)
def test_dtype_follows_and_extremes_stay_finite(name: str, dtype: torch.dtype) -> None:
    c = torch.tensor([0.0, -1e-9, -900.0, 0.0], dtype=dtype, requires_grad=True)
    r = torch.tensor([-900.0, 0.0, 0.0, 0.0], dtype=dtype)
    if name == "kto":
        found = kto(c, torch.tensor([True, False, True, False]), 0.1, beta=0.1)
    else:
        found = PREFERENCE[name].loss(c, r, **PAIRS[name][0])
    assert found.dtype == dtype and found.isfinite().all() and gradient_of(found, c).isfinite().all()


def test_smoothing_of_one_half_is_refused() -> None:
    one = torch.zeros(1)
    for function in (dpo, robust):
        with pytest.raises(ValueError, match="label_smoothing"):
            function(one, one, beta=0.1, label_smoothing=0.5)


def test_orpo_of_a_certain_answer() -> None:
    assert orpo(torch.zeros(1), torch.full((1,), -1.0), beta=1.0).item() == pytest.approx(0.0, abs=1e-6)
