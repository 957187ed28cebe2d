"""Trace of a run in Chrome's format (`trace.json` in its folder, for Perfetto, ui.perfetto.dev): an array of events,
one per line, whose closing bracket may be missing.

    {"ph":"X","name":"train","cat":"loop","ts":1760000000123000,"dur":2500000,"pid":7,"tid":1,"args":{"step":3,"version":3}},

`ts` is in microseconds since 1970, `cat` is the lane, `step` is the line of metrics.jsonl in which the time is counted.
Names of processes and threads ("M") stand before their first span; counters ("C") are versions, staleness and queues.
Each process of the run's life begins with a span `started`. Spans are recorded by `birl.spans` and written in the order
of their ends, a few seconds at a time, in whole lines: after a `kill -9` the last two seconds are missing, and nothing
else. At a resume the file is cut back to its checkpoint, as metrics.jsonl is.
"""

import atexit
import heapq
import json
import math
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.regular import open_regular
from birl.spans import LISTENERS, Span
from birl.track.log import JsonLog

FILE = "trace.json"
FLUSH = 2.0  # s that a span may be buffered
JOINED = 0.02  # s; the engine's slices of work with pauses up to this are joined to one span
END = 1 << 16  # bytes at the end of a file that contain its last spans
FIELDS = ("version", "tokens", "group", "busy", "paused")
PROCESSES = ("learner", "engine", "rollout")  # and lanes, in the order of display
LANES = ("loop", "calls", "compute", "requests", "weights", "admission", "groups", "environments", "rewards")
NESTED = ("loop", "calls")  # lanes of nested or disjoint spans; other lanes have a thread for each overlap
SLACK = 10  # us; consecutive spans may overlap by this, as clocks are read one after the other
REMEMBERED = 256  # spans of a thread that a later span may contain
COUNTED = {"staleness": ("staleness/mean", "staleness/max"), "queue": ("queue/ready", "queue/running")}
Event = dict[str, Any]


def rank_file(run: Path, rank: int) -> Path:
    """The trace file of a rank other than 0."""
    return run / f"trace-rank-{rank}.json"


class Threads:
    """Process and thread of each span. On one thread spans are nested or disjoint, as the format requires; overlapping
    spans are put on several threads of their lane."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], tuple[int, list[Any]]] = {}  # order of the lane, state of its threads

    def events(self, span: Span, args: Event) -> Iterator[Event]:
        """The span as an event, after the events that name a new process or thread."""
        start, pid, key = round(span.start * 1e6), pid_of(span.process), (span.process, span.lane)
        end = start + max(round(span.seconds * 1e6), 0)
        if key not in self._lanes:
            kind = span.process.split(" ")[0]
            if not any(process == span.process for process, _ in self._lanes):
                order = PROCESSES.index(kind) if kind in PROCESSES else len(PROCESSES)
                yield from _named("process", span.process, pid, 0, order)
            place = LANES.index(span.lane) if span.lane in LANES else len(LANES) + len(self._lanes)
            self._lanes[key] = place, []
        place, threads = self._lanes[key]
        known = len(threads)
        number, start = (_inside if span.lane in NESTED else _beside)(threads, start, end)
        tid = 1000 * place + number + 1
        if number == known:
            yield from _named("thread", f"{span.lane} {number + 1}" if number else span.lane, pid, tid, tid)
        where = {"ts": start, "dur": end - start, "pid": pid, "tid": tid}
        yield {"ph": "X", "name": span.name, "cat": span.lane, **where, "args": args}


def _beside(threads: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Number of a free thread, and the start of the span on it. `threads`: a heap of their ends."""
    if not threads or threads[0][0] > min(start + SLACK, end):
        heapq.heappush(threads, (end, len(threads)))
        return len(threads) - 1, start
    before, number = threads[0]
    heapq.heapreplace(threads, (end, number))
    return number, max(start, before)


def _inside(threads: list[list[tuple[int, int]]], start: int, end: int) -> tuple[int, int]:
    """`_beside` for a span that may contain earlier ones. `threads`: the latest spans of each, as (start, end)."""

    def free(spans: list[tuple[int, int]]) -> bool:
        before = next((one for one in reversed(spans) if one[0] < start), None)
        return before is None or before[1] <= min(start + SLACK, end)

    number = next((number for number, spans in enumerate(threads) if free(spans)), len(threads))
    if number == len(threads):
        threads.append([])
    spans = threads[number]
    while spans and spans[-1][0] >= start < spans[-1][1]:
        start -= spans.pop()[0] == start  # a containing span begins earlier
    start = max(start, spans[-1][1]) if spans else start
    spans.append((start, end))
    del spans[:-REMEMBERED]
    return number, start


def pid_of(process: str) -> int:
    """Process id in the trace; the same in all files of a run, and after a resume."""
    return zlib.crc32(process.encode("utf-8", "replace")) >> 1


