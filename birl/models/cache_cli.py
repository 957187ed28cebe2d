"""`birl cache [list | verify | clear [NAME | --all]]`: the converted models."""

import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from birl.errors import BirlError
from birl.models.gguf import cache_root, verify


def run(words: Sequence[str]) -> int:
    entries = sorted(p for p in cache_root().glob("*") if p.is_dir()) if cache_root().is_dir() else []
    match list(words):
        case [] | ["list"]:
            return _list(entries)
        case ["verify"]:
            problems = {p.name: verify(p, digests=True) for p in entries if not _unfinished(p)}
            for name, result in problems.items():
                print(f"{name}: {'; '.join(result) or 'intact'}")
            return 1 if any(problems.values()) else 0
        case ["clear", "--all"]:
            return _clear(entries)
        case ["clear", name] if chosen := [p for p in entries if name and p.name.startswith(name)]:
            return _clear(chosen)
        case ["clear", name]:
            raise BirlError(
                f"There is no {name!r} in {cache_root()}; there are: {', '.join(p.name for p in entries) or 'none'}."
            )
        case ["clear"]:
            raise BirlError(
                "Name the model to delete, as in `birl cache clear NAME`, or all: `birl cache clear --all`."
            )
        case _:
            raise BirlError(f"{words[0]}: `birl cache` has list, verify, clear NAME and clear --all.")


def _unfinished(folder: Path) -> bool:
    return ".part-" in folder.name


def _list(entries: Sequence[Path]) -> int:
    models = [p for p in entries if not _unfinished(p)]
    print(f"{cache_root()}: {len(models)} model{'s' if len(models) != 1 else ''}")
    for path in entries:
        size = sum(f.stat().st_size for f in path.iterdir()) / 2**20
        when = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        result = ["being converted, or left by a conversion that was killed"]
        if not _unfinished(path):
            result = verify(path, digests=False)
        print(f"  {path.name}  {size:,.0f} MiB  {when}  {result[0] if result else 'complete'}")
    return 0


def _clear(entries: Sequence[Path]) -> int:
    for path in entries:
        shutil.rmtree(path)
        print(f"deleted {path}")
    return 0
