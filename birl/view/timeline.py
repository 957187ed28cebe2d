"""The timeline of a run: what each process did, as much of it as fits into the page's pixels.

    /api/timeline?run=ID&begin=&end=&width=      begin, end: seconds from the run's start (all of it); width: pixels

Lanes in which things overlap come in rows while these are few, else as a crowd: how many at once, pixel by pixel. Spans
shorter than a pixel are joined with their neighbours.
"""

import threading
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from birl.errors import BirlError
from birl.track.limit import limit, said
from birl.track.rows import NESTED, Floats, lane_order, nested, rows_of
from birl.track.shares import Shares, shares_of, working
from birl.track.timeline import Step, Timeline, steps_of
from birl.view.answer import Answer
from birl.view.folders import Run, Runs

WIDTHS = (50, 4000)  # pixels that a page may ask for
ROWS = 10  # a lane with more at once is shown as a crowd,
MANY = 4000  # and one with so many spans in sight
LONGEST = 10  # spans that are listed
Indices = NDArray[np.int64]


@dataclass(slots=True)
class _Traced:
    """A run's trace and what follows from it, until there is more of it."""

    timeline: Timeline
    lock: threading.Lock = field(default_factory=threading.Lock)
    steps: list[Step] = field(default_factory=list[Step])
    shares: Shares | None = None

    def refresh(self) -> None:
        if self.timeline.read():
            self.steps = steps_of(self.timeline)
            self.shares = shares_of(self.timeline, self.steps)


def routes(runs: Runs) -> list[Route]:
    traces: dict[str, _Traced] = {}

    def answer(request: Request) -> Response:
        run = runs[request.query_params.get("run", "")]
        traced = traces.setdefault(run.id, _Traced(Timeline(run.folder)))
        with traced.lock:
            traced.refresh()
            return Answer(shown(run, traced, *_asked(request)))

    return [Route("/api/timeline", answer, methods=["GET"])]


def _asked(request: Request) -> tuple[float | None, float | None, int]:
    """begin, end [s], width [pixels]. Raises `BirlError`."""
    found: list[float | None] = []
    for name in ("begin", "end", "width"):
        text = request.query_params.get(name, "")
        try:
            found.append(float(text) if text else None)
        except ValueError:
            found.append(float("nan"))
        if found[-1] is not None and not isfinite(found[-1]):
            raise BirlError(f"{name}={text[:40]!r} is no number; leave it out, or give seconds from the run's start.")
    begin, end, width = found
    if begin is not None and end is not None and end <= begin:
        raise BirlError(f"end={end:g} must be above begin={begin:g}.")
    return begin, end, int(min(max(width or 1000, WIDTHS[0]), WIDTHS[1]))


def shown(run: Run, traced: _Traced, begin: float | None, end: float | None, width: int) -> dict[str, Any]:
    timeline, shares = traced.timeline, traced.shares
    if not len(timeline):
        raise BirlError(f"{run.name}: the trace is empty so far. Wait for the first step.")
    zero, last = float(timeline.start.min()), float(timeline.end.max())
    begin = 0.0 if begin is None else begin
    end = max(last - zero, begin + 1e-3) if end is None else max(end, begin + 1e-3)
    start, stop = timeline.start - zero, timeline.end - zero
    window = _Window(begin=begin, end=end, width=width)
    versions = timeline.version[timeline.version >= 0]
    return {
        "run": run.id, "name": run.name, "running": run.running, "zero": zero, "last": last - zero,
        "begin": begin, "end": end,
        "names": timeline.names, "said": [said(name) for name in timeline.names],
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else None,
        "processes": [_process(timeline, process, start, stop, window) for process in timeline.processes()],
        "steps": _steps(traced.steps, zero, window),
        "longest": _longest(timeline, start, stop, window),
        "limit": asdict(limit(shares, run.config)),
        "shares": None if shares is None else asdict(shares),
        "words": {name: said(name) for name in _named(shares)},
        "broken": timeline.broken[:5],
    }  # fmt: skip


def _named(shares: Shares | None) -> set[str]:
    tables = [] if shares is None else [shares.learner, *shares.processes.values()]
    return {name for its in tables for name in its}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Times in seconds from the run's start."""

    begin: float
    end: float
    width: int

    @property
    def pixel(self) -> float:
        return (self.end - self.begin) / self.width

    def has(self, start: Floats, end: Floats) -> NDArray[np.bool_]:
        return (end >= self.begin) & (start <= self.end)


def _process(timeline: Timeline, process: str, start: Floats, end: Floats, window: _Window) -> dict[str, Any]:
    lanes = lane_order([lane for name, lane in timeline.places if name == process])
    found: dict[str, Any] = {"name": process, "lanes": []}
    for lane in lanes:
        chosen = np.flatnonzero(timeline.of(process, lane) & window.has(start, end))
        found["lanes"].append({"lane": lane, **_lane(timeline, chosen, start, end, window, lane in NESTED)})
    if process.split(" ")[0] == "engine":
        gaps = working(timeline, process).gaps()
        zero = float(timeline.start.min())
        wide = (gaps.ends - gaps.starts >= window.pixel) & window.has(gaps.starts - zero, gaps.ends - zero)
        found["bubbles"] = [gaps.starts[wide] - zero, gaps.ends[wide] - zero]
    return found


