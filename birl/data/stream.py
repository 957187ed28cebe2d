"""The order of rows: shuffled, mixed, and a pure function of (seed, position).

A position is one integer. Nothing else has to be saved, and resuming from it reads no row twice.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np

from birl.errors import BirlError

T = TypeVar("T")
S = TypeVar("S", covariant=True)

BLOCK = 4096  # choices of a source that are drawn at once
MIX, ORDER = 0, 1  # independent streams of random numbers


class Source(Protocol[S]):
    """Rows with a name: `Tasks`, `Examples`."""

    @property
    def name(self) -> str: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> S: ...
    @overload
    def __getitem__(self, index: slice) -> "Source[S]": ...


class Stream(Iterator[T]):
    """Iterator over the rows of several sources.

    Without `weights` an epoch is one permutation of all rows together. With them each draw first chooses a source, and
    each source goes through its own permutations; an epoch is then as many draws as there are rows. `epochs` None:
    endless.

    Example: stream = Stream(sources, weights=[3, 1], seed=0, shuffle=True, epochs=None, start=128); next(stream)
    """

    def __init__(
        self,
        sources: Sequence[Source[T]],
        *,
        weights: Sequence[float] = (),
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        start: int = 0,
    ) -> None:
        _check(sources, weights, start)
        pools = [[source] for source in sources] if weights else [list(sources)]
        self._pools = [Pool(p, seed=seed, number=i, shuffle=shuffle) for i, p in enumerate(pools)]
        self._mix = Mix([float(w) for w in weights] or [1.0], seed)
        self._end = None if epochs is None else epochs * sum(map(len, sources))
        self._position = start
        self._drawn = self._mix.drawn(start)

    @property
    def position(self) -> int:
        """Number of rows returned since the run's start."""
        return self._position

    def __iter__(self) -> "Stream[T]":
        return self

    def __next__(self) -> T:
        if self._end is not None and self._position >= self._end:
            raise StopIteration
        pool = self._mix.choose(self._position)
        row = self._pools[pool].get(self._drawn[pool])
        self._drawn[pool] += 1
        self._position += 1
        return row


class Pool(Generic[T]):
    """Rows that are visited once each per epoch. `get(n)` is the n-th draw, counted over all epochs."""

    def __init__(self, sources: Sequence[Source[T]], *, seed: int, number: int, shuffle: bool) -> None:
        self._sources = sources
        self._ends = list(accumulate(map(len, sources)))
        self._seed, self._number, self._shuffle = seed, number, shuffle
        self._epoch, self._order = -1, np.arange(self._ends[-1])

    def get(self, n: int) -> T:
        epoch, i = divmod(n, self._ends[-1])
        if self._shuffle and epoch != self._epoch:
            generator = _generator(self._seed, ORDER, self._number, epoch)
            self._epoch, self._order = epoch, generator.permutation(self._ends[-1])
        row = int(self._order[i])
        source = bisect_right(self._ends, row)
        return self._sources[source][row - (self._ends[source - 1] if source else 0)]


class Mix:
    """Chooses the pool of draw n: independently, with the given weights."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._bounds = np.cumsum(weights) / sum(weights)
        self._last = max(i for i, w in enumerate(weights) if w > 0)  # rounding must not reach a source of weight 0
        self._seed = seed
        self._number, self._block = -1, np.zeros(0, dtype=np.int64)

    def choose(self, n: int) -> int:
        number, i = divmod(n, BLOCK)
        if number != self._number:
            self._number, self._block = number, self._draw(number)
        return int(self._block[i])

    def drawn(self, n: int) -> list[int]:
        """Number of the first n draws from each pool."""
        pools = len(self._bounds)
        if pools == 1:
            return [n]
        counts = np.zeros(pools, dtype=np.int64)
        for number in range(math.ceil(n / BLOCK)):
            counts += np.bincount(self._draw(number)[: n - number * BLOCK], minlength=pools)
        return counts.tolist()

    def _draw(self, number: int) -> np.ndarray:
        chosen = np.searchsorted(self._bounds, _generator(self._seed, MIX, number).random(BLOCK), side="right")
        return np.minimum(chosen, self._last)


def _generator(seed: int, *path: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**64, *path])


def _check(sources: Sequence[Source[Any]], weights: Sequence[float], start: int) -> None:
    if not sources:
        raise BirlError("There are no training sets. Set data.train.")
    for source in sources:
        if len(source) == 0:
            raise BirlError(f"{source.name} has no rows left to draw from. Remove it from data.train.")
    if weights and len(weights) != len(sources):
        raise BirlError(f"data.weights has {len(weights)} values for {len(sources)} training sets. Give one for each.")
    if weights and (not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights)):
        raise BirlError(f"data.weights={list(weights)}: weights are numbers from 0 up, and not all 0.")
    if start < 0:
        raise ValueError(f"a position counts from 0, got {start}")
