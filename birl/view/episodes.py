"""Index of rollouts.jsonl: position of each episode in the file, and the columns for filters and sorting.

The file is read incrementally: numbers go into one numpy array (about 100 bytes an episode), texts and tokens stay in
the file. An incomplete last line is read later. Broken lines are counted and skipped. If a resumed run truncated the
file, rows beyond its end are removed.
"""

import json
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from birl.errors import BirlError
from birl.regular import open_regular, parse_json
from birl.track.progress import right_from
from birl.track.runs import config
from birl.types import Outcome
from birl.view import flags, kept

ROW = np.dtype(
    [
        ("at", "<i8"),  # offset of its line [bytes]
        ("size", "<i8"),  # of the line, with its end
        ("head", "<i4"),  # of the line before the tokens
        ("step", "<i4"),
        ("group", "<i4"),
        ("episode", "<i4"),
        ("turns", "<i4"),
        ("tokens", "<i4"),  # number of generated tokens
        ("prompt", "<i4"),  # number of tokens before the first generated one
        ("reward", "<f8"),
        ("score", "<f8"),
        ("advantage", "<f8"),
        ("outcome", "u1"),  # index into OUTCOMES
        ("flags", "u1"),  # bits, in order of flags.NAMES
        ("source", "<i4"),  # number in `sources`
        ("task", "<i4"),  # number in `tasks`
        ("key", "<i8"),  # equal for equal answers
    ]
)
SCORE = list(ROW.names or ()).index("score")
OUTCOMES = (*map(str, Outcome), "unknown")
BLOCK = 1 << 22  # bytes per read
WINDOW = 1024  # earlier answers for the comparison of lengths
NAMED = 20  # broken lines that are reported one by one
DIGITS = 12  # bytes of a token and its comma, at most
FIRST = re.compile(rb',"samples":\[\{"tokens":\[([\d,]+)')
TOKENS = b',"samples":['  # tokens are written last; inside a text the quotes would be escaped
BITS = {name: 1 << place for place, name in enumerate(flags.NAMES)}
BROKEN = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # exceptions of a broken line
SAID_ALONE = ("repetition", "format", "unbacked", "script")  # flags that depend on the answer only


def _problem(line: bytes, error: Exception) -> str:
    """What is wrong with a line that caused `error`, in words."""
    try:
        record = parse_json(line)
    except ValueError as reason:
        return f"not JSON ({reason})"[:200]
    if not isinstance(record, dict):
        return "it is no JSON object"
    return "it has no step" if isinstance(error, KeyError) else f"it is no episode ({error})"[:200]


