"""Random inputs for the tests of this folder, as plain Python lists, and the comparison of losses with references in
floats."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

EXACT = 1e-6  # of gradients, against finite differences
VALUE = 1e-11  # of values in float64
STEP = 1e-5  # of finite differences: error of order STEP^2


@dataclass
class Tokens:
    """Trained tokens of some samples. `sample` starts anywhere and skips numbers; advantages are one number a
    sample."""

    lengths: list[int]
    sample: list[int]
    logp: list[float]
    old: list[float]
    advantages: list[float]
    random: random.Random

    def runs(self) -> list[range]:
        """Positions of each sample's tokens."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        return [range(start, start + n) for start, n in zip(starts, self.lengths, strict=True)]

    def uniform(self, low: float, high: float) -> list[float]:
        return [self.random.uniform(low, high) for _ in self.sample]


@st.composite
def tokens(draw: st.DrawFn, spread: float = 0.8, smallest: int = 0) -> Tokens:
    lengths = draw(st.lists(st.integers(1, 5), min_size=smallest, max_size=4))
    rng = random.Random(draw(st.integers(0, 10**6)))
    names, name = [], draw(st.integers(0, 100))
    for n in lengths:
        names += [name] * n
        name += rng.randint(1, 3)
    logp = [rng.uniform(-3, -0.1) for _ in names]
    old = [min(p + rng.uniform(-spread, spread), -0.01) for p in logp]
    same = draw(st.sampled_from([None, None, None, 0.0, 0.7]))
    advantages = [a for n in lengths for a in [rng.uniform(-2, 2) if same is None else same] * n]
    return Tokens(lengths, names, logp, old, advantages, rng)


@dataclass
class Episodes:
    """Rewards of some groups, in any order; groups of one, and groups of equal rewards, are among them."""

    rewards: list[float]
    group: list[int]
    random: random.Random

    def members(self, i: int) -> list[int]:
        return [j for j, g in enumerate(self.group) if g == self.group[i]]


@st.composite
def episodes(draw: st.DrawFn, binary: bool = False) -> Episodes:
    sizes = draw(st.lists(st.integers(1, 5), max_size=4))
    rng = random.Random(draw(st.integers(0, 10**6)))
    pairs: list[tuple[float, int]] = []
    for g, n in enumerate(sizes):
        kind = draw(st.sampled_from(["free", "free", "equal", "binary"]))
        constant = float(rng.randint(0, 1)) if binary else rng.uniform(-1, 1)
        for _ in range(n):
            coin = float(rng.randint(0, 1))
            free = coin if binary or kind == "binary" else rng.uniform(-1, 2)
            pairs.append((constant if kind == "equal" else free, g))
    rng.shuffle(pairs)
    return Episodes([r for r, _ in pairs], [g for _, g in pairs], rng)


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def close(found: Tensor, expected: Sequence[float], tolerance: float = VALUE) -> None:
    assert found.tolist() == pytest.approx(list(expected), rel=tolerance, abs=tolerance)


def differences(total: Callable[[list[float]], float], at: Sequence[float]) -> list[float]:
    """Central finite differences of a function of a list of floats."""
    gradient = []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += STEP
        down[i] -= STEP
        gradient.append((total(up) - total(down)) / (2 * STEP))
    return gradient


def gradient_of(loss: Tensor, at: Tensor) -> Tensor:
    if not loss.requires_grad:
        return torch.zeros_like(at)
    return torch.autograd.grad(loss.sum(), at, retain_graph=True)[0]
