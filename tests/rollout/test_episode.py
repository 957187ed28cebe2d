"""Whatever an environment, an agent or the engine does has a typed outcome, never a reward of 0, and is closed."""

import asyncio
import contextlib
import json
import math
import re
import threading
import time
from typing import Any

import pytest

from birl import foreign
from birl.envs.functions import StepFunction
from birl.errors import Aborted
from birl.rollout.assemble import samples
from birl.rollout.episode import run_episode
from birl.rollout.session import Limits, checked
from birl.types import Feedback, Message, Outcome, Task, ToolCall, Trajectory
from birl.waits import TABLE
from tests.rollout.scripted import CHAT, Scripted, session


def user(text: str) -> Message:
    return Message(role="user", content=text)


class Countdown:
    """Done after so many replies, each worth one more than the last."""

    def __init__(self, steps: int = 2, **broken: Any) -> None:
        self.steps, self.broken, self.said, self.closed = steps, broken, [], 0

    async def start(self) -> tuple[Message, ...]:
        await self._maybe("start")
        return (user("Go"),)

    async def step(self, reply: Message) -> Feedback:
        await self._maybe("step")
        self.said.append(reply.content)
        n = len(self.said)
        return Feedback(messages=(user("more"),), reward=float(n), score=1.0, done=n == self.steps, info={"n": n})

    async def close(self) -> None:
        self.closed += 1
        await self._maybe("close")

    async def _maybe(self, where: str) -> None:
        if where in self.broken:
            await self.broken[where]()


async def fails() -> None:
    raise KeyError("lost")


async def hangs() -> None:
    await asyncio.sleep(60)


def play(env: Any, engine: Scripted | None = None, **limits: Any) -> Trajectory:
    engine = engine or Scripted(["one", "two", "three", "four"])
    return asyncio.run(run_episode(env, session(engine, Limits(**limits))))


def test_rewards_are_added_and_belong_to_their_turns() -> None:
    env = Countdown(3)
    found = play(env)
    assert (found.outcome, found.reward, found.score, found.parts) == (Outcome.OK, 6.0, 3.0, {"n": 3})
    assert [t.reward for t in found.turns] == [1.0, 2.0, 3.0]
    assert env.said == ["one", "two", "three"] and env.closed == 1


def test_a_step_function_that_goes_on_behind_an_answer_is_one_sample() -> None:
    """RL2's prefix rule: the end token of an answer, which the function does not see, stays where it was sampled."""

    def step(state: str, action: str, extra_info: Any) -> dict[str, Any]:
        return {"next_state": f"{state}{action} Again:", "reward": 1.0, "done": state.count("Again") == 2}

    task = Task(id="row 1", prompt=(user("Count."),), columns={})
    found = play(StepFunction(step, task, lambda _: "Count: ", {}))
    assert (found.outcome, len(found.turns), found.reward) == (Outcome.OK, 3, 3.0)
    (sample,) = samples(found, 1.0, 0, 0)
    end = "<|im_end|>"
    assert CHAT.decode(tuple(sample.tokens.tolist())) == f"Count: one{end} Again:two{end} Again:three{end}"


def test_too_many_turns_are_cut_and_keep_what_they_earned() -> None:
    env = Countdown(9)
    found = play(env, turns=2)
    assert (found.outcome, found.reward) == (Outcome.TRUNCATED, 3.0) and env.closed == 1


def test_no_room_left_is_truncated() -> None:
    found = play(Countdown(9), tokens=len(CHAT.render((user("Go"),))) + 10)
    assert found.outcome is Outcome.TRUNCATED and found.reward == 1.0 and "leaves no room" in found.detail


@pytest.mark.parametrize("where", ["start", "step", "close"])
def test_an_environment_that_fails_has_no_reward(where: str) -> None:
    env = Countdown(1, **{where: fails})
    found = play(env)
    assert found.outcome is Outcome.ENV_ERROR and math.isnan(found.reward) and "KeyError" in found.detail
    assert env.closed == 1


