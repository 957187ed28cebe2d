"""One source of data -> `Rows`: plain dicts by index, each of which knows its file and row.

`datasets` does the reading and keeps big sets on disk. Its errors name no line, it stops at columns whose type changes
late in a file, and it turns text such as "2024-05-01" into dates. Where that happens, `parse.py` reads the file again.
"""

import base64
import datetime
import decimal
import difflib
import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from birl.data.parse import check_utf8, parse_csv, parse_json
from birl.errors import BirlError

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
PEEK = 100  # rows in which a nested field is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of one file. `label` is its name in messages and ids, which no other part of its source has."""

    label: str
    stem: str
    table: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]


class Rows(Sequence[dict[str, Any]]):
    """All rows of one source. Values are what JSON knows; a column that a row lacks is None.

    Example: read("train.jsonl")[0] == {"prompt": "What is 3 + 4?", "answer": "7"}
    """

    def __init__(self, name: str, parts: Sequence[Part], limit: int = 0) -> None:
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
                f"{self.where(index)} cannot be read: {_reason(error)}. Correct or remove the row."
            ) from error
        return {column: plain(row.get(column)) for column in self.columns}

    def where(self, index: int) -> str:
        """For messages; counts from 1."""
        part, i = self._find(index)
        return f"{part.label}, row {i + 1}"

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

    def _find(self, index: int) -> tuple[Part, int]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        number = bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)


def pick(row: Mapping[str, Any], path: str) -> Any:
    """The value of a column or of a dotted path, None where there is none. A column whose name has a dot comes first.

    Example: pick({"extra_info": {"answer": "7"}}, "extra_info.answer") == "7"
    """
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def plain(value: Any) -> Any:
    """The same value in JSON's types: dates as ISO text, bytes as base64, arrays as lists."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)  # numpy, torch


def read(path: str, *, subset: str = "", splits: Sequence[str] = ("train",), limit: int = 0) -> Rows:
    """Rows of a file, a folder or a hub name, each optionally as `split@path`.

    `splits`: which to take where `path` names none and has several, in order of preference. `limit`: only the first n
    rows, 0: all.
    """
    split, place = _parse(path)
    local = Path(place).expanduser()
    if local.is_file():
        if split not in ("", "train"):
            raise BirlError(f"{path}: one file has no splits. Write {place} alone, or put the splits into a folder.")
        return Rows(str(local), [_read_file(local)], limit)
    if local.is_dir():
        return Rows(path, _read_folder(local, subset, split, splits), limit)
    if local.suffix.lower() in FORMATS or not HUB_NAME.fullmatch(place):
        missing = "" if local.parent.is_dir() else f"The folder {local.parent} does not exist."
        raise BirlError(f"{place}: no such file or folder. {missing or _nearest(local)}".rstrip())
    return Rows(path, [_read_hub(place, subset, split, splits)], limit)


def given(rows: Any, name: str) -> Rows:
    """Rows that a Python program hands over: a `datasets.Dataset` or a list of dicts."""
    if isinstance(rows, list | tuple):
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise BirlError(
                    f"{name}, row {i + 1} is a {type(row).__name__}; a row is a dict such as {{'prompt': '...'}}."
                )
        return Rows(name, [_part(name, name, rows)])
    import datasets

    if isinstance(rows, datasets.Dataset):
        return Rows(name, [_part(name, name, rows.with_format(None))])
    if isinstance(rows, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise BirlError(
            f"{name}: it has the splits {', '.join(map(str, rows))}. Hand over one of them, as in data['train']."
        )
    raise BirlError(f"{name}: a {type(rows).__name__}; it takes a path, a datasets.Dataset or a list of dicts.")


def _parse(path: str) -> tuple[str, str]:
    """`split@path` -> (split, path). A path that exists may contain an @ itself."""
    split, at, place = path.partition("@")
    if not at or Path(path).expanduser().exists():
        return "", path
    if not split or not place:
        raise BirlError(f"{path}: written as split@path, as in test@openai/gsm8k, both are needed.")
    return split, place


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix.lower() in FORMATS]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else ""


def _read_file(path: Path, label: str = "") -> Part:
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise BirlError(f"{path}: unknown file type {path.suffix!r}. Known are {' '.join(FORMATS)}.")
    try:
        if path.stat().st_size == 0:
            raise BirlError(f"{path} is empty: it needs one row a line (docs/data.md).")
        table = {"json": _read_json, "csv": _read_csv}.get(kind, _read_binary)(path, kind)
    except OSError as error:
        raise BirlError(f"{path} cannot be read: {error.strerror or error}.") from error
    return _part(label or path.name, SHARD.sub("", path.stem), table)


def _part(label: str, stem: str, table: Any) -> Part:
    columns = table.column_names if hasattr(table, "column_names") else dict.fromkeys(c for row in table for c in row)
    return Part(label=label, stem=stem, table=table, columns=tuple(map(str, columns)))


def _read_json(path: Path, kind: str) -> Sequence[Mapping[str, Any]]:
    check_utf8(path)  # pyarrow lets it pass, and stops at the row when the row is asked for
    try:
        table = _load(path, kind)
    except Exception:
        return list(parse_json(path))
    # JSON has no dates, so these were text; and of a column with text and lists, text such as "7." has become a number
    changed = any(kind in str(table.features) for kind in ("timestamp[", "Json("))
    return list(parse_json(path)) if changed else table


def _read_csv(path: Path, kind: str) -> Sequence[Mapping[str, Any]]:
    zeros: set[str] = set()  # columns of digits such as 007, of which a number would keep the 7
    for row in parse_csv(path):  # all of it: pandas reads rows with a field too many as something else, without a word
        zeros |= {name for name, value in row.items() if value[:1] == "0" and value.isdigit() and len(value) > 1}
    try:
        # "None" and "NA" are answers
        return _load(path, kind, keep_default_na=False, converters=dict.fromkeys(zeros, str) or None)
    except Exception:
        return list(parse_csv(path))


def _read_binary(path: Path, kind: str) -> Sequence[Mapping[str, Any]]:
    try:
        return _load(path, kind)
    except OSError:
        raise
    except Exception as error:
        raise BirlError(f"{path} is no readable {kind} file: {_reason(error)}.") from error


def _load(path: Path, kind: str, **options: Any) -> Any:
    from datasets import load_dataset

    with _quiet():
        table = load_dataset(kind, _digest(path), data_files=str(path), split="train", **options)
    return _undecoded(table)


def _digest(path: Path) -> str:
    """Part of the cache's key. `datasets` itself looks at the time of the last change only, which copies may keep."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as file:
        digest.update(file.read(2**22))
        file.seek(max(size - 2**22, 0))
        digest.update(file.read())
    return digest.hexdigest()


