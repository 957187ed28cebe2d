"""Age (staleness) of weights in training steps. Versions count optimizer steps, of which a training step may have
several, or none."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from birl.errors import BirlError
from birl.track.units import counted
from birl.types import Sample

OLD = 8  # ages of this many steps or more are one class in the metrics


@dataclass(slots=True)
class Ages:
    """Ages of versions. `starts`: first version of each of the last training steps, oldest first."""

    starts: list[int] = field(default_factory=list)

    def begin(self, version: int, remembered: int) -> None:
        """Start a training step; `remembered` + 1 of them are kept."""
        self.starts = [*self.starts[-remembered:], version] if remembered else [version]

    def of(self, version: int) -> int:
        """Age of a version [training steps]; 0: the last step started with these weights."""
        return sum(start > version for start in self.starts)

    def check(self, versions: Iterable[int], most: int) -> None:
        """Check the bound that `rollout/pipeline.py` proves, for the versions at the start of groups. Raises
        `BirlError`."""
        if (oldest := max(map(self.of, versions), default=0)) > most:
            raise BirlError(
                f"A group began {counted(oldest, 'step')} ago, but rollout.max_staleness={most}. "
                "This is a bug in birl: please report it, with the ledger.jsonl of this run."
            )

    def histogram(self, samples: Iterable[Sample]) -> Counter[int]:
        """Number of trained tokens by age."""
        result: Counter[int] = Counter()
        for sample in samples:
            for version, n in sample.by_version().items():
                result[self.of(version)] += n
        return result

    def figures(self, samples: Sequence[Sample], bound: int) -> dict[str, float]:
        """Metrics of the trained tokens' ages [training steps]; if `bound` > 0, also the fraction of each age."""
        ages = self.histogram(samples)
        figures = {"staleness/mean": mean(ages), "staleness/max": float(max(ages, default=0))}
        if bound > 0:
            figures["staleness/mixed"] = mixed(samples)
            for age in range(min(bound, OLD) + 1):
                count = ages[age] if age < OLD else sum(n for a, n in ages.items() if a >= OLD)
                figures[f"staleness/{age}"] = count / max(ages.total(), 1)
        return figures


def mean(histogram: Counter[int]) -> float:
    """Mean age; NaN if nothing was trained."""
    total = histogram.total()
    return sum(age * n for age, n in histogram.items()) / total if total else float("nan")


def mixed(samples: Sequence[Sample]) -> float:
    """Fraction of the samples with tokens from more than one version; NaN if there are none."""
    if not samples:
        return float("nan")
    return sum(len(s.by_version()) > 1 for s in samples) / len(samples)
