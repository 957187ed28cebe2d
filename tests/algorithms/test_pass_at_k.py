from itertools import combinations

import pytest

from birl.algorithms.pass_at_k import pass_at_k, wilson


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n: int) -> None:
    for correct in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([True] * correct + [False] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


def test_pass_at_k_refuses_too_few_answers() -> None:
    with pytest.raises(ValueError, match="needs at least 4"):
        pass_at_k(3, 1, 4)


def test_wilson_holds_at_the_edges() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(0, 10)
    assert low == 0.0 and 0.2 < high < 0.35
    low, high = wilson(50, 100)
    assert low == pytest.approx(0.4038, abs=1e-3) and high == pytest.approx(0.5962, abs=1e-3)
