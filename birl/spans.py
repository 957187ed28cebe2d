"""What this process did, from when to when, for listeners (`track/trace.py` writes it). Every layer may record
what it has done, at almost no cost without a listener.

    began = time.perf_counter()
    ...
    done("train", began, step=3, tokens=8192)                          over, and it was the learner's
    done("generate", began, process="engine", lane="compute", tokens=31)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from birl.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`start` in seconds since 1970 (`time.time`, which processes of one machine share), `seconds` long. A lane holds
    what one actor did; `name` is what, and begins with "wait:" where it waited, followed by what for. `version` of the
    weights, `tokens` sampled or trained, `group` by its number, where they are known. `busy` [s]: how much of it was
    work, where parts were joined; `paused` [s]: how long an engine stood still for it.

    Example: Span(process="learner", lane="loop", name="train", start=1760000000.0, seconds=2.5, version=3, tokens=8192)
    """

    process: str
    lane: str
    name: str
    start: float
    seconds: float
    version: int | None = None
    tokens: int | None = None
    group: int | None = None
    busy: float | None = None
    paused: float | None = None


LISTENERS: list[Callable[[Span], None]] = []
JUMP = 0.05  # s; where the clock on the wall has moved by more, it was set, or the machine has slept
_offset = time.time() - time.perf_counter()


def wall(moment: float) -> float:
    """A time of `time.perf_counter` as seconds since 1970. Always by the same difference, so that spans that follow one
    another do not overlap."""
    global _offset
    now = time.time() - time.perf_counter()
    if abs(now - _offset) > JUMP:
        _offset = now
    return moment + _offset


def done(
    name: str,
    began: float,
    *,
    process: str = "learner",
    lane: str = "loop",
    ended: float | None = None,
    version: int | None = None,
    tokens: int | None = None,
    group: int | None = None,
    paused: float | None = None,
) -> None:
    """Tell of something that is over; `began` and `ended` (now) are times of `time.perf_counter`."""
    if not LISTENERS:
        return
    ended = time.perf_counter() if ended is None else ended
    span = Span(
        process=process,
        lane=lane,
        name=name,
        start=wall(began),
        seconds=max(ended - began, 0.0),
        version=version,
        tokens=tokens,
        group=group,
        paused=paused,
    )
    for listener in tuple(LISTENERS):
        listener(span)


def answered(completion: Completion, began: float, session: str, process: str = "engine") -> None:
    """Record a request as its caller sees it: from sent to answered, and by which weights at the end. The session
    of a group is its number."""
    if LISTENERS:
        group = int(session) if session.isdecimal() else None
        tokens = len(completion.tokens)
        version = int(completion.versions[-1]) if tokens else None
        done("generate", began, process=process, lane="requests", version=version, tokens=tokens, group=group)


def engine_name(address: str) -> str:
    """The process of an engine elsewhere. Example: engine_name("http://127.0.0.1:8000") == "engine 127.0.0.1:8000" """
    return f"engine {address.partition('://')[2] or address}"
