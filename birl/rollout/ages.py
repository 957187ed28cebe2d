"""How many training steps old a version of the weights is. Versions count optimizer steps, of which a training step may
have several, or none."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from birl.types import Sample


@dataclass(slots=True)
class Ages:
    """`starts`: the version that each of the last training steps began with, oldest first."""

    starts: list[int] = field(default_factory=list)

    def begin(self, version: int, remembered: int) -> None:
        """A training step begins; `remembered` + 1 of them are kept."""
        self.starts = [*self.starts[-remembered:], version] if remembered else [version]

    def of(self, version: int) -> int:
        """0: the step that began last began with these weights."""
        return sum(start > version for start in self.starts)

    def histogram(self, samples: Iterable[Sample]) -> Counter[int]:
        """Trained tokens by age."""
        counts = Counter(v for s in samples for v in s.versions if v >= 0)
        found: Counter[int] = Counter()
        for version, n in counts.items():
            found[self.of(version)] += n
        return found


def mean(histogram: Counter[int]) -> float:
    """NaN where nothing was trained."""
    total = histogram.total()
    return sum(age * n for age, n in histogram.items()) / total if total else float("nan")


def mixed(samples: Sequence[Sample]) -> float:
    """Share of the samples whose tokens come from more than one version; NaN where there are none."""
    if not samples:
        return float("nan")
    return sum(len({v for v in s.versions if v >= 0}) > 1 for s in samples) / len(samples)
