"""Current state of a run, for the console and the summary."""

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.track.log import numbered
from birl.track.units import counted


@dataclass(kw_only=True)
class Progress:
    """The metrics of a run up to its last step.

    Example: progress = Progress(title="smollm2", total=30); progress.add(1, {"reward/mean": 0.2, "time/step": 8.0})
    """

    title: str
    total: int | None = None
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)
    idle: int = 0  # steps in which nothing was trained
    validations: list[tuple[int, float]] = field(default_factory=list)
    phase: str = ""
    started: float = field(default_factory=time.monotonic)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step, self.metrics = step, dict(metrics)
        self.curve.append(metrics.get(self.headline, math.nan))
        self.idle += nothing_trained(metrics)
        self._recent.append(metrics.get("time/step", math.nan))

    def validate(self, step: int, metrics: Mapping[str, float]) -> None:
        value = validation_score(metrics)
        if value is not None:
            self.validations.append((step, value))

    @property
    def headline(self) -> str:
        return headline(self.metrics)

    @property
    def warning(self) -> str:
        """A warning if the last step trained nothing; else empty."""
        return idle_words(self.idle, len(self.curve)) if nothing_trained(self.metrics) else ""

    @property
    def eta(self) -> float | None:
        """Seconds left, at the pace of the last twenty steps."""
        known = [seconds for seconds in self._recent if math.isfinite(seconds)]
        if not known or self.total is None:
            return None
        return max(0, self.total - self.step) * sum(known) / len(known)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started


def headline(metrics: Iterable[str]) -> str:
    """Name of the main metric of a run: the reward if there is one, else the loss."""
    return "reward/mean" if "reward/mean" in metrics else "loss"


def nothing_trained(metrics: Mapping[str, Any]) -> bool:
    """Whether a step of `birl rl` left the weights unchanged, as all rewards in each group were equal, or none had a
    reward."""
    idle = metrics.get("updates/skipped", 0) > 0 or metrics.get("tokens/trained") == 0
    return metrics.get("updates/done") == 0 and idle


def idle_words(idle: int, steps: int) -> str:
    return f"nothing was trained: all rewards of a group are equal or missing, in {idle} of {counted(steps, 'step')}"


FAILURES = ("env_error", "engine_error", "timeout", "aborted")


def failures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Episodes of a step without a reward, by cause; causes that did not occur are absent."""
    return {name.replace("_", " "): n for name in FAILURES if (n := metrics.get(f"outcome/{name}", 0)) > 0}


WORDS = ("time", "weights", "data")  # fields of a record that are text
LONGEST = 1 << 63  # steps
LARGEST = int(sys.float_info.max)
VALIDATIONS = ("validation/all/score", "validation/all/pass@1", "validation/accuracy", "validation/nll")


def validation_name(metrics: Iterable[str]) -> str:
    """Name of the main figure of a validation: the mean score over all sources, or the nearest to it; empty if there is
    none. Its value may be null, if nothing was scored."""
    names = [name for name in metrics if name.startswith("validation/")]
    return next((wanted for wanted in (*VALIDATIONS, *names) if wanted in names), "")


def validation_score(metrics: Mapping[str, Any]) -> float | None:
    name = validation_name(metrics)
    return float(metrics[name]) if name else None


def source(name: str) -> str:
    """Source of a validation figure; it may contain a slash. Example: source("validation/openai/gsm8k/pass@1") ==
    "openai/gsm8k" """
    return name.removeprefix("validation/").rpartition("/")[0]


def rises(name: str) -> bool:
    """Whether higher is better for this validation figure; otherwise it is a loss."""
    return not name.endswith(("nll", "loss"))


def right_from(scores: Iterable[float], threshold: float) -> float:
    """The score from which on an answer is right: `threshold` unless it is 0; then 1 if all scores are 0 or 1 (failed
    episodes have none), else NaN."""
    return threshold or (1.0 if all(value in (0, 1) for value in scores if math.isfinite(value)) else math.nan)


def is_share(record: Mapping[str, Any]) -> bool:
    """Whether the main figure of a validation is the share of right answers; a mean score is, if it equals pass@1."""
    name = validation_name(record)
    value = record.get("validation/all/pass@1") if name.endswith("/score") else record.get(name)
    return name.endswith(("/score", "/pass@1", "accuracy")) and value is not None and value == record[name]


def stored(path: Path) -> list[dict[str, Any]]:
    """The records of a run's file, empty if there is none; null (NaN and infinity) is read as NaN, an integer beyond
    floats as infinity. Values that are neither numbers nor of `WORDS` or samples are left out."""
    records = []
    for number, record in numbered(path) if path.exists() else []:
        step: Any = record.get("step")
        if type(step) not in (int, float) or not -LONGEST < step < LONGEST:
            raise BirlError(f"{path}, line {number}: it has no step. Delete the line to read the rest.")
        records.append({key: read for key, value in record.items() if (read := _read(key, value)) is not None})
    return records


def _read(key: str, value: Any) -> Any:
    if key == "samples":
        samples = [sample for sample in value if isinstance(sample, dict)] if isinstance(value, list) else []
        return [sample | {"score": _read("score", sample.get("score"))} for sample in samples]
    if value is None:
        return math.nan
    if type(value) is int and abs(value) > LARGEST:
        return math.inf if value > 0 else -math.inf
    return value if type(value) in (int, float) or (key in WORDS and isinstance(value, str)) else None


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a stored record, without step, time and samples."""
    return {key: value for key, value in record.items() if key != "step" and type(value) in (int, float)}
