"""Online DPO against plain Python floats."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birl.algorithms.preference import online_dpo
from tests.algorithms.cases import EXACT, Tokens, close, differences, double, gradient_of, ids


def pairs(seed: int, count: int) -> tuple[Tokens, list[int]]:
    """`count` groups of one chosen and one rejected answer, in any order, and the group of each token."""
    rng = random.Random(seed)
    answers = [(group, sign) for group in range(count) for sign in (1.0, -1.0)]
    rng.shuffle(answers)
    lengths = [rng.randint(1, 4) for _ in answers]
    spread = [answer for answer, n in zip(answers, lengths, strict=True) for _ in range(n)]
    logp, old = ([rng.uniform(-3, -0.1) for _ in spread] for _ in range(2))
    sample = [3 * i + 1 for i, n in enumerate(lengths) for _ in range(n)]
    return Tokens(lengths, sample, logp, old, [sign for _, sign in spread], rng), [group for group, _ in spread]


@given(seed=st.integers(0, 10**6), count=st.integers(0, 3))
def test_each_token_has_the_loss_of_its_pair(seed: int, count: int) -> None:
    case, group = pairs(seed, count)
    ref = case.uniform(-3, -0.1)

    def losses(at: list[float]) -> list[float]:
        margin = [0.0] * count
        for p, r, sign, g in zip(at, ref, case.advantages, group, strict=True):
            margin[g] += sign * (p - r)
        return [math.log(1 + math.exp(-0.3 * margin[g])) for g in group]

    logp = double(case.logp).requires_grad_()
    found = online_dpo(
        logp,
        double(case.old),
        double(case.advantages),
        ids(case.sample),
        group=ids(group),
        ref_logp=double(ref),
        beta=0.3,
    )
    close(found.loss, losses(case.logp))
    close(gradient_of(found.loss, logp), differences(lambda at: sum(losses(at)), case.logp), EXACT)
    close(found.ratio, [math.exp(p - o) for p, o in zip(case.logp, case.old, strict=True)])


@pytest.mark.parametrize(
    ("advantages", "group"),
    [
        ([1.0, 1.0], [0, 0]),  # none is rejected
        ([1.0, -1.0], [0, 1]),
        ([1.0, -1.0, 0.0], [0, 0, 0]),
        ([1.0, -1.0, 1.0, -1.0], [0, 0, 0, 0]),  # whose is whose?
    ],
)
def test_what_is_no_pair_is_refused(advantages: list[float], group: list[int]) -> None:
    logp = torch.zeros(len(group))
    with pytest.raises(ValueError, match="one chosen and one rejected"):
        online_dpo(logp, logp, torch.tensor(advantages), torch.arange(len(group)), group=ids(group), ref_logp=logp)


def test_a_ratio_stays_finite() -> None:
    logp, old = torch.zeros(2), torch.tensor([-500.0, 0.0])
    found = online_dpo(logp, old, torch.tensor([1.0, -1.0]), torch.arange(2), group=ids([0, 0]), ref_logp=logp)
    assert found.ratio.isfinite().all()
