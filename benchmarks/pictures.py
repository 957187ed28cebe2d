"""Draw committed figures: docs/images/learning.svg of `benchmarks.tasks`, recipes/toy/staleness-*.svg of its JSON.

    .venv-trl/bin/python -m benchmarks.pictures [RESULTS]      after `make bench-setup`, for matplotlib

RESULTS: folder of benchmarks.tasks, benchmarks/results/<processor>/tasks. Without it the toy's pictures alone.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl  # pyright: ignore[reportMissingImports]

mpl.use("svg")
mpl.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "birl",  # the same file from the same figures
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#eceef2",
        "axes.prop_cycle": mpl.cycler(color=["#2563eb", "#e07b16", "#16925a", "#b8369b"]),
    }
)
from matplotlib import pyplot as plt  # noqa: E402  # pyright: ignore[reportMissingImports]
from matplotlib.axes import Axes  # noqa: E402  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[1]
TITLES = {"countdown": "Countdown", "calculator": "Calculator tool", "stories": "Stories"}
SIDES = {"grpo": "birl, GRPO", "thompson": "birl, data.order=thompson", "sdpo": "birl, SDPO", "trl": "TRL, GRPO"}
SMOOTH = 3  # steps


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean of the last `SMOOTH` values, of fewer at the beginning."""
    return [fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


def mean_curve(runs: Iterable[dict[str, Any]], x: str) -> tuple[list[float], list[float]]:
    """Steps that all seeds have: mean of `x` ("seconds" or "tokens", summed up), and mean of the smoothed reward."""
    curves = [run["curve"] for run in runs]
    steps = min(map(len, curves))
    places, rewards = [], []
    for curve in curves:
        values = [step[x] for step in curve[:steps]]
        places.append(values if x == "seconds" else [sum(values[: i + 1]) for i in range(steps)])
        rewards.append(smoothed([step["reward"] for step in curve[:steps]]))
    return [fmean(v) for v in zip(*places, strict=True)], [fmean(v) for v in zip(*rewards, strict=True)]


def learning(folder: Path) -> None:
    """A column for each task; reward over seconds above, over generated tokens below. Means over the seeds."""
    files = {
        f.stem.rsplit("-", 1)[0]: sorted(folder.glob(f"{f.stem.rsplit('-', 1)[0]}-*.json")) for f in folder.iterdir()
    }
    figure, rows = plt.subplots(2, len(TITLES), figsize=(10.5, 5.6), sharey="col", layout="constrained")
    for row, (x, label) in zip(
        rows, (("seconds", "seconds since the start"), ("tokens", "generated tokens")), strict=True
    ):
        for axes, (task, title) in zip(row, TITLES.items(), strict=True):
            for side, name in SIDES.items():
                runs = [json.loads(f.read_text()) for f in files.get(f"{task}-{side}", [])]
                if runs:
                    axes.plot(*mean_curve(runs, x), label=name, linewidth=1.8)
            finish(axes, title if x == "seconds" else "", label)
    save(figure, ROOT / "docs" / "images" / "learning.svg")


def staleness() -> None:
    """Of each task a panel for each way, with a line for each `rollout.max_staleness`."""
    for task, table in json.loads((ROOT / "recipes" / "toy" / "staleness.json").read_text()).items():
        fresh = next(r for r in table.values() if r["max_staleness"] == 0)
        ways = list(dict.fromkeys(r["way"] for r in table.values() if r is not fresh))
        figure, row = plt.subplots(1, len(ways), figsize=(3.6 * len(ways), 2.6), sharey=True, layout="constrained")
        for axes, way in zip(row, ways, strict=True):
            for record in (fresh, *(r for r in table.values() if r["way"] == way)):
                means = [fmean(values) for values in zip(*record["curves"], strict=True)]
                axes.plot(range(1, len(means) + 1), means, label=f"staleness {record['max_staleness']}", linewidth=1.5)
            finish(axes, way, "step")
        save(figure, ROOT / "recipes" / "toy" / f"staleness-{task}.svg")


def finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", loc="left")
    axes.set_xlabel(label)
    axes.set_ylabel("reward, mean of a step")
    axes.legend(frameon=False, fontsize=8)


def save(figure: Any, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
    print(file)


if __name__ == "__main__":
    staleness()
    if len(sys.argv) > 1:
        learning(Path(sys.argv[1]))
