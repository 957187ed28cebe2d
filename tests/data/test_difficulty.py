"""What a run knows of its tasks, against the same in plain Python floats."""

import json
import math
import random
from typing import Any

import numpy as np
import pytest

from birl.data.difficulty import Difficulty, Outcome, signal_of

IDS = [f"rows:{i}" for i in range(6)]


def known(**keys: Any) -> Difficulty:
    return Difficulty(IDS, **{"half_life": 7.0, "retire_after": 2, "retire_for": 5, **keys})


def outcome(task: int, *rates: float) -> Outcome:
    return Outcome(id=IDS[task], rates=rates, signal=len(set(rates)) > 1)


def history(seed: int, steps: int = 20) -> list[list[Outcome]]:
    chosen = random.Random(seed)
    rates = (0.0, 0.0, 0.25, 1.0)
    return [
        [outcome(chosen.randrange(5), *(chosen.choice(rates) for _ in range(chosen.randint(1, 6)))) for _ in range(3)]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("half_life", [7.0, 0.5, 0.0])
def test_the_posterior_is_its_definition(half_life: float) -> None:
    """Sums over everything that was seen, each answer weighted by 2^(-age / half_life); task 5 was never asked."""
    mine, steps = known(half_life=half_life), history(1)
    for step, outcomes in enumerate(steps, start=1):
        mine.update(step, outcomes)
    now = len(steps) + 3
    right, wrong = [0.0] * 6, [0.0] * 6
    for step, outcomes in enumerate(steps, start=1):
        weight = 2.0 ** (-(now - step) / half_life) if half_life else 1.0
        for one in outcomes:
            right[IDS.index(one.id)] += weight * sum(one.rates)
            wrong[IDS.index(one.id)] += weight * sum(1 - r for r in one.rates)
    share = [(a + b) / (a + b + 2) for a, b in zip(right, wrong, strict=True)]
    rates = [a / (a + b) if a + b else 0.0 for a, b in zip(right, wrong, strict=True)]
    mean = (1 + sum(s * r for s, r in zip(share, rates, strict=True))) / (2 + sum(share))
    alpha, beta = mine.posterior(now)
    assert alpha.tolist() == pytest.approx([a + 2 * mean for a in right], rel=1e-9)
    assert beta.tolist() == pytest.approx([b + 2 * (1 - mean) for b in wrong], rel=1e-9)


def test_nothing_seen_is_the_uniform_prior() -> None:
    alpha, beta = known().posterior(9)
    assert alpha.tolist() == beta.tolist() == [1.0] * 6


@pytest.mark.parametrize(("a", "b", "n"), [(1.0, 1.0, 8), (0.02, 3.0, 4), (9.0, 1.5, 16), (40.0, 40.0, 1)])
def test_the_chance_of_a_signal_is_that_of_the_beta_binomial(a: float, b: float, n: int) -> None:
    def moment(x: float, y: float) -> float:
        return math.exp(math.lgamma(x + n) - math.lgamma(x) + math.lgamma(x + y) - math.lgamma(x + y + n))

    assert signal_of(np.array([a]), np.array([b]), n)[0] == pytest.approx(1 - moment(a, b) - moment(b, a), abs=1e-12)


def test_solved_and_hopeless_tasks_rest_and_come_back() -> None:
    mine = known()
    for step in (1, 2):
        mine.update(
            step, [outcome(0, 1, 1), outcome(1, 0, 0), outcome(2, 0, 1), outcome(3, *((1, 1) if step > 1 else (0, 0)))]
        )
    assert mine.resting(2).tolist() == [True, True, False, False, False, False]
    assert mine.pools(2) == {"order/seen": 4, "order/solved": 1, "order/hopeless": 1}
    assert mine.resting(6)[:2].all() and not mine.resting(7).any()
    mine.update(8, [outcome(0, 1, 1), outcome(1, 0, 1)])  # one that is still solved, one that can be learned by now
    assert mine.resting(8).tolist() == [True, *[False] * 5]
    assert not known(retire_after=0).resting(3).any()


def test_groups_without_a_result_say_nothing() -> None:
    mine = known()
    mine.update(
        1, [Outcome(id=IDS[0], rates=(), signal=False), Outcome(id="of another run", rates=(1.0,), signal=False)]
    )
    assert mine.counts == {} and mine.pools(1)["order/seen"] == 0
    assert all(math.isnan(value) for value in mine.figures(1, 4, []).values())


def test_figures_compare_what_was_expected_with_what_came() -> None:
    mine = known()
    mine.update(1, [outcome(0, 1, 1, 1, 0)])
    alpha, beta = mine.posterior(2)
    found = mine.figures(2, 2, [outcome(0, 0, 1), outcome(5, 0, 0)])
    first, second = (float(alpha[i] / (alpha[i] + beta[i])) for i in (0, 5))
    assert found["order/predicted"] == pytest.approx((first + second) / 2)
    assert found["order/observed"] == 0.25 and found["order/signal"] == 0.5
    assert found["order/error"] == pytest.approx((abs(first - 0.5) + second) / 2)


def test_a_checkpoint_gives_the_same_bits() -> None:
    whole, steps = known(), history(2)
    for step, outcomes in enumerate(steps, start=1):
        whole.update(step, outcomes)
        again = known()
        again.restore(json.loads(json.dumps(whole.counts)) | {"a row that is gone": [1.0, 1.0, 1, 0]})
        assert again.counts == whole.counts
        assert all((a == b).all() for a, b in zip(again.posterior(step + 1), whole.posterior(step + 1), strict=True))
        whole = again
