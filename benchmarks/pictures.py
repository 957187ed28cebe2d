"""Draw committed figures: docs/images/learning.svg of `benchmarks.tasks`, recipes/toy/staleness-*.svg of its JSON.

    .venv-trl/bin/python -m benchmarks.pictures [RESULTS]      after `make bench-setup`, for matplotlib

RESULTS: folder of benchmarks.tasks, benchmarks/results/<processor>/tasks. Without it the toy's pictures alone.
"""

import json
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl  # pyright: ignore[reportMissingImports]
from cycler import cycler  # pyright: ignore[reportMissingImports]

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
        "axes.prop_cycle": cycler(color=["#2563eb", "#e07b16", "#16925a", "#b8369b"]),
    }
)
from matplotlib import pyplot as plt  # noqa: E402  # pyright: ignore[reportMissingImports]
from matplotlib.axes import Axes  # noqa: E402  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[1]
TITLES = {"countdown": "Countdown", "calculator": "Calculator tool", "stories": "Stories"}
SIDES = {
    "grpo": "birl, GRPO",
    "thompson": "birl, data.order=thompson",
    "sdpo": "birl, SDPO",
    "rloo": "birl, RLOO",
    "trl": "TRL, GRPO",
}
COLORS = {"grpo": "#2563eb", "thompson": "#16925a", "sdpo": "#b8369b", "rloo": "#626b77", "trl": "#e07b16"}
SMOOTH = 3  # steps


def smoothed(values: Sequence[float]) -> list[float]:
    """Means of the last `SMOOTH` values, of fewer at the beginning."""
    return [fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


def averaged(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """Means of both coordinates over the seeds, for the points that all seeds have."""
    points = list(zip(*(curve[: min(map(len, curves))] for curve in curves), strict=True))
    return [fmean(x for x, _ in each) for each in points], [fmean(y for _, y in each) for each in points]


def by_seconds(run: dict[str, Any]) -> list[tuple[float, float]]:
    curve = run["curve"]
    return list(zip((step["seconds"] for step in curve), smoothed([step["reward"] for step in curve]), strict=True))


def by_tokens(run: dict[str, Any]) -> list[tuple[float, float]]:
    generated = list(accumulate((step["tokens"] for step in run["curve"]), initial=0))
    return [(generated[int(step)] / 1000, score) for step, score in run.get("held_out", {}).items()]


def model_of(run: dict[str, Any]) -> str:
    return run["machine"].get("cpu_model", "")


def runs_of(folder: Path, task: str, side: str) -> list[tuple[str, dict[str, Any]]]:
    """Seed and result of each run."""
    return [(file.stem[-1], json.loads(file.read_text())) for file in sorted(folder.glob(f"{task}-{side}-*.json"))]


def rows(folder: Path) -> None:
    """Print the table of docs/learning.md: a line for each run."""
    heads = "task | run, seed | steps | seconds a step | tokens | reward, first 3 and last 5 steps | held out"
    print(f"| {heads} |\n|{'---|' * (heads.count('|') + 1)}")
    for task, side in product(TITLES, SIDES):
        for seed, run in runs_of(folder, task, side):
            curve, held = run["curve"], list(run.get("held_out", {}).values())
            rewards = [step["reward"] for step in curve]
            start = curve[0]["seconds"] if len(curve) > 1 else 0.0  # the first step includes the start of the process
            cells = [
                TITLES[task],
                f"{SIDES[side]}, {seed}",
                str(len(curve)),
                f"{(curve[-1]['seconds'] - start) / max(len(curve) - 1, 1):.1f}",
                f"{sum(step['tokens'] for step in curve):,.0f}",
                f"{fmean(rewards[:3]):.3f} → {fmean(rewards[-5:]):.3f}",
                f"{held[0]:.3f} → {held[-1]:.3f}" if held else "",
            ]
            print(f"| {' | '.join(cells)} |")


def tokens_to(points: Sequence[tuple[float, float]], score: float) -> float:
    """Thousands of generated tokens until the held-out score is reached, interpolated linearly between validations."""
    for (before, low), (after, high) in pairwise(points):
        if high >= score:
            return before + (after - before) * max(0.0, score - low) / max(high - low, score - low)
    raise ValueError(f"{score} is not reached")


def compared(folder: Path) -> None:
    """Compare each preset with GRPO of the same seed: tokens to the highest held-out score that both reach, and the
    difference of the last scores."""
    for task, side in product(TITLES, ("thompson", "sdpo", "rloo")):
        others = dict(runs_of(folder, task, "grpo"))
        for seed, run in runs_of(folder, task, side):
            if seed in others:
                each = by_tokens(run), by_tokens(others[seed])
                score = min(max(y for _, y in points) for points in each)
                gain, needs = each[0][-1][1] - each[1][-1][1], "never both above the first score"
                if score > each[0][0][1]:
                    own, other = (tokens_to(points, score) for points in each)
                    needs = f"{own / other:.2f} of the tokens to {score:.3f}"
                print(f"{task}, {side}, seed {seed}: {needs}, {gain:+.4f}")


def learning(folder: Path) -> None:
    """Plot a column for each task: above the reward over seconds, below the held-out score over generated tokens. Means
    over the seeds."""
    figure, lines = plt.subplots(2, len(TITLES), figsize=(10.5, 5.6), layout="constrained")
    ways = (
        (by_seconds, "seconds since the start", "reward of a step"),
        (by_tokens, "generated tokens, thousands", "held out"),
    )
    for line, (points, x, y) in zip(lines, ways, strict=True):
        for axes, (task, title) in zip(line, TITLES.items(), strict=True):
            for side, name in SIDES.items():
                runs = [run for _, run in runs_of(folder, task, side)]
                if points is by_seconds:  # GRPO's are the scale: runs on another processor are left out
                    runs = [run for run in runs if model_of(run) == model_of(runs_of(folder, task, "grpo")[0][1])]
                curves = [found for run in runs if (found := points(run))]
                if curves:
                    few = max(map(len, curves)) < 10
                    axes.plot(
                        *averaged(curves), label=name, linewidth=1.8, marker="o" if few else "", color=COLORS[side]
                    )
            axes.set_ylim(0, 1.03)
            finish(axes, title, x, y)
    save(figure, ROOT / "docs" / "images" / "learning.svg")


def staleness() -> None:
    """Plot a panel for each task and method, with a line for each `rollout.max_staleness`."""
    for task, table in json.loads((ROOT / "recipes" / "toy" / "staleness.json").read_text()).items():
        fresh = next(r for r in table.values() if r["max_staleness"] == 0)
        ways = list(dict.fromkeys(r["way"] for r in table.values() if r is not fresh))
        figure, row = plt.subplots(1, len(ways), figsize=(3.6 * len(ways), 2.6), sharey=True, layout="constrained")
        for axes, way in zip(row, ways, strict=True):
            for record in (fresh, *(r for r in table.values() if r["way"] == way)):
                means = [fmean(values) for values in zip(*record["curves"], strict=True)]
                axes.plot(range(1, len(means) + 1), means, label=f"staleness {record['max_staleness']}", linewidth=1.5)
            finish(axes, way, "step", "reward of a step")
        save(figure, ROOT / "recipes" / "toy" / f"staleness-{task}.svg")


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


def save(figure: Any, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
    print(file)


if __name__ == "__main__":
    staleness()
    if len(sys.argv) > 1:
        learning(Path(sys.argv[1]))
        rows(Path(sys.argv[1]))
        compared(Path(sys.argv[1]))
