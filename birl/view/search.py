"""An incremental search in the rollouts of a run: the file is read again only for conditions on texts.
The rows are exported as JSONL (unchanged lines of rollouts.jsonl) or as CSV for a spreadsheet, line by line."""

import csv
import io
import json
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from math import inf, isnan
from typing import Any

import numpy as np

from birl.errors import BirlError
from birl.view import flags
from birl.view.episodes import BITS, OUTCOMES, Episodes
from birl.view.query import NUMBERS, TEXTS, Query, select
from birl.view.tokens import Vocabulary
from birl.view.trajectory import Prompts
from birl.visible import visible

FIRST = 4  # rows of the first batch of texts, so that a slow expression is noticed early
MOST = 1024  # largest batch; its size doubles while batches are quick
QUICK = 0.05  # s
LARGE = 1 << 19  # characters of a batch, at most
FORMATS = ("jsonl", "csv")
COLUMNS = (
    *("row", "step", "group", "episode", "task", "source", "answer", "outcome", "detail", "reward", "score"),
    *("advantage", "prompt_tokens", "tokens", "turns", "flags", "parts", "text"),
)
#: first characters of formulas in a spreadsheet; the last four are the wide forms of = + - @
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
NAMED = [[name for name in flags.NAMES if BITS[name] & bits] for bits in range(1 << len(flags.NAMES))]


class Search:
    """The rows that match a query, searched incrementally. `looked`: number of searched rows.

    Example: search = Search(episodes, Query.parse("len(flags) > 0")); search.go_on(); search.rows
    """

    def __init__(self, episodes: Episodes, query: Query, prompts: Prompts | None = None) -> None:
        self.episodes, self.query = episodes, query
        self.prompts = prompts or Prompts(episodes, Vocabulary(episodes.path.parent / "model"))
        self._begin()

    def _begin(self) -> None:
        self.looked, self._begun = 0, self.episodes.begun
        self._found = np.zeros(0, np.int64)
        self._order: np.ndarray | None = None

    def go_on(self, seconds: float = inf) -> bool:
        """Search further rows, for about so many seconds; False if more are left. Raises `BirlError` if the condition
        fails on a row or takes too long."""
        if self._begun != self.episodes.begun:
            self._begin()
        until, end, many = time.monotonic() + seconds, self.episodes.settled, FIRST
        rows = np.arange(self.looked, end)
        if self.query.by_columns and len(rows):
            rows = select(self.query.by_columns, self._table(rows))
        while self.query.by_texts and len(rows):
            texts, start = self._texts(rows[:many]), time.monotonic()
            piece, rows = np.split(rows, [len(next(iter(texts.values())))])
            self._keep(select(self.query.by_texts, self._table(piece, texts)))
            many = min(2 * many, MOST) if time.monotonic() - start < QUICK else max(many // 2, 1)
            self.looked = int(piece[-1]) + 1
            if time.monotonic() > until:
                return False
        self._keep(rows)
        self.looked = end
        return True

    def _keep(self, rows: np.ndarray) -> None:
        if len(rows):
            self._found, self._order = np.concatenate([self._found, rows]), None

    def _texts(self, rows: np.ndarray) -> dict[str, list[str]]:
        """The texts of a batch, the first of the rows."""
        texts: dict[str, list[str]] = {name: [] for name in TEXTS if name in self.query.columns}
        size = 0
        for row in rows.tolist():
            head = self.episodes.head(row) if texts.keys() - {"prompt"} else {}
            for name, values in texts.items():
                values.append(_text(self.prompts.text(row) if name == "prompt" else head.get(name)))
                size += len(values[-1])
            if size > LARGE:
                break
        return texts

    def _table(self, rows: np.ndarray, texts: dict[str, list[str]] | None = None) -> Any:
        """The query's columns for these rows; a missing number is null."""
        import pyarrow

        known, wanted = self.episodes.rows, self.query.columns
        columns: dict[str, Any] = {"row": rows, **(texts or {})}
        for name in wanted & set(NUMBERS) - {"row"}:
            columns[name] = pyarrow.array(known["prompt" if name == "prompt_tokens" else name][rows], from_pandas=True)
        of = {"outcome": OUTCOMES, "source": self.episodes.sources, "task": self.episodes.tasks, "flags": NAMED}
        for name in wanted & set(of):
            values = of[name] if name in ("outcome", "flags") else list(map(_text, of[name]))
            columns[name] = pyarrow.array(values).take(pyarrow.array(known[name][rows]))
        return pyarrow.table(columns)

    @property
    def rows(self) -> np.ndarray:
        """Numbers of the matching rows, in the query's order."""
        if self._order is None:
            self._order = select(self.query.ordered, self._table(self._found)) if len(self._found) else self._found
        return self._order


def _text(value: Any) -> str:
    """Replace lone surrogates, which DuckDB refuses, by question marks."""
    return str(value or "").encode("utf-8", "replace").decode()


def lines(episodes: Episodes, rows: Iterable[int], form: str) -> Iterator[bytes]:
    """Lines of the exported file. Raises `BirlError` for a format that is not in FORMATS."""
    if form not in FORMATS:
        raise BirlError(f"export to {form or 'nothing'}: the formats are {' and '.join(FORMATS)}.")
    if form == "jsonl":
        return map(episodes.line, rows)
    return map(_written, chain([COLUMNS], (cells(episodes, row) for row in rows)))


def cells(episodes: Episodes, row: int) -> list[object]:
    """One row in the order of COLUMNS; numbers as numbers, text so that no spreadsheet evaluates it."""
    head, known = episodes.head(row), episodes.rows[row]
    parts = json.dumps(head.get("parts") or {}, ensure_ascii=False)
    named = [name for name, _ in episodes.reasons(row, head)]
    figures = ["" if isnan(known[name]) else repr(float(known[name])) for name in ("reward", "score", "advantage")]
    texts = [_safe(str(head.get(name) or "")) for name in ("task", "source", "answer")]
    return [
        *(row, int(known["step"]), int(known["group"]), int(known["episode"]), *texts, OUTCOMES[known["outcome"]]),
        *(_safe(str(head.get("detail") or "")), *figures),
        *(int(known["prompt"]), int(known["tokens"]), int(known["turns"]), " ".join(named), _safe(parts)),
        _safe(str(head.get("text") or "")),
    ]


def _safe(text: str) -> str:
    """Control characters are escaped, and a text like a formula gets a leading apostrophe."""
    text = visible(text)
    return f"'{text}" if text.lstrip(" ").startswith(FORMULA) else text


def _written(values: Iterable[object]) -> bytes:
    """Quote every cell: a program with another separator must not find a formula after a semicolon."""
    line = io.StringIO()
    csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="\r\n").writerow(values)
    return line.getvalue().encode("utf-8", "replace")
