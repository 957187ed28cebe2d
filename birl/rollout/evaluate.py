"""Evaluation on held-out tasks: score and unbiased pass@k by source; failures are counted separately. Used by
`birl eval` and by validation in `birl rl`. And the comparison of two evaluations on the same questions: is one model
better than the other?"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import xxhash

from birl import foreign
from birl.algorithms.pass_at_k import pass_at_k
from birl.config import schema
from birl.errors import BirlError
from birl.regular import read_json
from birl.rollout.group import Rollout
from birl.track.progress import right_from
from birl.types import Group, SamplingParams, Task

MOST = 100_000  # largest pass@k of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """How to evaluate. `samples`: answers for each prompt; `k`: of pass@k; `threshold`: least score that is right."""

    tasks: Sequence[Task]
    params: SamplingParams
    samples: int
    k: Sequence[int]
    threshold: float = 0.0

    @property
    def greedy_repeats(self) -> str:
        """A warning if prompts are answered several times without sampling, else empty."""
        most = max([self.samples, *(own_k(task) for task in self.tasks)])
        if most == 1 or self.params.temperature > 0:
            return ""
        return (
            f"validation.temperature=0: rows request {most} answers each, and greedy answers to one prompt are equal, "
            f"so pass@{most} is pass@1. Set validation.temperature=1."
        )


def plan(
    tasks: Sequence[Task], validation: schema.Validation, max_tokens: int, stop: Sequence[str] = ()
) -> EvaluationPlan:
    return EvaluationPlan(
        tasks=tasks,
        params=SamplingParams(
            max_tokens=validation.max_tokens or max_tokens,
            temperature=validation.temperature,
            top_p=validation.top_p,
            top_k=validation.top_k,
            stop=tuple(stop),
        ),
        samples=validation.samples,
        k=validation.k,
        threshold=validation.threshold,
    )


async def evaluate(plan: EvaluationPlan, rollout: Rollout) -> tuple[dict[str, float], list[Group]]:
    """Evaluate all tasks concurrently; the engine queues them. A row may set its own number of answers (EasyRL's
    extra_info["pass@k"])."""
    work = [
        asyncio.create_task(rollout.group(i, task, max(plan.samples, own_k(task)), plan.params))
        for i, task in enumerate(plan.tasks)
    ]
    try:
        groups = await asyncio.gather(*work)
    finally:
        await foreign.stop(*work)  # the others, where one raises
    return measure(groups, plan.k, plan.threshold), list(groups)


def data_digest(tasks: Sequence[Task]) -> str:
    """Digest of questions and answers, in order."""
    result = xxhash.xxh3_128()
    for task in tasks:
        result.update(f"{task.id}\n{task.prompt!r}\n{task.answer!r}\n".encode())
    return result.hexdigest()


def own_k(task: Task) -> int:
    """The row's extra_info["pass@k"], 1 by default. Raises `BirlError`."""
    extra = task.columns.get("extra_info")
    if isinstance(extra, str) and "pass@k" in extra:
        raise BirlError(
            f"{task.id}: extra_info is an object written as text, so its pass@k would be ignored. Write the object "
            "itself, in JSONL or Parquet."
        )
    value = extra.get("pass@k") if isinstance(extra, dict) else None
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in range(1, MOST + 1):
        raise BirlError(
            f"{task.place}: extra_info.pass@k is {str(value)[:80]}; it must be the number of validation answers, a "
            f"whole number from 1 to {MOST}."
        )
    return int(value)


def right_among(groups: Sequence[Group], threshold: float) -> float:
    """`right_from` of the groups' scores."""
    return right_from((score for group in groups for score in _scores(group)), threshold)


def measure(groups: Sequence[Group], ks: Sequence[int], threshold: float = 0.0) -> dict[str, float]:
    """validation/<source>/{score, pass@k, length, truncated, failed, n}; source "all" is over all groups. A score is
    the mean over prompts of the mean over answers. pass@k is there if answers are right or wrong (`right_among`)."""
    right = right_among(groups, threshold)
    return {
        f"validation/{source}/{name}": figure
        for source, members in _by_source(groups).items()
        for name, figure in _figures(members, ks, right).items()
    }


def by_prompt(groups: Sequence[Group], ks: Sequence[int], threshold: float = 0.0) -> dict[str, list[float]]:
    """score and pass@k of each prompt, by the names of `measure`, whose figures are their means."""
    right = right_among(groups, threshold)
    return {
        f"validation/{source}/{name}": values
        for source, members in _by_source(groups).items()
        for name, values in _by_prompt(members, ks, right).items()
    }


def _by_source(groups: Sequence[Group]) -> dict[str, list[Group]]:
    result: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        for source in dict.fromkeys((group.task.source, "all")):
            result[source].append(group)
    return result


def _figures(groups: Sequence[Group], ks: Sequence[int], right: float) -> dict[str, float]:
    """Figures of one source. Failed episodes enter no mean; `failed` counts them."""
    episodes = [t for g in groups for t in g.trajectories]
    scored = [t for t in episodes if t.outcome.scored]
    means = {name: _mean(values) for name, values in _by_prompt(groups, ks, right).items()}
    return {
        "score": means.pop("score"),
        "length": _mean([len(turn.completion.tokens) for t in scored for turn in t.turns]),
        "truncated": float(sum(t.outcome == "truncated" for t in episodes)),
        "failed": float(len(episodes) - len(scored)),
        "n": float(len(groups)),
        **means,
    }


def _by_prompt(groups: Sequence[Group], ks: Sequence[int], right: float) -> dict[str, list[float]]:
    """score of each prompt with a scored answer; pass@k of each with at least k."""
    each = [scores for g in groups if (scores := _scores(g))]
    result = {"score": [_mean(scores) for scores in each]}
    if math.isnan(right):
        return result
    counts = [(len(scores), sum(v >= right for v in scores)) for scores in each]
    for k in sorted({*ks, *(own_k(g.task) for g in groups)}):
        if enough := [pass_at_k(n, c, k) for n, c in counts if n >= k]:
            result[f"pass@{k}"] = enough
    return result


def _scores(group: Group) -> list[float]:
    return [t.score for t in group.trajectories if t.outcome.scored]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def versions_of(groups: Sequence[Group]) -> set[int]:
    """Versions of the weights that sampled any of their tokens."""
    return {v for g in groups for t in g.trajectories for turn in t.turns for v in turn.completion.versions.tolist()}


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
        word = f"{'better' if change > 0 else 'worse'} by {abs(change):.3f}" if change else "equal"
        return (
            f"{self.source}: {self.before:.3f} -> {self.after:.3f}, {word} (95 % of the change: "
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
        from birl.algorithms.uncertainty import bootstrap, sign_flips  # not needed by training

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
