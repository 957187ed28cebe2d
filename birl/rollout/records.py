"""Records of groups of episodes: metrics for metrics.jsonl, and every episode for rollouts.jsonl."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from birl.rollout import assemble, pipeline
from birl.rollout.group import Rollout, last_reply
from birl.types import PICTURES, Conversation, Group, Message, Outcome, Sample, Trajectory

if TYPE_CHECKING:
    from birl.text.chat import Chat


def episode_records(
    step: pipeline.Step,
    chat: "Chat",
    advantages: Mapping[tuple[int, int], float],
    figures: Callable[[Sample], dict[str, Any]],
    run: Path,
) -> list[dict[str, Any]]:
    """Records of all episodes of a step for rollouts.jsonl. `advantages`: by group and episode. `figures`: further
    values of a sample's tokens. The tokens come last, as readers use only the other fields."""
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
            "text": "".join(chat.decode(turn.completion.ids) for turn in t.turns),
            "turns": [
                {
                    "agent": turn.agent,
                    **({"policy": turn.policy} if turn.policy else {}),
                    "reward": turn.reward,
                    **({"rewards": dict(turn.rewards)} if turn.rewards else {}),
                    "text": chat.decode(turn.completion.ids),
                }
                for turn in (t.turns if len(t.turns) > 1 else ())
            ],
            "rewards": dict(t.rewards),
            **({"extra": dict(t.extra)} if t.extra else {}),
            **_seen(t, chat, run),
            "samples": [
                {
                    "tokens": s.tokens.tolist(),
                    "mask": s.mask.astype(int).tolist(),
                    "logprobs": s.logprobs.tolist(),
                    "versions": s.versions.tolist(),
                    **figures(s),
                }
                for s in assemble.samples(t, 0.0, g.index, i)
            ],
        }
        for g in (*step.groups, *step.refused)
        for i, t in enumerate(g.trajectories)
    ]


def _seen(trajectory: Trajectory, chat: "Chat", run: Path) -> dict[str, list[str]]:
    """Files of the environment's pictures, and of the pictures in prompts, each once."""
    digests = dict.fromkeys(digest for turn in trajectory.turns for digest in chat.shown(turn.prompt.tolist()))
    files = [*(_within(path, run) for path in trajectory.pictures), *(f"{PICTURES}/{digest}" for digest in digests)]
    return {"pictures": files} if files else {}


def _within(path: str, run: Path) -> str:
    """Path relative to the run folder, if it is within it: a run may be moved."""
    if "\0" in path:
        return path
    whole = Path(path).resolve()
    return whole.relative_to(run.resolve()).as_posix() if whole.is_relative_to(run.resolve()) else path


def outcome_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Number of requested episodes and of each outcome; the outcomes always sum to the requests."""
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
    """Metrics of the episodes that have a reward; failed ones are counted elsewhere. If a step has tasks of several
    sources, also the score of each."""
    scored = [t for g in groups for t in g.trajectories if t.outcome.scored]
    several = len({g.task.source for g in groups}) > 1
    rewards, scores = [t.reward for t in scored] or [nan], [t.score for t in scored] or [nan]
    return {
        **_means("reward/agent/", (t.rewards for t in scored)),
        **_means("reward/", (t.parts for t in scored)),
        **_means("reward/logged/", (t.logged for t in scored)),
        **_means(
            "score/", ({g.task.source: t.score} for g in groups for t in g.trajectories if several and t.outcome.scored)
        ),
        "reward/mean": fmean(rewards),  # after the parts: a function may be called mean
        "reward/std": pstdev(rewards) if scored else nan,
        "score/mean": fmean(scores),
    }


def said_by_policies(groups: Sequence[Group]) -> dict[str, float]:
    """For each policy by name, including earlier versions in a league: number of sampled tokens, and mean score over
    the scored episodes in which it took part."""
    episodes = [t for g in groups for t in g.trajectories]
    tokens = Counter[str]()
    scores = defaultdict[str, list[float]](list)
    for t in episodes:
        speakers = {turn.policy: turn.agent for turn in t.turns if turn.policy}
        for turn in t.turns:
            tokens.update({turn.policy: len(turn.completion.tokens)} if turn.policy else {})
        for policy, agent in speakers.items() if t.outcome.scored else ():
            scores[policy].append(t.rewards.get(agent, t.score))
    return {f"tokens/{name}": float(n) for name, n in sorted(tokens.items())} | {
        f"score/{name}": fmean(each) for name, each in sorted(scores.items())
    }


def _means(prefix: str, columns: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name over the mappings that have it."""
    values = defaultdict[str, list[float]](list)
    for row in columns:
        for name, value in row.items():
            values[name].append(value)
    return {prefix + name: fmean(each) for name, each in values.items()}


def answers(groups: Sequence[Group], rollout: Rollout, limit: int | None = None) -> list[dict]:
    """The first answer of each task as text, for reports."""
    result = []
    for group in groups[:limit]:
        trajectory = group.trajectories[0]
        result.append(
            {
                "prompt": prompt_text(group.task.prompt),
                **({"pictures": files} if (files := _asked(group.task.prompt)) else {}),
                "completion": last_reply(trajectory, rollout.chat).content if trajectory.turns else "",
                "answer": group.task.answer,
                "score": trajectory.score if trajectory.outcome.scored else None,
                "outcome": str(trajectory.outcome),
                "source": group.task.source,
                "id": group.task.id,
            }
        )
    return result


def _asked(prompt: Conversation) -> list[str]:
    """Files of a prompt's pictures."""
    return [f"{PICTURES}/{p.digest}" for m in prompt for p in m.pictures] if isinstance(prompt, tuple) else []


def prompt_text(prompt: tuple[Message, ...] | str) -> str:
    """The prompt's text for people to read; the model gets the template's rendering."""
    return prompt if isinstance(prompt, str) else "\n".join(m.content for m in prompt if m.role != "system")
