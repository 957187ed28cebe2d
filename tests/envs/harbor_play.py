"""An episode of one of Harbor's tasks with scripted answers, in the sandbox or in a container."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from birl.config.schema import Env as Keys
from birl.envs.open import open_world
from birl.rollout.episode import run_episode
from birl.rollout.session import Limits
from birl.text.chat import Chat
from birl.types import Message, Task, Trajectory
from tests.rollout.scripted import Scripted, session
from tests.tiny import tiny_tokenizer


def ran(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def play(
    folder: Path, answers: Sequence[str], ended: Callable[[], None] = lambda: None, **options: Any
) -> tuple[Trajectory, str]:
    """An episode, and the last prompt of it. `ended` is called behind it, while the environment is open."""

    async def episode() -> tuple[Trajectory, str]:
        chat = Chat(tiny_tokenizer())
        keys = {"tasks": str(folder.parent), "workers": "1", **options}
        world = await open_world(Keys(kind="harbor", options=keys), chat.text)
        try:
            assert world.rows is not None
            (row,) = world.rows("train")
            asked = (Message(role="user", content=row["prompt"]),)  # type: ignore[call-overload]
            engine = Scripted(answers, chat)
            told = await run_episode(
                world.open(Task(id="t", prompt=asked, columns=row)),  # type: ignore[arg-type]
                session(engine, Limits(timeout=120.0), tokens=1500),
            )
            ended()
            return told, chat.decode(engine.prompts[-1])
        finally:
            await world.close()

    return asyncio.run(episode())
