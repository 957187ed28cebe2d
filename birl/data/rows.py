"""Rows of one source: plain dicts by index, with file and row for messages. `sources.py` reads them; `given` takes
those of a Python program."""

import base64
import datetime
import decimal
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from birl.errors import BirlError
from birl.text.parts import png

PEEK = 100  # rows in which a nested field is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """The rows of one file. `label`: its name in ids, unique within its source; `place`: its path, for messages;
    `narrow`: the features of columns with floats of 16 or 32 bits."""

    label: str
    place: str
    stem: str
    table: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]
    narrow: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Rows(Sequence[dict[str, Any]]):
    """All rows of one source. Values are of JSON's types; a missing column is None.

    Example: read("train.jsonl")[0] == {"prompt": "What is 3 + 4?", "answer": "7"}
    """

    def __init__(self, name: str, parts: Sequence[SourceFile], limit: int = 0) -> None:
        self.name = name
        self.parts = parts
        self.columns = tuple(dict.fromkeys(column for part in parts for column in part.columns))
        self._ends = list(accumulate(len(part.table) for part in parts))
        total = self._ends[-1] if self._ends else 0
        if total == 0:
            raise BirlError(f"{name} has no rows.")
        self._length = min(total, limit) if limit else total

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        part, i = self._find(index)
        try:
            row = part.table[i]
        except (UnicodeDecodeError, ValueError) as error:
            raise BirlError(
                f"{self.where(index)} cannot be read: {reason(error)}. Correct or remove the row."
            ) from error
        own = {str(column): plain(value) for column, value in row.items() if value is not None}
        own |= {column: _shortest(own[column], feature) for column, feature in part.narrow.items() if column in own}
        return dict.fromkeys(self.columns) | own

    def where(self, index: int) -> str:
        """File and row for messages; counts from 1."""
        part, i = self._find(index)
        return f"{part.place}, row {i + 1}"

    def folder(self, index: int) -> Path:
        """Base folder of paths in a row: that of its file, or the working directory for rows without one."""
        place = Path(self._find(index)[0].place)
        return place.parent if place.is_file() else Path()

    def id(self, index: int) -> str:
        part, i = self._find(index)
        return f"{part.label}:{i}"

    def stem(self, index: int) -> str:
        return self._find(index)[0].stem

    def has(self, path: str) -> bool:
        """Whether `path`, a column or a dotted path into one, exists."""
        if path in self.columns:
            return True
        if path.split(".")[0] not in self.columns:
            return False
        heads = ((end - len(part.table), end) for part, end in zip(self.parts, self._ends, strict=True))
        peeked = (i for first, end in heads for i in range(first, min(first + PEEK, end, len(self))))
        return any(pick(self[i], path) is not None for i in peeked)

    def _find(self, index: int) -> tuple[SourceFile, int]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        number = bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)


def pick(row: Mapping[str, Any], path: str) -> Any:
    """Value of a column or of a dotted path; None if there is none. A column whose name has a dot takes precedence.

    Example: pick({"extra_info": {"answer": "7"}}, "extra_info.answer") == "7"
    """
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def plain(value: Any) -> Any:
    """Convert a value to JSON's types: dates to ISO text, arrays to lists, bytes to text if they are UTF-8, else to
    base64 (as for pictures)."""
    if isinstance(value, str | bool | int | float):
        return value
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return _written(value) or base64.b64encode(value).decode("ascii")
    if hasattr(value, "save") and hasattr(value, "convert"):  # a PIL image
        return base64.b64encode(png(value)).decode("ascii")
    if isinstance(value, decimal.Decimal):
        return _number(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype in (np.float16, np.float32):
        value = value.astype(str).astype(np.float64)
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)  # numpy, torch


def _number(value: decimal.Decimal) -> int | float | str:
    """Convert a decimal; to text if a float would round it."""
    if not value.is_finite():
        return float(value)
    if value == value.to_integral_value():
        return int(value)
    return float(value) if decimal.Decimal(repr(float(value))) == value else str(value)


def _shortest(value: Any, feature: Any) -> Any:
    """Shortest number that rounds to a narrow float: 0.1 in 32 bits is 0.10000000149 in 64."""
    if isinstance(value, float):
        narrow = getattr(feature, "dtype", "") in ("float16", "float32")
        return float(str(np.dtype(feature.dtype).type(value))) if narrow else value
    if isinstance(value, dict):
        return {name: _shortest(one, feature[name]) for name, one in value.items()}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
        return [_shortest(one, inner) for one in value]
    return value


def _written(value: bytes) -> str:
    """Text that some programs write to Parquet as bytes; empty if it is none."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return ""
    return "" if any(c < " " and c not in "\t\n\r" for c in text) else text


def given(rows: Any, name: str, limit: int = 0) -> Rows:
    """Rows passed by a Python program: a `datasets.Dataset` or a list of dicts; the first `limit`, 0: all."""
    if isinstance(rows, list | tuple):
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise BirlError(
                    f"{name}, row {i + 1} is a {type(row).__name__}; a row is a dict such as {{'prompt': '...'}}."
                )
        return Rows(name, [part(name, name, rows)], limit)
    import datasets

    if isinstance(rows, datasets.Dataset):
        return Rows(name, [part(name, name, rows.with_format(None))], limit)
    if isinstance(rows, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise BirlError(
            f"{name}: it has the splits {', '.join(map(str, rows))}. Pass one of them, as in data['train']."
        )
    way = 'DATA.to_dict("records")' if hasattr(rows, "columns") else "list(DATA)" if hasattr(rows, "__iter__") else ""
    if not way and hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):  # PyTorch's
        way = "[DATA[i] for i in range(len(DATA))]"
    own = f"{name}: a {type(rows).__name__}; it takes a path, a datasets.Dataset or a list of dicts."
    raise BirlError(f"{own} Pass {way}." if way else own)


def part(label: str, stem: str, table: Any, place: str = "") -> SourceFile:
    columns = table.column_names if hasattr(table, "column_names") else dict.fromkeys(c for row in table for c in row)
    features = getattr(table, "features", None) or {}
    narrow = {name: one for name, one in features.items() if "float16" in str(one) or "float32" in str(one)}
    names = tuple(map(str, columns))
    return SourceFile(label=label, place=place or label, stem=stem, table=table, columns=names, narrow=narrow)


def reason(error: BaseException) -> str:
    """First two lines of the innermost cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or type(error).__name__
