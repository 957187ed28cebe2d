"""A trace in the format of Chrome and Perfetto (ui.perfetto.dev): a JSON array of complete events ("X"), names of
processes and threads ("M"), and counters ("C"), with times in microseconds from the run's beginning."""

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birl.regular import writing
from birl.track.progress import stored
from birl.track.rows import NESTED, Floats, lane_order, nested, rows_of
from birl.track.timeline import Timeline

ABOUT = ("step", "version", "tokens", "group", "busy", "paused")
COUNTED = {"staleness": ("staleness/mean", "staleness/max"), "queue": ("queue/ready", "queue/running")}


def events(timeline: Timeline) -> list[dict[str, Any]]:
    """Names first, then everything else in the order of its start. On one thread events lie beside or inside of each
    other, as the format wants it. Raises `BirlError` for a damaged metrics.jsonl."""
    if not len(timeline):
        return []
    result: list[dict[str, Any]] = []
    zero = float(timeline.start.min())
    start = (timeline.start - zero).round(6)
    end = (start + timeline.seconds).round(6)
    pids = {process: number for number, process in enumerate(timeline.processes(), start=1)}
    tids = np.zeros(len(timeline), np.int64)
    for process, pid in pids.items():
        result += _about(process, pid, pid, "process")
        used = 0
        for lane in lane_order([lane for p, lane in timeline.places if p == process]):
            chosen = np.flatnonzero(timeline.of(process, lane))
            if lane in NESTED:
                start[chosen], end[chosen], _ = nested(start[chosen], end[chosen])
                rows = np.zeros(len(chosen), np.int64)
            else:
                rows = rows_of(start[chosen], end[chosen])
            count = int(rows.max()) + 1
            for row in range(count):
                result += _about(f"{lane} {row + 1}" if count > 1 else lane, pid, used + row + 1, "thread")
            tids[chosen] = used + rows + 1
            used += count
    ours = _spans(timeline, start, end, pids, tids)
    counted = _counters(timeline, zero, pids)
    return result + sorted([*ours, *counted], key=lambda event: (event["ts"], -event.get("dur", 0)))


def _about(name: str, pid: int, number: int, kind: str) -> Iterator[dict[str, Any]]:
    place = {"ph": "M", "pid": pid, "tid": 0 if kind == "process" else number}
    yield {**place, "name": f"{kind}_name", "args": {"name": name}}
    yield {**place, "name": f"{kind}_sort_index", "args": {"sort_index": number}}


def _spans(
    timeline: Timeline, start: Floats, end: Floats, pids: dict[str, int], tids: NDArray[np.int64]
) -> Iterator[dict[str, Any]]:
    ts = np.rint(start * 1e6).astype(np.int64)
    dur = np.rint(end * 1e6).astype(np.int64) - ts
    about = {name: getattr(timeline, name).tolist() for name in ABOUT}
    rows = zip(timeline.place.tolist(), timeline.name.tolist(), ts.tolist(), dur.tolist(), tids.tolist(), strict=True)
    for i, (place, name, began, took, thread) in enumerate(rows):
        process, lane = timeline.places[place]
        yield {
            "ph": "X",
            "name": timeline.names[name],
            "cat": lane,
            "ts": began,
            "dur": took,
            "pid": pids[process],
            "tid": thread,
            "args": {key: values[i] for key, values in about.items() if values[i] > (0 if key == "step" else -1)},
        }


def _counters(timeline: Timeline, zero: float, pids: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Versions where they change: the learner's after each training, an engine's after each load. Staleness and queues
    as metrics.jsonl has them."""
    for process, name in [("learner", "train"), *((p, "load") for p in pids if p.startswith("engine"))]:
        chosen = np.flatnonzero(timeline.of(process, name=name) & (timeline.version >= 0))
        for moment, version in zip(timeline.end[chosen].tolist(), timeline.version[chosen].tolist(), strict=True):
            yield _counter("version", pids[process], moment - zero, {"version": version})
    if "learner" not in pids:
        return
    for record in stored(timeline.run / "metrics.jsonl"):
        try:
            moment = datetime.fromisoformat(record["time"]).timestamp() - zero
        except (KeyError, TypeError, ValueError):
            continue
        for name, keys in COUNTED.items():
            values = {k.split("/")[1]: v for k in keys if isinstance(v := record.get(k), int | float) and isfinite(v)}
            if values and moment >= 0:
                yield _counter(name, pids["learner"], moment, values)


def _counter(name: str, pid: int, seconds: float, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": int(seconds * 1e6), "args": values}


def lines(found: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The file: one event a line."""
    before = "[\n"
    for event in found:
        yield before + json.dumps(event, separators=(",", ":"), allow_nan=False)
        before = ",\n"
    yield "\n]\n" if before[0] == "," else "[]\n"


def write(path: Path, found: Iterable[dict[str, Any]]) -> int:
    """Gives how many events there are."""
    count = -1
    with writing(path), path.open("w", encoding="utf-8") as file:
        for count, line in enumerate(lines(found)):  # noqa: B007
            file.write(line)
    return count