def _named(kind: str, name: str, pid: int, tid: int, order: int) -> Iterator[Event]:
    yield {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def counter(name: str, process: str, moment: float, values: Event) -> Event:
    return {"ph": "C", "name": name, "pid": pid_of(process), "tid": 0, "ts": round(moment * 1e6), "args": values}


class Trace:
    """Records spans from `begin` to `close`.

    Example: trace = Trace(run / "trace.json"); trace.begin(None, step=0); ...; trace.close()
    """

    def __init__(self, path: Path, process: str = "learner") -> None:
        self.path, self.process = path, process
        self.step = 0  # the line of metrics.jsonl that time counts in now
        self._log: JsonLog | None = None
        self._threads = Threads()
        self._events: list[Event] = []
        self._slices: dict[str, tuple[Span, int]] = {}  # process -> slices of work to be joined, and their step
        self._lock = threading.Lock()  # the engine reports from its own thread
        self._written = 0.0
        self._error: BirlError | None = None

    def begin(self, offset: int | None, step: int) -> float:
        """Open the file and start listening. The file is truncated to `offset` [bytes]; None: emptied. `step` are
        finished. Returns the end of the last kept span [s since 1970]."""
        self._log, self.step = JsonLog(self.path, array=True), step + 1
        self._log.cut(offset or 0)
        kept = last_moment(self.path)
        self._start()
        return kept

    def go_on(self, until: float) -> None:
        """As `begin`, but spans that began at `until` [s since 1970] or later are removed."""
        self._log = JsonLog(self.path, array=True)
        self._log.cut(sys.maxsize)  # a torn line
        self._log.cut(size_before(self.path, until))
        self._start()

    def _start(self) -> None:
        self.add(Span(process=self.process, lane="loop", name="started", start=time.time(), seconds=0.0))
        LISTENERS.append(self.add)
        atexit.register(self.close)
        self._written = time.monotonic()

    def add(self, span: Span) -> None:
        """Add a span, from any thread. Never raises; `flush` does. Rank 0 reports the engines of all ranks."""
        if self.process != "learner" and span.process == "engine":
            return
        with self._lock:
            if span.lane == "compute":
                self._join(span)
            else:
                self._note(span, self.step)
        if time.monotonic() - self._written > FLUSH:
            self._try()

    def _join(self, span: Span) -> None:
        before, step = self._slices.get(span.process, (span, self.step))
        gap = span.start - before.start - before.seconds
        if before is span or gap > JOINED or before.version != span.version or step != self.step:
            if before is not span:
                self._note(before, step)
            self._slices[span.process] = replace(span, busy=span.seconds), self.step
            return
        end = max(span.start + span.seconds, before.start + before.seconds)
        tokens, busy = (before.tokens or 0) + (span.tokens or 0), (before.busy or 0.0) + span.seconds
        self._slices[span.process] = replace(before, seconds=end - before.start, tokens=tokens, busy=busy), step

    def _note(self, span: Span, step: int) -> None:
        self._events += self._threads.events(span, about(span, step))
        if span.version is not None and (
            span.name == "load" or (span.process == self.process == "learner" and span.name == "train")
        ):
            moment = span.start + span.seconds
            self._events.append(counter("version", span.process, moment, {"version": span.version}))

    def count(self, metrics: Mapping[str, float]) -> None:
        """Write counters of a step's staleness and queues."""
        for name, keys in COUNTED.items():
            if values := {key.split("/")[1]: metrics[key] for key in keys if math.isfinite(metrics.get(key, math.nan))}:
                with self._lock:
                    self._events.append(counter(name, self.process, time.time(), values))

    def next_step(self, step: int) -> None:
        """`step` has its line in metrics.jsonl; further spans belong to the next one."""
        self.flush()
        self.step = step + 1

    def _try(self) -> None:
        try:
            self.flush()
        except BirlError as error:  # raised at the next step, on the run's own thread
            self._error = error

    def flush(self) -> None:
        """Write buffered events to the file. Raises `BirlError` if the disk is full."""
        with self._lock:
            for span, step in self._slices.values():
                self._note(span, step)
            events, self._events = self._events, []
            self._slices, self._written = {}, time.monotonic()
            error, self._error = self._error, None
            if self._log is not None and events:
                self._log.append(events)
        if error is not None:
            raise error

    def size(self) -> int:
        """Size in bytes, with all spans so far. Not synced: a power failure may shorten a trace."""
        self.flush()
        return self.path.stat().st_size

    def close(self) -> None:
        """Write the rest and stop listening; a second call does nothing."""
        atexit.unregister(self.close)
        if self.add in LISTENERS:
            LISTENERS.remove(self.add)
        if self._log is not None:
            self._try()
            self._log.close()
            self._log = None


def about(span: Span, step: int) -> Event:
    """The fields of a span besides its place."""
    known = {"step": step or None, **{name: getattr(span, name) for name in FIELDS}}
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in known.items() if v is not None}


def parsed(line: bytes) -> Event | None:
    """The event of a line; None if it is not one. A bracket of the array gives an empty one."""
    try:
        event = {} if line.strip() in (b"[", b"]") else json.loads(line.removesuffix(b","))
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def last_moment(path: Path) -> float:
    """End of the last span of a trace [s since 1970]; 0 if there is none. Joined slices are written after later spans,
    so it may not be the last line's."""
    result = 0.0
    with suppress(OSError), open_regular(path) as file:
        size = path.stat().st_size
        file.seek(max(size - END, 0))
        for line in file.read().split(b"\n")[size > END : -1]:
            with suppress(KeyError, TypeError):
                event = parsed(line) or {}
                result = max(result, (event["ts"] + event["dur"]) / 1e6)
    return result


def size_before(path: Path, until: float) -> int:
    """Bytes of the lines before the first span that began at `until` or later."""
    size = 0
    with open_regular(path) as file:
        for line in file:
            event = parsed(line.rstrip())
            try:
                if event is None or event.get("ts", 0) >= until * 1e6:
                    break
            except TypeError:
                break
            size += len(line)
    return size
