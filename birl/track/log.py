"""Crash-safe JSON Lines files: whole lines only, their length in each checkpoint, truncated to it on resume."""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

from birl.errors import BirlError, did_you_mean
from birl.regular import NotRegular, check_target, open_regular, parse_json, read_bytes, writing

#: line ends of `str.splitlines` and editors that are allowed in a JSON string
LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))
BLOCK = 1 << 23  # bytes read at a time
REMEMBERED = 256  # bytes before the last position, to detect that the file was replaced


def encode(record: object, exact: bool = False) -> bytes:
    """Encode one JSON line, also for `str.splitlines`. NaN and infinity become null. Floats inside lists (mostly
    log-probs) keep six significant digits, which saves a third of the bytes; with `exact` all of them."""
    short = record if exact else _short(record)
    try:
        text = _dumps(short)
    except ValueError:
        text = _dumps(_finite(short))
    for mark, escape in LINE_ENDS:
        text = text.replace(mark, escape)
    # A lone surrogate has no UTF-8, but its backslash form is a valid JSON escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _dumps(record: object) -> str:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)


def _plain(value: Any) -> object:
    """Numpy and torch scalars as Python numbers; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    if value and isinstance(value[0], float):
        return [float(f"{x:.6g}") if isinstance(x, float) else x for x in value]
    return [_short(x) for x in value] if value and isinstance(value[0], (dict, list, tuple)) else value


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All records of a file. A torn last line of a crash is skipped; any other bad line is an error."""
    return [record for _, record in numbered(path)]


def numbered(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """`read_jsonl`, each record with the number of its line."""
    # Not str.splitlines: it also splits at U+2028 and others, which JSON strings may hold as they are.
    *lines, torn = read_bytes(Path(path)).split(b"\n")
    records = [(number, parsed(path, number, line)) for number, line in enumerate(lines, start=1)]
    if _is_record(torn):
        records.append((len(records) + 1, json.loads(torn)))
    return records


def parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The record of line `number`. Raises `BirlError` that names the line."""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise BirlError(f"{path}, line {number}: not JSON ({error}). Delete the line to read the rest.") from error
    if not isinstance(record, dict):
        raise BirlError(f"{path}, line {number}: it is no JSON object. Delete the line to read the rest.")
    return record


def whole(path: Path, size: int = sys.maxsize) -> int:
    """Bytes up to the end of the last whole record within `size`; a crash may leave any bytes after it."""
    *lines, _ = read_bytes(path)[:size].split(b"\n")
    while lines and not _is_record(lines[-1]):
        lines.pop()
    return sum(len(line) + 1 for line in lines)


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.removesuffix(b",")), dict)
    except (ValueError, RecursionError):
        return False


class JsonLog:
    """An append-only file of JSON lines. `array`: lines of an unclosed JSON array, each with a comma.

    Example: log = JsonLog(run / "metrics.jsonl"); log.append([{"step": 1}]); size = log.sync()
    """

    def __init__(self, path: Path, array: bool = False) -> None:
        self.path, self.array = path, array
        with writing(path):
            # Unbuffered: after a failed write no data is left that a later close would write.
            check_target(path)
            self._file = path.open("ab", buffering=0)

    def cut(self, size: int) -> bool:
        """Truncate to `size` bytes. False if they are not whole lines, or the file is shorter: only what is left of
        a torn line is removed then."""
        with writing(self.path):
            have = os.path.getsize(self.path)
            with open_regular(self.path) as file:
                file.seek(min(max(size - 1, 0), have))
                fits = size == 0 or file.read(1) == b"\n"
            # truncate() beyond the end would append zero bytes.
            self._file.truncate(size if fits else whole(self.path, min(have, size)))
        return fits

    def append(self, records: Iterable[object], exact: bool = False) -> None:
        """Append the records as whole lines, or none of them."""
        lines = [encode(record, exact) for record in records]
        with writing(self.path):
            start = os.path.getsize(self.path)
            if self.array:
                lines = [b"[\n"] * (start == 0) + [line[:-1] + b",\n" for line in lines]
            data = memoryview(b"".join(lines))
            try:
                while data:
                    data = data[self._file.write(data) or 0 :]
            except OSError:
                self._file.truncate(start)
                raise

    def sync(self) -> int:
        """Flush to disk (fsync); returns the file's size in bytes."""
        with writing(self.path):
            os.fsync(self._file.fileno())
            return os.path.getsize(self.path)

    def close(self) -> None:
        self._file.close()


class Records(Sequence[dict[str, Any]]):
    """The lines of a JSON Lines file as dicts, read on every access, as a run may still be writing. A torn last line is
    left out.

    Example: Records(run / "metrics.jsonl")[-1]["reward/mean"]; Records(run / "rollouts.jsonl").to_pandas()
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Read line by line, as a file of rollouts may exceed the memory. Raises `BirlError` if there is no file yet,
        or a line is damaged."""
        if not self.path.is_file():
            raise BirlError(f"{self.path} does not exist (yet): call train() first.")
        with open_regular(self.path) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                yield parsed(self.path, number, line)

    def __len__(self) -> int:
        return sum(1 for _ in self) if self.path.is_file() else 0

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, int) and index >= 0:
            for record in islice(self, index, index + 1):
                return record
            raise IndexError(f"{self.path.name} has no line {index}")
        return list(self)[index]

    def column(self, name: str) -> list[Any]:
        """The value of each line, None if it has none. Raises `BirlError` if no line has it."""
        records = list(self)
        if records and not any(name in record for record in records):
            known = sorted({key for record in records for key in record})
            raise BirlError(f"{self.path.name} has no {name!r}.{did_you_mean(name, known)}")
        return [record.get(name) for record in records]

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each line. Lone surrogates, which pandas refuses, are escaped. Raises `BirlError`
        without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise BirlError('to_pandas() needs a package: pip install "birl[notebook]"') from error
        return pandas.DataFrame(
            {k: v.encode("utf-8", "backslashreplace").decode() if isinstance(v, str) else v for k, v in record.items()}
            for record in self
        )

    def __repr__(self) -> str:
        return f"<{len(self):,} records of {self.path}>"


class Growing:
    """Reads the whole lines that were added since the last call; an incomplete last line is read when it is complete.

    Example: file = Growing(Path("runs/demo/metrics.jsonl")); [line for lines in file.new() for line in lines]
    """

    def __init__(self, path: Path) -> None:
        self.path, self.taken = path, 0  # bytes
        self._before = b""

    @property
    def unread(self) -> int:
        """Number of bytes that were not read yet."""
        try:
            return max(0, self.path.stat().st_size - self.taken)
        except OSError:
            return 0

    @property
    def goes_on(self) -> bool:
        """Whether the part that was read is unchanged. A resume truncates files, which may have grown again since."""
        if not self.taken:
            return True
        try:
            with open_regular(self.path) as file:
                file.seek(self.taken - len(self._before))
                return file.read(len(self._before)) == self._before
        except OSError:
            return False

    def new(self) -> Iterator[list[bytes]]:
        """The added lines without their ends, in blocks; none if the file does not exist."""
        try:
            file = open_regular(self.path)
        except (FileNotFoundError, NotRegular):
            return
        with file:
            file.seek(self.taken)
            rest = b""
            while block := file.read(BLOCK):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                if newline:
                    self.taken += len(whole) + 1
                    self._before = (self._before + whole[-REMEMBERED:] + newline)[-REMEMBERED:]
                    yield whole.split(b"\n")
