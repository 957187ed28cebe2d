"""Compares results of a run with the band of earlier results."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from birl.errors import BirlError
from birl.recipes.recipe import Expectation

T = TypeVar("T")
Points = list[tuple[int, float]]  # (step, value), in the order of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One figure of a run with its band.

    Example: Finding(stage="rl", metric="reward/mean", steps="1 to 8", low=0.1, high=0.3, measured=0.22)
    """

    stage: str
    metric: str
    steps: str
    low: float
    high: float
    measured: float
    """NaN if the run has no such figure."""

    @property
    def within(self) -> bool:
        return isfinite(self.measured) and self.low <= self.measured <= self.high


def compare(expected: Expectation, measured: Points, seed: int) -> list[Finding]:
    """One finding for a value, one for each window of a curve. A known seed has the band around its own figure, another
    seed the band around all figures."""
    if expected.values:
        step, result = _chosen(measured, expected.step)
        values = _own_or_all(expected.values, seed)
        return [_finding(expected, f"{step}", [min(values), max(values)], result)]
    size = expected.window
    read = (read_curve(file, expected.column) for file in _own_or_all(expected.curves, seed))
    curves = [[points[start : start + size] for start in range(0, len(points), size)] for points in read]
    known = dict(measured)
    findings = []
    for same in zip(*curves, strict=False):  # the same window of all curves; the shortest one ends it
        steps = [step for step, _ in same[0]]
        label = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        means = [fmean(value for _, value in window) for window in same]
        result = fmean(known.get(step, nan) for step in steps)
        findings.append(_finding(expected, label, means, result))
    return findings


def _finding(expected: Expectation, steps: str, before: Sequence[float], measured: float) -> Finding:
    slack = expected.tolerance + 1e-9  # for the rounding of decimals
    low, high = min(before) - slack, max(before) + slack
    return Finding(stage=expected.stage, metric=expected.metric, steps=steps, low=low, high=high, measured=measured)


def _own_or_all(by_seed: Mapping[int, T], seed: int) -> list[T]:
    return [by_seed[seed]] if seed in by_seed else list(by_seed.values())


def _chosen(measured: Points, step: str) -> tuple[int | str, float]:
    """The point named by `step`; NaN if there is none."""
    points = [(at, value) for at, value in measured if isfinite(value)]
    if step.isdigit():
        return int(step), dict(points).get(int(step), nan)
    if not points:
        return step, nan
    return {"first": points[0], "last": points[-1], "best": max(points, key=lambda point: point[1])}[step]


def read_curve(file: Path, column: str) -> Points:
    """The points of a column without empty cells. Raises `BirlError` naming file, row and column."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BirlError(f"{file}: cannot be read: {error}") from error
    names = list(rows[0]) if rows else []
    if "step" not in names or column not in names:
        missing = "step" if "step" not in names else column
        raise BirlError(f"{file}: there is no column {missing}; there is {', '.join(names) or 'nothing'}")
    points = []
    for number, row in enumerate(rows, 2):
        if not row[column]:
            continue
        try:
            points.append((int(row["step"]), float(row[column])))
        except (ValueError, TypeError):
            raise BirlError(
                f"{file}, row {number}: step and {column} must be numbers, not {list(row.values())}"
            ) from None
    if not points:
        raise BirlError(f"{file}: the column {column} is empty")
    return points
