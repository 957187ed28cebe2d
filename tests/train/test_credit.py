"""From groups to advantages, with models whose word is a formula: every path against plain floats."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from birl.algorithms.reduce import DENOMINATORS
from birl.config import schema
from birl.config.load import load
from birl.data.pack import Batch
from birl.errors import BirlError
from birl.learner.distillation import taught_by
from birl.learner.token_figures import behaviour, per_token
from birl.parallel.crew import RankGroup
from birl.parallel.ranks import Ranks
from birl.rollout import assemble
from birl.train.build_worker import credit_of
from birl.types import Completion, Group, Outcome, Sample, Stop, Task, Trajectory, Turn


def episode(tokens: Sequence[int], reward: float, outcome: Outcome = Outcome.OK, **parts: float) -> Trajectory:
    n = len(tokens)
    said = Completion(tokens=tuple(tokens), logprobs=(-0.5,) * n, versions=(0,) * n, stop=Stop.STOP)
    turns = (Turn(prompt=(1, 2, 3), completion=said),)
    return Trajectory(turns=turns, reward=reward, score=reward, outcome=outcome, parts=parts)


def groups() -> list[Group]:
    told = [
        [episode([5, 6], 1.0, a=1.0, b=0.0), episode([7], 0.0, a=0.0, b=0.0), episode([8, 9, 10, 11], 0.5, a=0.5, b=3)],
        [episode([4], 1.0, a=1.0, b=1.0), episode([3, 2, 1], 0.0, Outcome.TRUNCATED, a=0.0, b=1.0)],
    ]  # fmt: skip
    task = Task(id="t", prompt="?")
    return [Group(index=i, task=task, trajectories=tuple(t), start_version=0) for i, t in enumerate(told)]


def config(*words: str) -> schema.RL:
    several = ["env=guess_number"] * ("algorithm.credit=turn" in words)
    return load(schema.RL, ["data.train=x", "rollout.max_tokens=8", *several, *words])


class Says:
    """A model whose log-prob of a token, or value before it, is a function of the token."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def forward(self, batch: Batch) -> Tensor:
        return torch.tensor([self.of(t) for t in batch.targets[batch.entry].tolist()])

    def each(self, batches: Sequence[Batch], verb: Callable[[Batch], Tensor]) -> list[Tensor]:
        return [verb(batch) for batch in batches]

    def __call__(self, batches: Sequence[Batch]) -> list[Tensor]:
        return self.each(batches, self.forward)


def reference_logp(token: int) -> float:
    return -0.1 * token


def value(token: int) -> float:
    return 0.05 * token


def credit(*words: str, greedy: dict[int, float] | None = None, kl_coef: float = 0.0, **models: Any) -> Any:
    keys = config(*words)
    return credit_of(keys, **models).of(groups(), greedy or {}, kl_coef)


def flat(samples: Sequence[Sample], name: str = "advantage") -> list[float]:
    pick = per_token if name == "advantage" else lambda s: getattr(s, name)
    return [a for s in samples for a, m in zip(pick(s), s.mask, strict=True) if m]


REWARDS = [1.0, 0.0, 0.5, 1.0, 0.0]
LENGTHS = [2, 1, 4, 1, 3]
TOKENS = [[5, 6], [7], [8, 9, 10, 11], [4], [3, 2, 1]]


