"""What is reported of a training step: figures for metrics.jsonl, and every episode for rollouts.jsonl."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from birl.learner.learner import Stats
from birl.parallel.machine import peak_memory
from birl.rollout import ages, assemble, pipeline
from birl.text.chat import Chat
from birl.train.credit import Credited
from birl.types import Group, Outcome, Sample

if TYPE_CHECKING:
    from birl.train.rl import Loop

OLD = 8  # staleness of this many steps or more is one class of the histogram


def step_metrics(
    loop: "Loop", step: pipeline.Step, credited: Credited, stats: Stats, waited: float, training: float
) -> dict[str, float]:
    """All figures of a step. `waited` [s]: for its groups."""
    worker, everything = loop.worker, (*step.groups, *step.refused)
    counters = loop.take_counters()
    computed = [s for s in credited.samples if worker.has_gradient(s)]
    trained = sum(len(s.tokens) for s in computed)
    metrics = outcome_metrics(everything) | reward_metrics(everything)
    metrics |= {
        "groups/kept": float(len(step.groups)),
        "groups/refilled": float(len(step.refused)),
        "groups/no_signal": float(sum(not assemble.has_signal(g, loop.usage) for g in everything)),
        "loss": stats.loss,
        "entropy": stats.mean("entropy"),
        "clip_fraction": stats.mean("clip_fraction"),
        "ratio/mean": stats.mean("ratio"),
        "ratio/max": stats.maxima.get("ratio", nan),
        "mismatch/mean": stats.first_gap,
        "grad_norm": stats.grad_norm,
        "lr": worker.rate,
        "updates/done": float(stats.updates),
        "updates/skipped": float(stats.skipped),
        "updates/nonfinite": float(stats.nonfinite),
        "tokens/generated": float(counters.tokens),
        "tokens/trained": float(trained),
        "tokens/learned": float(sum(sum(s.mask) for s in computed)),
        "speed/generate": counters.tokens / max(counters.seconds, 1e-9),
        "speed/guessed": counters.accepted / counters.tokens if counters.tokens else nan,
        "speed/train": trained / max(training, 1e-9),
        "time/generate": counters.seconds,
        "time/train": training,
        "time/wait": waited,
        "time/checkpoint": loop.run.saving,
        "memory/peak": peak_memory(),
    }
    if loop.config.rollout.max_staleness == 0:
        metrics["time/reward"] = max(waited - counters.seconds, 0.0)
    told = [n for n in stats.sums if n in ("kl", "held", "factor") or n.startswith("critic/")]
    metrics |= {name: stats.mean(name) for name in told} | stats.other
    if credited.kl == credited.kl:
        metrics |= {"kl/episode": credited.kl, "kl/coef": worker.kl.coef}
    return metrics | staleness_metrics(loop, step, credited) | weights_metrics(loop)


def staleness_metrics(loop: "Loop", step: pipeline.Step, credited: Credited) -> dict[str, float]:
    """How old the trained tokens were, in training steps, and how much is under way."""
    found = loop.worker.ages.histogram(credited.samples)
    total = max(found.total(), 1)
    metrics = {
        "staleness/mean": ages.mean(found),
        "staleness/max": float(max(found, default=0)),
    }
    if loop.config.rollout.max_staleness > 0:
        metrics |= {"queue/ready": float(step.ready), "queue/running": float(step.running)}
        metrics["staleness/mixed"] = ages.mixed(credited.samples)
        for age in range(min(loop.config.rollout.max_staleness, OLD) + 1):
            count = found[age] if age < OLD else sum(n for a, n in found.items() if a >= OLD)
            metrics[f"staleness/{age}"] = count / total
    return metrics


def weights_metrics(loop: "Loop") -> dict[str, float]:
    """What the last update of the engines cost; nothing where they have the learner's own weights."""
    sent = loop.sent
    if not sent.digest:
        return {}
    return {
        "time/weights": sent.seconds,
        "weights/paused": sent.paused,
        "weights/bytes": float(sent.bytes),
        "weights/gap": sent.gap,
    }


def episode_records(
    step: pipeline.Step,
    chat: Chat,
    advantages: Mapping[tuple[int, int], float],
    figures: Callable[[Sample], dict[str, Any]],
    run: Path,
) -> list[dict[str, Any]]:
    """Every episode of the step as rollouts.jsonl holds it. `advantages`: by group and episode. `figures`: what is
    known of a sample's tokens besides. The tokens come last: `birl/view/episodes.py` reads the rest without them."""
    return [
        {
            "group": g.index,
            "episode": i,
            "task": g.task.id,
            "source": g.task.source,
            "answer": g.task.answer,
            "outcome": str(t.outcome),
            "detail": t.detail,
            "reward": t.reward,
            "score": t.score,
            "parts": dict(t.parts),
            "advantage": advantages.get((g.index, i)),
            "text": "".join(chat.decode(turn.completion.tokens) for turn in t.turns),
            "turns": [
                {"agent": turn.agent, "reward": turn.reward, "text": chat.decode(turn.completion.tokens)}
                for turn in (t.turns if len(t.turns) > 1 else ())
            ],
            "rewards": dict(t.rewards),
            **({"extra": dict(t.extra)} if t.extra else {}),
            **({"pictures": [_within(path, run) for path in t.pictures]} if t.pictures else {}),
            "samples": [
                {
                    "tokens": s.tokens,
                    "mask": [int(m) for m in s.mask],
                    "logprobs": s.logprobs,
                    "versions": s.versions,
                    **figures(s),
                }
                for s in assemble.samples(t, 0.0, g.index, i)
            ],
        }
        for g in (*step.groups, *step.refused)
        for i, t in enumerate(g.trajectories)
    ]


def _within(path: str, run: Path) -> str:
    """Relative to the run folder, if it is in there: a run may be moved."""
    whole = Path(path).resolve()
    return whole.relative_to(run.resolve()).as_posix() if whole.is_relative_to(run.resolve()) else path


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
        "turns/mean": sum(len(t.turns) for t in episodes) / max(len(episodes), 1),
    }


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Over the episodes that have a reward; those that failed are counted elsewhere."""
    scored = [t for g in groups for t in g.trajectories if t.outcome.scored]
    rewards, scores = [t.reward for t in scored] or [nan], [t.score for t in scored] or [nan]
    parts: dict[str, list[float]] = {}
    for trajectory in scored:
        for name, value in trajectory.parts.items():
            parts.setdefault(name, []).append(value)
    logged: dict[str, list[float]] = {}
    for trajectory in scored:
        for name, value in trajectory.logged.items():
            logged.setdefault(name, []).append(value)
    by_agent: dict[str, list[float]] = {}
    for trajectory in scored:
        for name, value in trajectory.rewards.items():
            by_agent.setdefault(name, []).append(value)
    return {
        **{f"reward/agent/{name}": fmean(values) for name, values in by_agent.items()},
        **{f"reward/{name}": fmean(values) for name, values in parts.items()},
        **{f"reward/logged/{name}": fmean(values) for name, values in logged.items()},
        "reward/mean": fmean(rewards),  # behind the parts: a function may be called mean
        "reward/std": pstdev(rewards) if scored else nan,
        "score/mean": fmean(scores),
    }
