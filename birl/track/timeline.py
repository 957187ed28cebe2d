"""A run's trace as columns, read incrementally while the run is writing.

timeline = Timeline(run); timeline.read()
timeline.start[timeline.of("learner", "loop")]          starts of what the loop did [s since 1970]
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birl.errors import BirlError
from birl.regular import open_regular
from birl.track.log import Growing
from birl.track.trace import FILE, parsed

COLUMNS: dict[str, tuple[type, Any]] = {
    "start": (np.float64, 0.0),
    "seconds": (np.float64, 0.0),
    "step": (np.int64, 0),
    "version": (np.int64, -1),
    "tokens": (np.int64, -1),
    "group": (np.int64, -1),
    "busy": (np.float64, np.nan),
    "paused": (np.float64, np.nan),
}


class Timeline:
    """All spans of a run, in order of writing, rank after rank. `places`: (process, lane); `names`: names of spans;
    `place` and `name` are indices into them; a `version`, `tokens` or `group` of -1 is unknown. `broken`: lines that
    were skipped."""

    def __init__(self, run: Path) -> None:
        self.run = Path(run)
        self._forget()

    def _forget(self) -> None:
        self.broken: list[str] = []
        self._files: dict[Path, Growing] = {}
        self._lines: dict[Path, int] = {}
        self._processes: dict[tuple[Path, int], str] = {}
        self._places: dict[tuple[str, str], int] = {}
        self._names: dict[str, int] = {}
        self.places, self.names = list(self._places), list(self._names)
        self.place = self.name = np.zeros(0, np.int32)
        for column, (kind, _) in COLUMNS.items():
            setattr(self, column, np.zeros(0, kind))

    start: NDArray[np.float64]
    seconds: NDArray[np.float64]
    step: NDArray[np.int64]
    version: NDArray[np.int64]
    tokens: NDArray[np.int64]
    group: NDArray[np.int64]
    busy: NDArray[np.float64]
    paused: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> NDArray[np.float64]:
        return self.start + self.seconds

    def read(self) -> bool:
        """Read new lines; returns whether there were any. An incomplete last line is read later. Raises `BirlError` if
        the run has no trace."""
        paths = files(self.run)
        if not paths[0].is_file():
            raise BirlError(
                f"{self.run} has no {FILE}: it is no folder of a run, or the run was started with track.trace=false."
            )
        if not all(file.goes_on for file in self._files.values()):
            self._forget()
        rows: list[dict[str, Any]] = []
        for path in paths:
            rows += self._new(path)
        if rows:
            self._append(rows)
        return bool(rows)

    def _new(self, path: Path) -> Iterator[dict[str, Any]]:
        for lines in self._files.setdefault(path, Growing(path)).new():
            for line in lines:
                self._lines[path] = self._lines.get(path, 0) + 1
                try:
                    if row := self._row(path, parsed(line)):
                        yield row
                except (KeyError, TypeError, ValueError, OverflowError):
                    self.broken.append(f"{path.name}, line {self._lines[path]}")

    def _row(self, path: Path, event: dict[str, Any] | None) -> dict[str, Any] | None:
        """A span; None for a name or a counter. Raises `ValueError`, `KeyError` or `TypeError` if it is none."""
        if event is None:
            raise ValueError
        if event.get("ph") == "M" and event["name"] == "process_name" and isinstance(event["args"]["name"], str):
            self._processes[path, event["pid"]] = event["args"]["name"]
        if event.get("ph", "M") in ("M", "C"):
            return None
        times = {"start": event["ts"] / 1e6, "seconds": event["dur"] / 1e6}
        row = {"process": self._processes[path, event["pid"]], "lane": event["cat"], "name": event["name"]}
        numbers = times | {name: event["args"][name] for name in COLUMNS if name in event["args"]}
        sized = all(type(n) in (int, float) and abs(n) < 2**53 for n in numbers.values())
        if not sized or times["seconds"] < 0 or not all(isinstance(text, str) for text in row.values()):
            raise ValueError
        return row | numbers

    def _append(self, rows: list[dict[str, Any]]) -> None:
        for column, (kind, default) in COLUMNS.items():
            new = np.array([row.get(column, default) for row in rows], kind)
            setattr(self, column, np.concatenate([getattr(self, column), new]))
        places = [self._places.setdefault((row["process"], row["lane"]), len(self._places)) for row in rows]
        names = [self._names.setdefault(row["name"], len(self._names)) for row in rows]
        self.places, self.names = list(self._places), list(self._names)
        self.place = np.concatenate([self.place, np.array(places, np.int32)])
        self.name = np.concatenate([self.name, np.array(names, np.int32)])

    def of(self, process: str, lane: str = "", name: str = "") -> NDArray[np.bool_]:
        """Mask of the spans of a process, optionally of one of its lanes and with this name."""
        fitting = [i for i, (p, its) in enumerate(self.places) if p == process and lane in ("", its)]
        result = np.isin(self.place, fitting)
        if name:
            result &= self.name == self._names.get(name, -1)
        return result

    def processes(self) -> list[str]:
        """Names of processes: learners, engines, then the rollout."""
        order = {"learner": 0, "engine": 1, "rollout": 2}
        result = dict.fromkeys(process for process, _ in self.places)
        return sorted(result, key=lambda process: (order.get(process.split(" ")[0], 3), len(process), process))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step (line of metrics.jsonl) in the trace: `begin` to `end` [s since 1970], and seconds of the learner's loop
    by name; waits inside of other spans are counted only as waits. `life`: number of the run's process."""

    number: int
    begin: float
    end: float
    life: int
    seconds: dict[str, float] = field(default_factory=dict[str, float])