def test_the_kl_in_the_reward_is_taken_from_the_episode() -> None:
    words = ("algorithm.kl_coef=0.1", "algorithm.kl=k1", "algorithm.kl_in=reward")
    found = credit(*words, kl_coef=0.1, reference=Says(reference_logp))
    kl = [sum(-0.5 - reference_logp(t) for t in tokens) for tokens in TOKENS]
    paid = [r - 0.1 * k for r, k in zip(REWARDS, kl, strict=True)]
    means = [sum(paid[:3]) / 3] * 3 + [sum(paid[3:]) / 2] * 2
    assert list(found.by_episode.values()) == pytest.approx([p - m for p, m in zip(paid, means, strict=True)], abs=1e-6)
    assert found.kl == pytest.approx(sum(kl) / 5) and found.episodes == 5


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_returns_are_of_each_token_and_normalised_over_all(coef: float) -> None:
    """REINFORCE++: A_t = r - coef sum_{i >= t} KL_i, less the mean and over the deviation of all tokens."""
    words = ("algorithm=reinforce_pp", f"algorithm.kl_coef={coef}")
    found = credit(*words, kl_coef=coef, reference=Says(reference_logp)).samples
    each = [
        reward - coef * sum(-0.5 - reference_logp(t) for t in tokens[i:])
        for tokens, reward in zip(TOKENS, REWARDS, strict=True)
        for i in range(len(tokens))
    ]
    mean = sum(each) / len(each)
    deviation = (sum((a - mean) ** 2 for a in each) / len(each)) ** 0.5
    assert flat(found) == pytest.approx([(a - mean) / (deviation + 1e-6) for a in each], abs=1e-5)


def test_returns_of_a_talk_count_the_kl_of_later_turns() -> None:
    keys = config("algorithm=reinforce_pp", "algorithm.kl_coef=0.1")
    told = tuple(talk(*rewards, agents=()) for rewards in ((0.0, 1.0), (0.0, 0.0)))
    group = Group(index=0, task=Task(id="t", prompt="?"), trajectories=told, start_version=0)
    made = credit_of(keys, reference=Says(lambda t: -0.7))  # type: ignore[arg-type]
    found = flat(made.of([group], {}, 0.1).samples)
    each = [r - 0.1 * 0.2 * later for r in (1.0, 0.0) for later in (4, 3, 2, 1)]
    mean = sum(each) / len(each)
    deviation = (sum((a - mean) ** 2 for a in each) / len(each)) ** 0.5
    assert found == pytest.approx([(a - mean) / (deviation + 1e-6) for a in each], abs=1e-5)


@pytest.mark.parametrize("micro_batch", [4096, 12])
def test_gae_by_token_with_the_kl_in_each_reward(micro_batch: int) -> None:
    words = ("algorithm=ppo", "algorithm.kl_coef=0.1", "critic.gamma=0.9", "critic.lam=0.8", "critic.whiten=false")
    size = ("model.max_length=12", f"learner.tokens_per_microbatch={micro_batch}")
    found = credit(*words, *size, kl_coef=0.1, reference=Says(reference_logp), critic=Says(value))
    advantages, returns = [], []
    for tokens, reward in zip(TOKENS, REWARDS, strict=True):
        after, following, own = 0.0, 0.0, []
        for i, t in reversed(list(enumerate(tokens))):
            earned = -0.1 * (-0.5 - reference_logp(t)) + (reward if i == len(tokens) - 1 else 0.0)
            following = earned + 0.9 * after - value(t) + 0.9 * 0.8 * following
            after = value(t)
            own.insert(0, (following, following + value(t)))
        advantages += [a for a, _ in own]
        returns += [r for _, r in own]
    assert flat(found.samples) == pytest.approx(advantages, abs=1e-5)
    assert flat(found.samples, "returns") == pytest.approx(returns, abs=1e-5)
    assert flat(found.samples, "values") == pytest.approx([value(t) for tokens in TOKENS for t in tokens])


def test_whitening_is_over_all_tokens_of_the_step() -> None:
    found = flat(
        credit("algorithm=ppo", "algorithm.kl_coef=0.1", reference=Says(reference_logp), critic=Says(value)).samples
    )
    mean = sum(found) / len(found)
    assert mean == pytest.approx(0, abs=1e-6)
    assert sum(a * a for a in found) / len(found) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("between", [(3, 4), ()])
