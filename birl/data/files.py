"""Read the rows of one file.

`datasets` reads it and keeps big sets on disk. Its errors name no line, it stops at columns whose type changes late in
a file, and it turns text such as "2024-05-01" into dates. In these cases `parse.py` reads the file again.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from birl.data.parse import begins_with_row, check_columns, check_json, has_long, one_object, parse_csv, parse_json
from birl.data.rows import SourceFile, part, reason
from birl.errors import BirlError
from birl.regular import clear, open_regular

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
MOST, RATIO = 2**30, 1000  # largest decompressed size of a Parquet file [bytes], or as a multiple of its own size
EXACT = 15  # digits that a float has
LONG_FRACTION = re.compile(r"[+-]?(?=[\d.]{18})\d+\.\d+")
WIDE = 256  # columns above which a row's absent ones cost more than reading JSON in plain Python


class Uncached(BirlError):
    """The cache of `datasets` cannot be written."""


def data_files(folder: Path) -> Iterator[Path]:
    """Yield files of a known format in a folder and its subfolders, the outermost first."""
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names if Path(name).suffix.lower() in FORMATS)


def no_column(name: str, value: str) -> bool:
    return False


def read_file(path: Path, label: str = "", text: Callable[[str, str], bool] = no_column) -> SourceFile:
    """Read one file. `text`: whether a column of CSV stays text because of a value, even if it looks like a number."""
    kind = check_readable(path)
    try:
        if kind == "csv":
            table = _read_csv(path, kind, text)
        else:
            table = {"json": _read_json}.get(kind, _read_binary)(path, kind)
    except OSError as error:
        raise BirlError(f"{path} cannot be read: {error.strerror or error}.") from error
    result = part(label or path.name, SHARD.sub("", path.stem), table, str(path))
    check_columns(path, len(result.columns))
    return result


def check_readable(path: Path) -> str:
    """Return the format of a file. Raises `BirlError` if it is unknown, or the file is empty or cannot be opened."""
    try:
        with open_regular(path) as file:
            head = file.read(8)
    except OSError as error:
        raise BirlError(f"{path} cannot be read: {error.strerror or error}.") from error
    if packed := next((name for magic, name in PACKED.items() if head.startswith(magic)), ""):
        raise BirlError(f"{path} is compressed ({packed}). Decompress it first.")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BirlError(f"{path} is UTF-16, as PowerShell's > and Excel's Unicode text are. Save it as UTF-8.")
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise BirlError(f"{path}: unknown file type {path.suffix!r}. Supported: {' '.join(FORMATS)}.")
    if not head:
        raise BirlError(f"{path} is empty: it needs one row a line (docs/data.md).")
    return kind


def _read_json(path: Path, kind: str) -> Sequence[Mapping[str, Any]]:
    check_json(path)  # pyarrow lets it pass, and stops at the row when the row is asked for
    # Of `null` pyarrow would end the process; floats of a list `datasets` rounds to ten digits; and one object that
    # pyarrow cannot read has columns as its keys for pandas, and a row for each of what is in them.
    if not begins_with_row(path):
        return list(parse_json(path))
    if (one := one_object(path)) is not None:
        return [one]
    try:
        table = _load(path, kind)
    except Uncached:
        return list(parse_json(path))
    except BirlError:
        raise
    except Exception:
        return list(parse_json(path))
    # JSON has no dates, so these were text; and of a column with text and lists, text such as "7." has become a number
    changed = any(kind in str(table.features) for kind in ("timestamp[", "Json("))
    changed |= _has_large_floats(table) and has_long(path)  # beside 0.5 an integer becomes a float, rounded
    return list(parse_json(path)) if changed or len(table.column_names) > WIDE else table


def _has_large_floats(table: Any) -> bool:
    import pyarrow.compute as compute

    floats = (one for name in table.column_names for one in _floats(table.data.column(name)))
    return any((compute.max(compute.abs(one)).as_py() or 0) >= 2**53 for one in floats)  # pyright: ignore


def _floats(column: Any) -> Iterator[Any]:
    """Yield the float columns within an Arrow column, including those in lists and structs."""
    import pyarrow.compute as compute
    from pyarrow import types

    if types.is_floating(column.type):
        yield column
    elif types.is_list(column.type) or types.is_large_list(column.type):
        yield from _floats(compute.list_flatten(column))  # pyright: ignore
    elif types.is_struct(column.type):
        for i in range(column.type.num_fields):
            yield from _floats(compute.struct_field(column, [i]))  # pyright: ignore


def _read_csv(path: Path, kind: str, text: Callable[[str, str], bool]) -> Sequence[Mapping[str, Any]]:
    written: set[str] = set()  # columns whose values stay as they are written: of 007 a number would keep the 7
    long: set[str] = set()  # columns with integers that a float would round
    for row in parse_csv(path):  # all of it: pandas reads rows with a field too many as something else, without a word
        written |= {name for name, value in row.items() if text(name, value)}
        written |= {name for name, value in row.items() if value[:1] == "0" and value.isdigit() and len(value) > 1}
        written |= {name for name, value in row.items() if len(value) > EXACT + 2 and LONG_FRACTION.fullmatch(value)}
        long |= {name for name, value in row.items() if len(value) > EXACT and value.lstrip("+-").isdigit()}
    if long:  # of whole numbers alone a column has no floats
        written |= {name for row in parse_csv(path) for name in long if not row[name].lstrip("+-").isdigit()}
    try:
        # "None" and "NA" are answers
        return _load(path, kind, keep_default_na=False, converters=dict.fromkeys(written, str) or None)
    except BirlError:
        raise
    except Exception:
        return list(parse_csv(path))


def _read_binary(path: Path, kind: str) -> Sequence[Mapping[str, Any]]:
    try:
        if kind == "parquet":
            _check_parquet(path)
        return _load(path, kind)
    except (OSError, BirlError):
        raise
    except Exception as error:
        raise BirlError(f"{path} is not a readable {kind} file: {reason(error)}.") from error


def first_parquet(path: Path, count: int) -> list[dict[str, Any]] | None:
    """Read the first `count` rows without `datasets`; None if that takes long, or if one cannot be read. Raises
    `BirlError` as `read_file` does."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        _check_parquet(path)
        with open_regular(path) as source, parquet.ParquetFile(source) as file:
            small = file.metadata.row_group(0).total_byte_size < 2**25
            return next(file.iter_batches(batch_size=count)).to_pylist() if small else None
    except (OSError, pyarrow.ArrowException) as error:
        raise BirlError(f"{path} is not a readable parquet file: {reason(error)}.") from error
    except ValueError:  # text that is no UTF-8: the reader of rows names it
        return None


