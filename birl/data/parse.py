"""JSON and CSV in plain Python: slower than `datasets`, but keeps values as written and reports the faulty line."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.regular import open_regular, read_bytes

COLUMNS = 4096  # of one file
DEPTH = 64  # nested lists and objects
MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]')  # a text, which may hold brackets, or a bracket
LONG = re.compile(rb"\d{20}")
WHOLE = re.compile(rb'"(?:[^"\\]|\\.)*"?|(?<![\w.+-])-?\d{20,}(?![\d.eE])')  # a text, or an integer
EXACT = re.compile(rb"(?<![\w.+-])-?\d{16,}(?![\w.])")  # an integer that a float may round
OLD_MAC = re.compile(rb"(?<=\r)(?!\n)")  # behind a line end of old Macs, as Excel's "CSV (Macintosh)" has it
CSV_FIELD_LIMIT = 2**31 - 1  # characters; Python's own limit of 128 Ki is too small for long solutions


def check_json(path: Path) -> None:
    """Raises `BirlError` naming the first line that is not UTF-8, or that is nested deeper than `DEPTH`: pyarrow would
    end the process without a message, Python with a RecursionError."""
    depth = 0
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            _decode(line, path, number)
            _check_integers(line, path, number)
            depth = _depth(line.strip(), depth, path, number)


def _check_integers(line: bytes, path: Path, number: int) -> None:
    # pyarrow would read an integer beyond 64 bits as a rounded float, or as infinity
    for mark in WHOLE.findall(line) if LONG.search(line) else ():
        if not mark.startswith(b'"'):
            digits = len(mark.lstrip(b"-"))
            raise BirlError(
                f"{path}, line {number}: an integer of {digits} digits would be rounded. Write it as text, in quotes."
            )


def has_long(path: Path) -> bool:
    """Whether the file has an integer that may not be exact as a float."""
    with open_regular(path) as file:
        return any(EXACT.search(line) for line in file)


def _depth(line: bytes, depth: int, path: Path, number: int) -> int:
    """Number of open brackets after the line, given `depth` before it. Raises `BirlError` above `DEPTH`."""
    whole = depth == 0 and line.startswith(b"{") and line.endswith(b"}")
    if whole and line.count(b"{") + line.count(b"[") <= DEPTH:
        return 0  # a whole row: within a row no line begins with a brace at depth 0
    for mark in MARKS.findall(line):
        depth = max(depth + (mark in b"[{") - (mark in b"]}"), 0) if len(mark) == 1 else depth
        if depth > DEPTH:
            raise BirlError(
                f"{path}, line {number}: nested deeper than {DEPTH} lists and objects. Flatten the row, or store it "
                "as one text."
            )
    return depth


def begins_with_row(path: Path) -> bool:
    """Whether the file begins with an object."""
    return _head(path).startswith(b"{")


def one_object(path: Path) -> dict[str, Any] | None:
    """Return the object of a file with only one, on one line or several; None for other files. Raises `BirlError`."""
    with open_regular(path) as file:
        head = next((line for line in file if line.strip(b" \t\r\n\xef\xbb\xbf")), b"")
        if head.rstrip().endswith(b"}") and file.readline():
            return None  # a row a line
    text = _decode(read_bytes(path), path, 1)
    try:
        json.loads(text)
    except json.JSONDecodeError:  # several, or a broken one
        return None
    return _object(_parse_value(text, path, 1), f"{path}, line 1")


def _head(path: Path) -> bytes:
    with open_regular(path) as file:
        while block := file.read(2**12).removeprefix(b"\xef\xbb\xbf"):
            if text := block.lstrip():
                return text
    return b""


def check_columns(path: Path, count: int) -> None:
    """Raises `BirlError` for too many columns: each row has each of them, so that thousands take minutes."""
    if count > COLUMNS:
        raise BirlError(f"{path}: {count:,} columns; at most {COLUMNS:,} are allowed. Join them as one object.")


def parse_json(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a list of objects, of one object, or of one object a line."""
    head = _head(path)
    if not head:
        raise BirlError(f"{path} is empty: it needs one row a line (docs/data.md).")
    if head.startswith(b"["):
        lines = enumerate(read_bytes(path).splitlines(keepends=True), 1)
        for row, value in enumerate(_parse_value("".join(_decode(line, path, i) for i, line in lines), path, 1), 1):
            yield _object(value, f"{path}, row {row}")
        return
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            text = _decode(line, path, number)
            if text.strip():
                yield _object(_parse_value(text.rstrip(), path, number), f"{path}, line {number}")


def _parse_value(text: str, path: Path, line: int) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: unique(pairs, path, line))
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        place = line + error.lineno - 1
        excerpt = [*text.split("\n"), ""][error.lineno - 1] or text
        raise BirlError(
            f"{path}, line {place}: broken JSON, {error.msg} (character {error.colno}): {_short(excerpt)}\n"
            "Correct or remove it."
        ) from error
    except UnicodeEncodeError as error:
        raise BirlError(
            f"{path}, line {line}: half of a surrogate pair (\\ud...): {_short(text)}\nCorrect or remove it."
        ) from error


def unique(pairs: list[tuple[str, Any]], path: Path, line: int) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise BirlError(f"{path}, line {line}: the key {name!r:.80} is there twice in one object. Remove one.")
    return result


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BirlError(
            f'{where}: a row is a JSON object such as {{"prompt": "..."}}, this is {_short(json.dumps(value))}'
        )
    return value


def _decode(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise BirlError(
            f"{path}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1}): "
            f"{_short(line.decode('utf-8', 'replace'))}\nSave the file as UTF-8, or correct or remove the line."
        ) from error


def parse_csv(path: Path) -> Iterator[dict[str, str]]:
    """Yield rows with all values as text. The file needs one header line, and each row as many fields as that."""
    csv.field_size_limit(max(csv.field_size_limit(), CSV_FIELD_LIMIT))
    with open_regular(path) as file:
        lines = (line for some in file for line in OLD_MAC.split(some) if line)
        reader = csv.reader((_decode(line, path, i) for i, line in enumerate(lines, 1)), strict=True)
        try:
            header = next(reader, [])
            check_columns(path, len(header))
            _check_header(header, path)
            for record in reader:
                if record and len(record) != len(header):
                    raise BirlError(
                        f"{path}, line {reader.line_num}: {len(record)} fields, but the header has {len(header)} "
                        f"({', '.join(header)}). Quote fields that contain commas or line breaks."
                    )
                if record:
                    yield dict(zip(header, record, strict=True))
        except csv.Error as error:
            raise BirlError(
                f"{path}, line {reader.line_num}: broken CSV, {error}. Double the quotes inside a field."
            ) from error


def _check_header(header: list[str], path: Path) -> None:
    if len(set(header)) < len(header) or not all(name.strip() for name in header):
        own = " The index of pandas has none: to_csv(FILE, index=False)." if header[:1] == [""] else ""
        raise BirlError(f"{path}, line 1: the header needs a different name for each column, it has {header}.{own}")
    if spaced := next((name for name in header if name != name.strip()), ""):
        raise BirlError(f"{path}, line 1: {spaced!r}: a column's name must not begin or end with spaces. Remove them.")
    if len(header) == 1 and (sign := next((s for s in ";\t|" if s in header[0]), "")):
        raise BirlError(f"{path}, line 1: the columns are separated by {sign!r}; the separator must be a comma.")


def _short(text: str, width: int = 80) -> str:
    text = text.strip()
    return text if len(text) <= width else text[: width - 3] + "..."