def test_turns_share_an_advantage(between: tuple[int, ...]) -> None:
    """Turns without a token of the environment between them were one."""
    keys = config("algorithm=ppo", "algorithm.advantage=turn_gae", "algorithm.kl_coef=0.1", "critic.whiten=false")
    first = Completion(tokens=(5, 6), logprobs=(-0.5,) * 2, versions=(0,) * 2, stop=Stop.STOP)
    second = Completion(tokens=(7, 8, 9), logprobs=(-0.5,) * 3, versions=(0,) * 3, stop=Stop.STOP)
    turns = (Turn(prompt=(1, 2), completion=first), Turn(prompt=(1, 2, 5, 6, *between), completion=second))
    talk = Trajectory(turns=turns, reward=1.0, score=1.0, outcome=Outcome.OK)
    group = Group(index=0, task=Task(id="t", prompt="?"), trajectories=(talk, talk), start_version=0)
    made = credit_of(keys, reference=Says(lambda t: -0.5), critic=Says(value))  # type: ignore[arg-type]
    sample = made.of([group], {}, 0.0).samples[0]
    last = 1.0 - value(7)
    before = 0.0 + value(7) - value(5) + 0.95 * last
    assert flat([sample]) == pytest.approx([before] * 2 + [last] * 3, abs=1e-6)
    assert flat([sample], "returns") == pytest.approx([before + value(5)] * 2 + [last + value(7)] * 3, abs=1e-6)


def talk(*rewards: float, agents: tuple[str, ...] = ()) -> Trajectory:
    """Turns of two tokens each, one conversation for each agent; the last reward includes all that is left."""
    turns, seen = [], dict.fromkeys({*agents, ""}, (1,))
    for number, reward in enumerate(rewards):
        agent = agents[number] if agents else ""
        said = Completion(tokens=(5, 6), logprobs=(-0.5,) * 2, versions=(0,) * 2, stop=Stop.STOP)
        turns.append(Turn(prompt=(*seen[agent], 2), completion=said, reward=reward, agent=agent))
        seen[agent] = (*seen[agent], 2, 5, 6)
    return Trajectory(turns=tuple(turns), reward=sum(rewards), score=sum(rewards), outcome=Outcome.OK)


def of(talks: Sequence[Trajectory], *words: str) -> Any:
    group = Group(index=0, task=Task(id="t", prompt="?"), trajectories=tuple(talks), start_version=0)
    return credit_of(config(*words)).of([group], {}, 0.0)


def test_each_turn_is_thanked_for_what_came_after_it() -> None:
    talks = [talk(0.0, 1.0, 2.0), talk(0.5, 0.0)]
    found = of(talks, "algorithm.credit=turn", "algorithm.turn_discount=0.5").samples
    returns = [[0.5 * (1 + 0.5 * 2), 1 + 0.5 * 2, 2.0], [0.5, 0.0]]
    means = [(1.0 + 0.5) / 2, (2.0 + 0.0) / 2, 2.0]
    expected = [r - means[n] for own in returns for n, r in enumerate(own) for _ in range(2)]
    assert flat(found) == pytest.approx(expected)
    alike = of(talks).samples
    assert flat(alike) == pytest.approx([3 - 1.75] * 6 + [0.5 - 1.75] * 4)


def test_a_critic_is_told_when_each_turn_earned_what() -> None:
    keys = ("algorithm=ppo", "algorithm.kl_coef=0", "algorithm.kl_in=loss", "algorithm.kl=k3", "critic.whiten=false")
    group = Group(index=0, task=Task(id="t", prompt="?"), trajectories=(talk(1.0, -2.0),), start_version=0)
    made = credit_of(config(*keys, "critic.lam=1"), critic=Says(lambda t: 0.0))  # type: ignore[arg-type]
    (sample,) = made.of([group], {}, 0.0).samples
    assert flat([sample], "returns") == pytest.approx([-1.0, -1.0, -2.0, -2.0])


