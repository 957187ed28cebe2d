"""Agreement of a judge with human ratings, and its biases towards long answers and the answer shown first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from math import isnan

import numpy as np

from birl.algorithms.uncertainty import Indices, interval, kappa, ordered, over_prompts, spearman
from birl.rewards.panel import Value, Verdict
from birl.rewards.questions import Question
from birl.rewards.requests import NoAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """The answers to one prompt with human ratings; for a preference 1 and 0.

    Example: Gold(prompt="What is 3 + 4?", answers=("7", "8"), human=(1.0, 0.0))
    """

    prompt: str
    answers: tuple[str, ...]
    human: tuple[float, ...]
    right: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A statistic with its 95 % interval `low`, `high`; NaN if there is none. `n`: number of items or prompts."""

    name: str
    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Columns of the answers that the judge rated. `prompts`: indices of each prompt's answers."""

    human: Sequence[float]
    judge: Sequence[float]
    lengths: Sequence[float]
    prompts: Sequence[Indices]

    @classmethod
    def of(cls, gold: Sequence[Gold], values: Sequence[Sequence[Value]]) -> "Items":
        rows = [
            [
                (h, v, float(len(a)))
                for a, h, v in zip(g.answers, g.human, own, strict=True)
                if not isinstance(v, NoAnswer)
            ]
            for g, own in zip(gold, values, strict=True)
        ]
        human, judge, lengths = zip(*(item for row in rows for item in row), strict=True) if any(rows) else ((), (), ())
        ends = np.cumsum([len(row) for row in rows])
        prompts = [np.arange(end - len(row), end) for row, end in zip(rows, ends, strict=True) if row]
        return cls(human=human, judge=judge, lengths=lengths, prompts=prompts)

    def measure(self, name: str, statistic: Callable[[Indices], float]) -> Measure:
        """A statistic over all items."""
        value = statistic(np.arange(len(self.human)))
        low, high = over_prompts(statistic, self.prompts)
        return Measure(name=name, value=value, low=low, high=high, n=len(self.human))

    def mean(self, name: str, one: Callable[[Indices], float]) -> Measure:
        """Mean of one value per prompt, over the prompts that have one."""
        return mean(name, [one(prompt) for prompt in self.prompts])


def mean(name: str, values: Sequence[float]) -> Measure:
    known = [value for value in values if not isnan(value)]
    low, high = interval(known) if known else (float("nan"), float("nan"))
    return Measure(
        name=name, value=sum(known) / len(known) if known else float("nan"), low=low, high=high, n=len(known)
    )


def measures(
    gold: Sequence[Gold], values: Sequence[Sequence[Value]], *, preferences: bool, threshold: float
) -> list[Measure]:
    """Statistics of a judge or a panel. `threshold`: smallest value of a good answer, if the human ratings are only
    good or bad."""
    if preferences:  # keep pairs with values for both answers
        whole = [not any(isinstance(v, NoAnswer) for v in own) for own in values]
        gold, values = list(compress(gold, whole)), list(compress(values, whole))
    items = Items.of(gold, values)
    if not items.human:
        return []
    human, judge, lengths = (np.asarray(c, np.float64) for c in (items.human, items.judge, items.lengths))
    order = items.mean("accuracy" if preferences else "order", lambda i: ordered(human[i], judge[i]))
    if preferences:
        sides = partial(_sides, human, judge, lengths)
        agreement = items.measure("kappa", lambda i: _preference_kappa(human, judge, i))
        longer = items.mean("prefers longer", sides)
        return [order, agreement, longer]
    result = [items.measure("spearman", lambda i: spearman(human[i], judge[i])), order]
    if set(items.human) <= {0.0, 1.0}:
        good = judge >= threshold
        result.append(items.mean("accuracy", lambda i: float((good[i] == human[i]).mean())))
        result.append(items.measure("kappa", lambda i: kappa(good[i].tolist(), (human[i] == 1).tolist())))
    result.append(
        items.measure("prefers longer", lambda i: spearman(judge[i], lengths[i]) - spearman(human[i], lengths[i]))
    )
    return [one for one in result if one.n]


def _sides(human: np.ndarray, judge: np.ndarray, lengths: np.ndarray, pair: Indices) -> float:
    """Length bias in a pair of answers of unequal length: 1, 0.5 or 0 if the judge rates the longer one higher, equal,
    or lower, minus the same for the human ratings. NaN otherwise."""
    if len(pair) < 2 or lengths[pair[0]] == lengths[pair[1]]:
        return float("nan")
    long, short = pair if lengths[pair[0]] > lengths[pair[1]] else pair[::-1]
    return float((np.sign(judge[long] - judge[short]) - np.sign(human[long] - human[short])) / 2)


def _preference_kappa(human: np.ndarray, judge: np.ndarray, items: Indices) -> float:
    """Cohen's kappa of preferences. The chosen answer is alternately at an even and an odd position, so that a judge
    that always names one side agrees only by chance."""
    pairs = items[: len(items) // 2 * 2].reshape(-1, 2)
    turn = np.where(pairs[:, 0] // 2 % 2, 1, -1)
    wanted, given = (turn * np.sign(c[pairs[:, 0]] - c[pairs[:, 1]]) for c in (human, judge))
    return kappa(wanted.tolist(), given.tolist())


def prefers_first(questions: Sequence[Sequence[Question]], verdicts: Sequence[Sequence[Verdict]]) -> Measure:
    """Position bias: how often the answer shown first beats another one of the same question, averaged over prompts;
    ties count half. Orders are random, so that an unbiased judge has 0.5."""
    each: list[float] = []
    for own, given in zip(questions, verdicts, strict=True):
        shares = [
            ordered([1.0, 0.0], [verdict.values[0], other])
            for question, verdict in zip(own, given, strict=True)
            if len(question.shown) > 1 and not isinstance(verdict.values, NoAnswer)
            for other in verdict.values[1:]
        ]
        each.append(sum(shares) / len(shares) if shares else float("nan"))
    return mean("prefers first", each)


def changes_with_order(questions: Sequence[Sequence[Question]], verdicts: Sequence[Sequence[Verdict]]) -> Measure:
    """Fraction of the pairs shown in both orders in which the judge's preference changes with the order."""
    each: list[float] = []
    for own, given in zip(questions, verdicts, strict=True):
        named: dict[frozenset[str], list[dict[str, float]]] = {}
        for question, verdict in zip(own, given, strict=True):
            if len(question.shown) == 2 and not isinstance(verdict.values, NoAnswer):
                pair = dict(zip(question.shown, verdict.values, strict=True))
                named.setdefault(frozenset(pair), []).append(pair)
        changed = [float(pair[0] != pair[1]) for pair in named.values() if len(pair) == 2]
        each.append(sum(changed) / len(changed) if changed else float("nan"))
    return mean("changes with order", each)
