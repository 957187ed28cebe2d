"""Each baseline and scale against plain Python floats: loops over lists, written from the papers."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birl.algorithms.advantages import (
    BASELINES,
    EPS,
    SCALES,
    centre,
    gdpo,
    length_penalty,
    overlong_penalty,
    pass_at_k,
    scale,
)
from tests.algorithms.cases import Episodes, close, double, episodes, ids


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float]) -> float:
    return math.sqrt(mean([(v - mean(values)) ** 2 for v in values]))


def baseline_of(case: Episodes, i: int, name: str, lengths: list[int], greedy: list[float]) -> float:
    inside = case.members(i)
    if name == "group":
        return mean([case.rewards[j] for j in inside])
    if name == "leave_one_out":
        others = [case.rewards[j] for j in inside if j != i]
        return mean(others) if others else case.rewards[i]
    if name == "batch":
        return mean(case.rewards)
    if name == "optimal":
        if sum(lengths[j] for j in inside) == 0:
            return mean([case.rewards[j] for j in inside])
        return sum(lengths[j] * case.rewards[j] for j in inside) / sum(lengths[j] for j in inside)
    if name == "greedy":
        return greedy[case.group[i]]
    return 0.0


def divisor_of(case: Episodes, advantages: list[float], i: int, name: str) -> float:
    inside = case.members(i)
    deviates = {"group": [advantages[j] for j in inside], "batch": advantages, "rewards": case.rewards}
    if name in deviates:
        apart = deviation(deviates[name])
        return apart + EPS if EPS * abs(advantages[i]) <= apart else math.inf
    if name == "mean":
        average = mean([case.rewards[j] for j in inside])
        return average if average > 0 else math.inf
    return 1.0


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("by", SCALES)
@given(case=episodes())
def test_advantages_are_their_definition(baseline: str, by: str, case: Episodes) -> None:
    lengths = [case.random.choice([0, 1, 3, 9]) for _ in case.rewards]
    greedy = [case.random.uniform(-1, 1) for _ in range(max(case.group, default=-1) + 1)]
    count = range(len(case.rewards))
    expected = [case.rewards[i] - baseline_of(case, i, baseline, lengths, greedy) for i in count]
    rewards, group = double(case.rewards), ids(case.group)
    centred = centre(rewards, group, baseline, lengths=ids(lengths), greedy=double(greedy))
    close(centred, expected)
    # Scaled from what was found: a remainder of 1e-17 over a deviation of 0 is no difference of definition.
    found = scale(centred, group, by, rewards=rewards)
    before = centred.tolist()
    close(found, [before[i] / divisor_of(case, before, i, by) for i in count], 2e-6)


def test_lite_ppo_divides_by_the_deviation_of_the_rewards() -> None:
    """The centred rewards of two prompts, one solved and one not, do not differ; the rewards do."""
    rewards, group = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0]).double(), ids([0, 0, 1, 1, 2, 2])
    centred = centre(rewards, group, "group")
    assert centred.tolist() == [0, 0, 0, 0, 0.5, -0.5]
    lite = scale(centred, group, "rewards", rewards=rewards)
    assert lite[4].item() == pytest.approx(0.5 / 0.5, rel=1e-5)
    assert scale(centred, group, "batch")[4].item() == pytest.approx(0.5 / math.sqrt(0.5 / 6), rel=1e-5)


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch", "optimal"])
@pytest.mark.parametrize("by", SCALES)
@pytest.mark.parametrize("reward", [0.1, 100.1, -3.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_zero_not_noise(baseline: str, by: str, reward: float, dtype: torch.dtype) -> None:
    for count in (1, 5, 7, 13):
        group, rewards = torch.zeros(count, dtype=torch.int64), torch.full((count,), reward, dtype=dtype)
        centred = centre(rewards, group, baseline, lengths=torch.arange(1, count + 1))
        found = scale(centred, group, by, rewards=rewards)
        assert found.dtype == dtype and found.tolist() == [0.0] * count, count


@pytest.mark.parametrize("baseline", ["greedy", "none"])
@pytest.mark.parametrize("by", ["group", "batch", "rewards"])
@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_equal_rewards_without_a_baseline_are_not_a_million(baseline: str, by: str, noise: float) -> None:
    rewards, group = torch.full((8,), 1.0).double(), ids([0] * 4 + [1] * 4)
    rewards[0] += noise
    centred = centre(rewards, group, baseline, greedy=torch.zeros(2).double())
    assert scale(centred, group, by, rewards=rewards).tolist() == [0.0] * 8
    rewards[:2] = 0.0
    told = scale(centre(rewards, group, baseline, greedy=torch.zeros(2).double()), group, by, rewards=rewards)
    assert told[2].item() == pytest.approx(1 / (0.5 if by == "group" else math.sqrt(3 / 16)), rel=1e-5)


def test_what_is_missing_or_unknown_is_refused() -> None:
    rewards, group = torch.tensor([1.0]), torch.tensor([0])
    for name in ("optimal", "greedy", "gruop"):
        with pytest.raises(ValueError, match=name):
            centre(rewards, group, name)
    for name in ("rewards", "mean", "gruop"):
        with pytest.raises(ValueError, match=name):
            scale(rewards, group, name)


@given(case=episodes(), count=st.integers(1, 3))
def test_gdpo_is_its_definition(case: Episodes, count: int) -> None:
    weights = [case.random.uniform(0.1, 2) for _ in range(count)]
    parts = [[case.random.choice([0.0, 1.0, 0.3]) for _ in range(count)] for _ in case.rewards]
    total = []
    for i in range(len(parts)):
        rows = [parts[j] for j in case.members(i)]
        columns = [[row[k] for row in rows] for k in range(count)]
        spread = [deviation(c) if max(c) > min(c) else 0.0 for c in columns]
        centred = [parts[i][k] - mean(columns[k]) if spread[k] else 0.0 for k in range(count)]
        total.append(sum(weights[k] * centred[k] / (spread[k] + EPS) for k in range(count)))
    found = gdpo(double([v for row in parts for v in row]).reshape(-1, count), ids(case.group), double(weights))
    if total and deviation(total) > 1e-9:
        close(found, [(v - mean(total)) / (deviation(total) + EPS) for v in total], 1e-5)
    else:
        assert found.abs().sum() < 1e-6


def test_gdpo_keeps_apart_what_the_sum_of_rewards_confuses() -> None:
    # The paper's example: two rewards of 0 or 1, one answer with one of them right, or both right.
    group = ids([0, 0, 1, 1])
    one, both = [[0.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]]
    found = gdpo(double([v for row in one + both for v in row]).reshape(4, 2), group, double([1.0, 1.0]))
    assert found[3] > 1.9 * found[1] > 0
    summed = double([0, 1, 0, 2])
    grpo = scale(centre(summed, group, "group"), group, "group")
    assert grpo[3] == pytest.approx(grpo[1].item(), abs=1e-5)


def test_gdpo_compares_an_answer_by_what_judges_it_alone() -> None:
    group, weights, unjudged = ids([0] * 4), double([1.0, 1.0]), float("nan")
    alone = gdpo(double([1, 0, 0.5, 0.5]).reshape(4, 1), group, weights[:1])
    pair = double([1, unjudged, 0, unjudged, 0.5, 1, 0.5, 1]).reshape(4, 2)  # the second reward is equal where it is
    close(gdpo(pair, group, weights), alone.tolist())


@given(case=episodes(binary=True), k=st.integers(1, 4))
def test_pass_at_k_advantage_is_the_mean_over_all_sets_of_k(case: Episodes, k: int) -> None:
    rewards, group = double(case.rewards), ids(case.group)
    expected = []
    for i in range(len(case.rewards)):
        sets = list(combinations(case.members(i), k))
        if not sets:  # answers of its group have failed, and too few are left
            expected.append(0.0)
            continue
        scores = [max(case.rewards[j] for j in chosen) for chosen in sets]
        own = [s for s, chosen in zip(scores, sets, strict=True) if i in chosen]
        spread = deviation(scores)
        expected.append((mean(own) - mean(scores)) / spread if spread > 1e-9 else 0.0)
    close(pass_at_k(rewards, group, k), expected)


def test_pass_at_k_needs_zero_or_one() -> None:
    with pytest.raises(ValueError, match="0 and 1"):
        pass_at_k(torch.tensor([0.5, 1.0]), torch.tensor([0, 0]), 1)
    assert pass_at_k(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), 1).tolist() == [-1.0, 1.0]


@given(case=episodes(binary=True))
def test_length_penalty_is_its_definition(case: Episodes) -> None:
    lengths = [case.random.choice([3, 3, 7, 12, 20]) for _ in case.rewards]
    expected = []
    for i, n in enumerate(lengths):
        inside = [lengths[j] for j in case.members(i)]
        value = 0.5 - (n - min(inside)) / (max(inside) - min(inside)) if max(inside) > min(inside) else 0.0
        expected.append(value if case.rewards[i] == 1 else min(0.0, value))
    correct = torch.tensor(case.rewards, dtype=torch.float64) == 1
    close(length_penalty(ids(lengths).double(), correct, ids(case.group)), expected)
    assert length_penalty(ids(lengths), correct, ids(case.group)).dtype == torch.float32


def test_overlong_penalty_is_dapos_equation_13() -> None:
    lengths = torch.tensor([10.0, 60.0, 70.0, 80.0, 100.0])
    found = overlong_penalty(lengths, limit=80, buffer=20, penalty=1.0)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])
    assert overlong_penalty(lengths, limit=80, buffer=0, penalty=1.0).tolist() == [0.0] * 5
    assert overlong_penalty(torch.tensor([70]), limit=80, buffer=20, penalty=1.0).dtype == torch.float32


@given(case=episodes(binary=True))
def test_float32_agrees(case: Episodes) -> None:
    group, lengths = ids(case.group), ids([case.random.randint(1, 50) for _ in case.group])
    rewards = double(case.rewards)
    for baseline in ("group", "leave_one_out", "batch", "optimal", "none"):
        for by in SCALES:
            found = []
            for r in (rewards.float(), rewards):
                found.append(scale(centre(r, group, baseline, lengths=lengths), group, by, rewards=r))
            assert found[0].dtype == torch.float32
            close(found[0].double(), found[1].tolist(), 1e-3)
    for r in (rewards.float(), rewards):
        assert pass_at_k(r, group, 1).dtype == gdpo(r[:, None], group, torch.ones(1)).dtype == r.dtype
