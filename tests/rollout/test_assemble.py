import math

import pytest

from birl.rollout.assemble import Usage, has_signal, samples
from birl.types import Completion, Group, Outcome, Stop, Task, Trajectory, Turn


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
    assert sample.tokens == (1, 5, 6, 2, 8, 9, 7, 2)
    assert [int(m) for m in sample.mask] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert sample.versions == (-1, -1, 3, 3, -1, -1, 4, 4)
    assert (sample.advantage, sample.group, sample.episode) == (0.5, 1, 2)


def test_a_rewritten_history_starts_a_new_sample() -> None:
    found = samples(trajectory(turns=(turn((1, 5), (6, 2)), turn((1, 5, 9), (7, 2)))), 0.5, 0, 0)
    assert [s.tokens for s in found] == [(1, 5, 6, 2), (1, 5, 9, 7, 2)]


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