def _undecoded(table: Any) -> Any:
    """Pictures and sounds stay bytes: nothing here looks at them."""
    for name, feature in table.features.items():
        if getattr(feature, "decode", False) and type(feature).__name__ in ("Image", "Audio", "Video", "Pdf"):
            table = table.cast_column(name, type(feature)(decode=False))
    return table


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no log lines: what goes wrong is raised."""
    import datasets

    bars, level = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _read_folder(path: Path, subset: str, split: str, splits: Sequence[str]) -> list[Part]:
    from datasets.data_files import EmptyDatasetError

    try:
        files = _builder(str(path), subset).config.data_files or {}
    except EmptyDatasetError as error:
        raise BirlError(f"The folder {path} holds no data files ({' '.join(FORMATS)}).") from error
    except (ValueError, OSError) as error:
        raise BirlError(f"{path}: {_builder_reason(error)}") from error
    chosen = _choose(str(path), [str(name) for name in files], split, splits)
    found, folder = sorted(Path(str(file)) for file in files[chosen]), Path(os.path.abspath(path))
    known = [file for file in found if file.suffix.lower() in FORMATS]
    if not known:
        raise BirlError(
            f"The folder {path} holds no data files ({' '.join(FORMATS)}), only {found[0].name} and the like."
        )
    names = [file.name for file in known]
    return [_read_file(f, f.name if names.count(f.name) == 1 else str(f.relative_to(folder))) for f in known]


def _read_hub(name: str, subset: str, split: str, splits: Sequence[str]) -> Part:
    from datasets import load_dataset

    with _quiet(), _offline_unless_reachable(name):
        try:
            files = _builder(name, subset).config.data_files
            chosen = _choose(name, [str(s) for s in files], split, splits) if files else split or splits[0]
            table = _undecoded(load_dataset(name, subset or None, split=chosen))
        except BirlError:
            raise
        except ConnectionError as error:
            raise BirlError(
                f"{name}: no such file or folder here, and the Hugging Face hub cannot be reached, nor has it been "
                f"downloaded before. {_nearest(Path(name))}".rstrip()
            ) from error
        except Exception as error:
            raise BirlError(
                f"{name}: no such file or folder here, and from the hub: {_builder_reason(error)}"
            ) from error
    return _part(f"{chosen}@{name}", name.rpartition("/")[2], table)


def _builder(name: str, subset: str) -> Any:
    """`datasets`' view of a folder or repository: which files belong to which split."""
    from datasets import load_dataset_builder

    with _quiet():
        try:
            return load_dataset_builder(name, subset or None)
        except ValueError as error:
            if "['default']" not in str(error):  # it has no subsets: data.subset is meant for another source
                raise
            return load_dataset_builder(name)


@contextmanager
def _offline_unless_reachable(name: str) -> Iterator[None]:
    """Without a network `datasets` tries for half a minute before it looks into its cache. One try tells as much."""
    from datasets import config
    from huggingface_hub import HfApi

    before = config.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(name, timeout=10)
    except Exception as error:
        if getattr(error, "response", None) is None:  # nobody answered; a refusal is left to `datasets` to explain
            config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _choose(name: str, available: Sequence[str], split: str, preferred: Sequence[str]) -> str:
    if split:
        if split not in available:
            close = difflib.get_close_matches(split, available, n=1)
            hint = f" Did you mean {close[0]}@{name}?" if close else ""
            raise BirlError(f"{name} has no split {split!r}, only {', '.join(available)}.{hint}")
        return split
    for candidate in preferred if len(available) > 1 else available:
        if candidate in available:
            return candidate
    raise BirlError(
        f"{name} has the splits {', '.join(available)}, but not {' or '.join(preferred)}. "
        f"Say which to read, as in {available[0]}@{name}."
    )


def _builder_reason(error: BaseException) -> str:
    text = _reason(error)
    if "onfig" in text:
        return f"{text.replace('Config name', 'The subset')}. Set data.subset."
    if "same data file format" in text:
        return "it holds files of several formats. Name the files one by one."
    return f"{text}."


def _reason(error: BaseException) -> str:
    """The first lines of what went wrong at the bottom."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or type(error).__name__
