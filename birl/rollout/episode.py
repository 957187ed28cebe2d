"""One episode: an environment and an engine take turns, or an agent runs and calls the model.

A failure becomes a typed outcome with its reason, never a reward of 0.
"""

import asyncio
from collections.abc import Mapping
from math import isfinite, nan
from typing import Any

from birl.envs.calls import AGENTS, CLOSING, called
from birl.errors import Aborted, BirlError, EngineFailed, TooLong
from birl.foreign import Late, attribute, described, within
from birl.rollout.session import Session, following
from birl.types import LARGEST, Agent, Conversation, Env, Feedback, Message, Outcome, Stop, Trajectory
from birl.waits import forget, waiting

PATIENCE = 30.0  # seconds an environment may take to close


class Played:
    """The state of a running episode."""

    def __init__(self) -> None:
        self.reward = self.score = 0.0
        self.parts: dict[str, float] = {}
        self.rewards: dict[str, float] = {}
        self.alone: dict[str, float] = {}  # rewards of single agents, beside the common one
        self.judged = False  # the environment gave a score
        self.outcome, self.detail = Outcome.TRUNCATED, ""


async def run_episode(env: Env | Agent, session: Session) -> Trajectory:
    """Run until the environment is done, a limit is reached, or something fails. Always closes the environment."""
    played, limits = Played(), session.limits
    try:
        way: Any = _taking_turns if attribute(env, "run") is None else _run
        if admit := attribute(env, "admit"):  # waits for a slot of env.concurrency; the timeout starts after it
            with waiting(session.name, "its place", "other episodes"):
                await within(None, called(admit))
        await within(limits.timeout, way(env, session, played))
    except Late as late:
        forget(session.name)
        played = Played()  # abandoned code may still change the old one
        played.outcome = Outcome.TIMEOUT
        played.detail = str(late) or f"the episode took longer than env.timeout={limits.timeout:g} s"
    except Exception as error:
        # An agent may raise an error of its own after a failure of the engine; the engine's is the cause.
        failure = session.failure if isinstance(session.failure, EngineFailed | Aborted) else error
        cause = failure.__cause__ if isinstance(failure, EngineFailed) else None
        played.outcome, played.detail = _outcome(failure), described(cause or failure)
    finally:
        session.close()
        problem = await _close(env, session.name)
    pictures = ()
    try:
        pictures = tuple(map(str, attribute(env, "pictures", ())))
    except BaseException as error:
        problem = problem or described(error)
    if problem and played.outcome.scored:
        played.outcome, played.detail = Outcome.ENV_ERROR, problem
    if not played.outcome.scored:
        played.reward = played.score = nan
        played.rewards = {}
    return Trajectory(
        turns=session.turns,
        reward=played.reward,
        score=played.score,
        outcome=played.outcome,
        parts=played.parts,
        detail=played.detail,
        rewards=played.rewards,
        pictures=pictures,
    )


def unopened(error: BaseException) -> Trajectory:
    """The episode of an environment whose constructor failed."""
    return Trajectory(turns=(), reward=nan, score=nan, outcome=Outcome.ENV_ERROR, detail=described(error))


async def _taking_turns(env: Env, session: Session, played: Played) -> None:
    await _play(env, session, played)
    if not played.alone:
        return
    spoke = {turn.agent for turn in session.turns}
    if unknown := sorted(set(played.alone) - spoke - set(session.policies)):
        raise BirlError(f"Feedback.rewards names {unknown[0]!r}; there are {', '.join(sorted(spoke)) or 'no names'}")
    played.rewards = {name: played.reward + played.alone.get(name, 0.0) for name in sorted(spoke)}
    more = sum(played.rewards.values()) / len(spoke) - played.reward
    played.reward += more
    played.score += 0.0 if played.judged else more