def test_players_are_trained_on_their_own_rewards() -> None:
    def game(a: float, b: float) -> Trajectory:
        return replace(talk(0.0, 0.0, 0.0, agents=("a", "b", "a")), reward=(a + b) / 2, rewards={"a": a, "b": b})

    found = of([game(1.0, -1.0), game(-1.0, 1.0), game(1.0, -1.0)])
    assert sorted(set(flat(found.samples))) == pytest.approx([-4 / 3, -2 / 3, 2 / 3, 4 / 3])
    assert len(found.samples) == 6 and sum(sum(s.mask) for s in found.samples) == 18
    by_turn = of([game(1.0, -1.0), game(-1.0, 1.0), game(1.0, -1.0)], "algorithm.credit=turn")
    assert sorted(set(flat(by_turn.samples))) == pytest.approx([-4 / 3, -2 / 3, 2 / 3, 4 / 3])


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.turn_discount=0.5"],
        ["algorithm.credit=turn", "algorithm.advantage=gdpo"],
        ["algorithm.credit=turn", "algorithm=remax"],
        ["algorithm.credit=turn", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
    ],
)
def test_turns_cannot_be_combined_with_everything(words: list[str]) -> None:
    with pytest.raises(BirlError, match=r"turn_discount|algorithm\.credit=turn"):
        config(*words)


def test_a_teacher_is_followed_token_by_token() -> None:
    teacher = taught_by({"": cast(Any, Says(reference_logp))}, None, RankGroup(Ranks()))
    found = credit("algorithm=distill", "algorithm.teacher=t", "algorithm.teacher_coef=2", teacher=teacher)
    assert flat(found.samples) == pytest.approx([2 * (reference_logp(t) + 0.5) for ts in TOKENS for t in ts], abs=1e-6)
    both = credit("algorithm.teacher=t", teacher=teacher)
    means = [0.5, 0.5, 0.5, 0.5, 0.5]
    expected = [r - m + reference_logp(t) + 0.5 for r, m, ts in zip(REWARDS, means, TOKENS, strict=True) for t in ts]
    assert flat(both.samples) == pytest.approx(expected, abs=1e-6)


def test_the_greedy_baseline() -> None:
    found = credit("algorithm=remax", greedy={0: 0.25, 1: 1.0})
    assert list(found.by_episode.values()) == pytest.approx([0.75, -0.25, 0.25, 0.0, -1.0])
    without = credit("algorithm=remax", greedy={1: 1.0})  # the greedy answer of group 0 failed: it is no reward of 0
    assert set(without.by_episode) == {(1, 0), (1, 1)}


def test_lengths_and_pairs_reach_the_estimator() -> None:
    optimal = credit("algorithm=opo").by_episode.values()
    means = [(2 * 1.0 + 4 * 0.5) / 7] * 3 + [1 / 4] * 2
    assert list(optimal) == pytest.approx([r - m for r, m in zip(REWARDS, means, strict=True)], abs=1e-6)
    paired = credit("algorithm=online_dpo")
    assert [(s.group, s.advantage) for s in paired.samples] == [(0, 1.0), (0, -1.0), (1, 1.0), (1, -1.0)]


