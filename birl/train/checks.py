"""What stops a step of reinforcement learning, and the warning of one that continued with less."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from birl.config import schema
from birl.envs.tasks.rows import where
from birl.errors import BirlError
from birl.rollout.pipeline import Step
from birl.track.units import counted
from birl.types import UNSCORED, Outcome, Task, Trajectory


def staleness(oldest: int, config: schema.Rollout) -> None:
    """The bound that `rollout/pipeline.py` proves. `oldest`: steps since the oldest group was begun."""
    if oldest > config.max_staleness:
        raise BirlError(
            f"A group was begun {counted(oldest, 'step')} ago, and rollout.max_staleness={config.max_staleness}. "
            "That is a mistake in birl: please report it, with the ledger.jsonl of this run."
        )


def failures(step: Step, most: float) -> None:
    """Raises `BirlError` where more than this share of the episodes failed."""
    episodes = [(g.task, t) for g in (*step.groups, *step.refused) for t in g.trajectories]
    failed = [(task, t) for task, t in episodes if not t.outcome.scored and t.detail != UNSCORED]
    if len(failed) <= most * len(episodes):
        return
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(str(t.outcome) for _, t in failed).most_common())
    raise BirlError(
        f"Step {step.number}: {len(failed)} of {len(episodes)} episodes failed ({kinds}), more than "
        f"rollout.max_failure_rate={most:g} allows. Most frequent reasons:\n{reasons(failed)}"
    )


ALIKE = 8  # episodes
CHANCE = 0.01  # of so many failures in a row
VARIES = re.compile(r"\S*\d\S*")  # numbers, addresses and temporary names in what went wrong


@dataclass(slots=True)
class Start:
    """Stops a run whose episodes all fail alike from the start (a command that is missing, say): after the first
    `ALIKE`, or more where rollout.max_failure_rate allows so many failures that these may be chance."""

    config: schema.Rollout
    failed: list[tuple[Task, Trajectory]] = field(default_factory=list)
    over: bool = False  # an episode ended otherwise

    def saw(self, task: Task, trajectory: Trajectory) -> None:
        """Raises `BirlError` where no episode up to this one has ended otherwise, and there are enough."""
        self.failed += [] if self.over else [(task, trajectory)]
        kinds = {(t.outcome, VARIES.sub("", t.detail)) for _, t in self.failed}
        self.over |= len(kinds) > 1 or any(o.scored or o is Outcome.ABORTED or why == UNSCORED for o, why in kinds)
        rate, n = self.config.max_failure_rate, len(self.failed)
        if not self.over and n >= ALIKE and rate**n < CHANCE:
            raise BirlError(
                f"All of the first {counted(n, 'episode')} failed alike ({n} {trajectory.outcome}), so the run stops "
                f"(rollout.max_failure_rate={rate:g} would let so many fail by chance only):\n{reasons(self.failed)}"
            )


def reasons(failed: Sequence[tuple[Task, Trajectory]]) -> str:
    """The three most frequent, each with the first row that it happened to."""
    first = {t.detail: task for task, t in reversed(failed)}
    common = Counter(t.detail for _, t in failed).most_common(3)
    return "\n".join(f"  {n} x {why} (first with {where(first[why])})" for why, n in common)


def refill(step: Step, config: schema.RL) -> str:
    """The pipeline gives up after max_refill and hands over what it has; the step goes on with that."""
    wanted, asked = config.rollout.prompts, len(step.groups) + len(step.refused)
    if len(step.groups) >= wanted or len(step.refused) <= config.algorithm.max_refill * wanted:
        return ""
    return (
        f"Step {step.number}: only {len(step.groups)} of {asked} groups have rewards that differ "
        f"(algorithm.max_refill={config.algorithm.max_refill:g}). Where that lasts, the prompts are too easy or too "
        "hard by now."
    )


#: nats a token that right engines and learners stay below: birl's differ by less than 1e-5 in float32; in bfloat16 by
#: 0.04 with published models, and by 0.43 with large random weights in two implementations
GAPS = {"float32": 0.002, "bfloat16": 0.5}


def gap(mean: float, version: int, config: schema.RL) -> None:
    """`mean`: between the log-probs of engine and learner, of the same tokens and weights [nats a token]. Raises
    `BirlError` above learner.max_logprob_gap."""
    kind = config.model.dtype if config.engine.recompute_kv else "bfloat16"  # keys of older weights differ more
    most = config.learner.max_logprob_gap or GAPS[kind]
    if not mean <= most:
        raise BirlError(
            f"The engine's log-probs of tokens of version {version} differ from the learner's by {mean:.3g} nats a "
            f"token on average; learner.max_logprob_gap={most:g} is allowed. The engine does not sample from the "
            "weights that are trained."
        )
