"""Order of tasks by how often the run has solved them (`data.order`).

    thompson     the tasks whose success rate, drawn from its posterior, is nearest to the target: MoPPS,
                 arXiv:2507.04632. Tasks with few answers have wide posteriors and are therefore explored.
    curriculum   the same with a target that moves from easy to hard during the run, as in AdaRFT,
                 arXiv:2504.05520, which moves it by the rewards.
    difficulty   at random, in proportion to the chance of a group with a signal: sampling for learnability,
                 arXiv:2502.12272, with that chance in the place of p (1 - p).

DAPO's dynamic sampling (arXiv:2503.14476) rejects groups without signal after they were generated; this predicts them.
Both can be combined: a rejected group is replaced by the next best prediction.

The choice is a function of the state: counts, finished steps and pending tasks. All of it is in the checkpoint, on
rank 0 only, and each recorded group has its task's id. Random numbers depend on the seed and the step.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Any

import numpy as np

from birl.data.difficulty import NEVER, Difficulty, Outcome, signal_of
from birl.data.stream import Mix
from birl.data.tasks import Tasks
from birl.errors import BirlError, did_you_mean
from birl.foreign import described, harmless
from birl.named import load
from birl.types import Group, Task

RANKING = 2  # an independent stream of random numbers, beside those of stream.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`by`: a name of ORDERS, or file.py:function. `target`: the target success rate; a curriculum begins at
    `start`. `threshold`: the score from which an answer is right; 0: scores are success rates. `n`: answers of a
    group."""

    by: str
    n: int
    target: float = 0.5
    start: float = 0.9
    threshold: float = 0.0
    half_life: float = 50.0
    retire_after: int = 3
    retire_for: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """Statistics of a task for a user's function. `successes`, `failures`: answers, with forgetting; `rate`: mean of
    the posterior; `seen`: the step in which it was trained last, or None."""

    id: str
    source: str
    successes: float
    failures: float
    rate: float
    seen: int | None
    retired: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Inputs of a cost function: the posterior of each task, and the step's random numbers."""

    alpha: np.ndarray
    beta: np.ndarray
    n: int
    target: float
    rng: np.random.Generator


def nearest(look: Outlook) -> np.ndarray:
    """|p - target|, p ~ Beta(alpha, beta); ties are broken at random."""
    drawn = look.rng.beta(look.alpha, look.beta)
    return np.abs(drawn - look.target) + 1e-9 * look.rng.random(len(drawn))


def proportional(look: Outlook) -> np.ndarray:
    """E / w, E ~ Exp(1): in ascending order a sample without replacement in proportion to w (Efraimidis and Spirakis,
    2006), here the chance of a signal."""
    weight = signal_of(look.alpha, look.beta, look.n)
    return look.rng.exponential(size=len(weight)) / np.maximum(weight, 1e-6)


#: cost of each task: the cheapest is next
ORDERS: Mapping[str, Callable[[Outlook], np.ndarray]] = {
    "difficulty": proportional,
    "thompson": nearest,
    "curriculum": nearest,
}