def by_gdpo(columns: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    """arXiv:2601.05242 of the weight and the values of each reward, in the groups of `groups()`."""

    def normalised(values: Sequence[float]) -> list[float]:
        mean = sum(values) / len(values)
        return [(v - mean) / ((sum((u - mean) ** 2 for u in values) / len(values)) ** 0.5 + 1e-6) for v in values]

    each = [[w * a for a in (*normalised(v[:3]), *normalised(v[3:]))] for w, v in columns]
    return normalised([sum(own) for own in zip(*each, strict=True)])


@pytest.mark.parametrize("weights", [{"a": 1.0}, {"a": 0.7, "b": 0.5}, {}])
def test_gdpo_reads_each_reward_function_and_the_environments_own_reward(weights: dict[str, float]) -> None:
    """Figures of an environment (`Feedback.info`) were rewards without reward functions, such as its number of invalid
    actions, and its own reward was never read."""
    parts = {"a": REWARDS, "b": [0.0, 0.0, 3.0, 1.0, 1.0]}
    own = [r - sum(w * parts[n][i] for n, w in weights.items()) for i, r in enumerate(REWARDS)]
    columns = [*((w, parts[n]) for n, w in weights.items()), *([(1.0, own)] if any(own) else [])]
    found = list(credit("algorithm=gdpo", weights=weights).by_episode.values())
    assert found == pytest.approx(by_gdpo(columns), abs=1e-5)


def test_a_pair_needs_both_answers() -> None:
    """A masked or empty one, or an answer in pieces, ended the run with a ValueError of the loss."""
    masked = credit("algorithm=online_dpo", "algorithm.mask_truncated=true")
    assert [(s.group, s.advantage) for s in masked.samples] == [(0, 1.0), (0, -1.0)]
    first, last = groups()
    said = (episode([], 1.0), *first.trajectories[1:])
    silent = credit_of(config("algorithm=online_dpo")).of([replace(first, trajectories=said), last], {}, 0.0)
    assert {s.group for s in silent.samples} == {1}
    whole = first.trajectories[0]
    turns = (*whole.turns, replace(whole.turns[0], prompt=(1, 9)))
    pieces = replace(first, trajectories=(replace(whole, turns=turns), *first.trajectories[1:]))
    with pytest.raises(BirlError, match="one whole answer with another"):
        credit_of(config("algorithm=online_dpo")).of([pieces], {}, 0.0)


@pytest.mark.parametrize("denominator", ["sequence", "constant", "token", "group"])
@pytest.mark.parametrize("masked", [False, True])
def test_an_answer_without_tokens_counts_as_an_answer(denominator: str, masked: bool) -> None:
    """In the baseline and, as in TRL, in the denominator, where it was left out."""
    told = (episode([5, 6], 1.0), episode([], 0.0), episode([7], 0.5), episode([], 0.0, Outcome.TRUNCATED))
    group = replace(groups()[0], trajectories=told)
    words = ("algorithm.mask_truncated=true",) if masked else ()
    credited = credit_of(config("algorithm=grpo", "algorithm.kl_coef=0", *words)).of([group], {}, 0.0)
    n = 3 if masked else 4
    weighed = assemble.weighed(credited.samples, DENOMINATORS[denominator], 8, observed=True)
    expected = {"sequence": [1 / (2 * n), 1 / n], "constant": [1 / (8 * n)] * 2}.get(denominator, [1 / 3] * 2)
    assert [w for s, w, _ in weighed if s.mask.any()] == pytest.approx(expected)
    mean, deviation = 0.375, (11 / 64) ** 0.5
    assert credited.by_episode[0, 0] == pytest.approx((1 - mean) / deviation, rel=1e-5)
    assert credited.by_episode.keys() == {(0, 0), (0, 2)}


@pytest.mark.parametrize("advantage", ["gdpo", "pass_at_k", "zero"])
@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.overlong_buffer=4"],
        ["algorithm.length_penalty=0.1"],
        ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
    ],
)
def test_what_changes_the_reward_goes_with_advantages_that_read_it(advantage: str, words: list[str]) -> None:
    with pytest.raises(BirlError, match="does not use the penalties of"):
        config(f"algorithm.advantage={advantage}", "algorithm.teacher=t", *words)


def test_what_is_masked_still_counts_in_the_baseline() -> None:
    found = credit("algorithm.mask_truncated=true")
    assert found.by_episode[1, 0] == pytest.approx(0.5) and len(found.samples) == 4
    dropped = credit("rollout.truncated=drop")
    assert dropped.by_episode[1, 0] == pytest.approx(0.0) and (1, 1) not in dropped.by_episode


def test_length_penalties_change_the_rewards() -> None:
    found = credit("algorithm.length_penalty=1", "algorithm.baseline=none")
    expected = [1 + 0.5 - 1 / 3, min(0, 0.5), 0.5 + min(0.0, 0.5 - 1), 1.5, min(0.0, 0.5 - 1)]
    assert list(found.by_episode.values()) == pytest.approx(expected, abs=1e-6)


def custom(tmp_path: Any, text: str) -> str:
    (tmp_path / "mine.py").write_text(text)
    return f"algorithm.advantage={tmp_path}/mine.py:advantage"


