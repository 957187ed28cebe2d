"""Curves as inline SVG: axes, hover titles, colours from the page's style sheet; no script."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from birl.track.chart import mean
from birl.track.units import figure
from birl.visible import visible

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 8, 24
MOST_POINTS = 200
COLORS = 8  # .c0 to .c7 in the style sheet
LARGEST = 1e300  # values beyond it are drawn there: their differences are no floats
ROUNDING = 1e-9  # a range smaller than this share of its values is rounding: a mean of equal values


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values over steps; NaN leaves a gap. Example: Series(name="mean", steps=[1, 2], values=[0.2, 0.4])"""

    name: str
    steps: Sequence[float]
    values: Sequence[float]


def escape(text: object) -> str:
    """Text that no browser obeys: markup quoted, control and bidi characters spelled out."""
    return html.escape(visible(str(text)), quote=True)


def curves(title: str, series: Sequence[Series], points: int = MOST_POINTS) -> str:
    """A line for each series. Empty when nothing finite is there to draw."""
    thin = [thinned(one, points) for one in series]
    values = [value for one in thin for value in one.values if math.isfinite(value)]
    if not values:
        return ""
    axes = _Axes.around([step for one in thin for step in one.steps], min(values), max(values))
    drawn = [_line(one, axes, index) for index, one in enumerate(thin)]
    return _figure(title, [one.name for one in series], axes.frame() + "".join(drawn) + _hits(thin, axes))


def stacked(title: str, series: Sequence[Series]) -> str:
    """Bars of each step's parts on top of each other. All series share their steps."""
    thin = [thinned(one) for one in series]
    if not thin or not thin[0].steps:
        return ""
    heights = [
        sum(max(0.0, v) for v in column if math.isfinite(v))
        for column in zip(*(one.values for one in thin), strict=True)
    ]
    axes = _Axes.around(thin[0].steps, 0.0, max(heights), inset=True)
    floor, bars = [0.0] * len(heights), []
    for index, one in enumerate(thin):
        parts = [max(0.0, value) if math.isfinite(value) else 0.0 for value in one.values]
        tops = [low + part for low, part in zip(floor, parts, strict=True)]
        bars.append(_bars(one.steps, floor, tops, axes, index))
        floor = tops
    return _figure(title, [one.name for one in series], axes.frame() + "".join(bars) + _hits(thin, axes))


def thinned(series: Series, points: int = MOST_POINTS) -> Series:
    """At most `points` points, each the mean of its neighbours, at the last of their steps."""
    number = len(series.steps)
    if number <= points:
        return series
    edges = [round(i * number / points) for i in range(points + 1)]
    spans = list(pairwise(edges))
    values = [mean(series.values[start:end]) for start, end in spans]
    return Series(name=series.name, steps=[series.steps[end - 1] for _, end in spans], values=values)


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """Data to picture: where a step and a value lie."""

    first: float
    last: float
    low: float
    high: float
    tick: float
    pad: float

    @classmethod
    def around(cls, steps: Sequence[float], low: float, high: float, inset: bool = False) -> "_Axes":
        """Axes of whole ticks around the values, which are finite."""
        low, high = (min(max(value, -LARGEST), LARGEST) for value in (low, high))
        low = 0.0 if 0 < low <= high / 2 else low
        size = max(abs(low), abs(high))
        if high - low <= ROUNDING * size:
            low = high = (low + high) / 2
        step = nice(max((high - low or size or 1.0) / 4, 1 / LARGEST))
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        pad = (WIDTH - LEFT - RIGHT) / max(2, 2 * len(steps)) if inset else 0.0
        high = high if high > low else low + step
        return cls(first=min(steps), last=max(steps), low=low, high=high, tick=step, pad=pad)

    def x(self, step: float) -> float:
        if self.last == self.first:
            return (LEFT + WIDTH - RIGHT) / 2
        return LEFT + self.pad + (WIDTH - LEFT - RIGHT - 2 * self.pad) * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - value) / (self.high - self.low)

    def frame(self) -> str:
        size = max(abs(self.low), abs(self.high))
        digits = max(4, math.ceil(math.log10(size / self.tick)) + 1)  # as many as tell two ticks apart
        rows = [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.y(v):.1f}" y2="{self.y(v):.1f}"/>'
            f'<text x="{LEFT - 6}" y="{self.y(v) + 4:.1f}" text-anchor="end">{tick(v, digits)}</text>'
            for v in ticks(self.low, self.high, self.tick)
        ]
        apart = max(1, nice((self.last - self.first or 1) / 6))
        marks = [v for v in ticks(self.first, self.last, apart) if v == int(v)]
        columns = [f'<text x="{self.x(v):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{tick(v)}</text>' for v in marks]
        return "".join(rows + columns)


