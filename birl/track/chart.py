"""Small charts made of characters, also of ASCII alone."""

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS, _ASCII = " ▁▂▃▄▅▆▇█", " .-=+*%#@"


def sparkline(values: Sequence[float], width: int, height: int = 1, ascii_only: bool = False) -> list[str]:
    """The values as `height` lines of at most `width` columns, lowest value to highest. NaN leaves a gap.

    Example: sparkline([0, 1, 2, 3], width=4) == ["▁▃▆█"]
    """
    columns = resampled(values, width)
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return [""] * height
    low = min(finite)
    span = max(finite) / 2 - low / 2  # of halves: the difference of two floats may be none
    marks = _ASCII if ascii_only else _BLOCKS
    levels = [_level(value, low, span, 8 * height) for value in columns]
    return ["".join(marks[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(height))]


def _level(value: float, low: float, span: float, top: int) -> int:
    """1 to `top`; a flat curve lies in the middle, and 0 is nothing."""
    if not math.isfinite(value):
        return 0
    return 1 + round((top - 1) * ((value / 2 - low / 2) / span)) if span > 0 else max(1, top // 2)


def resampled(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: each the mean of finite neighbours, or, where they are few, itself up to six times."""
    if len(values) <= width:
        wide = min(width, 6 * len(values))
        return [values[i * len(values) // wide] for i in range(wide)]
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [mean(values[start:end]) for start, end in pairwise(edges)]


def mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
