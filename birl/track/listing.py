"""Tables of runs in the terminal.

birl runs [FOLDER ...] [--json]     the runs of a folder, newest first
birl diff RUN RUN [--json]          differences of two configurations, and of the results
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from birl.config.keys import written
from birl.errors import BirlError
from birl.flags import JSON, taken
from birl.track import runs
from birl.track.progress import headline, stored
from birl.track.runs import About, about, find
from birl.track.summary import facts
from birl.track.units import count, duration, figure, mean
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
        print("\n".join(table([row(one) for one in result], *_screen())))
    return 0


def _screen() -> tuple[int, bool]:
    """Columns of the terminal (10,000 if the output is not one), and whether it shows colours and bold text."""
    if not sys.stdout.isatty():
        return 10_000, False
    return shutil.get_terminal_size((100, 24)).columns, "NO_COLOR" not in os.environ


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


LAST = 10  # steps
FINAL = f"last {LAST}"  # suffix of means over them
FIGURES = (
    *("length/mean", "turns/mean", "groups/no_signal", "entropy", "kl", "clip_fraction", "grad_norm", "mismatch/mean"),
    *("staleness/mean", "outcome/truncated", "speed/generate", "speed/train", "time/step", "memory/peak"),
)
Row = tuple[str, str, str]


def diff(words: Sequence[str]) -> int:
    """Print both tables. Raises `BirlError` for a folder that is not a run."""
    flags, rest = taken("diff", words, (JSON,))
    folders = [Path(word) for word in rest]
    if len(folders) != 2:
        raise BirlError("Name two run folders, as in `birl diff runs/a runs/b`; `birl runs` lists them")
    for folder in folders:
        _check(folder)
    rows = runs.differences([runs.config(folder) for folder in folders])  # in the order of the configuration
    keys, (one, other) = [(row["key"], *row["values"]) for row in rows], map(outcome, folders)
    figures = [(name, one.get(name), other.get(name)) for name in one | other]
    if JSON.name in flags:
        told = {"keys": {key: [a, b] for key, a, b in keys}, "figures": {name: [a, b] for name, a, b in figures}}
        print(json.dumps({"runs": [str(folder) for folder in folders], **told}, indent=1))
        return 0
    width, bold = _screen()
    names = visible(str(folders[0])), visible(str(folders[1]))
    head = "configuration" if keys else "configuration: equal"
    shown = [(key, _value(a), _value(b)) for key, a, b in keys]
    results = [(name, _number(name, a), _number(name, b)) for name, a, b in figures]
    print("\n".join(side_by_side((head, *names), shown, width, bold)), end="\n\n")
    print("\n".join(side_by_side(("results", *names), results, width, bold)))
    print(f"{FINAL}: mean of the last {LAST} steps")
    return 0


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise BirlError(f"{folder} is {'a file' if folder.exists() else 'not there'}; `birl runs` lists runs")
    if not runs.is_run(folder):
        inside = next(iter(runs.find(folder)), None)
        hint = f"{inside} is one" if inside else "`birl runs` lists runs"
        raise BirlError(f"{folder} is no run: it has neither config.yaml nor metrics.jsonl. {hint}")
    if why := runs.problem(folder):
        raise BirlError(f"{why.rpartition('):')[0]}); without it there is nothing to compare")


def outcome(run: Path) -> dict[str, float]:
    """Final figures of a run, by name."""
    result, steps = facts(run), stored(run / "metrics.jsonl")

    def last(name: str) -> float:
        return mean([record.get(name, math.nan) for record in steps[-LAST:]])

    name = headline(steps[-1]) if steps else "loss"
    best = max if name == "reward/mean" else min
    known = [record[name] for record in steps if math.isfinite(record.get(name, math.nan))]
    values: dict[str, float] = {"steps": result["steps"]}
    if known:
        values |= {f"{name} {FINAL}": last(name), f"{name} best": best(known)}
    if validation := result.get("validation"):
        values |= {f"{validation['name']} {which}": validation[which] for which in ("first", "last", "best")}
    values |= {f"{key} {FINAL}": last(key) for key in FIGURES if any(key in record for record in steps[-LAST:])}
    values |= {key: result[key] for key in ("generated", "trained", "learned", "seconds") if key in result}
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _value(value: Any) -> str:
    return "-" if value is None else visible(written(value)).replace("\n", " ")


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "seconds":
        return duration(value)
    whole = name in ("steps", "generated", "trained", "learned") or name.startswith("speed/")
    return count(value) if whole else figure(value)


def side_by_side(heads: Row, rows: Sequence[Row], width: int, bold: bool = False) -> list[str]:
    """Three aligned columns; texts longer than their share of `width` are cut, names of runs at their front."""
    rows = [(visible(name), a, b) for name, a, b in rows]
    first = max(len(cells[0]) for cells in [heads, *rows])
    room = max(8, (width - first - 4) // 2)
    sizes = [min(room, max(len(cells[i]) for cells in [heads, *rows])) for i in (1, 2)]
    lines = []
    for number, (name, a, b) in enumerate([heads, *rows]):
        cells = [a, b]
        for i, (cell, size) in enumerate(zip((a, b), sizes, strict=True)):
            if len(cell) > size:
                cells[i] = f"..{cell[len(cell) - size + 2 :]}" if number == 0 else f"{cell[: size - 2]}.."
        line = f"{name:<{first}}  {cells[0]:<{sizes[0]}}  {cells[1]}".rstrip()
        lines.append(f"\033[1m{line}\033[0m" if bold and number == 0 else line)
    return lines
