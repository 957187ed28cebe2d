import pytest
from hypothesis import given
from hypothesis import strategies as st

from birl.algorithms.reduce import DENOMINATORS

samples = st.lists(st.tuples(st.integers(0, 6), st.integers(3, 6)), min_size=1, max_size=8)


def reference(name: str, lengths: list[int], groups: list[int], limit: int, losses: list[list[float]]) -> float:
    """The loss of a step, written as means of means."""
    if name == "token":
        return sum(sum(x) for x in losses) / max(sum(lengths), 1)
    if name == "sequence":
        return sum(sum(x) / max(len(x), 1) for x in losses) / len(losses)
    if name == "constant":
        return sum(sum(x) for x in losses) / limit / len(losses)
    total = 0.0
    for group in set(groups):
        flat = [v for x, g in zip(losses, groups, strict=True) if g == group for v in x]
        total += sum(flat) / max(len(flat), 1)
    return total / len(set(groups))


@pytest.mark.parametrize("name", DENOMINATORS)
@given(drawn=samples)
def test_weights_make_the_mean_of_means(name: str, drawn: list[tuple[int, int]]) -> None:
    lengths, groups = [n for n, _ in drawn], [g for _, g in drawn]
    losses = [[(i + 1) * 0.3 - t for t in range(n)] for i, n in enumerate(lengths)]
    weights = DENOMINATORS[name](lengths, groups, 7)
    found = sum(w * v for w, x in zip(weights, losses, strict=True) for v in x)
    assert found == pytest.approx(reference(name, lengths, groups, 7, losses), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", DENOMINATORS)
def test_no_samples_no_weights(name: str) -> None:
    assert DENOMINATORS[name]([], [], 7) == []