def _lane(
    timeline: Timeline, chosen: Indices, start: Floats, end: Floats, window: _Window, one_at_a_time: bool
) -> dict[str, Any]:
    first, last = start[chosen], end[chosen]
    if one_at_a_time:
        first, last, rows = nested(first, last)
        return {"kind": "nested", "rows": 1, **_joined(timeline, chosen, first, last, rows, window)}
    rows = rows_of(first, last, most=ROWS + 1) if len(chosen) <= MANY else np.full(1, ROWS)
    if len(rows) and rows.max() >= ROWS:
        return {"kind": "crowd", **_crowd(timeline, chosen, first, last, window)}
    count = int(rows.max()) + 1 if len(rows) else 1
    return {"kind": "rows", "rows": count, **_joined(timeline, chosen, first, last, rows, window)}


def _joined(
    timeline: Timeline, chosen: Indices, start: Floats, end: Floats, rows: Indices, window: _Window
) -> dict[str, Any]:
    """Columns of what is drawn, shortest last. Of spans below a pixel those that begin in the same one are one, under
    the name of the longest; `count` says how many, `seconds` how long they are together."""
    small = end - start < window.pixel
    place = np.clip(np.floor((start - window.begin) / window.pixel), -1, window.width).astype(np.int64) + 1
    key = np.where(small, rows * (window.width + 2) + place, -1 - np.arange(len(start)))
    order = np.argsort(start - end, kind="stable")  # the longest first: it stands for the others
    _, leader, group = np.unique(key[order], return_index=True, return_inverse=True)
    count, seconds = np.bincount(group), np.bincount(group, (end - start)[order])
    tokens = np.bincount(group, np.maximum(timeline.tokens[chosen], 0)[order])
    till = np.full(len(leader), -np.inf)
    np.maximum.at(till, group, end[order])
    since = np.full(len(leader), np.inf)
    np.minimum.at(since, group, start[order])
    own = chosen[order][leader]
    drawn = np.argsort(-(till - since), kind="stable")
    return {
        "start": since[drawn].round(6),
        "end": till[drawn].round(6),
        "row": rows[order][leader][drawn],
        "name": timeline.name[own][drawn],
        "version": timeline.version[own][drawn],
        "step": timeline.step[own][drawn],
        "group": timeline.group[own][drawn],
        "count": count[drawn],
        "seconds": seconds[drawn].round(6),
        "tokens": tokens[drawn].astype(np.int64),
    }


def _crowd(timeline: Timeline, chosen: Indices, start: Floats, end: Floats, window: _Window) -> dict[str, Any]:
    """How many at once, on average over each pixel, and the version at the end of whatever is over next."""
    edges = np.linspace(window.begin, window.end, window.width + 1)
    held = _time_before(edges, start) - _time_before(edges, end)
    order = np.argsort(end, kind="stable")
    middle = (edges[:-1] + edges[1:]) / 2
    next_end = np.minimum(np.searchsorted(end[order], middle), len(order) - 1)
    names, counts = np.unique(timeline.name[chosen], return_counts=True)
    return {
        "crowd": (np.diff(held) / window.pixel).round(3),
        "version": timeline.version[chosen][order][next_end],
        "name": int(names[counts.argmax()]),
        "count": len(chosen),
    }


def _time_before(moments: Floats, beginnings: Floats) -> Floats:
    """Sum of max(moment - beginning, 0) over all beginnings, for each moment."""
    ordered = np.sort(beginnings)
    sums, place = np.concatenate([[0.0], np.cumsum(ordered)]), np.searchsorted(ordered, moments)
    return moments * place - sums[place]


def _steps(steps: list[Step], zero: float, window: _Window) -> list[dict[str, Any]]:
    """What the learner's loop did in each step in sight; where these are many, in several together."""
    seen = [s for s in steps if s.end - zero >= window.begin and s.begin - zero <= window.end]
    together = max(1, -(-len(seen) * 3 // window.width))  # three pixels for each at least
    found: list[dict[str, Any]] = []
    for i in range(0, len(seen), together):
        some = seen[i : i + together]
        if len({s.life for s in some}) > 1:  # not over a time in which nothing ran
            some = [s for s in some if s.life == some[-1].life]
        seconds: dict[str, float] = {}
        for step in some:
            for name, its in step.seconds.items():
                seconds[name] = seconds.get(name, 0.0) + its
        found.append(
            {
                "first": some[0].number, "last": some[-1].number,
                "begin": round(some[0].begin - zero, 6), "end": round(some[-1].end - zero, 6),
                "seconds": {name: round(its, 6) for name, its in seconds.items()},
            }
        )  # fmt: skip
    return found


def _longest(timeline: Timeline, start: Floats, end: Floats, window: _Window) -> list[dict[str, Any]]:
    """The longest spans in sight, as rows of a table."""
    seen = np.flatnonzero(window.has(start, end))
    most = seen[np.argsort(-timeline.seconds[seen], kind="stable")[:LONGEST]]
    return [
        {
            "process": timeline.places[timeline.place[i]][0], "lane": timeline.places[timeline.place[i]][1],
            "name": said(timeline.names[timeline.name[i]]), "start": float(start[i]),
            "seconds": float(timeline.seconds[i]), "step": int(timeline.step[i]),
            "version": int(timeline.version[i]), "tokens": int(timeline.tokens[i]),
        }
        for i in most.tolist()
    ]  # fmt: skip