def nice(size: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 times a power of ten. Example: nice(0.13) == 0.2"""
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= size * 0.999999)


def ticks(low: float, high: float, step: float) -> list[float]:
    """Multiples of `step` from `low` to `high`."""
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = 12 - math.floor(math.log10(step))
    return [round(n * step, digits) for n in range(first, last + 1)]


def tick(value: float, digits: int = 4) -> str:
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if bound <= abs(value) < 1e12:
            return f"{value / (1e3 if unit == 'k' else bound):.{max(6, digits)}g}{unit}"
    return f"{value:.{digits}g}"


def _line(series: Series, axes: _Axes, index: int) -> str:
    """A noisy long curve is drawn twice: faintly as it is, and smoothed."""
    color = f"c{index % COLORS}"
    points = list(zip(series.steps, series.values, strict=True))
    if len(points) > 60:
        smooth = list(zip(series.steps, smoothed(series.values, len(points) // 40), strict=True))
        return f'<path class="line raw {color}" d="{_path(points, axes)}"/>' + (
            f'<path class="line {color}" d="{_path(smooth, axes)}"/>'
        )
    dots = [
        f'<circle class="{color}" cx="{axes.x(step):.1f}" cy="{axes.y(value):.1f}" r="2.4"/>'
        for step, value in points
        if math.isfinite(value) and len(points) <= 30
    ]
    return f'<path class="line {color}" d="{_path(points, axes)}"/>' + "".join(dots)


def _path(points: Sequence[tuple[float, float]], axes: _Axes) -> str:
    path, pen = [], "M"
    for step, value in points:
        if math.isfinite(value):
            path.append(f"{pen}{axes.x(step):.1f} {axes.y(value):.1f}")
        pen = "L" if math.isfinite(value) else "M"
    return "".join(path)


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Each value as the mean of itself and `reach` neighbours on either side; fewer near the ends, which stay put."""
    last = len(values) - 1
    reaches = [min(reach, i, last - i) for i in range(len(values))]
    windows = [values[i - near : i + near + 1] for i, near in enumerate(reaches)]
    return [mean(window) if math.isfinite(value) else math.nan for value, window in zip(values, windows, strict=True)]


def _bars(steps: Sequence[float], floor: list[float], tops: list[float], axes: _Axes, index: int) -> str:
    width = (WIDTH - LEFT - RIGHT) / max(1, len(steps)) * (0.8 if len(steps) <= 60 else 1.4)
    boxes = [
        f"M{axes.x(step) - width / 2:.1f} {axes.y(low):.1f}h{width:.1f}V{axes.y(top):.1f}h{-width:.1f}z"
        for step, low, top in zip(steps, floor, tops, strict=True)
        if top > low
    ]
    return f'<path class="bar c{index % COLORS}" d="{"".join(boxes)}"/>'


def _hits(series: Sequence[Series], axes: _Axes) -> str:
    """Invisible columns that say all values of a step when the pointer rests on them."""
    by_step: dict[float, list[str]] = {}
    for one in series:
        for step, value in zip(one.steps, one.values, strict=True):
            by_step.setdefault(step, []).append(f"{one.name}: {figure(value)}")
    steps = sorted(by_step)
    places = [axes.x(step) for step in steps]
    edges = [LEFT, *((left + right) / 2 for left, right in pairwise(places)), WIDTH - RIGHT]
    boxes = [
        f'<path d="M{edges[i]:.1f} {TOP}H{edges[i + 1]:.1f}V{HEIGHT - BOTTOM}H{edges[i]:.1f}z">'
        f"<title>step {step:g}\n{escape(chr(10).join(by_step[step]))}</title></path>"
        for i, step in enumerate(steps)
    ]
    return f'<g class="hit">{"".join(boxes)}</g>'


def _figure(title: str, names: Sequence[str], drawing: str) -> str:
    legend = "".join(
        f'<span class="c{i % COLORS}"><i></i>{escape(name)}</span>' for i, name in enumerate(names) if name
    )
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over steps"'
    return (
        f'<figure><figcaption><b>{escape(title)}</b><span class="legend">{legend}</span></figcaption>'
        f"<svg {view}>{drawing}</svg></figure>"
    )