def _check_parquet(path: Path) -> None:
    """Raises `BirlError` if there are no rows, or if repeated long texts decompress to far more than the file's
    size."""
    import pyarrow.parquet as parquet

    most = max(MOST, RATIO * path.stat().st_size)
    with open_regular(path) as source, parquet.ParquetFile(source) as file:
        if not file.metadata.num_rows:
            raise BirlError(f"{path} has no rows.")
        groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
        chunks = (group.column(i) for group in groups for i in range(group.num_columns))
        if sum(chunk.num_values * chunk.total_uncompressed_size for chunk in chunks) <= most:
            return
        size = rows = 0
        for batch in file.iter_batches(batch_size=16):
            columns = [c.dictionary_decode() if hasattr(c, "dictionary_decode") else c for c in batch.columns]
            size, rows = size + sum(column.nbytes for column in columns), rows + len(batch)
            if size > most:
                raise BirlError(f"{path}: its first {rows:,} rows come to {size / 2**30:.1f} GiB. Shorten their texts.")


def _load(path: Path, kind: str, **options: Any) -> Any:
    digest = _digest(path)
    try:
        with quiet():
            table = _copied(path, kind, digest, **options)
    except Exception as error:
        disk: BaseException | None = error
        while disk is not None and not isinstance(disk, OSError):
            disk = disk.__cause__ or disk.__context__
        if disk is None:
            raise
        raise Uncached(
            f"{path}: `datasets` cannot write its copy ({disk.strerror or disk}). Make room in its cache, or name "
            "another folder: HF_DATASETS_CACHE=..."
        ) from error
    if _digest(path) != digest:
        raise BirlError(f"{path} changed while it was read. Start again when it is complete.")
    return undecoded(table)


def _copied(path: Path, kind: str, digest: str, **options: Any) -> Any:
    """The file's copy in the cache of `datasets`, which is made anew if it cannot be read, or was written to later than
    its description, which is written last: `datasets` has no digest of it."""
    import datasets
    from datasets.config import HF_DATASETS_CACHE

    def load() -> Any:
        return datasets.load_dataset(kind, digest, data_files=str(path), split="train", **options)

    root, pattern = Path(HF_DATASETS_CACHE, kind), f"{digest}-*"
    try:
        table = load()
        files = [Path(entry["filename"]) for entry in table.cache_files]
        if all(_written(file) <= _written(file.with_name("dataset_info.json")) for file in files):
            return table
    except Exception as error:
        if not any(root.glob(pattern)) or getattr(error, "errno", None):  # the file itself, or the disk
            raise
    print(f"birl: the copy of {path} in the cache of `datasets` was damaged or changed: it is made again.")
    for folder in root.glob(pattern):
        clear(folder)
    return load()


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def _digest(path: Path) -> str:
    """Part of the cache's key. `datasets` itself checks only the modification time, which copies may keep."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with open_regular(path) as file:
        digest.update(file.read(2**22))
        file.seek(max(size - 2**22, 0))
        digest.update(file.read())
    return digest.hexdigest()


def undecoded(table: Any) -> Any:
    """Keep pictures and sounds as bytes, without decoding them."""
    for name, feature in table.features.items():
        if getattr(feature, "decode", False) and type(feature).__name__ in ("Image", "Audio", "Video", "Pdf"):
            table = table.cast_column(name, type(feature)(decode=False))
    return table


@contextmanager
def quiet() -> Iterator[None]:
    """Disable progress bars and log lines of `datasets`; errors are raised."""
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
