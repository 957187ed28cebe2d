"""A run writes down who did what from when to when: `trace.jsonl` in its folder, one line for each span.

    {"process":"learner","lane":"loop","name":"train","start":1760000000.123,"seconds":2.5,"step":3,"version":3}

`start` is in seconds since 1970, `step` is the line of metrics.jsonl in which the time is counted. Each process of the
run's life begins with a span `started`. Spans are recorded by `birl.spans` and written in the order of their ends, a
few seconds at a time, in whole lines: after a `kill -9` the last two seconds are missing, and nothing else. At a resume
the file is cut back to its checkpoint, as metrics.jsonl is.
"""

import atexit
import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.regular import open_regular
from birl.spans import LISTENERS, Span
from birl.track.log import JsonLog

FILE = "trace.jsonl"
FLUSH = 2.0  # s that a span may wait to be written
JOINED = 0.02  # s; the engine's slices of work with no longer pauses between them are one span
END = 1 << 16  # bytes at the end of a file, in which its last spans are
FIELDS = ("version", "tokens", "group", "busy", "paused")


def rank_file(run: Path, rank: int) -> Path:
    """What ranks but 0 write, each its own."""
    return run / f"trace-rank-{rank}.jsonl"


class Trace:
    """Listens from `begin` to `close`.

    Example: trace = Trace(run / "trace.jsonl"); trace.begin(None, step=0); ...; trace.close()
    """

    def __init__(self, path: Path, process: str = "learner") -> None:
        self.path, self.process = path, process
        self.step = 0  # the line of metrics.jsonl that time goes into now
        self._log: JsonLog | None = None
        self._rows: list[dict[str, Any]] = []
        self._slices: dict[str, tuple[Span, int]] = {}  # by process: slices of work to be joined, and their step
        self._lock = threading.Lock()  # the engine tells from its thread
        self._written = 0.0
        self._error: BirlError | None = None

    def begin(self, offset: int | None, step: int) -> float:
        """Open the file and listen. What lies behind `offset` [bytes] goes; None: everything. `step` are finished.
        Gives the end of what is left [s since 1970]."""
        self._log, self.step = JsonLog(self.path), step + 1
        self._log.cut(offset or 0)
        kept = last_moment(self.path)
        self._start()
        return kept

    def go_on(self, until: float) -> None:
        """As `begin`, but what goes is what began at `until` [s since 1970] or later."""
        self._log = JsonLog(self.path)
        self._log.cut(sys.maxsize)  # a torn line
        self._log.cut(size_before(self.path, until))
        self._start()

    def _start(self) -> None:
        self.add(Span(process=self.process, lane="loop", name="started", start=time.time(), seconds=0.0))
        LISTENERS.append(self.add)
        atexit.register(self.close)
        self._written = time.monotonic()

    def add(self, span: Span) -> None:
        """Of any thread. Never raises; `flush` does. Rank 0 asks the engines of all ranks, and tells of them."""
        if self.process != "learner" and span.process == "engine":
            return
        with self._lock:
            if span.lane == "compute":
                self._join(span)
            else:
                self._rows.append(row(span, self.step))
        if time.monotonic() - self._written > FLUSH:
            self._try()

    def _join(self, span: Span) -> None:
        before, step = self._slices.get(span.process, (span, self.step))
        gap = span.start - before.start - before.seconds
        if before is span or gap > JOINED or before.version != span.version or step != self.step:
            if before is not span:
                self._rows.append(row(before, step))
            self._slices[span.process] = replace(span, busy=span.seconds), self.step
            return
        end = max(span.start + span.seconds, before.start + before.seconds)
        tokens, busy = (before.tokens or 0) + (span.tokens or 0), (before.busy or 0.0) + span.seconds
        self._slices[span.process] = replace(before, seconds=end - before.start, tokens=tokens, busy=busy), step

    def next_step(self, step: int) -> None:
        """`step` has its line in metrics.jsonl; what comes belongs to the next one."""
        self.flush()
        self.step = step + 1

    def _try(self) -> None:
        try:
            self.flush()
        except BirlError as error:  # raised at the next step, on the run's own thread
            self._error = error

    def flush(self) -> None:
        """Hand everything to the operating system. Raises `BirlError` where the disk is full."""
        with self._lock:
            rows = self._rows + [row(span, step) for span, step in self._slices.values()]
            self._rows, self._slices, self._written = [], {}, time.monotonic()
            error, self._error = self._error, None
            if self._log is not None and rows:
                self._log.append(rows)
        if error is not None:
            raise error

    def size(self) -> int:
        """In bytes, with everything told so far. Not synced: a trace that a power failure shortens costs nothing."""
        self.flush()
        return self.path.stat().st_size

    def close(self) -> None:
        """Write what is left and stop listening; a second call does nothing."""
        atexit.unregister(self.close)
        if self.add in LISTENERS:
            LISTENERS.remove(self.add)
        if self._log is not None:
            self._try()
            self._log.close()
            self._log = None


def row(span: Span, step: int) -> dict[str, Any]:
    """As it is written: to the microsecond, without what is not known."""
    result: dict[str, Any] = {
        "process": span.process,
        "lane": span.lane,
        "name": span.name,
        "start": round(span.start, 6),
        "seconds": round(span.seconds, 6),
    }
    if step:
        result["step"] = step
    for name in FIELDS:
        value = getattr(span, name)
        if value is not None:
            result[name] = round(value, 6) if isinstance(value, float) else value
    return result


def last_moment(path: Path) -> float:
    """When the last span of a trace was over [s since 1970]; 0 where there is none. Joined slices are written later
    than what came after them: hence not the last line's."""
    result = 0.0
    with suppress(OSError), open_regular(path) as file:
        size = path.stat().st_size
        file.seek(max(size - END, 0))
        for line in file.read().split(b"\n")[size > END : -1]:
            with suppress(ValueError, KeyError, TypeError):
                span = json.loads(line)
                result = max(result, span["start"] + span["seconds"])
    return result


def size_before(path: Path, until: float) -> int:
    """Bytes of the lines before the first span that began at `until` or later."""
    size = 0
    with open_regular(path) as file:
        for line in file:
            try:
                if json.loads(line)["start"] >= until:
                    break
            except (ValueError, KeyError, TypeError):
                break
            size += len(line)
    return size
