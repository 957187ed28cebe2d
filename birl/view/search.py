"""A search in the rollouts of a run, which goes on piece by piece: only for text is the file read again.

A regular expression may take 50 ms on an answer; where it takes longer, the answer is counted as not looked at.
"""

import time
from functools import cache, partial
from math import inf
from typing import Any

import numpy as np

from birl.errors import BirlError
from birl.view.episodes import Episodes
from birl.view.prompts import Prompts
from birl.view.query import Query, Said
from birl.view.tokens import Vocabulary

PATTERN = 0.05  # seconds that a regular expression may take on one answer
SLOW = 20  # answers on which it may take longer before the search is given up
LOOK = 256  # rows between looks at the clock


class Search:
    """The rows that fit a query, found piece by piece. `looked`: rows that were looked at; `slow`: rows on which a
    regular expression took too long, which are not among those found.

    Example: search = Search(episodes, Query.parse("flag:any")); search.go_on(); search.rows
    """

    def __init__(self, episodes: Episodes, query: Query, prompts: Prompts | None = None) -> None:
        """Raises `BirlError` for a regular expression that is none."""
        self.episodes, self.query = episodes, query
        self.prompts = prompts or Prompts(episodes, Vocabulary(episodes.path.parent / "model"))
        self._tests: list[tuple[Any, Said]] = [
            (said.compiled() if said.is_pattern else said.text.casefold(), said) for said in query.said
        ]
        self._begin()

    def _begin(self) -> None:
        self.looked, self.slow, self._begun = 0, 0, self.episodes.begun
        self._found: list[np.ndarray] = []
        self._order: tuple[int, np.ndarray] | None = None  # how many were found, and they in the query's order

    def go_on(self, seconds: float = inf) -> bool:
        """Look at rows that were not looked at, for about so many seconds; False where more are left. Raises
        `BirlError` where a regular expression takes too long too often."""
        if self._begun != self.episodes.begun:
            self._begin()
        until, rows = time.monotonic() + seconds, self.episodes.rows[: self.episodes.settled]
        new = rows[self.looked :]
        good = np.ones(len(new), bool)
        for column in self.query.columns:
            good &= column.fits(new, self.episodes) ^ column.negated
        candidates = np.flatnonzero(good) + self.looked
        if not self._tests:
            self._keep(candidates)
            self.looked = len(rows)
            return True
        for start in range(0, len(candidates), LOOK):
            piece = candidates[start : start + LOOK]
            self._keep(np.array([row for row in piece.tolist() if self._says(row)], np.int64))
            self.looked = int(piece[-1]) + 1
            if time.monotonic() > until:
                return False
        self.looked = len(rows)
        return True

    def _keep(self, found: np.ndarray) -> None:
        if len(found):
            self._found.append(found)

    def _says(self, row: int) -> bool:
        answer, prompt = cache(partial(self._answer, row)), cache(partial(self.prompts.text, row))
        for test, said in self._tests:
            text = (prompt if said.of else answer)()
            if said.is_pattern:
                try:
                    fits = test.search(text, timeout=PATTERN) is not None
                except TimeoutError:
                    self.slow += 1
                    if self.slow >= SLOW:
                        raise BirlError(
                            f"{said}: this regular expression took more than {PATTERN:g} s on {SLOW} answers. Write it "
                            "without repetitions inside repetitions, or narrow the search, as with step:10..20."
                        ) from None
                    return False
            else:
                fits = test in text.casefold()
            if fits == said.negated:
                return False
        return True

    def _answer(self, row: int) -> str:
        return str(self.episodes.head(row).get("text") or "")

    @property
    def rows(self) -> np.ndarray:
        """Numbers of the rows that fit, in the query's order."""
        if len(self._found) > 1:
            self._found = [np.concatenate(self._found)]
        found = self._found[0] if self._found else np.zeros(0, np.int64)
        if not self.query.sort:
            return found
        if self._order is None or self._order[0] != len(found):
            values = self.episodes.rows[self.query.sort.removeprefix("-")][found].astype(np.float64)
            signed = -values if self.query.sort.startswith("-") else values
            self._order = len(found), found[np.argsort(signed, kind="stable")]
        return self._order[1]
