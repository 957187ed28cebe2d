"""Compares two evaluations on the same questions: is one model better than the other?"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from birl.algorithms.uncertainty import bootstrap, sign_flips
from birl.errors import BirlError
from birl.regular import read_json

Scores = Mapping[tuple[str, str], float]  # by source and id of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean scores of the prompts that both evaluations scored. `low`, `high`: 95 % interval of after - before, by
    bootstrap over prompts; `p`: two-sided, by paired sign flips."""

    source: str
    before: float
    after: float
    low: float
    high: float
    p: float
    prompts: int

    def __str__(self) -> str:
        p = f"p = {self.p:.2g}" if self.p >= 0.001 else "p < 0.001"
        change = self.after - self.before
        word = "better" if change > 0 else "worse" if change < 0 else "equal"
        return (
            f"{self.source}: {self.before:.3f} -> {self.after:.3f}, {word} by {abs(change):.3f} (95 % of the change: "
            f"{self.low:+.3f} to {self.high:+.3f}), {p}, {self.prompts} prompts"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The output of `birl eval output=FILE`."""

    path: str
    data: str
    scores: Scores

    @classmethod
    def read(cls, path: str) -> "Baseline":
        """Read a baseline. Raises `BirlError` if the file is none."""
        try:
            record = read_json(Path(path).expanduser())
            return cls(path=path, data=str(record["data"]), scores=scores(record["answers"]))
        except OSError as error:
            raise BirlError(f"baseline={path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BirlError(f"baseline={path}: was not written by `birl eval output=FILE`.") from error

    def against(self, data: str, answers: Sequence[Mapping[str, Any]]) -> list[Difference]:
        """Differences of each source, if there are several, and of all. Raises `BirlError` if the questions differ, or
        no prompt is scored in both."""
        if data != self.data:
            raise BirlError(
                f"baseline={self.path} answers other questions: only the same rows of data.validation can be compared, "
                "in the same order, with the same answers."
            )
        after = scores(answers)
        both = [key for key in after if key in self.scores]
        sources = dict.fromkeys(source for source, _ in both)
        names = [*sources, "all"] if len(sources) > 1 else ["all"]
        result = [self._difference(n, [k for k in both if n in (k[0], "all")], after) for n in names if both]
        if not result:
            raise BirlError(f"baseline={self.path}: no prompt has a score in both evaluations.")
        return result

    def _difference(self, source: str, keys: Sequence[tuple[str, str]], after: Scores) -> Difference:
        changes = [after[key] - self.scores[key] for key in keys]
        low, high = bootstrap(changes)
        return Difference(
            source=source,
            before=fmean(self.scores[key] for key in keys),
            after=fmean(after[key] for key in keys),
            low=low,
            high=high,
            p=sign_flips(changes),
            prompts=len(keys),
        )


def scores(answers: Sequence[Mapping[str, Any]]) -> Scores:
    """Mean score of each prompt over its scored answers."""
    each: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for answer in answers:
        if answer["score"] is not None:
            each[str(answer["source"]), str(answer["id"])].append(float(answer["score"]))
    return {key: fmean(values) for key, values in each.items()}
