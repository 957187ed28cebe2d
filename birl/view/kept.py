"""The index of a large rollouts.jsonl in the user's cache (never in the run folder), so that only added lines are read
when it is opened again. An invalid index is ignored."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from birl.cache import cache_folder

if TYPE_CHECKING:
    from birl.view.episodes import Episodes

MADE_BY = 4  # increased when the meaning of rows changes: a column, a detector or its limits
WORTH = 20_000  # number of rows that take about a second to read
FILES = 16  # newest indices that are kept
NAMES = ("tasks", "sources", "broken", "lines", "skipped", "read")


def place(path: Path) -> Path:
    return cache_folder("rollouts") / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]}.npz"


def save(episodes: "Episodes") -> None:
    """Write atomically; a cache that cannot be written is ignored."""
    target = place(episodes.path)
    about = {name: getattr(episodes, name) for name in NAMES} | {"made_by": MADE_BY, "threshold": episodes.threshold}
    about["sha256"] = hashlib.sha256(episodes.rows.tobytes()).hexdigest()
    part = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            text = np.frombuffer(json.dumps(about).encode(), np.uint8)
            np.savez(file, rows=episodes.rows, about=text)
        os.replace(part, target)
        old = sorted(target.parent.glob("*.npz"), key=lambda file: file.stat().st_mtime)[:-FILES]
        for file in old:
            file.unlink()
    except OSError:
        with suppress(OSError):
            part.unlink()


def load(episodes: "Episodes", dtype: np.dtype) -> bool:
    """Load the cached index, if there is one; returns whether. The caller compares it with the file."""
    try:
        with np.load(place(episodes.path), allow_pickle=False) as result:
            rows, about = result["rows"], json.loads(result["about"].tobytes())
        own = (MADE_BY, episodes.threshold, dtype)
        whole = hashlib.sha256(rows.tobytes()).hexdigest()  # numpy reads the first rows of a shorter shape
        if (about["made_by"], about["threshold"], rows.dtype) != own or about["sha256"] != whole:
            return False
        known = {name: about[name] for name in NAMES}
        known["broken"] = {int(line): why for line, why in about["broken"].items()}
    except Exception:  # tokenize, zipfile and numpy raise a dozen kinds of a damaged file
        return False
    episodes.take(rows, known)
    return True
