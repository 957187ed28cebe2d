"""Timeline of this process for listeners (`track/trace.py` writes it). Every layer may record spans, at almost no cost
without a listener.

    began = time.perf_counter()
    ...
    done("train", began, step=3, tokens=8192)                          a finished span of the learner
    done("generate", began, process="engine", lane="compute", tokens=31)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from birl.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A finished interval. `start` [s] since 1970 (`time.time`, which processes of one machine share), `seconds` long.
    `lane`: the actor; `name`: the activity, or "wait:" and the owner it waited for. `version` of the weights, `tokens`
    sampled or trained, `group` by its number, if known. `busy` [s]: the part that was work, if spans were joined;
    `paused` [s]: how long an engine was paused for it.

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
JUMP = 0.05  # s; if the wall clock has moved by more, it was set, or the machine was suspended
_offset = time.time() - time.perf_counter()


def wall(moment: float) -> float:
    """Convert a time of `time.perf_counter` to seconds since 1970. The offset is constant, so that consecutive spans do
    not overlap."""
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
    """Record a finished span; `began` and `ended` (default: now) are times of `time.perf_counter`."""
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
    """Record a request as its caller sees it: from sending to response, with the last version of the weights. The
    session of a group is its number."""
    if LISTENERS:
        group = int(session) if session.isdecimal() else None
        tokens = len(completion.tokens)
        version = int(completion.versions[-1]) if tokens else None
        done("generate", began, process=process, lane="requests", version=version, tokens=tokens, group=group)


def engine_name(address: str) -> str:
    """Process name of a remote engine. Example: engine_name("http://127.0.0.1:8000") == "engine 127.0.0.1:8000" """
    return f"engine {address.partition('://')[2] or address}"
