"""Several policies in one episode: each is credited as if it were alone."""

import random
from collections.abc import Sequence

import pytest

from birl.learner.token_figures import per_token
from birl.train.build_worker import credit_of
from birl.types import Completion, Group, Outcome, Stop, Task, Trajectory, Turn
from tests.train.test_credit import config


def several(seed: int, names: Sequence[str] = ("planner", "worker")) -> list[Group]:
    """Two prompts, four episodes each, with turns of policies whose rewards are of other sizes; in some the second one
    says nothing, and one has failed."""
    chosen, result = random.Random(seed), []
    for index in range(2):
        episodes = []
        for number in range(4):
            who = [names[0], *(chosen.choice(names) for _ in range(chosen.randint(0, 3)))]
            turns, ids = [], [1]
            for name in who:
                said = [chosen.randint(2, 30) for _ in range(chosen.randint(1, 4))]
                n = len(said)
                told = Completion(tokens=tuple(said), logprobs=(-0.5,) * n, versions=(0,) * n, stop=Stop.STOP)
                turns.append(Turn(prompt=tuple(ids), completion=told, agent=name, policy=name))
                ids += [*said, 1]
            failed = index == 0 and number == 3
            own = {name: chosen.uniform(0, 100.0 if name == names[0] else 1.0) for name in sorted(set(who))}
            reward = float("nan") if failed else sum(own.values()) / len(own)
            episodes.append(
                Trajectory(
                    turns=tuple(turns),
                    reward=reward,
                    score=reward,
                    outcome=Outcome.TIMEOUT if failed else Outcome.OK,
                    rewards={} if failed else own,
                )
            )
        task = Task(id=f"{index}", prompt="?")
        result.append(Group(index=index, task=task, trajectories=tuple(episodes), start_version=0))
    return result


def by_hand(all_groups: Sequence[Group], name: str, way: str) -> dict[tuple[int, int], float]:
    """The advantages of one policy by the papers' formulas, as if the others were not there."""
    told: dict[tuple[int, int], tuple[float, int]] = {}
    for g in all_groups:
        for i, t in enumerate(g.trajectories):
            words = sum(len(turn.completion.tokens) for turn in t.turns if turn.policy == name)
            if t.outcome is Outcome.OK and words:
                told[g.index, i] = t.rewards[name], words

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def deviation(values: Sequence[float]) -> float:
        return mean([(v - mean(values)) ** 2 for v in values]) ** 0.5

    rewards = {place: reward for place, (reward, _) in told.items()}
    of = {g: [r for (own, _), r in rewards.items() if own == g] for g, _ in rewards}
    if way == "grpo":  # arXiv:2402.03300 section 4.1
        return {p: (r - mean(of[p[0]])) / (deviation(of[p[0]]) + 1e-6) for p, r in rewards.items()}
    if way == "rloo":  # arXiv:2402.14740
        sizes = {g: len(values) for g, values in of.items()}
        return {p: (r - mean(of[p[0]])) * sizes[p[0]] / max(sizes[p[0]] - 1, 1) for p, r in rewards.items()}
    if way == "batch":
        centred = {p: r - mean(of[p[0]]) for p, r in rewards.items()}
        return {p: a / (deviation(list(centred.values())) + 1e-6) for p, a in centred.items()}
    tokens = [reward for reward, words in told.values() for _ in range(words)]  # reinforce_pp, arXiv:2501.03262
    return {p: (r - mean(tokens)) / (deviation(tokens) + 1e-6) for p, r in rewards.items()}


@pytest.mark.parametrize("failed", ["drop", "drop_group"])
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("grpo", ("algorithm=grpo",)),
        ("rloo", ("algorithm=rloo", "algorithm.kl_coef=0")),
        ("batch", ("algorithm.scale_rewards=batch",)),
        ("returns", ("algorithm=reinforce_pp", "algorithm.kl_coef=0")),
    ],
)
def test_each_policy_is_credited_as_if_it_were_alone(way: str, words: tuple[str, ...], failed: str) -> None:
    """REINFORCE++ and scale_rewards=batch once mixed the policies: one with rewards up to 100 decided about the other;
    and drop_group took an episode in which a policy said nothing for one that had failed."""
    for seed in range(10):
        given = several(seed)
        made = credit_of(config(*words, f"rollout.failed={failed}")).of(given, {}, 0.0)
        kept = [g for g in given if failed == "drop" or all(t.outcome is Outcome.OK for t in g.trajectories)]
        for name in ("planner", "worker"):
            expected = by_hand(kept, name, way)
            mine = [s for s in made.samples if s.policy == name]
            assert {(s.group, s.episode) for s in mine} == expected.keys()
            for s in mine:
                own = per_token(s)[s.mask].tolist()
                assert own == pytest.approx([expected[s.group, s.episode]] * len(own), rel=1e-4, abs=1e-4)
        assert [s.group for s in made.samples] == sorted(s.group for s in made.samples)
