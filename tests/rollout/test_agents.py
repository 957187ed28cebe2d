"""An agent's episode: its reward, and how it fails."""

import asyncio
import math
from typing import Any

import pytest

from birl.errors import Aborted
from birl.types import Outcome
from tests.rollout.scripted import Scripted
from tests.rollout.test_episode import play, user


class Talks:
    """An agent; `then` is what it returns, or raises."""

    def __init__(self, then: Any = 1.0, questions: tuple[str, ...] = ("Hi",), careless: bool = False) -> None:
        self.then, self.questions, self.careless, self.closed = then, questions, careless, 0

    async def run(self, model: Any) -> Any:
        for question in self.questions:
            try:
                await model.ask((user(question),), agent=question if isinstance(self.then, dict) else "")
            except Exception:
                if not self.careless:
                    raise
        if isinstance(self.then, Exception):
            raise self.then
        return self.then

    async def close(self) -> None:
        self.closed += 1


def test_an_agent_gives_its_reward() -> None:
    found = play(Talks(0.5, ("Hi", "Bye")))
    assert (found.outcome, found.reward, len(found.turns)) == (Outcome.OK, 0.5, 2)


def test_each_of_several_agents_has_its_own() -> None:
    found = play(Talks({"a": 1.0, "b": -0.5, "never spoke": 9.0}, ("a", "b")))
    assert found.rewards == {"a": 1.0, "b": -0.5} and found.reward == 0.25
    assert [t.agent for t in found.turns] == ["a", "b"]
    missing = play(Talks({"a": 1.0}, ("a", "b")))
    assert missing.outcome is Outcome.ENV_ERROR and "no reward for b" in missing.detail


@pytest.mark.parametrize(
    ("agent", "detail"),
    [
        (Talks(None), "gave no reward"),
        (Talks(math.nan), "reward is nan"),
        (Talks("good"), "the agent's reward is 'good'; it must be a number"),
        (Talks({"Hi": "x"}), "the reward of agent 'Hi' is 'x'"),
        (Talks(1.0, ()), "never called"),
        (Talks(ValueError("bad plan")), "bad plan"),
    ],
)
def test_an_agent_without_a_reward_has_failed(agent: Talks, detail: str) -> None:
    found = play(agent)
    assert found.outcome is Outcome.ENV_ERROR and detail in found.detail and math.isnan(found.reward)
    assert agent.closed == 1


def test_an_agent_that_swallows_the_engines_failure_has_not_earned_its_reward() -> None:
    class Down(Scripted):
        async def generate(self, *args: Any, **keys: Any) -> Any:
            raise ConnectionError("gone")

    found = play(Talks(1.0, careless=True), Down([]))
    assert found.outcome is Outcome.ENGINE_ERROR and math.isnan(found.reward)


def test_an_agent_that_is_cut_keeps_a_reward_it_has() -> None:
    found = play(Talks(0.5, ("Hi", "Bye"), careless=True), turns=1)
    assert (found.outcome, found.reward, len(found.turns)) == (Outcome.TRUNCATED, 0.5, 1)
    without = play(Talks(0.5, ("Hi", "Bye")), turns=1)
    assert without.outcome is Outcome.ENV_ERROR and "max_turns=1" in without.detail
    nothing = play(Talks(0.5, careless=True), tokens=2)  # it asked, and got no answer
    assert nothing.outcome is Outcome.ENV_ERROR and "leaves no room for an answer within 2" in nothing.detail


def test_an_answer_that_the_agent_did_not_wait_for_is_no_turn() -> None:
    """It comes after the reward, which therefore has no value for its speaker."""

    class Leaves(Talks):
        async def run(self, model: Any) -> Any:
            await model.ask((user("Hi"),), agent="a")
            self.late = asyncio.ensure_future(model.ask((user("Bye"),), agent="b"))
            await asyncio.sleep(0.01)
            return {"a": 1.0}

        async def close(self) -> None:
            await asyncio.wait({self.late})
            assert isinstance(self.late.exception(), Aborted)

    found = play(Leaves(), Scripted(["x", "y"], delay=0.05))
    assert (found.outcome, found.rewards, [t.agent for t in found.turns]) == (Outcome.OK, {"a": 1.0}, ["a"])


def test_numbers_of_an_agent_are_figures() -> None:
    agent = Talks(0.5)
    agent.info = {"tries": 2}  # type: ignore[attr-defined]
    assert play(agent).parts == {"tries": 2.0}
    agent.info = {"tries": "two"}  # type: ignore[attr-defined]
    assert "info['tries'] is 'two'; it must be a number" in play(agent).detail
    agent.info = "what the agent keeps for itself"  # type: ignore[attr-defined]
    assert not play(agent).parts
