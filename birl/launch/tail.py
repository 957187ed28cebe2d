"""Lines of log files, one after the other or as they come."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from birl.regular import open_regular

POLL = 0.2  # s between two looks


def lines(
    files: Callable[[], Mapping[str, Path]],
    follow: bool,
    over: Callable[[], bool],
    start: Mapping[Path, int] = MappingProxyType({}),
) -> Iterator[str]:
    """`files` gives the logs that there are now, by what to write before their lines where there are several. With
    `follow` until `over`. `start`: where to begin in a file [bytes]."""
    read = dict(start)
    while True:
        last = not follow or over()
        logs = files()
        for label, file in logs.items():
            for line in _new(file, read, last):
                yield f"{label} | {line}" if len(logs) > 1 else line
        if last:
            return
        time.sleep(POLL)


def _new(file: Path, read: dict[Path, int], last: bool) -> list[str]:
    """Whole lines since the last look; at the last one the rest too."""
    try:
        with open_regular(file) as opened:
            opened.seek(read.get(file, 0))
            result = opened.read()
    except OSError:
        return []
    if not last:
        result = result[: result.rfind(b"\n") + 1]
    read[file] = read.get(file, 0) + len(result)
    return result.decode(errors="replace").splitlines()
