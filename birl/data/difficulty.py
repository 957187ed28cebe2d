"""Difficulty of tasks: success rates of each task, past and predicted, as Beta counts with forgetting.

The success rate of a task has a Beta posterior (MoPPS, arXiv:2507.04632). Its counts lose half of their weight in
`half_life` steps, as the policy changes. Tasks that are forgotten or unseen fall back to the prior: PRIOR answers at
the mean rate of the tasks that were seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PRIOR = 2.0  # weight of the prior [answers]: at a mean of 1/2 it is Beta(1, 1)
NEVER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a group: `rates`, the success of each of its answers in [0, 1], and `signal`: whether its rewards are
    not all equal."""

    id: str
    rates: Sequence[float]
    signal: bool


class Difficulty:
    """`counts`: statistics of each seen task by id, as in a checkpoint: successes and failures at the step in which it
    was seen last, that step, and the number of groups in a row that were all right (above 0) or all wrong (below).

    `half_life` [steps]; 0: no forgetting. A task is retired for `retire_for` steps after `retire_after` groups in a row
    that were all right (solved) or all wrong (hopeless); 0: never. One more such group retires it again. Arrays are
    float64 or int64 with one entry for each task.
    """

    def __init__(self, ids: Sequence[str], *, half_life: float, retire_after: int, retire_for: int) -> None:
        self.ids, self.index = ids, {name: i for i, name in enumerate(ids)}
        self.keep = 0.5 ** (1 / half_life) if half_life else 1.0
        self.retire_after, self.retire_for = retire_after, retire_for
        self.counts: dict[str, list[Any]] = {}
        self.successes, self.failures = np.zeros(len(ids), np.float64), np.zeros(len(ids), np.float64)
        self.seen, self.alike = np.full(len(ids), NEVER, np.int64), np.zeros(len(ids), np.int64)

    def restore(self, counts: dict[str, list[Any]]) -> None:
        """Restore from a checkpoint. Tasks that are no longer in the data are dropped."""
        self.counts = {name: row for name, row in counts.items() if name in self.index}
        for name, row in self.counts.items():
            i = self.index[name]
            self.successes[i], self.failures[i], self.seen[i], self.alike[i] = row

    def posterior(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Alpha and beta of each task after `step` steps."""
        age = np.where(self.seen == NEVER, 0, step - self.seen)
        kept = self.keep**age
        successes, failures = self.successes * kept, self.failures * kept
        count = successes + failures
        rate = successes / np.maximum(count, 1e-300)
        known = count / (count + PRIOR)  # a task counts once, however often it was asked
        mean = (1 + (known * rate).sum()) / (2 + known.sum())
        return successes + PRIOR * mean, failures + PRIOR * (1 - mean)

    def resting(self, step: int) -> np.ndarray:
        """Mask of retired tasks, bool."""
        if not self.retire_after:
            return np.zeros(len(self.ids), np.bool_)
        return (np.abs(self.alike) >= self.retire_after) & (step - self.seen < self.retire_for)

    def update(self, step: int, outcomes: Iterable[Outcome]) -> None:
        """Add the outcomes of step `step`. An answer that spans several steps counts in the last one; it is at most
        rollout.max_staleness steps late."""
        for outcome in outcomes:
            if outcome.id not in self.index or not outcome.rates:
                continue
            i, good = self.index[outcome.id], float(sum(outcome.rates))
            kept = self.keep ** int(step - self.seen[i]) if self.seen[i] != NEVER else 1.0
            self.successes[i] = self.successes[i] * kept + good
            self.failures[i] = self.failures[i] * kept + (len(outcome.rates) - good)
            run = int(self.alike[i])
            self.alike[i] = {1.0: max(run, 0) + 1, 0.0: min(run, 0) - 1}.get(good / len(outcome.rates), 0)
            self.seen[i] = step
            now = (self.successes[i], self.failures[i], self.seen[i], self.alike[i])
            self.counts[outcome.id] = [value.item() for value in now]

    def figures(self, step: int, n: int, outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Predicted (call it before `update`) and observed figures of a step: means over its groups of `n`
        answers."""
        told = [outcome for outcome in outcomes if outcome.rates and outcome.id in self.index]
        where = [self.index[outcome.id] for outcome in told]
        alpha, beta = (each[where] for each in self.posterior(step))
        predicted = alpha / (alpha + beta)
        observed = np.array([sum(o.rates) / len(o.rates) for o in told], np.float64)
        signal = np.array([o.signal for o in told], np.float64)
        columns = {
            "order/predicted": predicted,
            "order/observed": observed,
            "order/error": np.abs(predicted - observed),
            "order/signal_predicted": signal_of(alpha, beta, n),
            "order/signal": signal,
        }
        return {name: float(values.mean()) if told else float("nan") for name, values in columns.items()}

    def pools(self, step: int) -> dict[str, float]:
        """Numbers of seen tasks, and of those retired as solved and as hopeless."""
        rest = self.resting(step)
        return {
            "order/seen": float((self.seen != NEVER).sum()),
            "order/solved": float((rest & (self.alike > 0)).sum()),
            "order/hopeless": float((rest & (self.alike < 0)).sum()),
        }


def signal_of(alpha: np.ndarray, beta: np.ndarray, n: int) -> np.ndarray:
    """1 - E[p^n] - E[(1-p)^n] for p ~ Beta(alpha, beta): chance that n answers are neither all right nor all wrong.

    E[p^n] is the product of (alpha + i) / (alpha + beta + i) over i < n.
    """
    right, wrong = np.ones_like(alpha), np.ones_like(alpha)
    for i in range(n):
        right, wrong = right * (alpha + i) / (alpha + beta + i), wrong * (beta + i) / (alpha + beta + i)
    return np.maximum(1 - right - wrong, 0.0)