class Episodes:
    """The indexed episodes of a run. `rows` [N] of type ROW.

    `threshold`: validation.threshold; `right`: least score of a right answer. Without a threshold, a score other than 0
    and 1 removes the flags that depend on it. `begun`: number of times that rows were removed: users of row numbers
    start again when it changes. `settled`: number of rows whose flags are final; those of an incompletely read group
    are not. `broken`: line number -> error, for the first broken lines; `skipped`: their number.

    Example: episodes = Episodes(Path("runs/demo/rollouts.jsonl")); episodes.read_on(); episodes.rows["reward"].mean()
    """

    def __init__(self, path: Path, threshold: float | None = None) -> None:
        """`threshold` None: that of the run's configuration."""
        own = config(Path(path).parent).get("validation.threshold") if threshold is None else threshold
        self.threshold = float(own) if isinstance(own, int | float) else 0.0
        self.path, self.lock, self.begun, self.settled = Path(path), threading.RLock(), 0, 0
        self._empty()
        self._kept = -1  # rows of the cached index; -1: not loaded yet

    def _empty(self) -> None:
        self._rows, self.count = np.zeros(1024, ROW), 0
        self.tasks, self.sources = dict[str, int](), dict[str, int]()  # names -> number of each, from 0
        self.read, self.lines, self.size = 0, 0, 0  # indexed bytes and lines, size of the file
        self.skipped, self.broken = 0, dict[int, str]()
        self._mark = b""  # start of the last row's line
        self.right = self.threshold or 1.0

    @property
    def rows(self) -> np.ndarray:
        return self._rows[: self.count]

    def read_on(self, seconds: float = inf) -> bool:
        """Index added lines, for about so many seconds; False if more are left. Raises `BirlError` if there is no such
        file."""
        until = time.monotonic() + seconds
        with self.lock, self._open() as file:
            self.size = file.seek(0, 2)
            if self._kept < 0:
                self._recall(file)
            self._take_back(file)
            while self._block(file):
                if time.monotonic() > until:
                    self.settled = self._beginning(max(self.count - 1, 0))
                    return False
            self.settled = self.count
            if self.count - self._kept >= kept.WORTH:
                kept.save(self)
                self._kept = self.count
            return True

    def _recall(self, file: BinaryIO) -> None:
        """Load the index from the cache, if it is of this file."""
        self._kept = 0
        if not kept.load(self, ROW):
            return
        if self.read <= self.size and all(self._as_it_was(file, row) for row in (0, self.count // 2, self.count - 1)):
            self._kept, self._mark = self.count, self._head(file, self.count - 1)
        else:
            self._empty()

    def take(self, rows: np.ndarray, about: Mapping[str, Any]) -> None:
        """Take over a cached index: its rows, and the attributes of `kept.NAMES`."""
        self._rows, self.count = rows, len(rows)
        self.right = right_from(rows["score"], self.threshold)
        for name in kept.NAMES:
            setattr(self, name, about[name])

    def _open(self) -> BinaryIO:
        try:
            return open_regular(self.path)
        except OSError as error:
            raise BirlError(
                f"{self.path}: {error.strerror or error}. `birl rl` writes it unless track.rollouts=false; the other "
                "commands have no rollouts."
            ) from error

    def _take_back(self, file: BinaryIO) -> None:
        """Remove rows that the file no longer has. One that has grown again since is detected by its last row."""
        if self.size < self.read:
            ends = self.rows["at"] + self.rows["size"]
            left = int(np.searchsorted(ends, self.size, side="right"))
            # Not truncated but rewritten; or the broken lines beyond the cut are unknown.
            if left and (self.skipped or not self._as_it_was(file, left - 1)):
                left = 0
            if not left:
                self._empty()
            else:
                self.read, self.lines, self._mark = int(ends[left - 1]), left, self._head(file, left - 1)
            self.count, self.begun = left, self.begun + 1
            self.size = file.seek(0, 2)
        elif self._mark and self._head(file, self.count - 1) != self._mark:
            self._empty()
            self.size, self.begun = file.seek(0, 2), self.begun + 1

    def _as_it_was(self, file: BinaryIO, row: int) -> bool:
        """Whether the file still has the indexed row there."""
        at, size = int(self._rows[row]["at"]), int(self._rows[row]["size"])
        file.seek(at)
        line, old = file.read(size), self._rows[row].copy()
        try:
            new = np.array([self._row(line[:-1], at)], ROW)[0]
        except BROKEN:
            return False
        old["flags"] = new["flags"]  # some depend on other rows
        return line.endswith(b"\n") and old.tobytes() == new.tobytes()

    def _head(self, file: BinaryIO, row: int) -> bytes:
        file.seek(int(self._rows[row]["at"]))
        return file.read(int(self._rows[row]["head"]))

    def _block(self, file: BinaryIO) -> bool:
        """Index a block of whole lines; False if there is none."""
        file.seek(self.read)
        data = file.read(BLOCK)
        while (end := data.rfind(b"\n") + 1) == 0:
            if not (more := file.read(BLOCK)):
                return False
            data += more
        first, result, at = self.count, list[tuple[Any, ...]](), self.read
        for line in data[:end].split(b"\n")[:-1]:
            self.lines += 1
            try:
                result.append(self._row(line, at))
            except BROKEN as error:
                self.skipped += 1
                if len(self.broken) < NAMED:
                    self.broken[self.lines] = _problem(line, error)
            at += len(line) + 1
        self.read = at
        self._append(result)
        if self.count > first:
            self._compare(first)
            self._mark = self._head(file, self.count - 1)
        return True

    def _row(self, line: bytes, at: int) -> tuple[Any, ...]:
        cut = line.find(TOKENS) if line.endswith((b"}]}", b"[]}")) else -1
        head = len(line) if cut < 0 else cut
        record = json.loads(line) if cut < 0 else json.loads(line[:cut] + b"}")
        tokens, prompt = _lengths(record, line, cut)
        score = number(record.get("score"))
        text = flags.plain(str(record.get("text") or ""))
        answer = record.get("answer")
        bits = sum(BITS[name] for name, _ in alone(text, answer, score, self.right))
        outcome = record.get("outcome")
        return (
            *(at, len(line) + 1, head, _whole(record["step"]), _whole(record.get("group", -1))),
            *(_whole(record.get("episode", -1)), max(len(record.get("turns") or ()), 1), tokens, prompt),
            *(number(record.get("reward")), score, number(record.get("advantage"))),
            *(OUTCOMES.index(outcome) if outcome in OUTCOMES else len(OUTCOMES) - 1, bits),
            self.sources.setdefault(str(record.get("source") or ""), len(self.sources)),
            self.tasks.setdefault(str(record.get("task") or ""), len(self.tasks)),
            flags.key(text),
        )

    def _append(self, new_rows: list[tuple[Any, ...]]) -> None:
        new = self.count + len(new_rows)
        if new > len(self._rows):
            rows = np.zeros(max(new, 2 * len(self._rows)), ROW)
            rows[: self.count] = self.rows
            self._rows = rows
        self._rows[self.count : new] = np.array(new_rows, ROW)
        self.count = new
        if isnan(right := right_from((row[SCORE] for row in new_rows), self.threshold)):
            self.right = right
            self.rows["flags"] &= ~np.uint8(BITS["unbacked"])

    def _compare(self, first: int) -> None:
        """Set the flags that depend on other episodes, for the rows from `first` on."""
        rows = self.rows
        for start, end in _runs(rows["step"][first:], first):
            limit = flags.BLOWUP * self.usual(start)
            new = rows[start:end]
            long = (new["tokens"] > limit) & (new["tokens"] >= flags.BLOWUP_FROM)
            new["flags"][long] |= BITS["length"]
        new = rows[self._beginning(first) :]
        remarkable = np.flatnonzero(new["key"])
        triples = np.stack([new[n][remarkable] for n in ("step", "group", "key")], axis=1)
        _, place, counts = np.unique(triples, axis=0, return_inverse=True, return_counts=True)
        new["flags"][remarkable[counts[place.reshape(-1)] > 1]] |= BITS["duplicate"]

    def _beginning(self, row: int) -> int:
        """The first row of the group of this row."""
        rows = self.rows
        while row > 0 and all(rows[row - 1][name] == rows[row][name] for name in ("step", "group")):
            row -= 1
        return row

    def usual(self, row: int) -> float:
        """95th percentile of the tokens of answers before this row's step; NaN if there are too few."""
        steps, first = self.rows["step"], max(row - WINDOW, 0)
        while first > 0 and (steps[first:row] == steps[row]).all():
            first = max(2 * first - row, 0)
        others = np.flatnonzero(steps[first:row] != steps[row])
        start = first + int(others[-1]) + 1 if len(others) else 0
        past = self.rows["tokens"][max(start - WINDOW, 0) : start]
        return float(np.quantile(past, 0.95)) if len(past) >= flags.PAST else nan

    def line(self, row: int) -> bytes:
        """The row's line in the file, with its end. Raises `BirlError`."""
        return self._bytes(row, "size")

    def record(self, row: int) -> dict[str, Any]:
        """The whole record, with tokens. Raises `BirlError`."""
        return self._parsed(row, self.line(row))

    def head(self, row: int) -> dict[str, Any]:
        """The record without tokens, which are most of it. Raises `BirlError`."""
        data = self._bytes(row, "head")
        alone = self._rows[row]["head"] + 1 >= self._rows[row]["size"]  # the line has no tokens
        return self._parsed(row, data if alone else data + b"}")

    def given(self, row: int) -> tuple[int, ...]:
        """Tokens before the first generated one; empty if that is no list of integers. Reads no more of the line than
        that. Raises `BirlError`."""
        count = int(self._rows[row]["prompt"]) if 0 <= row < self.count else 0
        data = self._bytes(row, "size", most=int(self._rows[row]["head"]) + DIGITS * (count + 8))
        result = FIRST.match(data, int(self._rows[row]["head"]))
        if result is None:
            try:
                tokens = self.record(row)["samples"][0]["tokens"][:count]
            except (LookupError, TypeError):
                return ()
            return tuple(tokens) if all(type(token) is int for token in tokens) else ()
        return tuple(map(int, result[1].split(b",")[:count])) if count else ()

    def _bytes(self, row: int, what: str, most: int = -1) -> bytes:
        if not 0 <= row < self.count:
            raise BirlError(f"{self.path}: there is no row {row}; there are {self.count}, counted from 0.")
        with self._open() as file:
            file.seek(int(self._rows[row]["at"]))
            size = int(self._rows[row][what])
            return file.read(size if most < 0 else min(size, most))

    def _parsed(self, row: int, data: bytes) -> dict[str, Any]:
        try:
            return json.loads(data)
        except ValueError as error:
            raise BirlError(f"{self.path}: row {row} is not what it was ({error}). Load the page again.") from error

    def group(self, row: int) -> list[int]:
        """All rows of this row's group."""
        rows, own = self.rows, self._rows[row]
        return [int(n) for n in np.flatnonzero((rows["step"] == own["step"]) & (rows["group"] == own["group"]))]

    def reasons(self, row: int, head: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(name, reason) of each flag of a row."""
        own = self._rows[row]
        text = flags.plain(str(head.get("text") or ""))
        result = alone(text, head.get("answer"), number(head.get("score")), self.right)
        if own["flags"] & BITS["length"]:
            result.append(("length", flags.length_blowup(int(own["tokens"]), self.usual(row))))
        if own["flags"] & BITS["duplicate"]:
            group = self.group(row)
            result.append(("duplicate", flags.duplicates(self.rows["key"][group].tolist())[group.index(row)]))
        return sorted(result, key=lambda flag: flags.NAMES.index(flag[0]))


def alone(text: str, answer: Any, score: float, right: float) -> list[tuple[str, str]]:
    """Flags that depend on the answer only; `text` without end tokens. `right`: of `flags.unbacked`."""
    reasons = (
        flags.repetition(text),
        flags.format_gaming(text),
        flags.unbacked(text, answer if isinstance(answer, str) else None, score, right),
        flags.script_switch(text),
    )
    return [(name, reason) for name, reason in zip(SAID_ALONE, reasons, strict=True) if reason]


def number(value: Any) -> float:
    """A float; NaN if it is not a number: a failed episode has no reward."""
    with suppress(OverflowError):
        return float(value) if isinstance(value, int | float) else nan
    return nan


def _whole(value: Any) -> int:
    if not isinstance(value, int) or not -(2**31) <= value < 2**31:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value


def _lengths(record: Mapping[str, Any], line: bytes, cut: int) -> tuple[int, int]:
    """Number of generated tokens, and of tokens before the first of them; counted in the bytes if possible."""
    total, prompt, place = 0, -1, cut
    while cut >= 0 and (place := line.find(b'"mask":[', place)) >= 0:
        start, place = place + 8, line.find(b"]", place)
        mask = line[start:place]
        if mask.translate(None, b"01,"):
            return _counted(json.loads(line).get("samples") or ())
        total += mask.count(b"1")
        prompt = mask.find(b"1") // 2 if prompt < 0 else prompt
    return (total, max(prompt, 0)) if cut >= 0 else _counted(record.get("samples") or ())


def _counted(samples: Any) -> tuple[int, int]:
    masks = [list(map(bool, s["mask"])) for s in samples]
    prompt = masks[0].index(True) if masks and True in masks[0] else 0
    return sum(map(sum, masks)), prompt


def _runs(values: np.ndarray, first: int) -> list[tuple[int, int]]:
    """(start, end) of each run of equal values, counted from `first`."""
    cuts = (np.flatnonzero(values[1:] != values[:-1]) + 1 + first).tolist()
    return list(zip([first, *cuts], [*cuts, first + len(values)], strict=True))
