"""Groups -> Samples: selects the episodes that count and joins their turns into flat token arrays."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
from math import isclose, nan

import numpy as np

from birl.algorithms.reduce import Denominator
from birl.data.sequences import observations
from birl.samples import Support
from birl.types import Group, Outcome, Sample, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Which episodes enter the baseline and are trained. Failures are dropped and never count as rewards of 0.

    `failed` "drop": episodes without a score are left out of the group; "drop_group": the whole group is.
    `truncated` "keep": a truncated answer has a reward like any other; "drop": it counts as failed.
    """

    failed: str = "drop"
    truncated: str = "keep"

    def usable(self, group: Group) -> list[int]:
        """Indices of the episodes of this group that count."""
        good = {Outcome.OK} if self.truncated == "drop" else {Outcome.OK, Outcome.TRUNCATED}
        kept = [i for i, t in enumerate(group.trajectories) if t.outcome in good and t.turns]
        if self.failed == "drop_group" and any(t.outcome not in good for t in group.trajectories):
            return []
        return kept


def has_signal(group: Group, usage: Usage) -> bool:
    """Whether the rewards that count differ; otherwise every advantage is 0."""
    return any(len({g.trajectories[i].reward for i in usage.usable(g)}) > 1 for g in by_agent(group))


def by_agent(group: Group) -> list[Group]:
    """One group for each agent and policy, with its own turns and rewards; of a single one the group itself. An episode
    with one reward gives it to all agents. Failed episodes stay in each group, without turns, to be counted. Turns of
    frozen policies are in none."""
    turns = [turn for t in group.trajectories for turn in t.turns]
    if not any(t.rewards for t in group.trajectories) and not any(turn.policy for turn in turns):
        return [group]
    speakers = sorted({(turn.agent, turn.policy) for turn in turns if not turn.frozen})
    several = Counter(agent for agent, _ in speakers)
    return [
        replace(
            group,
            agent=f"{agent} ({policy})" if several[agent] > 1 else agent,
            trajectories=tuple(_own(t, agent, policy) for t in group.trajectories),
        )
        for agent, policy in speakers
    ]


def _own(trajectory: Trajectory, agent: str, policy: str) -> Trajectory:
    """The agent's turns, each with the environment's rewards until its next one; the first also with earlier ones."""
    own = [(turn.agent, turn.policy) == (agent, policy) for turn in trajectory.turns]
    earned = [0.0] * len(own)
    for turn, number in zip(trajectory.turns, accumulate(own), strict=True):
        earned[max(number - 1, 0)] += turn.reward + turn.rewards.get(agent, 0.0)
    turns = tuple(replace(t, reward=r) for t, r in zip(compress(trajectory.turns, own), earned, strict=False))
    if not trajectory.rewards:
        return replace(trajectory, turns=turns)
    reward = trajectory.rewards.get(agent, nan)
    return replace(trajectory, turns=turns, reward=reward, score=reward, rewards={})


def turn_rewards(trajectory: Trajectory) -> list[float]:
    """Reward of each turn: the environment's; the last turn also gets the rest of the episode's reward."""
    result = [turn.reward for turn in trajectory.turns]
    return [*result[:-1], trajectory.reward - sum(result[:-1])]


def reward_parts(
    trajectories: Sequence[Trajectory], weights: Mapping[str, float]
) -> tuple[list[list[float]], list[float]]:
    """Values of the K rewards of each trajectory, and their weights: the reward functions of `weights`, NaN where one
    gave none, and last the environment's own reward (weight 1), if there is one or there are no functions. What an
    environment reports beside its reward (`Feedback.info`) is a figure and no reward."""
    rows, has_own = list[list[float]](), not weights
    for t in trajectories:
        judged = sum(weight * t.parts.get(name, 0.0) for name, weight in weights.items())
        own = 0.0 if isclose(t.reward, judged, abs_tol=1e-9) else t.reward - judged
        rows.append([*(t.parts.get(name, nan) for name in weights), own])
        has_own |= own != 0
    return (rows, [*weights.values(), 1.0]) if has_own else ([row[:-1] for row in rows], [*weights.values()])


@dataclass(slots=True)
class Chain:
    """Turns in which every prompt begins with all tokens of the turn before. `turns`: number of each, and the slice of
    its answer; `last`: the newest turn, which has all tokens."""

    last: Turn
    turns: list[tuple[int, slice]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.last.prompt) + len(self.last.completion.tokens)

    def continues(self, turn: Turn) -> bool:
        if (turn.agent, turn.policy) != (self.last.agent, self.last.policy):
            return False
        before, answer, n = self.last.prompt, self.last.completion.tokens, len(self.last.prompt)
        return np.array_equal(turn.prompt[n : len(self)], answer) and np.array_equal(turn.prompt[:n], before)


def chains(trajectory: Trajectory) -> list[Chain]:
    """The chains of an episode. A turn continues the longest chain that it extends, or starts one: after a branch, for
    another agent, or if the template or the environment changed earlier messages."""
    result: list[Chain] = []
    for number, turn in enumerate(trajectory.turns):
        fitting = [c for c in result if c.continues(turn)]
        if not fitting:
            result.append(Chain(turn))
        chain = max(fitting, key=len) if fitting else result[-1]
        chain.last = turn
        chain.turns.append((number, slice(len(turn.prompt), len(chain))))
    return [c for c in result if any(where.stop > where.start for _, where in c.turns)]


