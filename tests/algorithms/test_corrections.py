import math
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birl.algorithms.corrections import (
    LEVELS,
    MODES,
    importance,
    proximal,
    rejected_by_divergence,
    rejected_off_policy,
    second_moment_mask,
)
from tests.algorithms.cases import Tokens, close, double, ids, tokens


def ratios(case: Tokens) -> list[float]:
    return [p - o for p, o in zip(case.logp, case.old, strict=True)]


def spread(case: Tokens, values: list[float]) -> list[float]:
    return [v for v, n in zip(values, case.lengths, strict=True) for _ in range(n)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@given(case=tokens(), low=st.sampled_from([0.0, 0.5, 0.8]), high=st.sampled_from([0.9, 1.2, 2.0]))
def test_importance_is_its_definition(level: str, mode: str, case: Tokens, low: float, high: float) -> None:
    l = ratios(case)  # noqa: E741
    if level == "token":
        weights = [math.exp(x) for x in l]
    else:
        sums = [sum(l[t] for t in run) for run in case.runs()]
        if level == "geometric":
            sums = [s / n for s, n in zip(sums, case.lengths, strict=True)]
        weights = spread(case, [math.exp(s) for s in sums])
    if mode == "truncate":
        expected = [min(w, high) for w in weights]
    else:
        expected = [w if low <= w <= high else 0.0 for w in weights]
    found = importance(double(l).requires_grad_(), ids(case.sample), level=level, mode=mode, low=low, high=high)
    close(found, expected)
    assert not found.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", LEVELS)
def test_importance_of_long_samples_does_not_overflow(level: str, dtype: torch.dtype) -> None:
    sample = torch.arange(2).repeat_interleave(4000)
    far = torch.where(sample == 0, 3.0, -3.0).to(dtype)
    found = importance(far, sample, level=level, mode="truncate", low=0.0, high=2.0)
    assert found.dtype == dtype and found.isfinite().all() and found[0] == pytest.approx(2.0) and found[-1] < 0.05
    assert importance(far, sample, level=level, mode="mask", low=0.5, high=2.0).sum() == 0


@pytest.mark.parametrize("change", [{"level": "x"}, {"mode": "x"}, {"high": math.inf}, {"low": 3.0}, {"low": -1.0}])
def test_importance_refuses_what_it_does_not_know(change: dict[str, Any]) -> None:
    options: dict[str, Any] = {"level": "token", "mode": "mask", "low": 0.5, "high": 2.0}
    with pytest.raises(ValueError):
        importance(torch.zeros(1), torch.zeros(1, dtype=torch.int64), **(options | change))


def second_moment_reference(l: list[float], a: list[float], limit: float) -> list[bool]:  # noqa: E741
    """Algorithm 1 of the paper, line by line."""
    mask = [True] * len(l)
    left = [t for t in range(len(l)) if (a[t] > 0 and l[t] > 0) or (a[t] < 0 and l[t] < 0)]
    while left and sum(l[t] ** 2 for t in left) / len(left) > limit:
        worst = max(left, key=lambda t: l[t] ** 2)
        mask[worst] = False
        left.remove(worst)
    return mask


@given(case=tokens(), limit=st.sampled_from([0.0, 0.001, 0.01, 0.04, 0.2, 1.0]))
def test_second_moment_mask_is_algorithm_1(case: Tokens, limit: float) -> None:
    l, a = ratios(case), case.uniform(-1, 1)  # noqa: E741
    keep = second_moment_mask(double(l), double(a), limit).tolist()
    assert keep == second_moment_reference(l, a, limit)
    if sum(not k for k in keep) == 0:
        return
    # And no smaller number of them would do.
    binding = [t for t in range(len(l)) if a[t] * l[t] > 0]
    fewer = sum(not k for k in keep) - 1
    for dropped in combinations(binding, fewer):
        rest = [l[t] ** 2 for t in binding if t not in dropped]
        assert sum(rest) / len(rest) > limit


@given(case=tokens(), limit=st.sampled_from([0.0, 0.02, 0.1, 0.5]))
def test_rejections_are_their_definition(case: Tokens, limit: float) -> None:
    l = ratios(case)  # noqa: E741
    inputs = double(l), ids(case.sample), double(case.advantages)
    by_divergence = [sum(math.exp(l[t]) - l[t] - 1 for t in run) / len(run) > limit for run in case.runs() for _ in run]
    assert rejected_by_divergence(*inputs, limit=limit).tolist() == by_divergence
    off_policy = [
        case.advantages[t] < 0 and sum(case.old[u] - case.logp[u] for u in run) / len(run) > limit
        for run in case.runs()
        for t in run
    ]
    assert rejected_off_policy(*inputs, limit=limit).tolist() == off_policy


@given(case=tokens(), now=st.integers(3, 5))
def test_proximal_is_its_definition(case: Tokens, now: int) -> None:
    versions = [case.random.randint(0, now) for _ in case.logp]
    expected = []
    for b, c, v in zip(case.old, case.logp, versions, strict=True):
        a = 1 / (now - v) if now > v else 0.0
        expected.append(a * b + (1 - a) * c)
    found = proximal(double(case.old), double(case.logp).requires_grad_(), ids(versions), now)
    close(found, expected)
    assert not found.requires_grad
    for p, b, c in zip(found.tolist(), case.old, case.logp, strict=True):
        assert min(b, c) - 1e-9 <= p <= max(b, c) + 1e-9


def test_a_token_of_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match="version 4"):
        proximal(torch.zeros(1), torch.zeros(1), torch.tensor([4]), 3)


def test_a_second_moment_at_the_limit_is_kept() -> None:
    found = second_moment_mask(torch.tensor([0.5, -0.5, 0.5, 9.0]), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.25)
    assert found.all()  # the last one moves the way no clip binds
    assert second_moment_mask(torch.tensor([0.5, 1.0]), torch.ones(2), 0.25).tolist() == [True, False]
