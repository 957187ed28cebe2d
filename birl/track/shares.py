"""Breakdown of a run's time: the share of each activity and wait in every process, from its trace.

Finished steps count, without the first of each process (warm-up) if there are others. The learner's loop does one thing
at a time, so its shares add up to 1. Engines answer requests concurrently: their shares are of the time in which any
was active. Shares of episodes are of the episodes' own time.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birl.track.timeline import Timeline, TracedStep, steps_of

Floats = NDArray[np.float64]
GROUP = "wait:rollout"  # the learner waits for groups
WEIGHTS = ("sync", "wait:engines")  # weight sync, seen by the learner


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint sorted intervals, made by `union` [s].

    Example: union([0, 1, 5], [2, 3, 6]).total == 4 (0 to 3 and 5 to 6)
    """

    starts: Floats
    ends: Floats

    @property
    def total(self) -> float:
        return float((self.ends - self.starts).sum())

    def below(self, moments: Any) -> Floats:
        """Total length of the intervals before each of the moments."""
        moments = np.asarray(moments, float)
        if not len(self.starts):
            return np.zeros_like(moments)
        sums = np.concatenate([[0.0], np.cumsum(self.ends - self.starts)])
        place = np.searchsorted(self.starts, moments, side="right")  # number of intervals that begin before
        last = np.maximum(place - 1, 0)
        over = np.where(place > 0, np.maximum(self.ends[last] - moments, 0.0), 0.0)
        return sums[place] - over

    def within(self, other: "Intervals") -> float:
        """Total length of the intersection with the other intervals."""
        return float((self.below(other.ends) - self.below(other.starts)).sum())


