"""Sends metrics to a tracker from a thread with a bounded queue, so that a run never waits for a tracker's server."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.regular import write_whole
from birl.track.log import encode
from birl.track.runs import mapping
from birl.track.sink import Figures, Sink, Start

ROOM = 10_000  # records that wait while a tracker is down; then the oldest are dropped
PATIENCE = {"offline": 90.0, "online": 15.0}  # seconds that start and end of a run wait for a tracker
KINDS = ("log", "validation", "samples")  # of records
PAUSES = (1.0, 5.0, 15.0, 60.0)  # seconds between tries


@dataclass(frozen=True, slots=True)
class Record:
    """A queued call. `kind`: one of `KINDS`."""

    kind: str
    step: int
    content: Any


class Marks:
    """The last step that each tracker got, by kind of record, and the tracker's run id: RUN/trackers.json. A resumed
    run repeats steps, but no tracker gets a step twice.

    A step is noted just before it is sent: if the process is killed in between, the tracker lacks that point."""

    def __init__(self, run: Path, name: str) -> None:
        self.path, self.name = run / "trackers.json", name

    def read(self) -> dict[str, Any]:
        result: Any = mapping(self.path).get(self.name)
        if not isinstance(result, dict) or not isinstance(result.get("id", ""), str):
            return {}
        return result if all(type(result.get(kind, 0)) is int for kind in KINDS) else {}

    def write(self, **changed: Any) -> None:
        with _MARKS:  # several outboxes share the file
            known = mapping(self.path)
            known[self.name] = {**self.read(), **changed}
            write_whole(self.path, encode(known))


_MARKS = threading.Lock()


class Outbox:
    """Queue and thread that send a run's metrics to one tracker.

    Example: box = Outbox("mlflow", MlflowRun(), Marks(run, "mlflow"), 15.0); box.open(start); box.close({})
    """

    def __init__(self, name: str, sink: Sink, marks: Marks, patience: float, room: int = ROOM) -> None:
        self.name, self.sink, self.marks, self.patience, self.room = name, sink, marks, patience, room
        self.unsaid: list[str] = []  # warnings, printed by the run's thread
        self.lost = 0
        self._queue: deque[Record] = deque()
        self._more = threading.Condition()
        self._last: tuple[Figures, bool] | None = None  # arguments of `close`
        self._given_up = False
        self._begun, self._ended = threading.Event(), threading.Event()
        self._refused: BirlError | None = None
        self._warned = False

    def open(self, start: Start) -> None:
        """Start, and wait a little for the tracker. Raises `BirlError` if the user has to act first (log in)."""
        result = self.marks.read() if start.resumed else {}
        start = replace(start, id=result.get("id", start.id), resumed=bool(result))
        self._told = {kind: int(result.get(kind, -1)) for kind in KINDS}
        if not result:
            self.marks.write(id=start.id, **self._told)
        # A daemon: a tracker that hangs must not keep the process alive.
        threading.Thread(target=self._work, args=(start,), name=f"birl-{self.name}", daemon=True).start()
        self._begun.wait(self.patience)
        if self._refused:
            raise self._refused
        if not self._begun.is_set():
            self._warn("does not answer")

    def put(self, record: Record) -> None:
        """Queue a record without waiting. Steps that the tracker has already are not sent again."""
        with self._more:
            if record.step <= self._told[record.kind]:
                return
            self._queue.append(record)
            if len(self._queue) > self.room:
                self._queue.popleft()
                self.lost += 1
            self._more.notify()

    def close(self, summary: Figures, failed: bool = False) -> None:
        """Wait a little for queued records. A second call does nothing."""
        if self._last is not None:
            return
        with self._more:
            self._last = (summary, failed)
            self._more.notify()
        self._ended.wait(self.patience)
        with self._more:
            self._given_up = True
            waiting = len(self._queue) + self.lost
            self._more.notify()
        if waiting:
            self.unsaid.append(f"warning: {waiting} records did not reach {self.name}; the run's own files have them")
        elif not self._ended.is_set():
            self.unsaid.append(
                f"warning: {self.name} was still busy at the end of the run; its last figures may be missing"
            )

    def _work(self, start: Start) -> None:
        if self._persist(lambda: self.sink.start(start)):
            self._begun.set()
            while (record := self._next()) is not None:
                if not self._persist(lambda record=record: self._send(record)):
                    break
        with suppress(Exception):  # close of a tracker that did not start
            summary, failed = self._last or ({}, True)
            self.sink.close(summary, failed)
        self._ended.set()

    def _next(self) -> Record | None:
        """The oldest record, which stays in the queue until it is sent; None at the end."""
        with self._more:
            while not self._queue and self._last is None:
                self._more.wait()
            return self._queue[0] if self._queue and not self._given_up else None

    def _send(self, record: Record) -> None:
        told = self._told[record.kind]
        self.marks.write(**{record.kind: record.step})
        try:
            if record.kind == "samples":
                self.sink.samples(record.step, record.content)
            else:
                self.sink.log(record.step, record.content)
        except Exception as error:
            # A record that can never be sent is skipped; if a server is down, requests' ValueErrors are OSErrors.
            if not isinstance(error, (TypeError, ValueError)) or isinstance(error, OSError):
                self.marks.write(**{record.kind: told})
                raise
            self.lost += 1
            self._warn(f"refused step {record.step} ({type(error).__name__}: {_first_line(error)})")
        with self._more:
            self._told[record.kind] = record.step
            if self._queue and self._queue[0] is record:  # else it was dropped while it was sent
                self._queue.popleft()

    def _persist(self, call: Callable[[], None]) -> bool:
        """Retry until it works; after the end of the run only once. False: it failed."""
        for pause in chain(PAUSES, repeat(PAUSES[-1])):
            ended = self._last is not None
            try:
                call()
                return True
            except BirlError as error:
                if not self._begun.is_set():
                    self._refused = error
                    self.unsaid.append(f"warning: nothing is sent to {self.name}. {error}")  # after `open` has returned
                    self._begun.set()
                    return False
                self._warn(str(error))
            except Exception as error:
                self._warn(f"failed ({type(error).__name__}: {_first_line(error)})")
            if ended or self._given_up:
                return False
            with self._more:
                self._more.wait_for(lambda: self._last is not None, pause)
        return False

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self.unsaid.append(
                f"warning: {self.name} {what}; the run goes on, and up to {self.room:,} records wait for it"
            )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]
