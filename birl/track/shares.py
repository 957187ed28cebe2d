"""Where the time of a run went: the share of each wait in every process, from its trace.

What counts are the finished steps, without the first one of a process (it warms up) where there are others. In the
learner's loop one thing happens at a time, so its shares add up to 1; engines answer many requests at once, so what
counts there is whether they did anything; of episodes it is the share of their own time.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birl.track.timeline import Timeline, TracedStep, steps_of

Floats = NDArray[np.float64]
GROUP = "wait:rollout"  # the learner waits for groups
WEIGHTS = ("sync", "wait:engines")  # new weights on their way, from the learner's side


@dataclass(frozen=True, slots=True)
class Intervals:
    """Make them with `union`. Times in seconds.

    Example: union([0, 1, 5], [2, 3, 6]).total == 4 (0 to 3 and 5 to 6)
    """

    starts: Floats
    ends: Floats

    @property
    def total(self) -> float:
        return float((self.ends - self.starts).sum())

    def below(self, moments: Any) -> Floats:
        """How much lies before each of the moments."""
        moments = np.asarray(moments, float)
        if not len(self.starts):
            return np.zeros_like(moments)
        sums = np.concatenate([[0.0], np.cumsum(self.ends - self.starts)])
        place = np.searchsorted(self.starts, moments, side="right")  # so many begin before
        last = np.maximum(place - 1, 0)
        over = np.where(place > 0, np.maximum(self.ends[last] - moments, 0.0), 0.0)
        return sums[place] - over

    def within(self, other: "Intervals") -> float:
        """How much of it is also in the other."""
        return float((self.below(other.ends) - self.below(other.starts)).sum())


def union(starts: Any, ends: Any) -> Intervals:
    """Of intervals in any order that may overlap."""
    first, last = np.asarray(starts, float), np.asarray(ends, float)
    if not len(first):
        return Intervals(np.zeros(0), np.zeros(0))
    order = np.argsort(first, kind="stable")
    first, reach = first[order], np.maximum.accumulate(last[order])
    new = np.concatenate([[True], first[1:] > reach[:-1]])  # begins after everything before it was over
    return Intervals(first[new], reach[np.concatenate([new[1:], [True]])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """`learner`: share of the time, by what its loop did, "other" included. `processes`: the same for other processes;
    "idle" is when an engine had nothing to do. `episodes`: what episodes waited for, as share of their time. `busy`:
    mean share of the time in which an engine worked; `busy_in_wait`: the same while the learner waited for groups;
    `crowd`: requests at once while engines worked, by how many there were at most, in that wait. `seconds` are looked
    at, `steps` (first, last) of `count`."""

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
    """Those that count: trained, and not the first of their process where others are there."""
    trained = [s for s in steps if "train" in s.seconds]
    firsts = {life: min(s.number for s in trained if s.life == life) for life in {s.life for s in trained}}
    later = [s for s in trained if s.number != firsts[s.life]]
    return later or trained


def shares_of(timeline: Timeline, steps: list[TracedStep] | None = None) -> Shares | None:
    """None where no step is finished yet."""
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
    """When an engine did something: of one in this process the time that it computed, of others that in which it was
    asked for something, or took weights."""
    computed = timeline.of(engine, "compute")
    return spans(timeline, computed if computed.any() else timeline.of(engine))


def _cut(its: Intervals, windows: Intervals) -> Intervals:
    """Those that begin within the windows."""
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
                continue  # what it computed says more than what was asked
            for index in np.unique(timeline.name[chosen]).tolist():
                name, same = timeline.names[index], chosen & (timeline.name == index)
                its[name] = its.get(name, 0.0) + spans(timeline, same).within(windows) / windows.total
        if process in engines:
            its["idle"] = max(1 - engines[process].within(windows) / windows.total, 0.0)
        result[process] = dict(sorted(its.items(), key=lambda item: -item[1]))
    return {process: its for process, its in result.items() if its}


def _episodes(timeline: Timeline, windows: Intervals) -> dict[str, float]:
    """Of all requests and waits of episodes that ended in the windows: the share of each in their sum."""
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
    """Mean requests at once while there were any in the waits, by the most that there were at once."""
    lanes = [i for i, (process, lane) in enumerate(timeline.places) if lane == "requests"]
    chosen = np.isin(timeline.place, lanes)
    if not chosen.any() or not waits.total:
        return 1.0
    start, end = timeline.start[chosen], timeline.end[chosen]
    moments = np.concatenate([start, end])
    change = np.concatenate([np.ones(len(start)), -np.ones(len(end))])
    most = int(np.cumsum(change[np.lexsort((change, moments))]).max())
    asked = float((waits.below(end) - waits.below(start)).sum())  # each request by itself
    while_any = union(start, end).within(waits)
    return asked / while_any / max(most, 1) if while_any > 0 else 1.0