class Order:
    """The tasks of a run, chosen one by one.

    With `weights` a task's source is drawn first, by the same draws as in `Stream`; else all are one pool. No task is
    pending twice unless all of its pool are, and a retired one is chosen only if no other is left. `end`: number of
    draws after which the data end; `steps`: of the run, if it counts them.

    Example: order = Order(sources, Rule(by="thompson", n=8), seed=0); order.choose(0)
    """

    def __init__(
        self,
        sources: Sequence[Tasks],
        rule: Rule,
        *,
        weights: Sequence[float] = (),
        seed: int = 0,
        steps: int | None = None,
        end: int | None = None,
    ) -> None:
        self.sources, self.rule, self.seed, self.steps, self.end = sources, rule, seed, steps, end
        self._ends = list(accumulate(map(len, sources)))
        starts = [0, *self._ends[:-1]]
        self._pools = [slice(a, b) for a, b in zip(starts, self._ends, strict=True)] if weights else [slice(None)]
        self._weights = [float(w) for w in weights] or [1.0]
        self._mix = Mix(self._weights, seed)
        ids = [name for source in sources for name in source.ids]
        self.known = Difficulty(
            ids, half_life=rule.half_life, retire_after=rule.retire_after, retire_for=rule.retire_for
        )
        self._custom = None if rule.by in ORDERS else load("data.order", rule.by, ORDERS)
        self.step = self.position = 0  # finished steps, and groups that were consumed
        self.pending: dict[str, str] = {}  # number of an admitted group -> id of its task
        self._flying = np.zeros(len(ids), np.int64)
        self._ranked: np.ndarray | None = None
        self._costs()  # a function that fails, fails now

    @property
    def state(self) -> dict[str, Any]:
        """State for a checkpoint. It references the live counts, so that no copy is needed at each step."""
        return {"counts": self.known.counts, "pending": self.pending}

    @property
    def progress(self) -> float:
        """Finished share of the run; 0 if its length is not known."""
        over = self.step / self.steps if self.steps else self.position / self.end if self.end else 0.0
        return min(over, 1.0)

    def restore(self, state: Mapping[str, Any] | None, step: int, position: int) -> None:
        """Restore from a checkpoint after `step` steps; `state` None: of a run with another order."""
        self.step, self.position, self._ranked = step, position, None
        if state is not None:
            self.known.restore(state["counts"])
            self.pending = {number: name for number, name in state["pending"].items() if name in self.known.index}
            for name in self.pending.values():
                self._flying[self.known.index[name]] += 1

    def tasks(self, position: int, ahead: Collection[int] = ()) -> Iterator[Task]:
        """Yield the tasks of the groups from number `position` on. Those with numbers in `ahead` are consumed, and the
        caller skips them."""
        for number in count(position) if self.end is None else range(position, self.end):
            yield self._task(0) if number in ahead else self.choose(number)

    def choose(self, number: int) -> Task:
        """Return the task of the group with this number, and mark it as pending."""
        if str(number) not in self.pending:
            i = self._cheapest(self._mix.choose(number))
            self.pending[str(number)] = self.known.ids[i]
            self._flying[i] += 1
        return self._task(self.known.index[self.pending[str(number)]])

    def observe(
        self, step: int, position: int, groups: Sequence[tuple[Group, Sequence[int], bool]]
    ) -> dict[str, float]:
        """Update after step `step`, when all groups before number `position` are consumed. `groups`: of the step, each
        with the indices of its usable episodes, and whether their rewards differ. Returns the step's figures."""
        outcomes = [self._outcome(*group) for group in groups]
        figures = self.known.figures(step, self.rule.n, outcomes)
        self.known.update(step, outcomes)
        for group, _, _ in groups:
            if (name := self.pending.pop(str(group.index), None)) is not None:
                self._flying[self.known.index[name]] -= 1
        self.step, self.position, self._ranked = step, position, None
        return figures | self.known.pools(step)

    def _outcome(self, group: Group, usable: Sequence[int], signal: bool) -> Outcome:
        """Raises `BirlError` if scores are no success rates and there is no threshold."""
        scores = [group.trajectories[i].score for i in usable]
        if self.rule.threshold:
            scores = [float(score >= self.rule.threshold) for score in scores]
        if wrong := [score for score in scores if not 0 <= score <= 1]:
            raise BirlError(
                f"data.order={self.rule.by} counts how often a task is solved, but an answer to {group.task.place} has "
                f"the score {wrong[0]:g}, which is not in [0, 1]. Set data.order_threshold to the lowest score of a "
                "right answer."
            )
        return Outcome(id=group.task.id, rates=scores, signal=signal)

    def _cheapest(self, pool: int) -> int:
        """Best task of a pool: of the least often pending ones those not retired, and of these the cheapest."""
        where = self._pools[pool]
        cost, flying = self._costs()[where], self._flying[where]
        left = np.isfinite(cost)
        left &= flying == flying[left].min()
        if self._custom is None and (awake := left & ~self.known.resting(self.step)[where]).any():
            left = awake
        return int(np.argmin(np.where(left, cost, np.inf))) + (where.start or 0)

    def _costs(self) -> np.ndarray:
        """Costs of each task until the end of the next step, [tasks] float64; infinite: not to be chosen."""
        if self._ranked is None:
            rng = np.random.default_rng([self.seed % 2**64, RANKING, self.step])
            alpha, beta = self.known.posterior(self.step)
            rule = self.rule
            target = rule.start + (rule.target - rule.start) * self.progress if rule.by == "curriculum" else rule.target
            if self._custom is None:
                costs = ORDERS[rule.by](Outlook(alpha=alpha, beta=beta, n=rule.n, target=target, rng=rng))
            else:
                costs = self._own(self._custom, alpha / (alpha + beta), rng)
            self._ranked = costs
        return self._ranked

    def _own(self, function: Callable[..., Any], rate: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Costs from a user's function: positions in the list that it returns. Raises `BirlError`."""
        known, key = self.known, f"data.order={self.rule.by}"
        kept, resting = known.keep ** np.maximum(self.step - known.seen, 0), known.resting(self.step)
        states = [
            TaskState(
                id=name,
                source=self.sources[bisect_right(self._ends, i)].name,
                successes=float(known.successes[i] * kept[i]),
                failures=float(known.failures[i] * kept[i]),
                rate=float(rate[i]),
                seen=None if known.seen[i] == NEVER else int(known.seen[i]),
                retired=bool(resting[i]),
            )
            for i, name in enumerate(known.ids)
        ]
        try:
            told = function(states, self.step, rng)
            if isinstance(told, set | frozenset | dict):  # strings have another order in each process
                raise BirlError(f"it returned a {type(told).__name__}, which has no order: return a list of ids")
            names = list(islice(told, len(states) + 1))  # a generator may have no end
        except BaseException as error:  # whatever the user's function raises
            raise BirlError(f"{key}: it failed at step {self.step}: {described(error)}") from harmless(error)
        costs = np.full(len(known.ids), np.inf, np.float64)
        for place, name in enumerate(names):
            if not isinstance(name, str) or name not in known.index:
                near = did_you_mean(name, known.ids) if isinstance(name, str) else ""
                raise BirlError(f"{key}: it returned {name!r}, which is the id of no task.{near}")
            costs[known.index[name]] = place
        if repeated := [name for name, times in Counter(names).items() if times > 1]:
            raise BirlError(f"{key}: it returned {repeated[0]!r} more than once; each id may occur once.")
        for source, where, weight in zip(self.sources, self._pools, self._weights, strict=False):
            if weight and not np.isfinite(costs[where]).any():
                what = f" of {source.name}, from which data.weights draws" if len(self._pools) > 1 else ""
                raise BirlError(f"{key}: it returned no task{what}.")
        return costs

    def _task(self, index: int) -> Task:
        source = bisect_right(self._ends, index)
        return self.sources[source][index - (self._ends[source - 1] if source else 0)]
