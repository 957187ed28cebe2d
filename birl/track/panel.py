"""The live panel as a pure function of a run's progress and the terminal's size."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from birl.track.progress import Progress, failures
from birl.track.units import count, duration, figure, mean, share
from birl.visible import visible

PHASES = ("generate", "reward", "train", "validate", "checkpoint", "other")  # time/<name>
CELL = 28  # columns of a cell
Cell = tuple[str, str, str]  # label, figure, style of both
_BLOCKS, _ASCII = " ▁▂▃▄▅▆▇█", " .-=+*%#@"


class ProgressPanel:
    """Renders `progress` at each refresh in the terminal's current size. The end is cropped if it does not fit, so the
    most important comes first.

    Example: Live(ProgressPanel(progress))
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(None, complete_style="green"),
            TextColumn("{task.fields[times]}"),
            expand=True,
        )
        self.bar.add_task("", total=None, times="")
        self.phase = Bar(SpinnerColumn(), TextColumn("{task.description}", style="cyan", markup=False))
        self.phase.add_task("")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain, width = options.ascii_only, max(1, options.max_width - 4)
        rows = [self._bar(width), self._phase(plain)]
        rows += _warnings(self.progress)
        rows += _curves(self.progress, width, console.height >= 24 and width >= 56, plain)
        rows += _cells(self.progress.metrics, width)
        title = Text(f" birl · {_short(self.progress.title, width - 12)} ".replace("·", "-" if plain else "·"), "bold")
        shape = box.ASCII if plain else box.ROUNDED
        yield Panel(Group(*rows), title=title, title_align="left", box=shape, border_style="bright_black")
        # Otherwise rich leaves the cursor at the end of the last line, and a log line would be appended to it.
        yield Segment("")

    def _bar(self, width: int) -> RenderableType:
        total, step, eta = self.progress.total, self.progress.step, self.progress.eta
        times = ([] if eta is None else [f"eta {duration(eta)}"]) + [duration(self.progress.elapsed)]
        text = f"step {step}/{total}" if total else f"step {step}"
        if not total or width < 36:
            return Text("  ".join([text, *times]), "bold", no_wrap=True, overflow="ellipsis")
        (task,) = self.bar.task_ids
        self.bar.update(task, description=text, total=total, completed=step, times="  ".join(times))
        return self.bar.get_renderable()

    def _phase(self, plain: bool) -> RenderableType:
        text = visible(self.progress.phase)
        if plain or not text:
            return Text(text, "cyan", no_wrap=True, overflow="ellipsis")
        self.phase.update(self.phase.task_ids[0], description=text)
        return self.phase.get_renderable()


def _short(text: str, width: int) -> str:
    text = visible(text).replace("\n", " ")
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _warnings(progress: Progress) -> Iterator[RenderableType]:
    m = progress.metrics
    if failed := failures(m):
        causes = ", ".join(f"{count(n)} {cause}" for cause, n in failed.items())
        asked = f" of {count(m['outcome/asked'])}" if "outcome/asked" in m else ""
        text = f"FAILED     {count(sum(failed.values()))}{asked} episodes: {causes}"
        yield Text(text, "bold red", no_wrap=True, overflow="crop")
    if progress.warning:
        yield Text(progress.warning, "bold yellow", no_wrap=True, overflow="ellipsis")


def _curves(progress: Progress, width: int, tall: bool, plain: bool) -> Iterator[RenderableType]:
    """Reward or loss, and validation: last and first value, and a sparkline of one or three lines."""
    name = "reward" if progress.headline == "reward/mean" else "loss"
    curves = [(name, progress.curve, "green"), ("validation", [value for _, value in progress.validations], "blue")]
    if not progress.curve:
        yield Text("waiting for the first step", "bright_black")
    for name, values, style in curves:
        if not values:
            continue
        parts = [f"{name:<10}", f"{values[-1]:.3f}", f"from {values[0]:.3f}"]
        about = Text(("\n" if tall else " ").join(parts), no_wrap=True, overflow="crop")
        about.stylize(f"bold {style}", len(parts[0]) + 1, len(parts[0]) + 1 + len(parts[1]))
        room = width - 2 - max(map(len, about.plain.split("\n")))
        lines = sparkline(values, max(room, 1), 3 if tall and not plain else 1, plain)
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(about, Text("\n".join(lines), style, no_wrap=True, overflow="crop"))
        yield grid if room >= 4 else about


