import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from birl.rollout.assemble import Usage, by_agent, has_signal, samples, token_rewards, turn_rewards
from birl.rollout.episode import run_episode
from birl.samples import Support
from birl.types import Completion, Feedback, Group, Message, Outcome, Stop, Task, Trajectory, Turn
from tests.rollout.scripted import Scripted, session


def turn(prompt: tuple[int, ...], answer: tuple[int, ...], version: int = 0) -> Turn:
    n = len(answer)
    completion = Completion(tokens=answer, logprobs=(-1.0,) * n, versions=(version,) * n, stop=Stop.STOP)
    return Turn(prompt=prompt, completion=completion)


def trajectory(
    reward: float = 0.0, outcome: Outcome = Outcome.OK, turns: tuple[Turn, ...] = (turn((1,), (2,)),)
) -> Trajectory:
    value = reward if outcome.scored else math.nan
    return Trajectory(turns=turns, reward=value, score=value, outcome=outcome)


def group(*trajectories: Trajectory) -> Group:
    return Group(index=0, task=Task(id="t", prompt="x"), trajectories=trajectories, start_version=0)


def test_turns_that_extend_each_other_are_one_sample() -> None:
    (sample,) = samples(trajectory(turns=(turn((1, 5), (6, 2), 3), turn((1, 5, 6, 2, 8, 9), (7, 2), 4))), 0.5, 1, 2)
    assert sample.tokens.tolist() == [1, 5, 6, 2, 8, 9, 7, 2]
    assert [int(m) for m in sample.mask] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert sample.versions.tolist() == [-1, -1, 3, 3, -1, -1, 4, 4]
    assert (sample.advantage, sample.group, sample.episode) == (0.5, 1, 2)


def test_the_words_of_a_turn_stay_with_its_tokens() -> None:
    """Also of a token that was drawn from all words, and of turns that say nothing."""
    plain, told = turn((1, 5), (6, 2)), turn((1, 5, 6, 2, 8), (7, 2))
    words = Support(counts=(3, 0), ids=(4, 7, 9))
    told = replace(told, completion=replace(told.completion, support=words))
    (sample,) = samples(trajectory(turns=(plain, told)), 0.5, 1, 2)
    assert sample.support == Support(counts=(0, 0, 3, 0), ids=(4, 7, 9))
    (sample,) = samples(trajectory(turns=(plain,)), 0.5, 1, 2)
    assert sample.support is None
    with pytest.raises(ValueError, match="token 0 is not in the support"):
        replace(told.completion, tokens=(5, 2)).possible()
    for wrong in ({"counts": (2,), "ids": (4,)}, {"counts": (-1,), "ids": ()}, {"counts": (1,), "ids": (1.5,)}):
        with pytest.raises(ValueError, match=r"support|is no id"):
            Support(**wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="2 tokens, 1 supports"):
        replace(told.completion, support=Support(counts=(1,), ids=(7,)))


def test_a_rewritten_history_starts_a_new_sample() -> None:
    found = samples(trajectory(turns=(turn((1, 5), (6, 2)), turn((1, 5, 9), (7, 2)))), 0.5, 0, 0)
    assert [s.tokens.tolist() for s in found] == [[1, 5, 6, 2], [1, 5, 9, 7, 2]]


def test_an_empty_answer_gives_no_sample() -> None:
    assert samples(trajectory(turns=(turn((1, 5), ()),)), 0.5, 0, 0) == []


@pytest.mark.parametrize("outcome", [o for o in Outcome if not o.scored])
def test_failures_never_enter_a_baseline(outcome: Outcome) -> None:
    """NeMo-RL committed failed generations as empty text with reward 0, which entered the leave-one-out baseline."""
    mixed = group(trajectory(1.0), trajectory(outcome=outcome), trajectory(0.0))
    assert Usage().usable(mixed) == [0, 2]
    assert Usage(failed="drop_group").usable(mixed) == []
    assert not has_signal(group(trajectory(1.0), trajectory(outcome=outcome)), Usage())


def test_truncated_answers_count_or_not_as_configured() -> None:
    mixed = group(trajectory(1.0), trajectory(0.0, Outcome.TRUNCATED))
    assert Usage().usable(mixed) == [0, 1] and has_signal(mixed, Usage())
    dropped = Usage(truncated="drop")
    assert dropped.usable(mixed) == [0] and not has_signal(mixed, dropped)


def test_a_turn_continues_the_longest_chain_that_it_can() -> None:
    """Two conversations that take turns, as an agent and its helper have."""
    turns = (
        turn((1, 5), (6,)),
        turn((3, 5), (7,)),
        turn((1, 5, 6, 8), (9,)),
        turn((3, 5, 7, 8), (9,)),
        turn((1, 5, 6, 4), (8,)),  # another way to go on from the first answer
    )
    found = samples(trajectory(turns=turns), [0.0, 1.0, 2.0, 3.0, 4.0], 0, 0)
    assert [s.tokens.tolist() for s in found] == [[1, 5, 6, 8, 9], [3, 5, 7, 8, 9], [1, 5, 6, 4, 8]]
    assert [list(s.advantage) for s in found] == [[0, 0, 0, 0, 2.0], [0, 0, 1.0, 0, 3.0], [0, 0, 0, 0, 4.0]]
    assert sum(sum(s.mask) for s in found) == 5


