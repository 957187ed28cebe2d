"""How far two raters of the same items agree, with 95 % intervals over prompts."""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


def ranks(values: Sequence[float] | Floats) -> Floats:
    """[N], from 1; equal values share the mean of their ranks.

    Example: ranks([3.0, 1.0, 3.0]).tolist() == [2.5, 1.0, 2.5]
    """
    _, where, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[where].astype(np.float64)


def spearman(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """Pearson's correlation of the ranks (Spearman 1904). NaN where one of them is constant."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else float("nan")


def kappa(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """(observed agreement - chance's) / (1 - chance's), from the raters' own frequencies (Cohen 1960). NaN where both
    give the same label to everything."""
    n = len(a)
    observed = sum(x == y for x, y in zip(a, b, strict=True)) / n
    chance = sum(sum(x == label for x in a) * sum(y == label for y in b) for label in set(a)) / n**2
    return (observed - chance) / (1 - chance) if chance < 1 else float("nan")


def ordered(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """The share of the pairs that differ in `a` which `b` orders alike; a tie in `b` counts half. NaN without such a
    pair.

    Example: ordered([1.0, 0.0, 0.0], [0.9, 0.2, 0.9]) == 0.75
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    i, j = np.triu_indices(len(x), 1)
    wanted, given = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
    differ = wanted != 0
    return float((1 + (wanted * given)[differ]).mean() / 2) if differ.any() else float("nan")


def over_prompts(
    statistic: Callable[[Indices], float], prompts: Sequence[Indices], draws: int = 1000
) -> tuple[float, float]:
    """95 % interval of a statistic of items: the percentiles 2.5 and 97.5 over `draws` samples of as many prompts, with
    replacement, each with all of its items (the cluster bootstrap). Draws in which it is NaN do not count."""
    if len(prompts) < 2:
        return float("nan"), float("nan")
    rng = np.random.default_rng(0)
    drawn = (rng.integers(len(prompts), size=len(prompts)).tolist() for _ in range(draws))
    values = np.array([statistic(np.concatenate([prompts[int(i)] for i in which])) for which in drawn], np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
