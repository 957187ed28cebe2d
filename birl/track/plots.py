"""Curves of a run as a matplotlib figure, for notebooks and scripts. matplotlib is optional."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from birl.errors import BirlError, did_you_mean
from birl.track.progress import stored

SHOWN = ("reward/mean", "length/mean", "kl", "entropy", "loss", "grad_norm", "mismatch/mean", "staleness/mean")
PANELS = 6


def plot(run: Path, names: Sequence[str] = ()) -> Any:
    """A matplotlib figure of a run's metrics by step, with its validations in the panel of the reward or loss. `names`:
    of metrics.jsonl or validation.jsonl; by default the six that say most. Raises `BirlError` for an unknown name,
    before the first step, and where matplotlib is missing."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise BirlError('plot() needs a package: pip install "birl[notebook]"') from error
    metrics, validations = stored(run / "metrics.jsonl"), stored(run / "validation.jsonl")
    if not metrics and not validations:
        raise BirlError(f"{run} has no finished step (yet): call train() first.")
    result = {key for record in (*metrics, *validations) for key in record}
    if unknown := [name for name in names if name not in result]:
        raise BirlError(f"the run has no metric {unknown[0]!r}.{did_you_mean(unknown[0], sorted(result))}")
    chosen = list(names) or [name for name in SHOWN if name in result][:PANELS] or ["loss"]
    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 2.8 * rows), squeeze=False)
    for name, ax in zip(chosen, axes.flat, strict=False):
        _curve(ax, metrics, validations, name)
    for ax in axes.flat[len(chosen) :]:
        ax.axis("off")
    figure.tight_layout()
    pyplot.close(figure)  # a notebook shows what the cell returns; it would show it twice
    return figure


def _curve(ax: Any, metrics: list[dict[str, Any]], validations: list[dict[str, Any]], name: str) -> None:
    ax.set_title(name, fontsize=10, loc="left")
    ax.set_xlabel("step", fontsize=9)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    for records, marker in ((metrics, ""), (validations, "o")):
        some = [r for r in records if isinstance(r.get(name), int | float)]
        if some:
            ax.plot([r["step"] for r in some], [r[name] for r in some], marker=marker, markersize=4)
    also = {"reward/mean": "validation/all/score", "loss": "validation/loss"}.get(name, "")
    some = [r for r in validations if isinstance(r.get(also), int | float)]
    if some:
        ax.plot([r["step"] for r in some], [r[also] for r in some], "o--", markersize=4, label="validation")
        ax.legend(fontsize=8, frameon=False)
