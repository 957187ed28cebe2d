"""The numbers of a JSON Lines file as columns, read incrementally."""

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from birl.regular import open_regular
from birl.track.log import Growing

BATCH = 500  # lines that are parsed at a time; other threads wait meanwhile
END = 1 << 14  # bytes at the end of a file that a glimpse reads completely: a few lines
STAMP = "time"  # the one column that is text in the file; as seconds since 1970, used if no step was timed
TIMED = "time/step"


class Columns:
    """metrics.jsonl or validation.jsonl. `read` reads added lines; an incomplete last line is read later. A file that
    became shorter, or whose bytes before the last position changed (after a resume), is read again from its start. Not
    thread-safe.

    Example: table = Columns(Path("runs/demo/metrics.jsonl")); table.read(); table["reward/mean"]
    """

    def __init__(self, path: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
        """`keep`: whether a name becomes a column."""
        self.path, self.keep = path, keep
        self.generation = 0  # number of restarts from the beginning
        self._clear()

    @property
    def unread(self) -> int:
        """Number of bytes that were not read yet."""
        return self._file.unread

    @property
    def taken(self) -> int:
        """Number of bytes that were read."""
        return self._file.taken

    def glimpse(self, lines: int) -> "Columns":
        """Another table of about `lines` rows from all over the file and its last ones, read quickly. This table is
        unchanged."""
        result, chosen, last = Columns(self.path, self.keep), [], -1
        with suppress(OSError), open_regular(self.path) as file:
            end = max(0, file.seek(0, 2) - END)
            for place in range(0, end, max(1, end // lines)):
                file.seek(place)
                if place:
                    file.readline()  # the middle of a line
                if last < file.tell() < end:
                    last = file.tell()
                    chosen.append(file.readline())
            file.seek(end)
            if end:
                file.readline()
            chosen += [line for line in file.readlines() if line.endswith(b"\n")]
        result._take(chosen)
        return result

    def _clear(self) -> None:
        self.rows, self.broken = 0, 0  # broken: skipped lines that are no JSON object with a step
        self._file = Growing(self.path)
        self._columns: dict[str, np.ndarray] = {}

    @property
    def names(self) -> list[str]:
        """Names in the order of the file, without step and time."""
        return [name for name in self._columns if name not in ("step", STAMP)]

    def __getitem__(self, name: str) -> np.ndarray:
        """A value for each row, NaN if it has none; all NaN for an unknown name."""
        column = self._columns.get(name)
        return np.full(self.rows, np.nan) if column is None else column[: self.rows]

    def read(self) -> bool:
        """Read added lines; returns whether anything changed. A missing file is an empty one."""
        state = (self.generation, self.rows, self.broken)
        if not self._file.goes_on:
            self.generation += 1
            self._clear()
        for lines in self._file.new():
            self._take(lines)
        return state != (self.generation, self.rows, self.broken)

    def _take(self, lines: list[bytes]) -> None:
        for start in range(0, len(lines), BATCH):
            batch = lines[start : start + BATCH]
            records = [r for r in parse(batch) if isinstance(r, dict) and type(r.get("step")) in (int, float)]
            self.broken += len(batch) - len(records)
            if records:
                self._add(records)

    def _add(self, records: list[dict[str, Any]]) -> None:
        first, end = self.rows, self.rows + len(records)
        for name, values in _transposed(records):
            if name == STAMP:
                result = None if TIMED in records[0] else np.array([_stamp(value) for value in values])
            else:
                result = _floats(values) if name == "step" or self.keep(name) else None
            if result is not None:
                self._room(name, end)[first:end] = result
        self.rows = end

    def _room(self, name: str, rows: int) -> np.ndarray:
        """The column with room for so many rows; unset values are NaN."""
        column = self._columns.get(name)
        if column is None or len(column) < rows:
            larger = np.full(max(1024, 2 * rows if column is not None else rows), np.nan)
            if column is not None:
                larger[: len(column)] = column
            self._columns[name] = column = larger
        return column


def parse(lines: Sequence[bytes]) -> list[Any]:
    """The value of each line, without lines that are not JSON. Two broken lines must not form a valid one together."""
    if all(line[:1] == b"{" and line.rstrip()[-1:] == b"}" for line in lines):
        with suppress(ValueError, RecursionError):
            result = json.loads(b"[" + b",".join(lines) + b"]")  # one call: each name is decoded only once
            if len(result) == len(lines):
                return result
    result = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            result.append(json.loads(line))
    return result


def _transposed(records: list[dict[str, Any]]) -> Iterable[tuple[str, Sequence[Any]]]:
    names = tuple(records[0])
    if all(tuple(record) == names for record in records):
        return zip(names, zip(*(record.values() for record in records), strict=True), strict=True)
    every = dict.fromkeys(name for record in records for name in record)
    return ((name, [record.get(name) for record in records]) for name in every)


def _floats(values: Sequence[Any]) -> np.ndarray | None:
    """The column as floats; None if it has no number: text, lists, only null."""
    if type(values[0]) in (int, float):
        with suppress(TypeError, OverflowError):
            return np.frombuffer(array("d", values))  # by far the fastest way; accepts numbers only
    kinds = set(map(type, values))
    if not kinds & {int, float}:
        return None
    if kinds <= {int, float, type(None)}:
        with suppress(OverflowError):
            return np.array(values, dtype=np.float64)
    return np.array([_float(value) for value in values])


def _float(value: Any) -> float:
    with suppress(OverflowError):
        return float(value) if type(value) in (int, float) else np.nan
    return np.nan


def _stamp(value: Any) -> float:
    with suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else np.nan
    return np.nan
