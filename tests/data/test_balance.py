import math
import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birl.data.balance import balance, cost, first_fit, imbalance, in_rounds, largest_differencing
from birl.data.pack import pack
from birl.parallel.ranks import Packer
from tests.data.test_pack import groups

PAIR_COST = 4e-5  # of a model of seven billion parameters
CAPACITY = 32768


def lengths(kind: str, seed: int, count: int, most: int) -> list[int]:
    """Heavy-tailed: medians of 665 and 250 tokens, tails up to `most`."""
    draws = random.Random(seed)
    draw = partial(draws.lognormvariate, 6.5, 1.0) if kind == "lognormal" else lambda: 150 * draws.paretovariate(1.3)
    return [max(1, min(most, int(draw()))) for _ in range(count)]


def costs_of(sizes: list[int], pair_cost: float) -> list[float]:
    return [cost(size, pair_cost) for size in sizes]


def sums(bins: list[list[int]], values: list[float]) -> list[float]:
    return [sum(values[i] for i in items) for items in bins]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 64), max_size=50), st.integers(1, 6), st.floats(0, 0.5))
def test_every_item_once_and_never_too_full(sizes: list[int], parts: int, pair_cost: float) -> None:
    bins = balance(sizes, 64, parts, costs_of(sizes, pair_cost))
    assert len(bins) % parts == 0 and len(bins) >= parts
    assert sorted(i for items in bins for i in items) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in items) <= 64 for items in bins)
    assert len(bins) <= -(-max(len(first_fit(sizes, 64)), 1) // parts) * parts


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 100, allow_subnormal=False), max_size=40), st.integers(1, 9))
def test_differencing_keeps_every_item(weights: list[float], count: int) -> None:
    bins = largest_differencing(weights, count)
    assert len(bins) == count
    assert sorted(i for items in bins for i in items) == list(range(len(weights)))


def test_differencing_is_what_karmarkar_and_karp_do() -> None:
    """Their own example, {8, 7, 6, 5, 4} in two: the differences leave 2, where greedy leaves 4."""
    assert sorted(sums(largest_differencing([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4])) == [14, 16]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(2, 6))
def test_differencing_is_bounded(weights: list[int], count: int) -> None:
    """No two bins differ by more than the largest item."""
    loads = sums(largest_differencing(weights, count), weights)
    assert max(loads) - min(loads) <= max(weights)


@pytest.mark.parametrize("kind", ["lognormal", "pareto"])
@pytest.mark.parametrize("parts", [2, 8, 64])
@pytest.mark.parametrize("seed", [0, 1])
def test_two_per_cent_on_heavy_tails(kind: str, parts: int, seed: int) -> None:
    sizes = lengths(kind, seed, 10_000, CAPACITY // 2)
    costs = costs_of(sizes, PAIR_COST)
    bins = balance(sizes, CAPACITY, parts, costs)
    loads = sums(bins, costs)
    mean = sum(costs) / parts
    shares = [sum(loads[share::parts]) for share in range(parts)]
    assert max(shares) / mean - 1 <= imbalance(loads, parts) + 1e-9 <= 0.02
    fewest = -(-math.ceil(sum(sizes) / CAPACITY) // parts) * parts
    assert len(bins) == fewest, "more micro-batches than their tokens need"


def test_one_that_costs_more_than_a_share_lifts_its_round() -> None:
    """One sequence costs more than a bin should: the other bin of its round may cost as much, and the rest less."""
    sizes = [60] + [15] * 23
    costs = costs_of(sizes, 0.1)
    bins = balance(sizes, 200, 2, costs)
    assert sums(bins, costs) == [243, 243, 189, 189]
    assert imbalance(sums(in_rounds(largest_differencing(costs, 4), costs, 2), costs), 2) > 0.06


def test_imbalance_is_what_waits() -> None:
    assert imbalance([3.0, 3.0, 1.0, 1.0], 2) == 0
    assert imbalance([4.0, 2.0, 2.0, 0.0], 2) == pytest.approx((4 + 2) * 2 / 8 - 1)
    assert imbalance([5.0, 1.0], 1) == 0 and imbalance([], 3) == 0


def test_figures_of_packing() -> None:
    samples = groups(0, count=2, size=1)
    batches = pack(samples, [1.0] * 2, 40, parts=4, pair_cost=0.1)
    found = Packer(capacity=40, shares=4, pair_cost=0.1).figures(batches)
    tokens = sum(len(s.tokens) for s in samples)
    assert found["packing/padding"] == pytest.approx(2 / (tokens + 2))
    assert found["packing/filled"] == pytest.approx(tokens / 160)
    assert found["packing/imbalance"] > 0.9  # two of four shares have nothing


def test_groups_stay_together() -> None:
    """What was compared in one micro-batch still is, however many shares there are."""
    samples = groups(5, count=6, size=2)
    for parts in (1, 2, 3):
        for batch in pack(samples, [1.0] * len(samples), 64, parts, 0.01):
            found = sorted(set(batch.sample.tolist()))
            assert [i // 2 for i in found] == [i for pair in found[::2] for i in (pair // 2, pair // 2)]