def samples(trajectory: Trajectory, advantage: float | Sequence[float], group: int, episode: int) -> list[Sample]:
    """One Sample for each chain of turns. `advantage`: of all turns, or one for each."""
    result = []
    for chain in chains(trajectory):
        n = len(chain)
        mask, logprobs, versions = np.zeros(n, np.bool_), np.zeros(n, np.float32), np.full(n, -1, np.int32)
        own = advantage if isinstance(advantage, float | int) else np.zeros(n, np.float32)
        for number, where in chain.turns:
            completion = trajectory.turns[number].completion
            mask[where], logprobs[where], versions[where] = True, completion.logprobs, completion.versions
            if isinstance(own, np.ndarray):
                own[where] = advantage[number]  # pyright: ignore[reportIndexIssue]
        result.append(
            Sample(
                tokens=np.concatenate([chain.last.prompt, chain.last.completion.tokens]),
                mask=mask,
                logprobs=logprobs,
                versions=versions,
                advantage=own,
                group=group,
                episode=episode,
                routes=routes(trajectory, chain),
                support=support(trajectory, chain),
                policy=chain.last.policy,
            )
        )
    return result


def routes(trajectory: Trajectory, chain: Chain) -> bytes:
    """Experts that computed each token when it was sampled (`Completion.routes`); unknown for the last token, which no
    engine has computed."""
    completions = [(trajectory.turns[number].completion, where) for number, where in chain.turns]
    size = max(len(c.routes) // max(where.stop - 1, 1) for c, where in completions)
    result = b""
    for completion, _ in completions:
        result += completion.routes[len(result) :]
    return result.ljust(len(chain) * size, b"\xff")


def support(trajectory: Trajectory, chain: Chain) -> Support | None:
    """The kept sets of tokens (top-k, top-p, min-p) that its trained tokens were sampled from."""
    completions = [trajectory.turns[number].completion for number, _ in chain.turns]
    return Support.joined([(c.support, len(c.tokens)) for c in completions])


def token_rewards(trajectory: Trajectory, rewards: Sequence[float]) -> list[list[float]]:
    """Reward of each trained token, for each Sample of `samples`: the last token of a turn has all rewards until the
    next turn of its chain, so that every chain has all rewards of the episode after its start."""
    result = []
    for chain in chains(trajectory):
        numbers = [number for number, _ in chain.turns]
        each: list[float] = []
        for (number, where), following in zip(chain.turns, [*numbers[1:], len(rewards)], strict=True):
            each += [0.0] * (where.stop - where.start)
            if each:
                each[-1] += sum(rewards[number:following])
        result.append(each)
    return result


def trained_lengths(samples: Sequence[Sample]) -> list[int]:
    return [int(np.count_nonzero(s.mask)) for s in samples]


def by_policy(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each policy, in order; without any sample one empty list."""
    return [[s for s in samples if s.policy == name] for name in dict.fromkeys(s.policy for s in samples)] or [[]]


def weighed(
    samples: Sequence[Sample], denominator: Denominator, limit: int, observed: bool
) -> list[tuple[Sample, float, float]]:
    """Each sample with the weight of its trained tokens and, if `observed`, of the environment's tokens. A denominator
    is over the samples of one policy. `limit`: longest answer [tokens]."""
    result: list[tuple[Sample, float, float]] = []
    for own in by_policy(samples):
        groups, read = [s.group for s in own], [len(observations(s)) if observed else 0 for s in own]
        result += zip(own, *(denominator(n, groups, limit) for n in (trained_lengths(own), read)), strict=True)
    return result


def split_by_group(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """The samples in at most `parts` pieces with about equally many groups each, in order. Groups are not split."""
    groups = list(dict.fromkeys(s.group for s in samples))
    pieces = min(parts, len(groups))
    piece_of = {g: n * pieces // len(groups) for n, g in enumerate(groups)}
    return [[s for s in samples if piece_of[s.group] == piece] for piece in range(pieces)]


Unit = tuple[Group, int, int | None]  # an episode of a group (turn None), or one of its turns; has one advantage


def places(units: Sequence[Unit]) -> list[int]:
    """Number of the set that each unit is compared in: units of one group, agent and turn number."""
    names = [(g.index, g.agent, turn) for g, _, turn in units]
    order = {name: n for n, name in enumerate(dict.fromkeys(names))}
    return [order[name] for name in names]


def unit_lengths(units: Sequence[Unit]) -> list[int]:
    """Generated tokens of each unit."""
    turns = [(g.trajectories[i].turns, turn) for g, i, turn in units]
    return [sum(len(t.completion.tokens) for t in (own if n is None else own[n : n + 1])) for own, n in turns]


def earned(trajectory: Trajectory, penalty: float) -> list[float]:
    """`token_rewards` of an episode with a length penalty, concatenated over its samples."""
    rewards = turn_rewards(trajectory)
    rewards[-1] += penalty
    return [value for own in token_rewards(trajectory, rewards) for value in own]


def token_turns(trajectory: Trajectory) -> list[int]:
    """Number of each trained token's turn, concatenated over the episode's samples."""
    turns = [turn for chain in chains(trajectory) for turn in chain.turns]
    return [number for number, where in turns for _ in range(where.stop - where.start)]
