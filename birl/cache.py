"""Where things are kept that can be made again: $BIRL_CACHE, or ~/.cache/birl."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ABANDONED = 24 * 3600.0  # seconds after which what is half made is abandoned


def cache_folder(kind: str) -> Path:
    """The folder for one kind of them, such as "models"; it may not exist yet."""
    return Path(os.environ.get("BIRL_CACHE") or Path.home() / ".cache" / "birl") / kind


def sweep(root: Path, pattern: str) -> None:
    """Remove folders in `root` that a killed process has left half made: those of this name that nothing was written
    into for a day."""
    for path in root.glob(pattern):
        with suppress(OSError):  # another process removes it too
            written = max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
            if path.is_dir() and time.time() - written > ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Other processes that want to make the same `path` wait until this one has made it. Where no file can be locked,
    each makes it."""
    with ExitStack() as stack:
        with suppress(OSError, ImportError):
            import fcntl  # Windows has none

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
