"""Formatting of numbers for people, and means of figures."""

import math
from collections.abc import Sequence


def duration(seconds: float) -> str:
    """Example: duration(130) == "2m10s" """
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def count(value: float) -> str:
    """Example: count(1930.4) == "1,930"; from ten million on, count(1.23e7) == "12.3M" """
    if not math.isfinite(value):
        return str(value)
    for bound, unit in ((1e10, "G"), (1e7, "M")):
        if abs(value) >= bound:
            return f"{value / (bound / 10):.1f}{unit}"
    return f"{value:,.0f}"


def counted(number: float, noun: str) -> str:
    """Example: counted(1, "step") == "1 step"; counted(30, "step") == "30 steps" """
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def figure(value: float) -> str:
    """A metric of unknown magnitude as a short text. Example: figure(0.00012) == "0.00012"; figure(0.5) == "0.500" """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{value:,.0f}"
    if 0.01 <= size < 10:
        return f"{value:.3f}"
    return f"{value:,.1f}" if 10 <= size < 1e6 else f"{value:.2g}"


def decimal(value: float, sign: str = "") -> str:
    """A score, reward or loss. Example: decimal(0.78123) == "0.781"; from a million on, decimal(1e200) == "1e+200" """
    return f"{value:{sign}.3f}" if abs(value) < 1e6 else f"{value:{sign}.3g}"


def share(value: float) -> str:
    """Example: share(0.123) == "12.3 %" """
    return f"{100 * value:.1f} %" if math.isfinite(value) else str(value)


def mean(values: Sequence[float]) -> float:
    """Of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
