"""Charts in one self-contained HTML file, for report.html and notebooks: the chart of the live page, drawn by uPlot,
with the data inside. No other script can run, whatever a model has written into its answers: the content security
policy has this script's digest."""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from birl.errors import BirlError, did_you_mean
from birl.regular import write_whole
from birl.track.figures import figure, headed
from birl.track.progress import stored
from birl.track.units import figure as brief
from birl.track.units import mean
from birl.visible import visible

STATIC = Path(__file__).parents[1] / "view" / "static"
SHEETS = ("vendor/uPlot.min.css", "style.css", "report.css")
MODULES = ("dom.js", "figures.js", "smooth.js", "chart.js", "report.js")  # each after those that it imports
SCRIPT = (STATIC / "vendor/uPlot.iife.min.js").read_text("utf-8") + "".join(
    re.sub(r"(?m)^import .*\n|^export ", "", (STATIC / name).read_text("utf-8")) for name in MODULES
)
DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{DIGEST}'; base-uri 'none'; form-action 'none'"
)
MOST_POINTS = 200
LARGEST = 1e300  # values beyond it are clipped: their differences overflow floats
SHOWN = ("reward/mean", "length/mean", "kl", "entropy", "loss", "grad_norm", "mismatch/mean", "staleness/mean")
PANELS = 6
Line = tuple[str, Sequence[float], Sequence[float]]  # name, steps, values


class Charts:
    """The charts of one HTML file. Example: charts = Charts(); charts.page("demo", charts.draw("KL [nats]", [line]))"""

    def __init__(self) -> None:
        self._data: list[dict[str, Any]] = []

    def draw(
        self, heading: str, lines: Sequence[Line], *, about: str = "", stacked: bool = False, points: int = MOST_POINTS
    ) -> str:
        """HTML of a chart with its title, and the ends of each line as text; empty without finite values. NaN leaves a
        gap; `stacked` parts must have the same steps."""
        lines = [(name, *thinned(steps, values, points)) for name, steps, values in lines]
        if not any(math.isfinite(value) for _, _, values in lines for value in values):
            return ""
        drawn = [{"label": name, "x": steps, "y": list(map(_number, values))} for name, steps, values in lines]
        self._data.append({"name": heading, "heading": heading, "about": about, "lines": drawn, "stacked": stacked})
        ends = "; ".join(f"{name} {brief(values[0])} to {brief(values[-1])}" for name, _, values in lines if values)
        words = escape(f"{heading}, first to last step: {ends}")
        return f'<div data-chart="{len(self._data) - 1}"><p class="unseen">{words}</p></div>'

    def page(self, title: str, body: str, kind: str = "report") -> str:
        """The whole HTML file. `body` is HTML, `title` is text."""
        sheet = "".join((STATIC / name).read_text("utf-8") for name in SHEETS)
        data = json.dumps(self._data, separators=(",", ":")).replace("<", "\\u003c")
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{escape(title)} · birl</title>'
            f'<style>{sheet}</style></head>\n<body class="{kind}"><main>{body}</main>\n'
            f'<script type="application/json" id="data">{data}</script>\n<script type="module">{SCRIPT}</script>'
            "</body></html>\n"
        )


def escape(text: object) -> str:
    """Escape text for HTML; control and bidi characters are spelled out."""
    return html.escape(visible(str(text)), quote=True)


def thinned(steps: Sequence[float], values: Sequence[float], points: int) -> tuple[list[float], list[float]]:
    """At most `points` points, each the mean of neighbours, at the last of their steps."""
    edges = [round(i * len(steps) / points) for i in range(points + 1)]
    if len(steps) <= points:
        return list(steps), list(values)
    return [steps[end - 1] for end in edges[1:]], [mean(values[start:end]) for start, end in pairwise(edges)]


def _number(value: float) -> float | None:
    """Round to six digits for JSON; None if not finite."""
    return float(f"{min(max(value, -LARGEST), LARGEST):.6g}") if math.isfinite(value) else None


def line(name: str, records: Sequence[dict[str, Any]], label: str = "") -> Line:
    """One metric of stored records as a line; records without it are left out."""
    rows = [record for record in records if isinstance(record.get(name), (int, float))]
    return label or figure(name).title, [row["step"] for row in rows], [row[name] for row in rows]


@dataclass(frozen=True)
class Curves:
    """Charts of a run as a notebook shows them; `save` writes them to an HTML file."""

    html: str
    names: tuple[str, ...]

    def save(self, path: str | Path) -> None:
        write_whole(Path(path), self.html.encode("utf-8", "replace"))

    def __repr__(self) -> str:
        return f"<curves of {', '.join(self.names)}>"

    def _repr_html_(self) -> str:
        high = 20 + 300 * -(-len(self.names) // 2)
        inside = html.escape(self.html, quote=True)
        style = f"width:100%;height:{high}px;border:0"
        return f'<iframe title="curves" sandbox="allow-scripts" style="{style}" srcdoc="{inside}"></iframe>'


def plot(run: Path, names: Sequence[str] = ()) -> Curves:
    """Plot metrics of a run by step, with validations in the chart of the reward or loss. `names`: of metrics.jsonl or
    validation.jsonl; by default up to six. Raises `BirlError` for an unknown name, and before the first step."""
    metrics, validations = stored(run / "metrics.jsonl"), stored(run / "validation.jsonl")
    if not metrics and not validations:
        raise BirlError(f"{run} has no finished step (yet): call train() first.")
    known = {key for record in (*metrics, *validations) for key in record}
    if unknown := [name for name in names if name not in known]:
        raise BirlError(f"the run has no metric {unknown[0]!r}.{did_you_mean(unknown[0], sorted(known))}")
    chosen = tuple(names) or tuple(name for name in SHOWN if name in known)[:PANELS] or ("loss",)
    charts, drawn = Charts(), ""
    for name in chosen:
        also = {"reward/mean": "validation/all/score", "loss": "validation/loss"}.get(name, "")
        lines = [line(name, records) for records in (metrics, validations)] + [line(also, validations, "validation")]
        row = figure(name)
        drawn += charts.draw(headed(row.title, row.unit), [one for one in lines if one[1]], about=row.about)
    return Curves(charts.page(run.name, f'<div class="charts">{drawn}</div>', "report notebook"), chosen)
