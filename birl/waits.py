"""Table of current waits and recent events, and a watchdog that ends a run without progress. Standard library only:
every layer may record its waits.

    with waiting("training", "group 12", owner="engine"):         one row of the table in this context
        ...
    event("step 3 trained")                                      one of the last 50
    alive()                                                      progress that is not worth a row

The watchdog is a thread, as the event loop itself may be stuck.
"""

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from birl.foreign import standing
from birl.regular import check_target
from birl.spans import done

GRACE = 30.0  # seconds that a wait may exceed its deadline: its owner needs a moment to notice


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait. `deadline` [s] from `since`: the waiter gives up. `owner`: the part that must act to end it."""

    who: str
    what: str
    owner: str
    since: float
    deadline: float


@dataclass(slots=True)
class Table:
    waits: dict[int, Wait] = field(default_factory=dict)
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=50))
    last: float = field(default_factory=time.monotonic)
    count: int = 0
    spent: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))  # s

    def text(self) -> str:
        """The table as text, longest wait first."""
        now = time.monotonic()
        rows = [("who", "waits for", "owner", "since", "deadline")]
        waits = list(self.waits.values())  # other threads add and remove meanwhile
        for w in sorted(waits, key=lambda w: w.since)[:200]:
            rows.append(
                (w.who, w.what, w.owner, f"{now - w.since:.1f} s", f"{w.deadline:g} s" if w.deadline < inf else "-")
            )
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        happened = [f"{now - at:8.1f} s ago  {text}" for at, text in tuple(self.events)]
        return "\n".join([*lines, "", "last events:", *(happened or ["(none)"])])


TABLE = Table()

# (process, lane) of the span of a waiter. Every other waiter is an episode or a group.
PLACES = {"training": ("learner", "loop"), "learner": ("learner", "loop"), "rollout": ("rollout", "admission")}
LANES = {"reward workers": "rewards", "environment": "environments"}  # of episodes and groups, by owner
SHORT = 1e-3  # s; shorter waits of the rollout are no spans: most environments answer at once


@contextmanager
def waiting(who: str, what: str, owner: str, deadline: float = inf) -> Iterator[None]:
    """Register a wait while the context is open. Afterwards it counts in `spent` and is recorded as a span, except
    waits of episodes for the engine, as engines record each request."""
    table = TABLE
    table.count += 1
    key, began = table.count, time.perf_counter()
    table.waits[key] = Wait(who, what, owner, time.monotonic(), deadline)
    try:
        yield
    finally:
        table.waits.pop(key, None)
        ended = time.perf_counter()
        table.spent[who if who in PLACES else "", owner] += ended - began  # one key for all episodes
        _tell(who, owner, began, ended)


def forget(who: str) -> None:
    """Drop the waits of abandoned code, so that the watchdog does not end the run for them."""
    for key, wait in tuple(TABLE.waits.items()):
        if wait.who == who:
            TABLE.waits.pop(key, None)


def _tell(who: str, owner: str, began: float, ended: float) -> None:
    process, lane = PLACES.get(who) or ("rollout", LANES.get(owner, owner))
    if who.startswith("learner rank"):
        process, lane = who, "calls"
    elif process == "rollout" and (owner == "engine" or ended - began < SHORT):
        return
    done(f"wait:{owner}", began, process=process, lane=lane, ended=ended)


def spent(who: str, owner: str) -> float:
    """Seconds that `who` (a key of `PLACES`) has waited for this owner, in this process."""
    return TABLE.spent[who, owner]


def event(text: str) -> None:
    TABLE.events.append((time.monotonic(), text))
    alive()


def alive() -> None:
    TABLE.last = time.monotonic()


def stalled(limit: float) -> str:
    """Why the run counts as stalled; empty if it does not."""
    now = time.monotonic()
    for wait in tuple(TABLE.waits.values()):
        if now - wait.since > wait.deadline + GRACE:
            return f"{wait.who} waits for {wait.what} beyond its deadline of {wait.deadline:g} s"
    if now - TABLE.last > limit:
        return f"nothing has happened for {limit:g} s"
    return ""


class Watchdog:
    """Checks every `interval` seconds; at a stall it writes the report to `file` and calls `act` with it, once."""

    def __init__(self, limit: float, act: Callable[[str], None], file: Path, interval: float = 1.0) -> None:
        self.limit, self.act, self.file, self.interval = limit, act, file, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        alive()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            if reason := stalled(self.limit):
                where = f"The main thread is at {place}.\n" if (place := standing()) else ""
                report = f"birl: stopped by the watchdog: {reason}.\n{where}{TABLE.text()}\n"
                with suppress(OSError):
                    check_target(self.file)
                    self.file.write_text(report, encoding="utf-8", errors="backslashreplace")
                self.act(report)
                return


def exit_at_once(report: str) -> None:
    """End the process, as the event loop may not respond; the newest checkpoint is complete, so nothing is lost."""
    import os

    with suppress(OSError, ValueError):
        sys.stderr.write(f"\n{report}The newest checkpoint is complete: the same command goes on from it.\n")
        sys.stderr.flush()
    os._exit(3)
