"""A curve of any length as what a screen can show: points, or the mean and the range of each column of pixels."""

from typing import Any

import numpy as np

DIGITS = 6  # significant ones, in what is drawn; `/api/values` has all


def sampled(x: np.ndarray, y: np.ndarray, *, low: float, high: float, width: int) -> dict[str, np.ndarray]:
    """The curve between `low` and `high`, with a neighbour at each side so that lines reach the edge.

    Up to two points for each of `width` columns: {"x", "y"}, every point. Above that also "min", "max" and "n", the
    number of points behind each: nothing that stands out is lost. NaN is left out.

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
    """To `DIGITS` significant digits, which a third of the bytes pays for."""
    size = np.abs(values)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(size)))
        rounded = np.round(values * scale) / scale
    return np.where(np.isfinite(rounded), rounded, values)


def span(x: np.ndarray) -> tuple[float, float] | None:
    known: Any = x[np.isfinite(x)]
    return (float(known.min()), float(known.max())) if len(known) else None
