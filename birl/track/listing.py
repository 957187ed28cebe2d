"""`birl runs [FOLDER ...] [--json]`: table of the runs of a folder, newest first."""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from birl.errors import BirlError
from birl.flags import JSON, taken
from birl.track.runs import About, about, find
from birl.track.units import count, duration, figure
from birl.visible import visible

HEADS = ("run", "state", "step", "reward", "best val", "time", "changed", "model", "algorithm")
RIGHT = ("step", "reward", "best val", "time")
COLORS = {"running": "36", "done": "32", "stopped": "33", "failed": "31"}
SHORTEST = 16  # least columns of the name before other columns are dropped


def run(words: Sequence[str]) -> int:
    """Print the table. Raises `BirlError` if a folder does not exist."""
    flags, rest = taken("runs", words, (JSON,))
    named = [Path(word) for word in rest]
    for folder in named:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "there is no such folder"
            raise BirlError(f"birl runs {folder}: {what}; name one that holds runs")
    folders = named or [Path("runs")]
    result = sorted((about(path) for folder in folders for path in find(folder)), key=lambda one: -one.updated)
    if JSON.name in flags:
        print(json.dumps([one.as_json() for one in result], indent=1))
    elif not result:
        where = ", ".join(map(str, folders))
        print(f"There is no run in {where}. `birl rl data.train=my.jsonl` makes one in runs/.")
    else:
        tty = sys.stdout.isatty()
        width = shutil.get_terminal_size((100, 24)).columns if tty else 10_000
        for line in table([row(one) for one in result], width, colors=tty and "NO_COLOR" not in os.environ):
            print(line)
    return 0


def row(one: About) -> list[str]:
    """The cells of a run, by `HEADS`."""
    step = count(one.step) + (f"/{count(one.total)}" if one.total else "")
    reward = "-" if one.reward is None else figure(one.reward)
    if one.reward is not None and one.headline != "reward/mean":
        reward += " loss"
    return [
        visible(str(one.path)).replace("\n", " "),
        one.state,
        step,
        reward,
        "-" if one.best is None else figure(one.best),
        "-" if one.seconds is None else duration(one.seconds),
        when(one.updated),
        visible(one.model).replace("\n", " "),
        one.algorithm,
    ]


def when(seconds: float) -> str:
    """Time of day if it is today, else the date."""
    if not seconds:
        return "-"
    then, now = datetime.fromtimestamp(seconds), datetime.fromtimestamp(time.time())
    return then.strftime("%H:%M" if then.date() == now.date() else "%Y-%m-%d")


def table(rows: list[list[str]], width: int, colors: bool = False) -> list[str]:
    """Aligned lines of at most `width` columns: names are cut in the middle first, then last columns dropped."""
    heads, rows = list(HEADS), [list(cells) for cells in rows]
    while True:
        widths = [max(len(cells[i]) for cells in [heads, *rows]) for i in range(len(heads))]
        room = width - sum(widths[1:]) - 2 * (len(widths) - 1)
        if room >= min(widths[0], SHORTEST) or len(heads) == 2:
            break
        heads.pop()
        rows = [cells[:-1] for cells in rows]
    widths[0] = max(min(widths[0], room), 4)
    lines = []
    for cells in [heads, *rows]:
        cells = [shortened(cells[0], widths[0]), *cells[1:]]
        padded = [f"{c:>{w}}" if h in RIGHT else f"{c:<{w}}" for h, c, w in zip(heads, cells, widths, strict=True)]
        if colors:
            color = "1" if cells[1] == heads[1] else COLORS.get(cells[1], "0")
            padded[1] = f"\033[{color}m{padded[1]}\033[0m"
        lines.append("  ".join(padded).rstrip())
    return lines


def shortened(text: str, width: int) -> str:
    """Cut in the middle, as names of runs differ at their ends."""
    if len(text) <= width:
        return text
    kept = max(0, width - 2)
    return text[: kept // 3] + ".." + text[len(text) - (kept - kept // 3) :] if kept else text[:width]
