import math

import pytest
import torch

from birl.algorithms.advantages import EPS, centre, overlong_penalty, scale

REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.25]
GROUP = [0, 0, 0, 1, 1, 2, 2]


def reference(baseline: str, by: str) -> list[float]:
    """The definition in plain Python floats."""
    groups = {g: [r for r, h in zip(REWARDS, GROUP, strict=True) if h == g] for g in set(GROUP)}
    mean = {g: sum(v) / len(v) for g, v in groups.items()}
    centred = [r - (mean[g] if baseline == "group" else 0.0) for r, g in zip(REWARDS, GROUP, strict=True)]
    spread = {g: math.sqrt(sum((r - mean[g]) ** 2 for r in v) / len(v)) for g, v in groups.items()}
    average = sum(centred) / len(centred)
    whole = math.sqrt(sum((a - average) ** 2 for a in centred) / len(centred))
    divisor = {"none": lambda g: 1.0, "group": lambda g: spread[g] + EPS, "batch": lambda g: whole + EPS}[by]
    return [a / divisor(g) for a, g in zip(centred, GROUP, strict=True)]


@pytest.mark.parametrize("baseline", ["group", "none"])
@pytest.mark.parametrize("by", ["none", "group", "batch"])
def test_advantages_are_their_definition(baseline: str, by: str) -> None:
    group = torch.tensor(GROUP)
    found = scale(centre(torch.tensor(REWARDS), group, baseline), group, by)
    assert found.tolist() == pytest.approx(reference(baseline, by), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("by", ["none", "group", "batch"])
def test_a_group_of_one_has_advantage_zero_not_nan(by: str) -> None:
    group = torch.tensor([0])
    assert scale(centre(torch.tensor([0.7]), group, "group"), group, by).tolist() == [0.0]


@pytest.mark.parametrize("by", ["none", "group", "batch"])
def test_equal_rewards_give_zero_not_noise(by: str) -> None:
    group = torch.tensor([0, 0, 0, 0, 0])
    advantages = scale(centre(torch.tensor([0.1] * 5), group, "group"), group, by)
    assert advantages.abs().max() < 1e-2  # 0.1 is not exact in float32: the remainder must not be blown up by 1 / std


def test_overlong_penalty_is_dapos_equation_13() -> None:
    lengths = torch.tensor([10.0, 60.0, 70.0, 80.0, 100.0])
    found = overlong_penalty(lengths, limit=80, buffer=20, penalty=1.0)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])
    assert overlong_penalty(lengths, limit=80, buffer=0, penalty=1.0).tolist() == [0.0] * 5
