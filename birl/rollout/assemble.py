"""Groups -> Samples: which episodes count, and how their turns become flat token lists."""

from collections.abc import Sequence
from dataclasses import dataclass

from birl.types import Group, Outcome, Sample, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Which episodes enter a baseline and are trained: the rule that keeps failures from becoming rewards of 0.

    `failed` "drop": episodes without a score leave the group, the others go on; "drop_group": the whole group goes.
    `truncated` "keep": an answer that was cut has a reward like any other; "drop": it counts as failed.
    """

    failed: str = "drop"
    truncated: str = "keep"

    def usable(self, group: Group) -> list[int]:
        """Indices of the episodes of this group that count."""
        good = {Outcome.OK} if self.truncated == "drop" else {Outcome.OK, Outcome.TRUNCATED}
        kept = [i for i, t in enumerate(group.trajectories) if t.outcome in good and t.turns]
        if self.failed == "drop_group" and len(kept) < len(group.trajectories):
            return []
        return kept


def has_signal(group: Group, usage: Usage) -> bool:
    """Do the rewards that count differ? Otherwise every advantage is 0."""
    return len({group.trajectories[i].reward for i in usage.usable(group)}) > 1


def samples(trajectory: Trajectory, advantage: float, group: int, episode: int) -> list[Sample]:
    """One Sample for each stretch of turns in which every prompt extends what came before, token by token."""
    found: list[Sample] = []
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []

    def flush() -> None:
        if any(mask):
            found.append(
                Sample(
                    tokens=tuple(tokens),
                    mask=tuple(mask),
                    logprobs=tuple(logprobs),
                    versions=tuple(versions),
                    advantage=advantage,
                    group=group,
                    episode=episode,
                )
            )
        for column in (tokens, mask, logprobs, versions):
            column.clear()

    for turn in trajectory.turns:
        if tuple(tokens) != turn.prompt[: len(tokens)]:
            flush()
        new, completion = turn.prompt[len(tokens) :], turn.completion
        tokens += (*new, *completion.tokens)
        mask += [False] * len(new) + [True] * len(completion.tokens)
        logprobs += [0.0] * len(new) + list(completion.logprobs)
        versions += [-1] * len(new) + list(completion.versions)
    flush()
    return found


def trained_lengths(samples: Sequence[Sample]) -> list[int]:
    return [sum(s.mask) for s in samples]
