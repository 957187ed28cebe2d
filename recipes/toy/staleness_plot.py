"""staleness.json as a picture: a panel for each way, a line for each rollout.max_staleness, means over the seeds."""

import re
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from birl.track.svg import HEIGHT, LEFT, WIDTH, Series, curves, escape

HEAD = 34
STYLE = """
svg { font-family: system-ui, sans-serif; --c0:#2563eb; --c1:#e07b16; --c2:#16925a; --c3:#b8369b; }
.card { fill:#fff; } text { fill:#626b77; font-size:10.5px; } .title { fill:#1b1f24; font-size:12px; font-weight:600; }
.grid { stroke:#eceef2; } .line { fill:none; stroke:var(--c); stroke-width:1.8; } .raw { opacity:0; }
circle, .key { fill:var(--c); } .hit path { fill:transparent; }
.c0{--c:var(--c0)} .c1{--c:var(--c1)} .c2{--c:var(--c2)} .c3{--c:var(--c3)}
"""


def average(record: Mapping[str, Any]) -> list[float]:
    return [fmean(values) for values in zip(*record["curves"], strict=True)]


def panel(title: str, series: list[Series], left: int) -> str:
    drawing = re.search(r"<svg [^>]*>(.*)</svg>", curves(title, series), re.DOTALL)
    assert drawing is not None, "nothing to draw"
    keys = "".join(
        f'<rect class="key c{i}" x="{LEFT + 90 * i}" y="20" width="9" height="9" rx="2"/>'
        f'<text x="{LEFT + 90 * i + 13}" y="28">{escape(one.name)}</text>'
        for i, one in enumerate(series)
    )
    inner = f'<svg y="{HEAD}" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">{drawing[1]}</svg>'
    head = f'<text class="title" x="{LEFT}" y="13">{escape(title)}</text>'
    return f'<g transform="translate({left} 0)">{head}{keys}{inner}</g>'


def drawn(table: Mapping[str, Mapping[str, Any]]) -> str:
    """An SVG file."""
    fresh = next(r for r in table.values() if r["max_staleness"] == 0)
    steps = range(1, len(fresh["curves"][0]) + 1)
    ways = list(dict.fromkeys(r["way"] for r in table.values() if r is not fresh))
    panels = []
    for place, way in enumerate(ways):
        records = [fresh, *(r for r in table.values() if r["way"] == way)]
        series = [Series(name=f"staleness {r['max_staleness']}", steps=steps, values=average(r)) for r in records]
        panels.append(panel(way, series, place * WIDTH))
    width, height = len(ways) * WIDTH, HEIGHT + HEAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{STYLE}</style><rect class="card" width="{width}" height="{height}"/>{"".join(panels)}</svg>\n'
    )