def _cells(metrics: dict[str, float], width: int) -> Iterator[RenderableType]:
    texts = [
        Text(f"{label:<10} ", style or "bright_black", no_wrap=True, overflow="crop").append(value, style or "default")
        for label, value, style in _figures(metrics)
    ]
    if texts:
        yield Columns(texts, width=min(CELL, width), padding=0)
    parts = {name: metrics.get(f"time/{name}", 0.0) for name in PHASES}
    parts = {name: seconds for name, seconds in parts.items() if math.isfinite(seconds) and seconds > 0}
    if parts:
        total = sum(parts.values())
        shares = [f"{name} {100 * seconds / total:.0f} %" for name, seconds in parts.items()]
        line = Text(f"{'time':<10} ", "bright_black", no_wrap=True, overflow="ellipsis")
        yield line.append("  ".join([f"{metrics.get('time/step', total):.1f} s", *shares]), "default")


def _figures(m: dict[str, float]) -> Iterator[Cell]:
    """The metrics worth a glance; others are only in the files. A truncated answer has a reward; failed episodes have
    none, and get a line of their own."""
    if "length/mean" in m:
        yield "length", f"{m['length/mean']:.1f}" + (f" max {m['length/max']:.0f}" if "length/max" in m else ""), ""
    if "outcome/asked" in m:
        yield "finished", f"{count(m.get('outcome/ok', 0))} of {count(m['outcome/asked'])}", ""
    if m.get("outcome/truncated"):
        yield "truncated", count(m["outcome/truncated"]), "yellow"
    for label, name in (("generate", "speed/generate"), ("train", "speed/train")):
        if name in m:
            yield label, f"{count(m[name])} tok/s", ""
    for label, name in (("KL", "kl"), ("entropy", "entropy"), ("grad norm", "grad_norm")):
        if name in m:
            yield label, figure(m[name]), ""
    if "clip_fraction" in m:
        yield "clipped", share(m["clip_fraction"]), ""
    if "mismatch/mean" in m:
        yield "mismatch", figure(m["mismatch/mean"]), ""
    for name in ("loss", "lr"):
        if name in m:
            yield name, f"{m[name]:.3g}", ""
    if m.get("groups/no_signal"):
        yield "no signal", count(m["groups/no_signal"]) + (" group" if m["groups/no_signal"] == 1 else " groups"), ""


def sparkline(values: Sequence[float], width: int, height: int = 1, ascii_only: bool = False) -> list[str]:
    """The values as `height` lines of at most `width` columns, lowest value to highest. NaN leaves a gap.

    Example: sparkline([0, 1, 2, 3], width=4) == ["▁▃▆█"]
    """
    columns = resampled(values, width)
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return [""] * height
    low = min(finite)
    span = max(finite) / 2 - low / 2  # of halves: the difference of two floats may overflow
    marks = _ASCII if ascii_only else _BLOCKS
    levels = [_level(value, low, span, 8 * height) for value in columns]
    return ["".join(marks[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(height))]


def _level(value: float, low: float, span: float, top: int) -> int:
    """Level from 1 to `top`; a flat curve is in the middle, and 0 is empty."""
    if not math.isfinite(value):
        return 0
    return 1 + round((top - 1) * ((value / 2 - low / 2) / span)) if span > 0 else max(1, top // 2)


def resampled(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: each the mean of finite neighbours; if there are few, each up to six times."""
    if len(values) <= width:
        wide = min(width, 6 * len(values))
        return [values[i * len(values) // wide] for i in range(wide)]
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [mean(values[start:end]) for start, end in pairwise(edges)]
