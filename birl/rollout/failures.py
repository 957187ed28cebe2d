"""Stops a run with failed episodes: too many in a step, or identical failures of all the first ones."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from birl.errors import BirlError
from birl.rollout.pipeline import Step
from birl.track.units import counted
from birl.types import UNSCORED, Outcome, Task, Trajectory


def check(step: Step, most: float, told: set[str]) -> str:
    """Warning about kinds of failures that no earlier step had; `told` stores them. Raises `BirlError` if more than
    this fraction of the episodes failed."""
    episodes = [(g.task, t) for g in (*step.groups, *step.refused) for t in g.trajectories]
    failed = [(task, t) for task, t in episodes if not t.outcome.scored and t.detail != UNSCORED]
    if len(failed) <= most * len(episodes):
        new = [(task, t) for task, t in failed if t.outcome is not Outcome.ABORTED and _kind(t) not in told]
        told |= {_kind(t) for _, t in new}
        return f"Step {step.number}: {counted(len(new), 'episode')} failed:\n{reasons(new)}" if new else ""
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(str(t.outcome) for _, t in failed).most_common())
    raise BirlError(
        f"Step {step.number}: {len(failed)} of {len(episodes)} episodes failed ({kinds}), more than "
        f"rollout.max_failure_rate={most:g} allows. Most frequent reasons:\n{reasons(failed)}"
    )


def refill(step: Step, wanted: int, most: float) -> str:
    """Warning if the pipeline stopped refilling a step of `wanted` groups after `most` times as many refused ones, and
    trained it as it was."""
    asked = len(step.groups) + len(step.refused)
    if len(step.groups) >= wanted or len(step.refused) <= most * wanted:
        return ""
    return (
        f"Step {step.number}: only {len(step.groups)} of {asked} groups have rewards that differ "
        f"(algorithm.max_refill={most:g}). If this persists, the prompts are too easy or too hard."
    )


ALIKE = 8  # episodes
CHANCE = 0.01  # probability of so many failures in a row
VARIES = re.compile(r"\S*\d\S*")  # numbers, addresses and temporary names in error messages


@dataclass(slots=True)
class Start:
    """Stops a run in which all episodes fail identically from the start (a missing command, for example): after the
    first `ALIKE`, or more if rollout.max_failure_rate allows so many failures that these may be chance. They must be of
    at least `tasks` tasks, and include those of `rows`, ids of tasks: early failures may be those of a few bad rows
    while others are still running."""

    most: float = 0.0  # rollout.max_failure_rate
    rows: frozenset[str] = frozenset()
    tasks: int = 2
    failed: list[tuple[Task, Trajectory]] = field(default_factory=list)
    over: bool = False  # an episode ended differently

    def saw(self, task: Task, trajectory: Trajectory) -> None:
        """Record an episode. Raises `BirlError` if enough episodes failed, all of them identically."""
        self.failed += [] if self.over else [(task, trajectory)]
        kinds = {(t.outcome, _kind(t)) for _, t in self.failed}
        self.over |= len(kinds) > 1 or any(o.scored or o is Outcome.ABORTED or why == UNSCORED for o, why in kinds)
        rate, n, tasks = self.most, len(self.failed), {task.id for task, _ in self.failed}
        if not self.over and n >= ALIKE and rate**n < CHANCE and len(tasks) >= self.tasks and self.rows <= tasks:
            chance = f" (probability {rate**n:.1g} at the accepted rollout.max_failure_rate={rate:g})" if rate else ""
            raise BirlError(
                f"All of the first {counted(n, 'episode')} failed alike ({n} {trajectory.outcome}), so the run stops"
                f"{chance}:\n{reasons(self.failed)}"
            )


def _kind(trajectory: Trajectory) -> str:
    return VARIES.sub("", trajectory.detail)


def start(most: float, prompts: int, rows: int) -> Start:
    """The `Start` for training on so many rows: failures must be of more of a step's `prompts` than
    rollout.max_failure_rate, `most`, allows, and of at least two."""
    return Start(most, tasks=min(rows, prompts, max(2, int(most * prompts) + 1)))


def reasons(failed: Sequence[tuple[Task, Trajectory]]) -> str:
    """The three most frequent reasons, each with the first row it occurred for."""
    first = {t.detail: task for task, t in reversed(failed)}
    common = Counter(t.detail for _, t in failed).most_common(3)
    return "\n".join(f"  {n} x {why} (first with {first[why].place})" for why, n in common)
