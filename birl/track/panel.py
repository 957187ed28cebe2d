"""The live panel as a pure function of a run's progress and the room there is."""

import math
from collections.abc import Iterator

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from birl.track import chart
from birl.track.progress import Progress, failures
from birl.track.units import count, duration, figure, share
from birl.visible import visible

PHASES = {  # time/<name>: colour, mark without colours, mark without UTF-8
    "generate": ("cyan", "█", "G"),
    "reward": ("yellow", "▓", "R"),
    "train": ("green", "▒", "T"),
    "validate": ("blue", "▚", "V"),
    "checkpoint": ("magenta", "▞", "C"),
    "other": ("bright_black", "░", "o"),
}
Cell = tuple[str, str, str]  # label, figure, style of both


class ProgressPanel:
    """Draws `progress` anew at each refresh, as large as the terminal is then.

    Example: Live(ProgressPanel(progress))
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.spinner = Spinner("dots", style="cyan")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = options.ascii_only
        inner = max(8, options.max_width - 4)
        rows = _rows(self.progress, inner, console.height - 4, plain, console.no_color)
        body = Group(*rows, self._phase(plain, console))
        title = Text(f" birl · {_short(self.progress.title, inner - 12)} ".replace("·", "-" if plain else "·"), "bold")
        shape = box.ASCII if plain else box.ROUNDED
        yield Panel(body, title=title, title_align="left", box=shape, border_style="bright_black", padding=(0, 1))
        # Without this, rich leaves the cursor at the end of the last line, where a log line would be glued on.
        yield Segment("")

    def _phase(self, plain: bool, console: Console) -> RenderableType:
        text = Text(visible(self.progress.phase) or " ", style="cyan", no_wrap=True, overflow="ellipsis")
        if plain or not self.progress.phase:
            return text
        self.spinner.update(text=text)
        return self.spinner.render(console.get_time())


def _short(text: str, width: int) -> str:
    text = visible(text).replace("\n", " ")
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _rows(progress: Progress, width: int, height: int, plain: bool, no_color: bool) -> Iterator[RenderableType]:
    tall = height >= 16
    yield _bar(progress, width, plain)
    if tall:
        yield Text("")
    yield from _curves(progress, width, plain, tall)
    if tall:
        yield Text("")
    # What does not fit goes, from the end: a cropped panel would lose the phase, which is its last line.
    failed = failures(progress.metrics)
    most = height - (11 if tall else 5) - bool(failed) - bool(progress.warning)
    yield _cells(list(_figures(progress.metrics)), width, most=max(2, most))
    if failed:
        causes = ", ".join(f"{count(n)} {cause}" for cause, n in failed.items())
        asked = f" of {count(progress.metrics['outcome/asked'])}" if "outcome/asked" in progress.metrics else ""
        text = f"FAILED     {count(sum(failed.values()))}{asked} episodes: {causes}"
        yield Text(text, "bold red", no_wrap=True, overflow="crop")
    if progress.warning:
        yield Text(progress.warning, "bold yellow", no_wrap=True, overflow="ellipsis")
    yield from _time_split(progress.metrics, width, plain, no_color)


def _bar(progress: Progress, width: int, plain: bool) -> RenderableType:
    total, step = progress.total, progress.step
    words = [f"step {step}/{total}" if total else f"step {step}"]
    if progress.eta is not None:
        words.append(f"eta {duration(progress.eta)}")
    words.append(duration(progress.elapsed))
    label = "  ".join(words)
    room = width - len(label) - 2
    if not total or room < 8:
        return Text(label, style="bold", no_wrap=True, overflow="ellipsis")
    done = min(room, round(room * step / total))
    full, empty = ("#", "-") if plain else ("━", "━")
    line = Text(full * done, style="green")
    # The rest of the bar must differ without colours too.
    line.append((empty if plain else "╌") * (room - done), style="bright_black")
    return line.append("  " + label, style="bold")


def _curves(progress: Progress, width: int, plain: bool, tall: bool) -> Iterator[RenderableType]:
    name = "reward" if progress.headline == "reward/mean" else "loss"
    curves = [(name, progress.curve, "green"), ("validation", [value for _, value in progress.validations], "blue")]
    curves = [curve for curve in curves if curve[1]]
    if not curves:
        yield Text("waiting for the first step", style="bright_black")
    elif not tall or width < 56 or plain:
        for name, values, style in curves:
            yield _thin_curve(name, values, style, width, plain)
    elif width < 100:
        yield _big_curve(*curves[0], width)
        for name, values, style in curves[1:]:
            yield Text("")
            yield _thin_curve(name, values, style, width, plain)
    else:
        grid = Table.grid(padding=(0, 4, 0, 0))
        room = (width - 4 * len(curves)) // len(curves)
        grid.add_row(*(_big_curve(name, values, style, room) for name, values, style in curves))
        yield grid


def _thin_curve(name: str, values: list[float], style: str, width: int, plain: bool) -> Text:
    line = Text(f"{name:<10} ", no_wrap=True, overflow="crop").append(f"{values[-1]:.3f}", style=f"bold {style}")
    first = f"  from {values[0]:.3f}" if len(values) > 1 else ""
    room = width - len(line.plain) - len(first) - 2
    if room >= 4:
        line.append("  " + chart.sparkline(values, min(room, 60), 1, plain)[0], style=style)
    return line.append(first if room >= 0 else "", style="bright_black")


def _big_curve(name: str, values: list[float], style: str, width: int) -> RenderableType:
    """Three lines: the figure on the left, its curve on the right."""
    last = values[-1]
    finite = math.isfinite(last)
    digits = chart.big(f"{last:.3f}" if abs(last) < 100 else f"{last:.0f}") if finite else ["", str(last), ""]
    known = [value for value in values if math.isfinite(value)]
    notes = [f"{max(known):.3f} max", f"{values[0]:.3f} first", f"{min(known):.3f} min"] if known else [""] * 3
    room = width - 12 - len(digits[0]) - 2 - 2 - max(map(len, notes))
    rows = chart.sparkline(values, max(4, room), 3)
    block = Text(no_wrap=True, overflow="crop")
    for row in range(3):
        block.append(f"{name if row == 1 else '':<12}").append(f"{digits[row]}  ", style=f"bold {style}")
        block.append(rows[row], style=style).append("  " + notes[row], style="bright_black")
        block.append("\n" if row < 2 else "")
    return block


def _figures(m: dict[str, float]) -> Iterator[Cell]:
    """Everything worth a glance; unknown names are in the files only."""
    if "length/mean" in m:
        yield "length", f"{m['length/mean']:.1f}" + (f" max {m['length/max']:.0f}" if "length/max" in m else ""), ""
    yield from _episodes(m)
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


def _episodes(m: dict[str, float]) -> Iterator[Cell]:
    """An answer that was cut has a reward; episodes that failed have none, and get a line of their own."""
    if "outcome/asked" in m:
        yield "finished", f"{count(m.get('outcome/ok', 0))} of {count(m['outcome/asked'])}", ""
    if m.get("outcome/truncated"):
        yield "truncated", count(m["outcome/truncated"]), "yellow"


def _cells(cells: list[Cell], width: int, most: int) -> RenderableType:
    if not cells:
        return Text("")
    columns = max(1, min(len(cells), width // 24))
    room = width // columns
    grid = Table.grid()
    for _ in range(columns):
        grid.add_column(width=room, no_wrap=True)
    texts = [
        Text(f"{label:<10} ", style or "bright_black", overflow="crop").append(value, style or "default")
        for label, value, style in cells
    ]
    for start in range(0, min(len(texts), most * columns), columns):
        grid.add_row(*texts[start : start + columns])
    return grid


def _time_split(metrics: dict[str, float], width: int, plain: bool, no_color: bool) -> Iterator[RenderableType]:
    parts = {name: metrics.get(f"time/{name}", 0.0) for name in PHASES}
    parts = {name: seconds for name, seconds in parts.items() if math.isfinite(seconds) and seconds > 0}
    if not parts:
        return
    total = metrics.get("time/step", sum(parts.values()))
    columns = chart.split(list(parts.values()), max(8, width - 21))
    bar = Text(f"{'time':<10} ", "bright_black", no_wrap=True, overflow="crop")
    legend: list[Text] = []
    for (name, seconds), size in zip(parts.items(), columns, strict=True):
        color, shade, letter = PHASES[name]
        mark = letter if plain else shade if no_color else "█"
        bar.append(mark * size, style=color)
        percent = f"{name} {100 * seconds / sum(parts.values()):.0f} %"
        legend.append(Text(mark, style=color).append(f" {percent}", style="bright_black"))
    yield bar.append(f"  {total:.1f} s", style="default")
    yield Padding(Columns(legend, padding=(0, 3, 0, 0)), (0, 0, 0, 11 if width >= 60 else 0))