async def _play(env: Env, session: Session, played: Played) -> None:
    tools = tuple(attribute(env, "tools", ()))
    conversation: Conversation = await _in(env.start, session, "start")
    named = ""
    for _ in range(session.limits.turns):
        try:
            policy = named or str(attribute(env, "policy", ""))
            reply, turn = await session.answer(
                conversation, session.params, tools=tools, agent=policy, policy=policy, keep_end=True
            )
        except TooLong as error:
            if not session.turns:  # there is no reply that could have a reward
                raise
            played.detail = str(error)
            return
        number = session.asked - 1
        feedback = _checked(await _in(env.step, session, f"turn {number}", reply))
        reward = _number(feedback.reward, "the environment's reward")
        alone = {name: _number(value, f"rewards[{name!r}]") for name, value in feedback.rewards.items()}
        session.credit(reward, alone)
        played.reward += reward
        played.score += reward if feedback.score is None else _number(feedback.score, "the environment's score")
        played.judged |= feedback.score is not None
        for name, value in alone.items():
            played.alone[name] = played.alone.get(name, 0.0) + value
        named = feedback.policy or named
        played.parts |= {name: _number(value, f"info[{name!r}]") for name, value in feedback.info.items()}
        if turn.completion.stop is Stop.LENGTH and session.limits.cut_ends:
            return
        if feedback.done or feedback.truncated:
            played.outcome = Outcome.TRUNCATED if feedback.truncated else Outcome.OK
            return
        conversation = following(conversation, reply, feedback.messages) if feedback.prompt is None else feedback.prompt


def _checked(feedback: Any) -> Feedback:
    """What `step` returned. Raises `BirlError`."""
    if not isinstance(feedback, Feedback):
        raise BirlError(f"step returned {feedback!r:.100}; it must return a birl.types.Feedback.")
    if isinstance(feedback.messages, str) or not all(isinstance(m, Message) for m in feedback.messages):
        raise BirlError(
            f"Feedback(messages={feedback.messages!r:.100}): must be birl.types.Message, as in "
            'messages=(Message(role="user", content="Again."),).'
        )
    return feedback


def _number(value: Any, what: str) -> float:
    """`value` as a float. Raises `BirlError` if it is no finite number (a text is none)."""
    try:
        result = nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = nan
    if not isfinite(result):
        raise BirlError(f"{what} is {value!r:.100}; it must be a number.")
    if abs(result) > LARGEST:
        raise BirlError(f"{what} is {result:g}; it must be between -{LARGEST:g} and {LARGEST:g}.")
    return result


async def _run(agent: Agent, session: Session, played: Played) -> None:
    try:
        with waiting(session.name, "an agent", "environment", session.limits.timeout):
            result = await called(agent.run, session, threads=AGENTS)
        session.close()
    except Exception:
        if not isinstance(session.failure, TooLong) or session.reward is None:
            raise
        result = None  # it was cut, and its reward came before
    if isinstance(session.failure, EngineFailed | Aborted):
        raise session.failure
    if result is None:
        result = session.reward
    if result is None:
        raise BirlError("the agent gave no reward: return a number, or POST it to base_url/reward")
    if not session.turns:
        raise session.failure or BirlError("the agent never called the model")
    if isinstance(result, Mapping):
        spoke = {turn.agent for turn in session.turns}
        if missing := spoke - set(result):
            raise BirlError(f"no reward for {', '.join(sorted(missing)) or 'the agent without a name'}: got {result}")
        played.rewards = {name: _number(result[name], f"the reward of agent {name!r}") for name in sorted(spoke)}
    values = list(played.rewards.values()) or [_number(result, "the agent's reward")]
    played.reward = played.score = sum(values) / len(values)
    info = attribute(agent, "info")
    if isinstance(info, Mapping):
        played.parts = {name: _number(value, f"info[{name!r}]") for name, value in info.items()}
    cut = isinstance(session.failure, TooLong) or session.turns[-1].completion.stop is Stop.LENGTH
    cut |= bool(getattr(agent, "truncated", False))  # by a limit of its own
    played.outcome, played.detail = Outcome.TRUNCATED if cut else Outcome.OK, str(session.failure or "")


async def _in(method, session: Session, what: str, *args):
    with waiting(session.name, what, "environment", session.limits.timeout):
        return await called(method, *args)


async def _close(env: Env | Agent, name: str) -> str:
    """Close the environment, also if the episode is cancelled; returns what went wrong, or an empty text."""

    async def closed() -> None:
        if (close := attribute(env, "close")) is not None:
            await called(close, threads=CLOSING)

    closing = asyncio.ensure_future(within(PATIENCE, closed()))
    cancelled: asyncio.CancelledError | None = None
    with waiting(name, "closing", "environment", PATIENCE):
        while not closing.done():
            try:
                await asyncio.wait({closing})
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        closing.exception()  # looked at
        raise cancelled
    try:
        closing.result()
    except Late as late:
        return str(late) or f"the environment did not close within {PATIENCE:g} s"
    except Exception as error:
        return described(error)
    return ""


def _outcome(error: Exception) -> Outcome:
    match error:
        case EngineFailed():
            return Outcome.ENGINE_ERROR
        case Aborted():
            return Outcome.ABORTED
        case _:
            return Outcome.ENV_ERROR
