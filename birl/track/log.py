"""JSON lines that survive: whole lines only, a known length at each checkpoint, and a cut back to it on resume."""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.regular import parse_json, read_bytes, writing

#: what ends a line for `str.splitlines` and editors, and is allowed in a JSON string
LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


def encode(record: object, exact: bool = False) -> bytes:
    """One JSON line, to `str.splitlines` as well. NaN and infinity become null. Floats inside lists (log-probs, mostly)
    keep six significant digits, which a third of the bytes pays for; with `exact` all of them."""
    short = record if exact else _short(record)
    try:
        text = _dumps(short)
    except ValueError:
        text = _dumps(_finite(short))
    for mark, escape in LINE_ENDS:
        text = text.replace(mark, escape)
    # A lone surrogate has no UTF-8, but its backslash form is the JSON escape for it.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _dumps(record: object) -> str:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)


def _plain(value: Any) -> object:
    """Scalars of numpy and torch as Python numbers; anything else as text."""
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
    """All records of a file. A torn last line, left by a crash, is passed over; any other bad line is an error."""
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
    """The record of line `number` of a file. Raises `BirlError` that names the line."""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise BirlError(f"{path}, line {number}: not JSON ({error}). Delete the line to read the rest.") from error
    if not isinstance(record, dict):
        raise BirlError(f"{path}, line {number}: it is no JSON object. Delete the line to read the rest.")
    return record


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.removesuffix(b",")), dict)
    except (ValueError, RecursionError):
        return False


class JsonLog:
    """An append-only file of JSON lines. `array`: the lines of a JSON array whose end is missing, each with a comma.

    Example: log = JsonLog(run / "metrics.jsonl"); log.append([{"step": 1}]); size = log.sync()
    """

    def __init__(self, path: Path, array: bool = False) -> None:
        self.path, self.array = path, array
        with writing(path):
            # Unbuffered: a failed write leaves nothing behind that a later close would try to write again.
            self._file = path.open("ab", buffering=0)

    def cut(self, size: int) -> bool:
        """Drop everything behind the first `size` bytes. False when the file is shorter: then only a torn line goes."""
        with writing(self.path):
            have = os.path.getsize(self.path)
            # truncate() to more than the file has would fill it up with zero bytes.
            self._file.truncate(size if have >= size else self._whole(have))
        return have >= size

    def _whole(self, size: int) -> int:
        """Length of the file up to the end of its last whole record: a crash may leave any bytes behind it."""
        *lines, _ = read_bytes(self.path)[:size].split(b"\n")
        while lines and not _is_record(lines[-1]):
            lines.pop()
        return sum(len(line) + 1 for line in lines)

    def append(self, records: Iterable[object], exact: bool = False) -> None:
        """Write the records as whole lines, or none of them."""
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
        """Put everything on the disk; the file's size in bytes."""
        with writing(self.path):
            os.fsync(self._file.fileno())
            return os.path.getsize(self.path)

    def close(self) -> None:
        self._file.close()
