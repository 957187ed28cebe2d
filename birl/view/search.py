"""An incremental search in the rollouts of a run: the file is read again only for conditions on texts.
The rows are exported as JSONL (unchanged lines of rollouts.jsonl) or as CSV for a spreadsheet, line by line.
`birl rollouts RUN "query"` is the page's search in the terminal."""

import csv
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy as np

from birl.errors import BirlError
from birl.flags import Flag, taken, whole
from birl.regular import check_target, writing
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


USAGE = (
    'Usage: birl rollouts RUN ["SQL condition"] [--text WORDS] [--limit N] [--export FILE.jsonl or FILE.csv]\n\n'
    "Lists the episodes of a run that match an SQL condition, as on the page of `birl view`:\n\n"
    "  birl rollouts runs/demo 'reward < 0.5 and step > 3 order by step desc'\n"
    "  birl rollouts runs/demo \"'repetition' in flags and step between 10 and 20\"\n"
    "  birl rollouts runs/demo \"outcome = 'truncated' order by tokens desc\" --limit 5\n"
    "  birl rollouts runs/demo 'reward >= 1' --text 'two words' --export found.csv\n\n"
    "--text: words in the prompt or the answer, case-insensitive. --limit: episodes to show (default 20; --export\n"
    "writes all). docs/rollouts.md has all columns and flags."
)
LIMIT = 20
SHAPE = "{:>7} {:>6} {:<12} {:>8} {:>6}  {:<12} {}"


def _exported(text: str) -> Path:
    if (file := Path(text)).suffix.removeprefix(".") not in FORMATS:
        raise ValueError
    return file


WORDS = Flag(name="--text", value="WORDS", takes="words, as in `birl rollouts RUN --text 'two apples'`", read=str)
SHOWN = Flag(name="--limit", value="N", takes="a whole number, as in `birl rollouts RUN --limit 50`", read=whole)
EXPORT = Flag(name="--export", value="FILE", takes="a file that ends in .jsonl or .csv", read=_exported)


def run(words: list[str]) -> int:
    given, named = taken("rollouts", words, (WORDS, SHOWN, EXPORT))
    if not named:
        raise BirlError("Name a run folder, as in `birl rollouts runs/NAME`; `birl runs` lists them.")
    folder, condition = Path(named[0]), " ".join(named[1:])
    limit, target = given.get(SHOWN.name), given.get(EXPORT.name)
    if not folder.is_dir():
        raise BirlError(f"There is no folder {folder}. Name a run, as in `birl rollouts runs/demo`.")
    search = Search(Episodes(folder / "rollouts.jsonl"), Query.parse(condition, given.get(WORDS.name, "")))
    search.episodes.read_on()
    search.go_on()
    if search.episodes.skipped:
        line, why = next(iter(search.episodes.broken.items()), (0, ""))
        rest = f" So are {more} others." if (more := search.episodes.skipped - 1) else ""
        place = visible(f"{search.episodes.path}, line {line}: {why}")
        print(f"birl: {place}. It is left out; delete it to end this message.{rest}", file=sys.stderr)
    if target is not None:
        return _export(search, target, limit)
    _print(search, LIMIT if limit is None else limit)
    return 0


def _print(search: Search, limit: int) -> None:
    rows, episodes = search.rows, search.episodes
    width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 10_000
    print(SHAPE.format("row", "step", "outcome", "reward", "tokens", "flags", "text")[:width].rstrip())
    for row in rows[:limit].tolist():
        head, known = episodes.head(row), episodes.rows[row]
        text = " ".join(visible(flags.plain(str(head.get("text") or ""))).split())
        step, outcome, tokens = int(known["step"]), OUTCOMES[known["outcome"]], int(known["tokens"])
        reward = "-" if isnan(known["reward"]) else f"{known['reward']:.4g}"
        named = ",".join(name for name, _ in episodes.reasons(row, head))
        print(SHAPE.format(row, step, outcome, reward, tokens, named, text[:400])[:width].rstrip())
    more = f", {limit} shown (--limit N shows more)" if len(rows) > limit else ""
    print(f"{len(rows):,} of {episodes.count:,} episodes{more}")


def _export(search: Search, target: Path, limit: int | None) -> int:
    rows = search.rows[:limit].tolist()
    result = lines(search.episodes, rows, target.suffix.removeprefix("."))
    if target.exists() and target.samefile(search.episodes.path):
        raise BirlError(f"{target} is the run's own file. Choose another name.")
    part = target.with_name(target.name + ".part")
    with writing(target):
        check_target(target)
        part.unlink(missing_ok=True)
        with part.open("wb") as file:
            file.writelines(result)
        os.replace(part, target)
    print(f"{len(rows):,} episodes in {target}")
    return 0
