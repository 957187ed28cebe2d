"""Manifests: {"files": {name: {"bytes": ..., "sha256": ...}}} of a folder. A manifest is written last, so a valid one
means that the folder is complete."""

import hashlib
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.regular import inside, is_name, open_regular, parse_json, read_bytes

SHA256 = re.compile(r"[0-9a-f]{64}")


def files(content: bytes) -> dict[str, dict[str, Any]]:
    """Return name -> bytes and SHA-256 of a manifest's content. Raises `ValueError` if it is invalid: it must list a
    file, and names must be relative paths without `..`."""
    data = parse_json(content)
    result = data.get("files") if isinstance(data, dict) else None
    if not isinstance(result, dict) or not result:
        raise ValueError("it lists no files")
    for name, entry in result.items():
        if not is_name(name):
            raise ValueError(f"the name {name!r} leads out of the folder")
        size, sha256 = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            raise ValueError(f"{name} has no size and SHA-256 there")
    return result


def damage(
    folder: Path, name: str, *, required: Iterable[str] = (), digests: bool = True, first: int = 0, every: int = 1
) -> list[str]:
    """Return the problems of a folder by its manifest `name`: missing files, `required` names that it does not list,
    wrong sizes, and with `digests` wrong contents. Checks files `first`, `first` + `every` and so on, so that several
    processes may share the work."""
    manifest = folder / name
    if not manifest.is_file():
        return [f"{name} is missing" if folder.is_dir() else f"there is no folder {folder}"]
    try:
        listed = files(read_bytes(manifest))
    except (OSError, ValueError) as error:
        return [f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"]
    problems = [f"{name} does not list {file}" for file in required if file not in listed]
    for file, expected in islice(listed.items(), first, None, every):
        try:
            path = inside(folder, file)
        except BirlError as error:
            problems.append(str(error).rstrip("."))
            continue
        try:
            if not path.is_file():
                problems.append(f"{file} is missing")
            elif path.stat().st_size != expected["bytes"]:
                problems.append(f"{file} has {path.stat().st_size} bytes instead of {expected['bytes']}")
            elif digests and digest(path) != expected["sha256"]:
                problems.append(f"{file} has another SHA-256 than when it was written")
        except OSError as error:
            problems.append(f"{file} cannot be read ({error.strerror})")
    return problems


def digest(file: Path) -> str:
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
