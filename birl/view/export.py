"""Export of rows as JSONL (unchanged lines of rollouts.jsonl) or as CSV for a spreadsheet, line by line."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from math import isnan

from birl.errors import BirlError
from birl.view.episodes import OUTCOMES, Episodes
from birl.visible import visible

FORMATS = ("jsonl", "csv")
COLUMNS = (
    *("row", "step", "group", "episode", "task", "source", "answer", "outcome", "detail", "reward", "score"),
    *("advantage", "prompt_tokens", "tokens", "turns", "flags", "parts", "text"),
)
#: first characters of formulas in a spreadsheet; the last four are the wide forms of = + - @
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


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
