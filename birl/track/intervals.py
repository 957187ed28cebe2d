"""Stretches of time as sorted, disjoint intervals: how long something went on, and how much of it beside something
else."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Make them with `union`. Times in seconds.

    Example: union([0, 1, 5], [2, 3, 6]).total == 4 (0 to 3 and 5 to 6)
    """

    starts: Floats
    ends: Floats

    @property
    def total(self) -> float:
        return float((self.ends - self.starts).sum())

    def below(self, moments: Any) -> Floats:
        """How much lies before each of the moments."""
        moments = np.asarray(moments, float)
        if not len(self.starts):
            return np.zeros_like(moments)
        sums = np.concatenate([[0.0], np.cumsum(self.ends - self.starts)])
        place = np.searchsorted(self.starts, moments, side="right")  # so many begin before
        last = np.maximum(place - 1, 0)
        over = np.where(place > 0, np.maximum(self.ends[last] - moments, 0.0), 0.0)
        return sums[place] - over

    def within(self, other: "Intervals") -> float:
        """How much of it is also in the other."""
        return float((self.below(other.ends) - self.below(other.starts)).sum())


def union(starts: Any, ends: Any) -> Intervals:
    """Of intervals in any order that may overlap."""
    first, last = np.asarray(starts, float), np.asarray(ends, float)
    if not len(first):
        return Intervals(np.zeros(0), np.zeros(0))
    order = np.argsort(first, kind="stable")
    first, reach = first[order], np.maximum.accumulate(last[order])
    new = np.concatenate([[True], first[1:] > reach[:-1]])  # begins after everything before it was over
    return Intervals(first[new], reach[np.concatenate([new[1:], [True]])])
