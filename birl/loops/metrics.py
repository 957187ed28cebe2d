"""Figures of a step that come from its episodes alone."""

from collections import Counter
from collections.abc import Sequence
from math import nan
from statistics import fmean, pstdev

from birl.types import Group, Outcome


def outcome_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """How many episodes were asked for, and how each ended: the counts close, always."""
    episodes = [t for g in groups for t in g.trajectories]
    counts = Counter(t.outcome for t in episodes)
    lengths = [len(turn.completion.tokens) for t in episodes for turn in t.turns]
    return {
        "outcome/asked": float(len(episodes)),
        **{f"outcome/{o}": float(counts[o]) for o in Outcome},
        "length/mean": sum(lengths) / max(len(lengths), 1),
        "length/max": float(max(lengths, default=0)),
    }


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Over the episodes that have a reward; those that failed are counted elsewhere."""
    scored = [t for g in groups for t in g.trajectories if t.outcome.scored]
    rewards = [t.reward for t in scored] or [nan]
    parts: dict[str, list[float]] = {}
    for trajectory in scored:
        for name, value in trajectory.parts.items():
            parts.setdefault(name, []).append(value)
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards) if scored else nan,
        "score/mean": sum(t.score for t in scored) / max(len(scored), 1),
        **{f"reward/{name}": sum(values) / len(values) for name, values in parts.items()},
    }
