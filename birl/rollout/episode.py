"""One episode: the only place where an environment and an engine take turns.

Whatever goes wrong becomes a typed outcome with its reason, never a reward of 0.
"""

import asyncio
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Protocol

from birl.types import Engine, Env, Message, Outcome, SamplingParams, Stop, Trajectory, Turn
from birl.waits import waiting


class Translator(Protocol):
    """What an episode needs of `birl.text.chat.Chat`."""

    def render(self, prompt: tuple[Message, ...] | str) -> tuple[int, ...]: ...
    def extend(
        self, ids: tuple[int, ...], reply_tokens: tuple[int, ...], messages: tuple[Message, ...]
    ) -> tuple[int, ...]: ...
    def parse(self, tokens: Sequence[int]) -> Message: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`timeout` [s] for the whole episode, `turns` calls of the model."""

    timeout: float = 600.0
    turns: int = 8


class EngineFailed(Exception):
    """Wraps what an engine raised, to tell it from what an environment raised."""


async def run_episode(
    env: Env,
    engine: Engine,
    chat: Translator,
    params: SamplingParams,
    limits: Limits,
    seed_of_turn: Callable[[int], int],
    session: str = "",
    name: str = "an episode",
) -> Trajectory:
    """Play until the environment is done, a limit cuts it, or something fails. Closes the environment in any case.
    `session` tells engines what belongs together, `name` is for the table of waits."""
    turns: list[Turn] = []
    reward = score = 0.0
    parts: dict[str, float] = {}
    outcome, detail = Outcome.TRUNCATED, ""
    try:
        async with asyncio.timeout(limits.timeout):
            prompt = chat.render(await env.start())
            for number in range(limits.turns):
                with waiting(name, f"turn {number}", "engine", limits.timeout):
                    turn = await _ask(engine, prompt, replace(params, seed=seed_of_turn(number)), session)
                turns.append(turn)
                if turn.completion.stop is Stop.ABORT:
                    outcome = Outcome.ABORTED
                    break
                with waiting(name, f"turn {number}", "environment", limits.timeout):
                    feedback = await env.step(chat.parse(turn.completion.tokens))
                reward += feedback.reward
                score += feedback.reward if feedback.score is None else feedback.score
                parts |= feedback.info
                if turn.completion.stop is Stop.LENGTH:
                    break
                if feedback.done:
                    outcome = Outcome.OK
                    break
                prompt = chat.extend(prompt, turn.completion.tokens, feedback.messages)
    except TimeoutError:
        outcome, detail = Outcome.TIMEOUT, f"the episode took longer than rollout.timeout={limits.timeout:g} s"
    except EngineFailed as error:
        outcome, detail = Outcome.ENGINE_ERROR, describe(error.__cause__ or error)
    except Exception as error:
        outcome, detail = Outcome.ENV_ERROR, describe(error)
    finally:
        await env.close()
    if not outcome.scored:
        reward = score = nan
    return Trajectory(turns=tuple(turns), reward=reward, score=score, outcome=outcome, parts=parts, detail=detail)


async def _ask(engine: Engine, prompt: tuple[int, ...], params: SamplingParams, session: str) -> Turn:
    try:
        return Turn(prompt=prompt, completion=await engine.generate(prompt, params, session))
    except TimeoutError:
        raise
    except Exception as error:
        raise EngineFailed from error


def describe(error: BaseException) -> str:
    """`file.py:12: ValueError: message`, the innermost place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {error}".splitlines()[0]
