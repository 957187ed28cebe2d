"""`birl diff RUN RUN`: differences of two configurations, and of the results."""

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from birl.config.keys import written
from birl.errors import BirlError
from birl.flags import JSON, taken
from birl.track import runs
from birl.track.progress import headline, stored
from birl.track.summary import facts
from birl.track.units import count, duration, figure
from birl.visible import visible

LAST = 10  # steps that "last" is the mean of
FIGURES = (
    *("length/mean", "turns/mean", "groups/no_signal", "entropy", "kl", "clip_fraction", "grad_norm", "mismatch/mean"),
    *("staleness/mean", "outcome/truncated", "speed/generate", "speed/train", "time/step", "memory/peak"),
)
Row = tuple[str, str, str]


def run(words: Sequence[str]) -> int:
    """Print both tables. Raises `BirlError` for a folder that is not a run."""
    flags, rest = taken("diff", words, (JSON,))
    folders = [Path(word) for word in rest]
    if len(folders) != 2:
        raise BirlError("Name two run folders, as in `birl diff runs/a runs/b`; `birl runs` lists them")
    for folder in folders:
        _check(folder)
    rows = runs.differences([runs.config(folder) for folder in folders])  # in the order of the configuration
    keys, figures = [(row["key"], *row["values"]) for row in rows], compared(*folders)
    if JSON.name in flags:
        told = {"keys": {key: [a, b] for key, a, b in keys}, "figures": {name: [a, b] for name, a, b in figures}}
        print(json.dumps({"runs": [str(folder) for folder in folders], **told}, indent=1))
        return 0
    tty = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns if tty else 10_000
    names = visible(str(folders[0])), visible(str(folders[1]))
    head = "configuration" if keys else "configuration: equal"
    shown = [(key, _value(a), _value(b)) for key, a, b in keys]
    came_out = [(name, _number(name, a), _number(name, b)) for name, a, b in figures]
    bold = tty and "NO_COLOR" not in os.environ
    print("\n".join(side_by_side((head, *names), shown, width, bold)), end="\n\n")
    print("\n".join(side_by_side(("came out", *names), came_out, width, bold)))
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


def compared(first: Path, second: Path) -> list[tuple[str, float | None, float | None]]:
    """(name, first value, second value) of every figure that one of the runs has. `... last`: over ten steps."""
    one, other = outcome(first), outcome(second)
    return [(name, one.get(name), other.get(name)) for name in {**one, **other}]


def outcome(run: Path) -> dict[str, float]:
    """Final figures of a run, by name."""
    result, steps = facts(run), stored(run / "metrics.jsonl")
    name = headline(steps[-1]) if steps else "loss"
    best = max if name == "reward/mean" else min
    known = [record[name] for record in steps if math.isfinite(record.get(name, math.nan))]
    values: dict[str, float] = {"steps": result["steps"]}
    if known:
        values |= {f"{name} last": _mean(steps, name), f"{name} best": best(known)}
    if validation := result.get("validation"):
        values |= {f"{validation['name']} {which}": validation[which] for which in ("first", "last", "best")}
    values |= {f"{key} last": _mean(steps, key) for key in FIGURES if any(key in record for record in steps[-LAST:])}
    values |= {key: result[key] for key in ("generated", "trained", "learned", "seconds") if key in result}
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    known = [r[name] for r in steps[-LAST:] if math.isfinite(r.get(name, math.nan))]
    return sum(known) / len(known) if known else math.nan


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
        cells = [cell if len(cell) <= s else _cut(cell, s, number == 0) for cell, s in zip((a, b), sizes, strict=True)]
        line = f"{name:<{first}}  {cells[0]:<{sizes[0]}}  {cells[1]}".rstrip()
        lines.append(f"\033[1m{line}\033[0m" if bold and number == 0 else line)
    return lines


def _cut(text: str, size: int, front: bool) -> str:
    return ".." + text[len(text) - size + 2 :] if front else text[: size - 2] + ".."
