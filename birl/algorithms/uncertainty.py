"""How certain a mean over prompts is, and a difference of two over the same prompts."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from birl.algorithms.pass_at_k import wilson

AT_ONCE = 2**20  # numbers that are drawn at once
EXACT = 13  # differences up to which all signs are tried
FEWEST = 2  # values that say something about how much they vary


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of one value a prompt: Wilson's where all are 0 or 1, else by `bootstrap`."""
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
    """Two-sided p of paired differences under "each could as well have had the other sign" (Fisher's randomisation
    test): the share of sign patterns whose |sum| is at least as large. All patterns of up to 13 differences that are
    not 0, else `draws` random ones and the observed one."""
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
    """Parts of `draws` rows of `n` numbers, none of more than `AT_ONCE` numbers unless one row is."""
    most = max(AT_ONCE // n, 1)
    while draws:
        rows = min(most, draws)
        yield rows
        draws -= rows
