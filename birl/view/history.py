"""Steps and validations of runs in memory, read incrementally."""

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.datastructures import QueryParams

from birl.errors import BirlError
from birl.track.progress import idle_words
from birl.track.runs import ALWAYS_OTHER
from birl.view.columns import STAMP, Columns
from birl.view.folders import Run, Runs

AXES = ("step", "time", "tokens")
LARGE = 1 << 23  # bytes; a longer file is read in the background, and shown by a glimpse until then
GLIMPSE = 1000  # rows of a glimpse
LATER = 0.5  # s; the page gets its first curves before the background thread uses the CPU
_READER = threading.Lock()  # one long file at a time
DIGITS = 6  # significant digits of curves; `/api/values` has all
OWN = ("seed", "threads", *ALWAYS_OTHER)  # keys that may differ between seeds of one configuration
OWN_SECTIONS = ("track.", "checkpoint.")


class History:
    """Steps and validations of a run in memory; `update` reads added lines."""

    def __init__(self, run: Run) -> None:
        self.run, self.lock = run, threading.RLock()
        self._whole = Columns(run.folder / "metrics.jsonl")
        self._glimpse: Columns | None = None
        self._begun = 0  # size of the file when the background thread started
        self.validations = Columns(run.folder / "validation.jsonl", keep=lambda name: name.startswith("validation/"))
        self._axes: dict[str, np.ndarray] = {}

    @property
    def steps(self) -> Columns:
        """The rows of metrics.jsonl; while a long file is being read, a sample of them."""
        return self._glimpse or self._whole

    @property
    def read(self) -> float:
        """Share of metrics.jsonl that has been read; below 1 only at first, for a long file."""
        return 1.0 if self._glimpse is None else min(0.99, self._whole.taken / self._begun)

    def update(self) -> None:
        with self.lock:
            changed = self.validations.read()
            if self._glimpse is None:
                if (unread := self._whole.unread) > LARGE:
                    self._begun, self._glimpse = self._whole.taken + unread, self._whole.glimpse(GLIMPSE)
                    threading.Thread(target=self._read_all, daemon=True).start()
                changed |= self._whole.read() if self._glimpse is None else True
            if changed:
                self._axes = {}

    def _read_all(self) -> None:
        time.sleep(LATER)
        try:
            with _READER:
                self._whole.read()
        finally:
            with self.lock:
                self._glimpse, self._axes = None, {}

    @property
    def version(self) -> str:
        """Version of the data; changes when anything is added or read again."""
        tables = "-".join(f"{t.generation}.{t.rows}.{t.broken}" for t in (self.steps, self.validations))
        return tables if self._glimpse is None else f"{tables}~{self.read:.2f}"

    @property
    def names(self) -> list[str]:
        with self.lock:  # another request may be reading, and add new ones
            return list(dict.fromkeys([*self.steps.names, *self.validations.names]))

    @property
    def constant(self) -> dict[str, float]:
        """Figures that have the same value in all of two or more rows."""
        result = {}
        for table in (self.steps, self.validations):
            for name in table.names if table.rows > 1 else ():
                values = table[name][np.isfinite(table[name])]
                if len(values) > 1 and (values == values[0]).all():
                    result[name] = float(values[0])
        return result

    def table(self, name: str) -> Columns:
        return self.validations if name in self.validations.names else self.steps

    def axis(self, table: Columns, kind: str) -> np.ndarray:
        """x-coordinate of each row of a table: its step; seconds of training since the start of the run; or tokens that
        were sampled (trained on if nothing is sampled) since then."""
        if kind == "step":
            return table["step"]
        if kind not in self._axes:
            self._axes[kind] = self._seconds() if kind == "time" else self._tokens()
        if table is self.steps:
            return self._axes[kind]
        return _at_steps(table["step"], self.steps["step"], self._axes[kind])

    def _seconds(self) -> np.ndarray:
        taken = self.steps["time/step"]
        if np.isfinite(taken).any():
            return self._summed(taken)
        stamps = self.steps[STAMP]
        known = stamps[np.isfinite(stamps)]
        return stamps - known[0] if len(known) else stamps

    def _tokens(self) -> np.ndarray:
        for name in ("tokens/generated", "tokens/trained"):
            if name in self.steps.names:
                return self._summed(self.steps[name])
        return np.full(self.steps.rows, np.nan)

    def _summed(self, values: np.ndarray) -> np.ndarray:
        """Cumulative sum; a row also stands for missing steps before it."""
        steps = self.steps["step"]
        return np.cumsum(np.nan_to_num(values) * np.maximum(np.diff(steps, prepend=steps[:1] - 1), 0))

    def span(self, kind: str) -> tuple[float, float] | None:
        """Range of the x-axis; None if there are no points."""
        result = [r for table in (self.steps, self.validations) if (r := span(self.axis(table, kind)))]
        return (min(low for low, _ in result), max(high for _, high in result)) if result else None

    @property
    def warning(self) -> str:
        """A warning if the last step trained nothing; else empty, also while a long file is being read."""
        with self.lock:
            if self._glimpse is not None:
                return ""
            empty = (self._whole["updates/skipped"] > 0) | (self._whole["tokens/trained"] == 0)
            idle = (self._whole["updates/done"] == 0) & empty
        return idle_words(int(idle.sum()), len(idle)) if idle[-1:].any() else ""

    def about(self) -> dict[str, Any]:
        return {
            "id": self.run.id,
            "name": self.run.name,
            "running": self.run.running,
            "problem": self.run.problem,
            "warning": self.warning,
            "family": family(self.run.id, self.run.config),
            "read": self.read,
            "rows": self.steps.rows,
            "broken": self.steps.broken + self.validations.broken,
            "names": self.names,
            "constant": self.constant,
        }

    def curve(self, name: str, kind: str, low: float, high: float, width: int) -> dict[str, np.ndarray]:
        table = self.table(name)
        return sampled(self.axis(table, kind), table[name], low=low, high=high, width=width)

    def values(self, kind: str, at: float) -> dict[str, Any]:
        """All figures, with all digits, of the row nearest to `at`, and of the nearest validation."""
        result: dict[str, Any] = {"step": None, "x": None, "values": {}, "validation_step": None}
        for table, step in ((self.validations, "validation_step"), (self.steps, "step")):
            x = self.axis(table, kind)
            if not np.isfinite(x).any():
                continue
            row = int(np.nanargmin(np.abs(x - at)))
            result[step] = table["step"][row]
            result["values"] |= {name: table[name][row] for name in table.names}
            if table is self.steps:
                result["x"] = x[row]
        return result