MESSAGE: Any = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Feedback(reward=math.nan), "the environment's reward is nan"),
        (Feedback(reward=math.inf), "the environment's reward is inf"),
        (Feedback(reward="1"), "the environment's reward is '1'; it must be a number"),  # type: ignore[arg-type]
        (Feedback(reward=None), "the environment's reward is None"),  # type: ignore[arg-type]
        (Feedback(reward=1.0, score="x"), "the environment's score is 'x'"),  # type: ignore[arg-type]
        (Feedback(info={"level": "easy"}), "info['level'] is 'easy'"),  # type: ignore[dict-item]
        (Feedback(messages="Again.", done=False), "Feedback(messages='Again.'): must be"),  # type: ignore[arg-type]
        (Feedback(reward=1e200), "the environment's reward is 1e+200; it must be between"),
        (Feedback(messages=(MESSAGE,), done=False), "Feedback(messages=({'role'"),
        (Feedback(prompt=(), done=False), "The model's input is ();"),
        (None, "step returned None; it must return a birl.types.Feedback"),
        (("x", 1.0, True, {}), "step returned ('x', 1.0, True, {})"),
    ],
)
def test_what_step_must_not_return_is_told(found: Any, told: str) -> None:
    class Broken(Countdown):
        async def step(self, reply: Message) -> Feedback:
            return found

    played = play(Broken())
    assert played.outcome is Outcome.ENV_ERROR and math.isnan(played.reward) and played.detail.startswith(told)


def test_the_model_takes_messages_as_openai_writes_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = [MESSAGE, {"role": "assistant", "content": None, "tool_calls": [call]}]
    found = checked([*said, {"role": "tool", "tool_call_id": "c1", "content": "7"}, user("So?")])
    assert found[0] == user("Hi") and found[3] == user("So?")
    assert found[1] == Message(
        role="assistant", content="", tool_calls=(ToolCall(name="add", arguments="{}", id="c1"),)
    )
    assert found[2] == Message(role="tool", content="7", tool_call_id="c1")


class Unclosed:
    """One turn, and nothing to give back."""

    async def start(self) -> Any:
        return [MESSAGE]

    async def step(self, reply: Message) -> Feedback:
        return Feedback(reward=1.0)


def test_close_is_optional() -> None:
    found = play(Unclosed())
    assert (found.outcome, found.reward, found.detail) == (Outcome.OK, 1.0, "")


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


class MuteExit(SystemExit):
    __str__ = Mute.__str__


class Both(Exception, SystemExit):
    pass


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, Own, Mute, MuteExit, Both]
)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("where", ["start", "step", "close"])
def test_no_exception_of_an_environment_ends_the_run(error: type[BaseException], plain: bool, where: str) -> None:
    class Raises(Countdown):
        pass

    async def later(self: Any, *_: Any) -> Any:
        raise error("mine")

    def now(self: Any, *_: Any) -> Any:
        raise error("mine")

    setattr(Raises, where, now if plain else later)
    found = play(Raises(1))
    told = "cancelled from within" if error is asyncio.CancelledError else error.__name__
    assert found.outcome is Outcome.ENV_ERROR and told in found.detail


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration])
@pytest.mark.parametrize("name", ["run", "admit", "tools", "policy", "close", "pictures"])
def test_an_attribute_that_raises_ends_its_episode_alone(name: str, error: type[BaseException]) -> None:
    class Raising(Countdown):
        pass

    def value(env: Any) -> Any:
        raise error("boom")

    setattr(Raising, name, property(value))
    found = play(Raising(1))
    assert found.outcome is Outcome.ENV_ERROR and math.isnan(found.reward)
    assert re.match(r"\S*test_episode\.py:\d+: .*boom", found.detail), found.detail


def test_pictures_without_names_end_their_episode_alone() -> None:
    env: Any = Countdown(1)
    env.pictures = 5
    assert play(env).outcome is Outcome.ENV_ERROR


@pytest.mark.parametrize("said", [None, 3, "", (), [{}], [{"role": "user"}], user("Hi"), (user("Hi"), "there")])
def test_what_the_model_cannot_be_asked_is_told(said: Any) -> None:
    class Broken(Countdown):
        async def start(self) -> Any:
            return said

    played = play(Broken())
    assert played.outcome is Outcome.ENV_ERROR and played.detail.startswith("The model's input is ")


