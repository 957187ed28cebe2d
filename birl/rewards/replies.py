"""What judges have replied, on disk under a digest of what they were asked: the same question is asked once."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from birl.cache import cache_folder

FILES = 400  # in each of 256 folders: about 100,000 replies
LONGEST = 2**16  # bytes of a reply that is kept


def kept(place: str, body: Mapping[str, Any]) -> Path:
    """Where the reply to a question is kept: a name of its content."""
    digest = hashlib.sha256(json.dumps([place, body], sort_keys=True).encode()).hexdigest()
    return cache_folder("judge") / digest[:2] / f"{digest}.json"


def recall(file: Path) -> str | None:
    """None where nothing, or nothing readable, is kept."""
    try:
        with file.open("rb") as opened:
            reply = json.loads(opened.read(2 * LONGEST))["reply"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return reply if isinstance(reply, str) else None


def keep(file: Path, reply: str) -> None:
    """Whole or not at all. A full disk costs the next question, not this answer."""
    data = json.dumps({"reply": reply}).encode()
    if len(data) > LONGEST:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=file.parent, delete=False) as new:
            try:
                new.write(data)
                new.close()
                os.replace(new.name, file)
            except OSError:
                os.unlink(new.name)
        forget(file.parent)


def forget(folder: Path) -> None:
    """The oldest, beyond `FILES`."""
    with os.scandir(folder) as entries:
        files = list(entries)
    if len(files) > FILES:
        files.sort(key=lambda entry: entry.stat().st_mtime)
        for entry in files[: len(files) - FILES]:
            os.unlink(entry.path)
