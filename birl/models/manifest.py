"""Manifests: {"files": {name: {"bytes": ..., "sha256": ...}}} of a folder, written last, so that one that holds is of a
whole folder."""

import hashlib
import json
from itertools import islice
from pathlib import Path


def damage(folder: Path, name: str, *, digests: bool = True, first: int = 0, every: int = 1) -> list[str]:
    """What is wrong with a folder by its manifest `name`: what is missing, sizes, and with `digests` contents. Looks at
    files `first`, `first` + `every` and so on: several processes may share them out."""
    manifest = folder / name
    if not manifest.is_file():
        return [f"{name} is missing" if folder.is_dir() else f"there is no folder {folder}"]
    try:
        files = json.loads(manifest.read_bytes())["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{name} cannot be read ({error})"]
    problems = []
    for file, expected in islice(files, first, None, every):
        path = folder / file
        if not path.is_file():
            problems.append(f"{file} is missing")
        elif path.stat().st_size != expected["bytes"]:
            problems.append(f"{file} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        elif digests and digest(path) != expected["sha256"]:
            problems.append(f"{file} has another SHA-256 than when it was written")
    return problems


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