def steps_of(timeline: Timeline) -> list[TracedStep]:
    """Steps in order of time. The last one may be unfinished: then it has no `train`."""
    result: list[dict[str, Any]] = []
    life = 0
    for name, start, end, number, own in exclusive(timeline, "learner", "loop"):
        if name == "started":
            life += 1
        elif number == 0:
            continue
        if not result or result[-1]["number"] != number or result[-1]["life"] != life:
            if result and result[-1]["life"] == life:
                result[-1]["end"] = start
            result.append({"number": number, "begin": start, "end": end, "life": life, "seconds": {}})
        step = result[-1]
        step["end"] = max(step["end"], end)
        if name != "started":
            step["seconds"][name] = step["seconds"].get(name, 0.0) + own
    return [TracedStep(**step) for step in result]


def exclusive(timeline: Timeline, process: str, lane: str) -> list[tuple[str, float, float, int, float]]:
    """(name, start, end, step, exclusive seconds) of each span of a lane whose spans are nested or disjoint, by
    start."""
    chosen = np.flatnonzero(timeline.of(process, lane))
    start, end = timeline.start[chosen], timeline.end[chosen]
    order = np.lexsort((-end, end > start, start))  # a mark before a span that begins with it
    result: list[list[Any]] = []
    stack: list[int] = []
    for i in order.tolist():
        span = chosen[i]
        while stack and result[stack[-1]][2] <= start[i] + 1e-6:
            stack.pop()
        if stack:
            result[stack[-1]][4] -= min(end[i], result[stack[-1]][2]) - start[i]
        stack.append(len(result))
        name, step = timeline.names[timeline.name[span]], int(timeline.step[span])
        result.append([name, float(start[i]), float(end[i]), step, float(end[i] - start[i])])
    return [(name, a, b, step, max(own, 0.0)) for name, a, b, step, own in result]


def files(run: Path) -> list[Path]:
    """Trace files: of rank 0, then of the other ranks."""
    return [run / FILE, *sorted(run.glob("trace-rank-*.json"))]


def joined(run: Path) -> Iterator[bytes]:
    """The trace of all ranks as one closed JSON array."""
    before = b"[\n"
    for path in files(run):
        with open_regular(path) as file:
            for line in file:
                if line.endswith(b",\n") and parsed(line[:-1]):
                    yield before + line[:-2]
                    before = b",\n"
    yield b"\n]\n" if before[0] == b","[0] else b"[]\n"
