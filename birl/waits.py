"""Who waits for whom, since when, and what happened last; and a watchdog that ends a run in which nothing happens any
more. Standard library only: every layer may say what it waits for.

    with waiting("training", "group 12", owner="engine"):         one line of the table while it lasts
        ...
    event("step 3 trained")                                      one of the last 50
    alive()                                                      something happens, not worth a line

The watchdog is a thread, as the event loop itself may be what is stuck.
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

from birl.blocked import standing
from birl.regular import check_target
from birl.spans import done

GRACE = 30.0  # seconds that a wait may outlast its own deadline: its owner needs a moment to notice


@dataclass(frozen=True, slots=True)
class Wait:
    """`deadline` in seconds from `since`; who waits gives up then. `owner` is what must act for the wait to end."""

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
        """Longest wait first."""
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

# Whose time a wait is: (process, lane) of its span. Every other waiter is an episode or a group.
PLACES = {"training": ("learner", "loop"), "learner": ("learner", "loop"), "rollout": ("rollout", "admission")}
LANES = {"reward workers": "rewards", "environment": "environments"}  # of episodes and groups, by owner
SHORT = 1e-3  # s; a wait of the rollout that is over sooner is no span: most environments answer at once


@contextmanager
def waiting(who: str, what: str, owner: str, deadline: float = inf) -> Iterator[None]:
    """When it is over it counts in `spent`, and is recorded as a span; but not what an episode waits for its engine, as
    engines tell of each request."""
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
    """Drop the waits of what was left behind: the watchdog does not end the run for them."""
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
    """Seconds that `who` (a key of `PLACES`) has waited for this owner in this process."""
    return TABLE.spent[who, owner]


def event(text: str) -> None:
    TABLE.events.append((time.monotonic(), text))
    alive()


def alive() -> None:
    TABLE.last = time.monotonic()


def stalled(limit: float) -> str:
    """Why this counts as a stall; empty where it does not."""
    now = time.monotonic()
    for wait in tuple(TABLE.waits.values()):
        if now - wait.since > wait.deadline + GRACE:
            return f"{wait.who} waits for {wait.what} beyond its deadline of {wait.deadline:g} s"
    if now - TABLE.last > limit:
        return f"nothing has happened for {limit:g} s"
    return ""


class Watchdog:
    """Looks every `interval` seconds; at a stall it calls `act` with the report, once. `file` gets the report too."""

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
    """For a run whose event loop may not answer: the newest checkpoint is complete, so there is nothing to save."""
    import os

    with suppress(OSError, ValueError):
        sys.stderr.write(f"\n{report}The newest checkpoint is complete: the same command goes on from it.\n")
        sys.stderr.flush()
    os._exit(3)