class Index:
    """The histories of all requested runs."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self._lock = runs, threading.Lock()
        self._histories: dict[str, History] = {}

    def asked(self, query: QueryParams) -> list[History]:
        """Histories of `run=...&run=...`, updated. Raises `BirlError`."""
        wanted = list(dict.fromkeys(query.getlist("run")))
        if not wanted:
            raise BirlError("No run was chosen. Choose one or more from the list of runs.")
        return [self.of(self.runs[one]) for one in wanted]

    def of(self, run: Run) -> History:
        with self._lock:
            history = self._histories.setdefault(run.id, History(run))
        history.update()
        return history


def _at_steps(steps: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value that the table had reached at each step; 0 before its first row."""
    if not len(known):
        return np.where(steps == 0, 0.0, np.nan)
    place = np.searchsorted(known, steps, "right") - 1
    return np.where(place < 0, 0.0, values[np.maximum(place, 0)])


def sampled(x: np.ndarray, y: np.ndarray, *, low: float, high: float, width: int) -> dict[str, np.ndarray]:
    """Downsample the curve between `low` and `high`, with a neighbour at each side so that lines reach the edge.

    Up to two points for each of `width` columns: {"x", "y"}, every point. Above that also "min", "max" and "n", the
    number of points of each, so that outliers remain visible. NaN is left out.

    Example: sampled(steps, rewards, low=0, high=100_000, width=600)["max"]
    """
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    if len(x) > 1 and (np.diff(x) < 0).any():
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    first = max(0, int(np.searchsorted(x, low, "left")) - 1)
    last = int(np.searchsorted(x, high, "right")) + 1
    x, y = x[first:last], y[first:last]
    if len(x) <= 2 * width:
        return {"x": _short(x), "y": _short(y)}
    edges = np.searchsorted(x, np.linspace(low, high, width + 1)[:-1])
    beyond = int(np.searchsorted(x, high, "right"))  # neighbours are points of their own
    starts = np.unique(np.append(edges, [0, beyond]))
    starts = starts[starts < len(x)]
    n = np.diff(np.append(starts, len(x)))
    return {
        "x": _short(np.add.reduceat(x, starts) / n),
        "y": _short(np.add.reduceat(y, starts) / n),
        "min": _short(np.minimum.reduceat(y, starts)),
        "max": _short(np.maximum.reduceat(y, starts)),
        "n": n,
    }


def _short(values: np.ndarray) -> np.ndarray:
    """Round to `DIGITS` significant digits, which saves a third of the bytes."""
    size = np.abs(values)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(size)))
        rounded = np.round(values * scale) / scale
    return np.where(np.isfinite(rounded), rounded, values)


def span(x: np.ndarray) -> tuple[float, float] | None:
    known: Any = x[np.isfinite(x)]
    return (float(known.min()), float(known.max())) if len(known) else None


def family(run_id: str, config: Mapping[str, Any]) -> str:
    """Key of a run's configuration without seed, folder and reporting. A run without a readable configuration has its
    own."""
    if not config:
        return run_id
    kept = {k: v for k, v in config.items() if k not in OWN and not k.startswith(OWN_SECTIONS)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:12]
