"""The cache for files that can be made again: $BIRL_CACHE, or ~/.cache/birl."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ABANDONED = 24 * 3600.0  # seconds after which an unfinished folder counts as abandoned


def cache_folder(kind: str) -> Path:
    """The cache folder of one kind of files, such as "models"; it may not exist yet."""
    return Path(os.environ.get("BIRL_CACHE") or Path.home() / ".cache" / "birl") / kind


def sweep(root: Path, pattern: str) -> None:
    """Remove unfinished folders in `root` of killed processes: those that match `pattern` and were not written to for a
    day."""
    for path in root.glob(pattern):
        with suppress(OSError):  # another process may remove it too
            written = max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
            if path.is_dir() and time.time() - written > ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lock: other processes that want to make the same `path` wait until this one has made it. If files cannot be
    locked, each makes it."""
    with ExitStack() as stack:
        with suppress(OSError, ImportError):
            import fcntl  # not on Windows

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
