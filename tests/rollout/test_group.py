"""A group: n episodes of one task, scored."""

import asyncio
from collections.abc import Sequence

from birl.rewards.score import Score
from birl.rollout.group import Rollout
from birl.rollout.session import Limits
from birl.rollout.tasks import prompt_tokens
from birl.types import Feedback, Message, Outcome, SamplingParams, Task
from tests.rollout.scripted import CHAT, Scripted

PARAMS = SamplingParams(max_tokens=40)


class Endless:
    """Asks on and on; each answer is worth 1."""

    async def start(self) -> tuple[Message, ...]:
        return (Message(role="user", content="Go"),)

    async def step(self, reply: Message) -> Feedback:
        return Feedback(messages=(Message(role="user", content="On"),), reward=1.0, done=False)

    async def close(self) -> None:
        pass


def test_rewards_are_added_and_it_stays_known_why_an_episode_was_cut() -> None:
    async def score(task: Task, texts: list[str]) -> Sequence[Score]:
        assert texts == ["word", "word"]
        return [
            Score(value=0.5, parts={"half": 0.5}),
            Score(value=float("nan"), outcome=Outcome.TIMEOUT, detail="slow"),
        ]

    room = len(CHAT.render((Message(role="user", content="Go"),))) + 10
    rollout = Rollout(
        engine=Scripted(lambda _: "word"), chat=CHAT, open_env=lambda task: Endless(), score=score,
        limits=Limits(tokens=room), seed=0,
    )  # fmt: skip
    cut, late = asyncio.run(rollout.group(3, Task(id="t", prompt="Go"), 2, PARAMS)).trajectories
    assert (cut.outcome, cut.reward, cut.parts) == (Outcome.TRUNCATED, 1.5, {"half": 0.5})
    assert "leaves no room" in cut.detail
    assert (late.outcome, late.detail) == (Outcome.TIMEOUT, "slow") and late.reward != late.reward


def test_a_prompt_that_cannot_fit_is_not_encoded() -> None:
    """Ten megabytes took 40 s."""

    class Never:
        def render(self, messages: object) -> tuple[int, ...]:
            raise AssertionError("it was encoded")

    long = Task(id="row 1", prompt=(Message(role="user", content="x" * 10**7),), columns={})
    assert prompt_tokens(Never(), long, 512) == 513  # type: ignore[arg-type]
    assert prompt_tokens(CHAT, Task(id="row 2", prompt=(Message(role="user", content="Hi"),), columns={}), 512) < 513
