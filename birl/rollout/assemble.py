"""Groups -> Samples: which episodes count, and how their turns become flat token lists."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
from math import nan

import numpy as np

from birl.algorithms.reduce import Denominator
from birl.data.sequences import observations
from birl.support import Support
from birl.types import Group, Outcome, Sample, Trajectory, Turn


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
        if self.failed == "drop_group" and any(t.outcome not in good for t in group.trajectories):
            return []
        return kept


def has_signal(group: Group, usage: Usage) -> bool:
    """Do the rewards that count differ? Otherwise every advantage is 0."""
    return any(len({g.trajectories[i].reward for i in usage.usable(g)}) > 1 for g in by_agent(group))


def by_agent(group: Group) -> list[Group]:
    """The group itself; of several agents or policies, one group for each with its own turns and rewards. A single
    reward of an episode is each agent's. Failed episodes stay in each, without turns, so that they are counted as such.
    What frozen policies generated is in none."""
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
    """Its turns, each with what the environment gave until the next of them; the first also with what came before."""
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
    """What each turn earned: the environment's reward for it; what is left of the episode's is the last one's."""
    result = [turn.reward for turn in trajectory.turns]
    return [*result[:-1], trajectory.reward - sum(result[:-1])]


@dataclass(slots=True)
class Chain:
    """Turns of which every prompt begins with all that came before, token by token. `turns`: the number of each, and
    where its answer is; `last`: the newest one, which has all tokens."""

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
    """A turn continues the longest chain that it can, or begins one: after a branch, by another agent, or because the
    template or the environment changed earlier messages."""
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
    """Which experts computed each token when it was first computed. That of the last one is unknown: no engine has
    computed it."""
    completions = [(trajectory.turns[number].completion, where) for number, where in chain.turns]
    size = max(len(c.routes) // max(where.stop - 1, 1) for c, where in completions)
    result = b""
    for completion, _ in completions:
        result += completion.routes[len(result) :]
    return result.ljust(len(chain) * size, b"\xff")


def support(trajectory: Trajectory, chain: Chain) -> Support | None:
    """The tokens that its trained ones were drawn from."""
    completions = [trajectory.turns[number].completion for number, _ in chain.turns]
    return Support.joined([(c.support, len(c.tokens)) for c in completions])


def token_rewards(trajectory: Trajectory, rewards: Sequence[float]) -> list[list[float]]:
    """For each Sample of `samples` the reward of each trained token: at the end of a turn what came until the next turn
    of its chain, so that every chain sees all of the episode's reward that came after it began."""
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
    """Each sample with the weight of its trained tokens, and that of what it read, where this is `observed`; by the
    denominator of its policy's samples. `limit`: longest answer [tokens]."""
    result: list[tuple[Sample, float, float]] = []
    for own in by_policy(samples):
        groups, read = [s.group for s in own], [len(observations(s)) if observed else 0 for s in own]
        result += zip(own, *(denominator(n, groups, limit) for n in (trained_lengths(own), read)), strict=True)
    return result


def split_by_group(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Samples in at most `parts` pieces of about equally many groups, in order; the samples of a group stay
    together."""
    groups = list(dict.fromkeys(s.group for s in samples))
    pieces = min(parts, len(groups))
    piece_of = {g: n * pieces // len(groups) for n, g in enumerate(groups)}
    return [[s for s in samples if piece_of[s.group] == piece] for piece in range(pieces)]


Unit = tuple[Group, int, int | None]  # what has an advantage of its own: an episode, or one of its turns


def places(units: Sequence[Unit]) -> list[int]:
    """What each unit is compared with, counted from 0: the same turn, or all, of its group and agent."""
    names = [(g.index, g.agent, turn) for g, _, turn in units]
    order = {name: n for n, name in enumerate(dict.fromkeys(names))}
    return [order[name] for name in names]


def unit_lengths(units: Sequence[Unit]) -> list[int]:
    """Tokens that the model generated."""
    turns = [(g.trajectories[i].turns, turn) for g, i, turn in units]
    return [sum(len(t.completion.tokens) for t in (own if n is None else own[n : n + 1])) for own, n in turns]


def earned(trajectory: Trajectory, penalty: float) -> list[float]:
    """The reward of each trained token of an episode's samples, one after the other."""
    rewards = turn_rewards(trajectory)
    rewards[-1] += penalty
    return [value for own in token_rewards(trajectory, rewards) for value in own]