@pytest.mark.parametrize("error", [TimeoutError, StopIteration, asyncio.CancelledError])
@pytest.mark.parametrize("plain", [False, True])
def test_an_error_that_asyncio_replaces_names_the_line(error: type[BaseException], plain: bool) -> None:
    class Late(Countdown):
        pass

    async def later(self: Any, reply: Message) -> Any:
        raise error("mine")

    def now(self: Any, reply: Message) -> Any:
        raise error("mine")

    Late.step = now if plain else later  # pyright: ignore
    assert re.match(r"\S*test_episode\.py:\d+: ", play(Late(1)).detail)


def test_an_error_names_the_line_of_the_environment() -> None:
    class Broken(Countdown):
        async def step(self, reply: Message) -> Feedback:
            return json.loads(reply.content)

    played = play(Broken())
    assert re.match(r"\S*test_episode\.py:\d+: JSONDecodeError: ", played.detail)


def test_an_error_says_what_was_said_last() -> None:
    class Broken(Countdown):
        async def step(self, reply: Message) -> Feedback:
            try:
                raise KeyError("x")
            except KeyError as error:
                raise ValueError("no such move") from error

    assert play(Broken()).detail.endswith("ValueError: no such move")


@pytest.mark.parametrize("where", ["start", "step"])
def test_an_environment_that_hangs_is_timed_out_and_closed(where: str) -> None:
    env = Countdown(1, **{where: hangs})
    began = time.monotonic()
    found = play(env, timeout=0.05)
    assert found.outcome is Outcome.TIMEOUT and "env.timeout=0.05" in found.detail
    assert env.closed == 1 and time.monotonic() - began < 50


async def swallows(what: type[BaseException]) -> None:
    while True:
        with contextlib.suppress(what):
            await asyncio.sleep(60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python says what ignored its close()
@pytest.mark.parametrize("what", [asyncio.CancelledError, BaseException])
def test_an_environment_that_ignores_that_it_is_cancelled_is_left_behind(
    what: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "GRACE", 0.05)
    env = Countdown(1, step=lambda: swallows(what))
    found = play(env, timeout=0.05)  # and the event loop ends
    assert found.outcome is Outcome.TIMEOUT and env.closed == 1
    assert not [w for w in TABLE.waits.values() if w.who == "an episode"], "the watchdog would end the run for it"


def test_who_is_left_behind_asks_nothing_any_more() -> None:
    own = session(Scripted(["one"]))
    own.close()
    with pytest.raises(Aborted):
        asyncio.run(own.ask("x"))


def test_the_engines_failure_is_not_the_environments() -> None:
    class Down(Scripted):
        async def generate(self, *args: Any, **keys: Any) -> Any:
            raise ConnectionError("gone")

    env = Countdown()
    found = play(env, Down([]))
    assert found.outcome is Outcome.ENGINE_ERROR and "gone" in found.detail and env.closed == 1


async def late() -> None:
    raise TimeoutError("no page within 5 s")


@pytest.mark.parametrize("where", ["start", "step"])
def test_a_deadline_within_an_environment_is_its_own(where: str) -> None:
    """A socket that times out raises TimeoutError too; nobody should raise env.timeout for it."""
    found = play(Countdown(1, **{where: late}))
    assert found.outcome is Outcome.ENV_ERROR and found.detail.endswith("TimeoutError: no page within 5 s")


def test_a_deadline_within_an_engine_is_its_own() -> None:
    class Slow(Scripted):
        async def generate(self, *args: Any, **keys: Any) -> Any:
            await late()

    found = play(Countdown(), Slow([]))
    assert found.outcome is Outcome.ENGINE_ERROR and "no page within 5 s" in found.detail


def test_cancelling_closes() -> None:
    async def cancel() -> Countdown:
        env, engine = Countdown(1, step=hangs), Scripted(["one"])
        task = asyncio.create_task(run_episode(env, session(engine)))
        while not engine.prompts:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return env

    assert asyncio.run(cancel()).closed == 1


async def test_plain_functions_hold_up_nobody() -> None:
    class Slow:
        def start(self) -> str:
            time.sleep(0.2)
            assert threading.current_thread() is not threading.main_thread()
            return "Go"

        def step(self, reply: Message) -> Feedback:
            return Feedback(reward=1.0)

        def close(self) -> None:
            pass

    began = time.monotonic()
    found = await asyncio.gather(*(run_episode(Slow(), session(Scripted(["one"]))) for _ in range(20)))
    seconds = time.monotonic() - began
    assert seconds < 8 and all(t.reward == 1.0 for t in found)
