"""Confidence intervals of means over prompts, tests of differences over the same prompts, and agreement of two raters
of the same items."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from birl.algorithms.pass_at_k import wilson

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

AT_ONCE = 2**20  # numbers that are drawn at once
EXACT = 13  # differences up to which all signs are tried
FEWEST = 2  # least number of values with a measurable spread


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of one value a prompt: Wilson's if all are 0 or 1, else by `bootstrap`."""
    binary = all(value in (0, 1) for value in values)
    return wilson(sum(values), len(values)) if binary else bootstrap(values)


def bootstrap(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean: the percentiles 2.5 and 97.5 of the means of `draws` samples of as many values, with
    replacement (Efron 1979). NaN of fewer than two values. The same values give the same interval."""
    n = len(values)
    if n < FEWEST:
        return float("nan"), float("nan")
    rng, given = np.random.default_rng(0), np.asarray(values, np.float64)
    means = [given[rng.integers(n, size=(rows, n))].mean(1) for rows in _rows(draws, n)]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def sign_flips(differences: Sequence[float], draws: int = 10_000) -> float:
    """Two-sided p of paired differences under the hypothesis that all signs are random (Fisher's randomisation test):
    the share of sign patterns whose |sum| is at least as large. All patterns for up to 13 differences that are not 0,
    else `draws` random ones and the observed one."""
    given = np.asarray([d for d in differences if d], np.float64)
    if not len(given):
        return 1.0
    observed = abs(given.sum()) - 1e-9 * np.abs(given).sum()
    if len(given) <= EXACT:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(given))))
        return float((np.abs(signs @ given) >= observed).mean())
    rng, extreme = np.random.default_rng(0), 0
    for rows in _rows(draws, len(given)):
        signs = rng.integers(2, size=(rows, len(given))) * 2.0 - 1
        extreme += int((np.abs(signs @ given) >= observed).sum())
    return (extreme + 1) / (draws + 1)


def _rows(draws: int, n: int) -> Iterator[int]:
    """Split `draws` rows of `n` numbers into chunks of at most `AT_ONCE` numbers, but at least one row."""
    most = max(AT_ONCE // n, 1)
    while draws:
        rows = min(most, draws)
        yield rows
        draws -= rows


def ranks(values: Sequence[float] | Floats) -> Floats:
    """[N], from 1; equal values share the mean of their ranks.

    Example: ranks([3.0, 1.0, 3.0]).tolist() == [2.5, 1.0, 2.5]
    """
    _, where, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[where].astype(np.float64)


def spearman(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """Pearson's correlation of the ranks (Spearman 1904). NaN if one of them is constant."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else float("nan")


def kappa(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """(observed agreement - chance's) / (1 - chance's), from the raters' own frequencies (Cohen 1960). NaN if both give
    the same label to everything."""
    n = len(a)
    observed = sum(x == y for x, y in zip(a, b, strict=True)) / n
    chance = sum(sum(x == label for x in a) * sum(y == label for y in b) for label in set(a)) / n**2
    return (observed - chance) / (1 - chance) if chance < 1 else float("nan")


def ordered(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """The share of the pairs that differ in `a` which `b` orders alike; a tie in `b` counts half. NaN if there is no
    such pair.

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
