from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birl.algorithms.advantages import EPS
from birl.algorithms.values import gae, kl_rewards, token_rewards, turn_gae, value_loss, whiten
from tests.algorithms.cases import EXACT, Tokens, close, differences, double, gradient_of, ids, tokens

unit = st.floats(0, 1)


def gae_reference(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Eq. 16 as it is written: A_t = sum_l (gamma lam)^l d_{t+l}."""
    deltas = [r + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** l * d for l, d in enumerate(deltas[t:])) for t in range(len(deltas))]  # noqa: E741


@given(case=tokens(), gamma=unit, lam=unit)
def test_gae_is_its_definition(case: Tokens, gamma: float, lam: float) -> None:
    rewards, values = case.uniform(-1, 1), case.uniform(-1, 1)
    expected = []
    for run in case.runs():
        expected += gae_reference([rewards[t] for t in run], [values[t] for t in run], gamma, lam)
    advantages, returns = gae(double(rewards), double(values), ids(case.sample), gamma=gamma, lam=lam)
    close(advantages, expected)
    close(returns, [a + v for a, v in zip(expected, values, strict=True)])


@given(case=tokens(), gamma=unit, alpha=st.floats(0.01, 10))
def test_lambda_by_length_is_its_definition(case: Tokens, gamma: float, alpha: float) -> None:
    """VAPO arXiv:2504.05118 sections 4.1 and 4.2: that of the advantages by the sample's length, of the returns 1."""
    rewards, values = case.uniform(-1, 1), case.uniform(-1, 1)
    expected, earned = [], []
    for run in case.runs():
        own = [rewards[t] for t in run], [values[t] for t in run]
        expected += gae_reference(*own, gamma, max(1 - 1 / (alpha * len(run)), 0.0))
        earned += [a + v for a, v in zip(gae_reference(*own, gamma, 1.0), own[1], strict=True)]
    result = gae(double(rewards), double(values), ids(case.sample), gamma=gamma, lam=0.5, alpha=alpha)
    close(result[0], expected)
    close(result[1], earned)


@given(case=tokens(), gamma=unit, lam=unit)
def test_turn_gae_is_gae_over_turns(case: Tokens, gamma: float, lam: float) -> None:
    rewards, values = case.uniform(-1, 1), case.uniform(-1, 1)
    turn, advantages, returns = [], [], []
    for run in case.runs():
        inside, cuts = list(run), sorted(t for t in run[1:] if case.random.random() < 0.4)
        edges = [inside[0], *cuts, inside[-1] + 1]
        turns = [range(a, b) for a, b in pairwise(edges)]
        sums = [sum(rewards[t] for t in part) for part in turns]
        firsts = [values[part[0]] for part in turns]
        for k, (part, a) in enumerate(zip(turns, gae_reference(sums, firsts, gamma, lam), strict=True)):
            turn += [k] * len(part)
            advantages += [a] * len(part)
            returns += [a + firsts[k]] * len(part)
    found = turn_gae(double(rewards), double(values), ids(case.sample), ids(turn), gamma=gamma, lam=lam)
    close(found[0], advantages)
    close(found[1], returns)


@given(case=tokens(), coef=st.floats(0, 1))
def test_rewards_of_tokens(case: Tokens, coef: float) -> None:
    kl, score = case.uniform(0, 1), [case.random.uniform(-1, 1) for _ in case.lengths]
    expected = [
        -coef * kl[t] + (s if t == run[-1] else 0.0) for run, s in zip(case.runs(), score, strict=True) for t in run
    ]
    earned = [s if t == run[-1] else 0.0 for run, s in zip(case.runs(), score, strict=True) for t in run]
    close(token_rewards(double(earned), double(kl), coef), expected)
    close(kl_rewards(double(kl), coef), [-coef * k for k in kl])


def test_values_within_the_bound_are_not_clipped_by_rounding() -> None:
    """old + (value - old) is not always the value: a share of the tokens was told as clipped."""
    old, values, returns = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float32) / 10
    assert not value_loss(values, -old, returns, clip=0.2)[1].any()
    far = old + 0.3
    assert value_loss(far, old, far, clip=0.2)[1].all() and not value_loss(far, old, old - 1, clip=0.2)[1].any()


@pytest.mark.parametrize("clip", [0.0, 0.2])
@given(case=tokens())
def test_value_loss_is_its_definition(clip: float, case: Tokens) -> None:
    old, returns, now = case.uniform(-1, 1), case.uniform(-1, 1), case.uniform(-1, 1)

    def terms(at: list[float]) -> list[float]:
        out = []
        for v, o, r in zip(at, old, returns, strict=True):
            near = o + min(max(v - o, -clip), clip) if clip else v
            out.append(0.5 * max((v - r) ** 2, (near - r) ** 2))
        return out

    values = double(now).requires_grad_()
    loss, clipped = value_loss(values, double(old), double(returns), clip=clip)
    close(loss, terms(now))
    gradient = gradient_of(loss, values)
    close(gradient, differences(lambda at: sum(terms(at)), now), EXACT)
    assert clipped.tolist() == [g == 0 for g in gradient.tolist()]


@pytest.mark.parametrize("shift_mean", [True, False])
@given(case=tokens())
def test_whiten_is_its_definition(shift_mean: bool, case: Tokens) -> None:
    x = case.logp
    if not x:
        assert whiten(double(x), shift_mean=shift_mean).tolist() == []
        return
    mean = sum(x) / len(x)
    deviation = (sum((v - mean) ** 2 for v in x) / len(x)) ** 0.5 if len(x) > 1 else 0.0
    expected = [(v - mean) / (deviation + EPS) + (0 if shift_mean else mean) for v in x]
    close(whiten(double(x), shift_mean=shift_mean), expected)


def test_equal_values_whiten_to_nothing_and_dtypes_follow() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.full((7,), 33.3, dtype=dtype)
        assert whiten(x).tolist() == [0.0] * 7 and whiten(x).dtype == dtype
        assert whiten(x, shift_mean=False).tolist() == pytest.approx([33.3] * 7)
        sample = torch.zeros(7, dtype=torch.int64)
        for tensor in (
            *gae(x, x, sample, gamma=0.9, lam=0.9),
            *turn_gae(x, x, sample, sample, gamma=0.9, lam=0.9),
            token_rewards(x, x, 0.1),
            value_loss(x, x, x, clip=0.2)[0],
        ):
            assert tensor.dtype == dtype