def test_a_function_of_ones_own(tmp_path: Any) -> None:
    text = "def advantage(rewards, group, *, lengths, bonus=1.0):\n    return rewards / lengths + bonus\n"
    found = credit(custom(tmp_path, text), "algorithm.advantage_args=[bonus=2]")
    assert list(found.by_episode.values()) == pytest.approx([r / n + 2 for r, n in zip(REWARDS, LENGTHS, strict=True)])


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("def advantage(rewards, group): return 3", (), "one finite number for each of 5 rewards"),
        ("def advantage(rewards, group): return rewards / 0", (), "one finite number"),
        ("def advantage(rewards, group, *, tau): return rewards", (), r"needs tau\. Set algorithm\.advantage_args"),
        ("def advantage(rewards, group, *, tau=1.0): return rewards", ("tua=2",), "Did you mean tau"),
        ("def advantage(rewards, group, *, tau=1.0): return rewards", ("tau=x",), "tau=x must be a number"),
        ("def other(rewards, group): return rewards", (), "has no function advantage. It has: other"),
        ("import nothing_of_that_name", (), r"cannot be imported: \S*mine\.py:1: ModuleNotFoundError"),
        ("def advantage(rewards, group):\n return rewards[99]", (), r"it failed: \S*mine\.py:2: IndexError"),
        ("def advantage(rewards, group): raise SystemExit(3)", (), r"it failed: \S*mine\.py:1: SystemExit: 3"),
        ("def advantage(rewards): return rewards", (), r"too many positional .* with \(rewards, group\); options"),
        ("def advantage(rewards, group, tau): return rewards", (), r"a required argument: 'tau'\. It is called"),
        ("from torch import relu as advantage", (), "name a function that is written in Python"),
        ("def advantage(rewards, group, **more): return rewards", (), "cannot be checked"),
    ],
)
def test_a_broken_function_is_told_before_or_at_the_first_step(
    tmp_path: Any, text: str, words: tuple[str, ...], message: str
) -> None:
    more = [f"algorithm.advantage_args=[{','.join(words)}]"] if words else []
    with pytest.raises(BirlError, match=message):
        credit(custom(tmp_path, text), *more)


def test_behaviour_is_of_the_trained_tokens() -> None:
    assert behaviour(credit().samples[0]).tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("words", [("scale_rewards=batch",), ("baseline=batch",), ("advantage=gdpo",), ("returns",)])
def test_environments_of_a_mixture_are_compared_within_themselves(words: tuple[str, ...]) -> None:
    keys = [f"algorithm.{w}" for w in words] if words != ("returns",) else ["algorithm=reinforce_pp"]
    keys += ["algorithm.kl_coef=0", "env=mixture", "env.parts=[countdown,guess_number]"]
    first, second = groups()
    rich = [replace(t, reward=100 * t.reward) for t in first.trajectories]
    places = {"countdown": [first, replace(second, index=3)], "guess_number": [replace(first, index=1), second]}
    places["guess_number"] = [
        replace(g, index=i, trajectories=tuple(rich)) for i, g in enumerate(places["guess_number"], 1)
    ]
    own = {
        name: [replace(g, task=replace(g.task, columns={"env": name})) for g in some] for name, some in places.items()
    }
    both = sorted((g for some in own.values() for g in some), key=lambda g: g.index)
    each = {name: credit_of(config(*keys)).of(some, {}, 0.0) for name, some in own.items()}
    whole = credit_of(config(*keys)).of(both, {}, 0.0)
    assert [s.group for s in whole.samples] == sorted(s.group for s in whole.samples) and whole.episodes == 11
    expected = sorted((s for result in each.values() for s in result.samples), key=lambda s: s.group)
    assert flat(whole.samples) == flat(expected)
    assert whole.by_episode == {**each["countdown"].by_episode, **each["guess_number"].by_episode}
    plain = credit_of(config(*keys))
    plain.mixture = False
    assert flat(plain.of(both, {}, 0.0).samples) != pytest.approx(flat(whole.samples))