def union(starts: Any, ends: Any) -> Intervals:
    """Union of intervals in any order, which may overlap."""
    first, last = np.asarray(starts, float), np.asarray(ends, float)
    if not len(first):
        return Intervals(np.zeros(0), np.zeros(0))
    order = np.argsort(first, kind="stable")
    first, reach = first[order], np.maximum.accumulate(last[order])
    new = np.concatenate([[True], first[1:] > reach[:-1]])  # begins after all earlier ones have ended
    return Intervals(first[new], reach[np.concatenate([new[1:], [True]])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """`learner`: share of the time by activity of its loop, with "other". `processes`: the same for other processes;
    "idle": an engine had no work. `episodes`: share of each wait in the episodes' time. `busy`: mean share of the time
    in which an engine worked; `busy_in_wait`: the same while the learner waited for groups; `crowd`: in that wait, mean
    concurrent requests of working engines, relative to their maximum. `seconds`: of the counted steps, `steps`: (first,
    last), `count`: their number."""

    seconds: float
    steps: tuple[int, int]
    count: int
    learner: dict[str, float]
    processes: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    episodes: dict[str, float] = field(default_factory=dict[str, float])
    busy: float = 0.0
    busy_in_wait: float = 0.0
    crowd: float = 1.0

    @property
    def weights(self) -> float:
        return sum(self.learner.get(name, 0.0) for name in WEIGHTS)


def finished(steps: list[TracedStep]) -> list[TracedStep]:
    """Steps that count: with training, and not the first of their process if there are others."""
    trained = [s for s in steps if "train" in s.seconds]
    firsts = {life: min(s.number for s in trained if s.life == life) for life in {s.life for s in trained}}
    later = [s for s in trained if s.number != firsts[s.life]]
    return later or trained


def shares_of(timeline: Timeline, steps: list[TracedStep] | None = None) -> Shares | None:
    """The shares of a run; None if no step is finished."""
    counted = finished(steps_of(timeline) if steps is None else steps)
    windows = union([s.begin for s in counted], [s.end for s in counted])
    total = windows.total
    if total <= 0:
        return None
    learner: dict[str, float] = {}
    for step in counted:
        for name, seconds in step.seconds.items():
            learner[name] = learner.get(name, 0.0) + seconds / total
    learner["other"] = max(1 - sum(learner.values()), 0.0)
    waits = spans(timeline, timeline.of("learner", "loop", GROUP))
    waits = _cut(waits, windows)
    engines = {p: working(timeline, p) for p in timeline.processes() if p.split(" ")[0] == "engine"}
    busy = [its.within(windows) / total for its in engines.values()]
    in_wait = [its.within(waits) / waits.total for its in engines.values()] if waits.total else []
    return Shares(
        seconds=total,
        steps=(min(s.number for s in counted), max(s.number for s in counted)),
        count=len(counted),
        learner=dict(sorted(learner.items(), key=lambda item: (item[0] == "other", -item[1]))),
        processes=_others(timeline, windows, engines),
        episodes=_episodes(timeline, windows),
        busy=float(np.mean(busy)) if busy else 0.0,
        busy_in_wait=float(np.mean(in_wait)) if in_wait else 0.0,
        crowd=_crowd(timeline, waits),
    )


def spans(timeline: Timeline, chosen: np.ndarray) -> Intervals:
    return union(timeline.start[chosen], timeline.end[chosen])


def working(timeline: Timeline, engine: str) -> Intervals:
    """Intervals in which an engine worked: of an embedded one its computation, of others their requests and weight
    loads."""
    computed = timeline.of(engine, "compute")
    return spans(timeline, computed if computed.any() else timeline.of(engine))


def _cut(its: Intervals, windows: Intervals) -> Intervals:
    """The intervals that begin within the windows."""
    if not len(its.starts) or not len(windows.starts):
        return union([], [])
    place = np.searchsorted(windows.starts, its.starts, side="right") - 1
    inside = (place >= 0) & (its.starts < windows.ends[np.maximum(place, 0)])
    return Intervals(its.starts[inside], its.ends[inside])


def _others(timeline: Timeline, windows: Intervals, engines: dict[str, Intervals]) -> dict[str, dict[str, float]]:
    result: dict[str, dict[str, float]] = {}
    for process in timeline.processes():
        if process == "learner":
            continue
        its: dict[str, float] = {}
        lanes = {"engine": ("requests", "compute", "weights"), "rollout": ("admission",)}
        for lane in lanes.get(process.split(" ")[0], ("calls",)):
            chosen = timeline.of(process, lane)
            if lane == "requests" and timeline.of(process, "compute").any():
                continue  # the computation is more exact than requests
            for index in np.unique(timeline.name[chosen]).tolist():
                name, same = timeline.names[index], chosen & (timeline.name == index)
                its[name] = its.get(name, 0.0) + spans(timeline, same).within(windows) / windows.total
        if process in engines:
            its["idle"] = max(1 - engines[process].within(windows) / windows.total, 0.0)
        result[process] = dict(sorted(its.items(), key=lambda item: -item[1]))
    return {process: its for process, its in result.items() if its}


def _episodes(timeline: Timeline, windows: Intervals) -> dict[str, float]:
    """Share of each request and wait in the total of episodes that ended in the windows."""
    sums: dict[str, float] = {}
    ends = timeline.end
    place = np.searchsorted(windows.starts, ends, side="right") - 1
    counted = (place >= 0) & (ends <= windows.ends[np.maximum(place, 0)])
    for index, (process, lane) in enumerate(timeline.places):
        kind = process.split(" ")[0]
        if (kind, lane) == ("engine", "requests"):
            name = "engine"
        elif kind == "rollout" and lane not in ("admission", "groups"):
            name = lane
        else:
            continue
        sums[name] = sums.get(name, 0.0) + float(timeline.seconds[counted & (timeline.place == index)].sum())
    total = sum(sums.values())
    return {name: s / total for name, s in sorted(sums.items(), key=lambda item: -item[1])} if total else {}


def _crowd(timeline: Timeline, waits: Intervals) -> float:
    """Mean concurrent requests while there were any in the waits, relative to the maximum."""
    lanes = [i for i, (process, lane) in enumerate(timeline.places) if lane == "requests"]
    chosen = np.isin(timeline.place, lanes)
    if not chosen.any() or not waits.total:
        return 1.0
    start, end = timeline.start[chosen], timeline.end[chosen]
    moments = np.concatenate([start, end])
    change = np.concatenate([np.ones(len(start)), -np.ones(len(end))])
    most = int(np.cumsum(change[np.lexsort((change, moments))]).max())
    asked = float((waits.below(end) - waits.below(start)).sum())  # each request separately
    while_any = union(start, end).within(waits)
    return asked / while_any / max(most, 1) if while_any > 0 else 1.0
