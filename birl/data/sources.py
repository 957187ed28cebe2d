"""Sources in `data.train` and `data.validation`: a file, a folder with splits, or a data set of the hub."""

import difflib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from birl.data.files import FORMATS, check_readable, data_files, no_column, quiet, read_file, undecoded
from birl.data.rows import Rows, SourceFile, part, reason
from birl.errors import BirlError
from birl.hub import missing
from birl.regular import check_all

PACKED = {".gz", ".zst", ".bz2", ".xz"}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read(
    path: str,
    *,
    subset: str = "",
    splits: Sequence[str] = ("train",),
    limit: int = 0,
    text: Callable[[str, str], bool] = no_column,
) -> Rows:
    """Read the rows of a file, a folder or a hub name, each optionally as `split@path`.

    `splits`: splits in order of preference, if `path` names none and has several. `limit`: only the first n rows, 0:
    all. `text`: whether a column of CSV stays text because of a value (`read_file`).
    """
    split, place = _parse(path)
    local = Path(place).expanduser()
    if os.path.lexists(local) and not local.is_dir():
        if split not in ("", "train"):
            raise BirlError(f"{path}: one file has no splits. Write {place} alone, or put the splits into a folder.")
        return Rows(str(local), [read_file(local, text=text)], limit)
    if local.is_dir():
        return Rows(path, _read_folder(local, subset, split, splits, text), limit)
    check_place(path)
    return Rows(path, [_read_hub(place, subset, split, splits)], limit)


def check_place(path: str) -> None:
    """Raises `BirlError` if there is no such file, folder or data set of the hub. Reads nothing."""
    split, place = _parse(path)
    local = Path(place).expanduser()
    if local.exists():
        return
    if split and Path(split).expanduser().exists():
        raise BirlError(f"{path}: the split comes first, as in {place}@{split}.")
    if any(c in place for c in "*?["):
        parent, pattern = local.parent, local.name
        files = sorted(str(file) for file in parent.glob(pattern)) if parent.is_dir() else []
        way = f"Name {parent}, the folder, or the files: [{','.join(files[:3])}{',...' if len(files) > 3 else ''}]."
        raise BirlError(
            f"{place}: patterns are not expanded. " + (way if files else "No file matches this one, either.")
        )
    if local.suffix.lower() in FORMATS or not HUB_NAME.fullmatch(place):
        parent = "" if local.parent.is_dir() else f"The folder {local.parent} does not exist."
        raise BirlError(f"{place}: no such file or folder. {parent or _nearest(local)}".rstrip())
    if why := missing(place, "dataset"):
        raise BirlError(f"{place}: no such file or folder here, and {why}. {_nearest(local)}".rstrip())


def _parse(path: str) -> tuple[str, str]:
    """`split@path` -> (split, path). A path that exists may contain an @ itself."""
    split, at, place = path.partition("@")
    if not at or Path(path).expanduser().exists():
        return "", path
    if not split or not place:
        raise BirlError(f"{path}: expected split@path, as in test@openai/gsm8k.")
    return split, place


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix.lower() in FORMATS]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else ""


def _read_folder(
    path: Path, subset: str, split: str, splits: Sequence[str], text: Callable[[str, str], bool]
) -> list[SourceFile]:
    from datasets.data_files import EmptyDatasetError
    from yaml import YAMLError

    check_all(path, links=True)
    try:
        files = _builder(str(path), subset).config.data_files or {}
    except EmptyDatasetError as error:
        raise BirlError(f"The folder {path} holds no data files ({' '.join(FORMATS)}).") from error
    except RuntimeError as error:  # it has a script of its name, which versions before 4 would have run
        raise BirlError(
            f"{path}: {_builder_reason(error)} Scripts in data folders are not run: remove the .py file, or name the "
            "data files one by one."
        ) from error
    except (ValueError, TypeError, OSError, YAMLError) as error:  # of what describes the folder, too
        raise BirlError(f"{path}: {_builder_reason(error)}") from error
    chosen = _choose(str(path), [str(name) for name in files], split, splits)
    result, folder = sorted(Path(str(file)) for file in files[chosen]), Path(os.path.abspath(path))
    known = [file for file in result if file.suffix.lower() in FORMATS]
    if not known:  # `datasets` takes the format that most files have
        others, there = f"{result[0].name} and the like", next(data_files(folder), None)
        if there is not None:
            raise BirlError(f"The folder {path} has mostly {others}. Name the data files: {there}.")
        raise BirlError(f"The folder {path} holds no data files ({' '.join(FORMATS)}), only {others}.")
    for file in result:
        if file.suffix.lower() in PACKED:
            check_readable(file)  # refuses it
    kinds = {FORMATS[file.suffix.lower()] for file in known} | {"json"}  # what describes a data set is JSON
    others = (p for p in data_files(folder) if FORMATS[p.suffix.lower()] not in kinds)
    if left := sorted(str(p.relative_to(folder)) for p in others):
        print(f"birl: {path}: not read, as they are of another format: {', '.join(left[:3])}{' ...' * (len(left) > 3)}")
    names = [file.name for file in known]
    labels = [f.name if names.count(f.name) == 1 else str(f.relative_to(folder)) for f in known]
    return [read_file(f, label, text) for f, label in zip(known, labels, strict=True)]


def _read_hub(name: str, subset: str, split: str, splits: Sequence[str]) -> SourceFile:
    from datasets import load_dataset

    with quiet(), _offline_unless_reachable(name):
        try:
            files = _builder(name, subset).config.data_files
            chosen = _choose(name, [str(s) for s in files], split, splits) if files else split or splits[0]
            table = undecoded(load_dataset(name, subset or None, split=chosen))
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
    return part(f"{chosen}@{name}", name.rpartition("/")[2], table)


def _builder(name: str, subset: str) -> Any:
    """The `datasets` builder of a folder or repository, with the files of each split."""
    from datasets import load_dataset_builder

    with quiet():
        try:
            return load_dataset_builder(name, subset or None)
        except ValueError as error:
            if "['default']" not in str(error):  # it has no subsets: data.subset is meant for another source
                raise
            return load_dataset_builder(name)


@contextmanager
def _offline_unless_reachable(name: str) -> Iterator[None]:
    """Go offline if a request fails: without a network `datasets` retries for half a minute before using its cache."""
    from datasets import config
    from huggingface_hub import HfApi

    before = config.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(name, timeout=10)
    except Exception as error:
        if getattr(error, "response", None) is None:  # no answer; a refusal is left to `datasets` to explain
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
        f"Choose one, as in {available[0]}@{name}."
    )


def _builder_reason(error: BaseException) -> str:
    text = reason(error)
    if "onfig" in text:
        return f"{text.replace('Config name', 'The subset')}. Set data.subset."
    if "same data file format" in text:
        return "it holds files of several formats. Name the files one by one."
    return f"{text}."
