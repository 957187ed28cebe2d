"""Intervals and p-values against their definitions, and against what they promise."""

import random
from itertools import product
from math import isnan

import pytest

from birl.algorithms.pass_at_k import wilson
from birl.algorithms.uncertainty import bootstrap, interval, sign_flips


def test_the_interval_holds_the_mean_about_as_often_as_it_says() -> None:
    rng, inside = random.Random(0), 0
    for _ in range(200):
        low, high = bootstrap([rng.random() ** 2 for _ in range(50)])
        inside += low <= 1 / 3 <= high
    assert 180 <= inside <= 198


def test_zeros_and_ones_are_a_proportion() -> None:
    assert interval([0.0, 1.0, 1.0]) == wilson(2, 3)
    assert interval([0.0] * 5)[1] > 0.3  # a bootstrap would be sure of 0
    assert all(map(isnan, interval([0.5])))
    assert interval([]) == (0.0, 1.0)


@pytest.mark.parametrize("n", [1, 2, 5, 11])
def test_p_is_the_share_of_sign_patterns(n: int) -> None:
    rng = random.Random(n)
    given = [rng.choice([-0.5, 0.25, 1.0]) for _ in range(n)]
    sums = [abs(sum(s * g for s, g in zip(signs, given, strict=True))) for signs in product((-1, 1), repeat=n)]
    assert sign_flips([*given, 0.0, 0.0]) == pytest.approx(sum(s >= abs(sum(given)) for s in sums) / len(sums))


def test_many_differences_are_drawn() -> None:
    assert sign_flips([]) == sign_flips([0.0] * 9) == 1.0
    assert sign_flips([0.1] * 40) == 1 / 10_001  # ties of floating point count as ties
    assert sign_flips([1.0, -1.0] * 40) == 1.0
    # 60 better, 40 worse: the binomial test gives 0.0569
    assert sign_flips([1.0] * 60 + [-1.0] * 40) == pytest.approx(0.0569, abs=0.01)