def test_every_token_of_a_chain_sees_what_came_after_it() -> None:
    earned = (0.5, 0.25, 1.0)
    turns = tuple(
        replace(t, reward=r)
        for t, r in zip((turn((1,), (2, 3)), turn((9,), (4,)), turn((1, 2, 3, 5), (6,))), earned, strict=True)
    )
    whole = replace(trajectory(2.0, turns=turns), reward=2.0)
    assert turn_rewards(whole) == [0.5, 0.25, 1.25]  # what is left of the episode's reward is the last turn's
    assert token_rewards(whole, turn_rewards(whole)) == [[0.0, 0.75, 1.25], [1.5]]


def test_agents_are_compared_with_their_like() -> None:
    def talk(a: float, b: float) -> Trajectory:
        turns = (replace(turn((1,), (2,)), agent="a"), replace(turn((4,), (5,)), agent="b"))
        return replace(trajectory((a + b) / 2, turns=turns), rewards={"a": a, "b": b})

    failed = trajectory(outcome=Outcome.ENV_ERROR, turns=())
    first, second = by_agent(group(talk(1.0, -1.0), failed, talk(0.0, 0.5)))
    assert (first.agent, second.agent) == ("a", "b")
    assert [t.reward for t in first.trajectories if t.turns] == [1.0, 0.0]
    assert [t.reward for t in second.trajectories if t.turns] == [-1.0, 0.5]
    assert Usage().usable(first) == [0, 2] == Usage().usable(second)
    assert not has_signal(group(talk(1.0, 1.0), talk(1.0, 1.0)), Usage())
    assert has_signal(group(talk(1.0, -1.0), talk(-1.0, 1.0)), Usage())  # the means are equal
    whole = replace(talk(9.0, 9.0), reward=0.25, rewards={})  # one reward for all of the episode
    assert [[t.reward for t in g.trajectories] for g in by_agent(group(talk(1.0, -1.0), whole))] == [
        [1.0, 0.25],
        [-1.0, 0.25],
    ]
    alone = group(trajectory(1.0))
    assert by_agent(alone) == [alone]


class Office:
    """Who speaks when, what each reply is worth to everyone, and to each alone."""

    def __init__(self, order: str, shared: Sequence[float], alone: Sequence[dict[str, float]]) -> None:
        self.policy, self.steps = order[0], iter(list(zip([*order[1:], ""], shared, alone, strict=True)))

    def start(self) -> tuple[Message, ...]:
        return (Message(role="user", content="Go"),)

    def step(self, reply: Message) -> Feedback:
        following, reward, rewards = next(self.steps)
        more = (Message(role="user", content="more"),)
        return Feedback(messages=more, policy=following, reward=reward, rewards=rewards, done=not following)


@pytest.mark.parametrize("order", ["pwwpw", "pwpww", "pwwwp", "wpwpp"])
def test_what_a_step_gives_is_for_the_turn_before_it_of_each_who_gets_it(order: str) -> None:
    """The planner's part of what the worker's reply is worth belongs to its plan before that, and to no later one; what
    comes before its first word, to that. Against plain floats. Until now all of that was the last turn's."""
    draw = random.Random(order)
    shared = [draw.uniform(-1, 1) for _ in order]
    alone = [{n: draw.uniform(-1, 1) for n in draw.choice(["p", "w", "pw", "wp"])} for _ in order]
    engine = Scripted(["one", "two", "three", "four", "five"])
    played = asyncio.run(run_episode(Office(order, shared, alone), session(engine)))
    for own in by_agent(group(played)):
        expected: list[float] = []
        early = 0.0
        for speaker, everyone, each in zip(order, shared, alone, strict=True):
            value = everyone + each.get(own.agent, 0.0)
            if speaker == own.agent:
                expected.append(value + early)
                early = 0.0
            elif expected:
                expected[-1] += value
            else:
                early += value
        assert turn_rewards(own.trajectories[0]) == pytest.approx(expected)
        assert own.trajectories[0].reward == pytest.approx(sum(expected))


def test_columns_are_arrays_that_hold_every_number_as_it_was() -> None:
    said = Completion.of([5, 6], (-0.5, -1), [0, 1], Stop.STOP)
    assert (said.tokens.dtype, said.logprobs.dtype, said.versions.dtype) == (np.int32, np.float32, np.int32)
    turn = Turn(prompt=np.array([1, 2]), completion=said)
    assert turn == replace(turn) and turn.prompt.dtype == np.int32 and said.ids == (5, 6)
    assert said != replace(said, logprobs=np.array([-0.5, -2.0])) and said != replace(said, stop=Stop.LENGTH)
    assert said.tokens is replace(said, stop=Stop.LENGTH).tokens  # no copy


@pytest.mark.parametrize(
    ("tokens", "why"),
    [([1.5], "1.5 is no token id"), ([2**40], "does not fit"), (["a"], "'a' is no"), ([1, 2], "2 tokens")],
)
def test_what_an_array_would_change_silently_is_refused(tokens: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Completion.of(tokens, [-0.5], [0], Stop.STOP)
