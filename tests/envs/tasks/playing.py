"""Tasks as a run opens them, played without a model."""

import asyncio
from typing import Any

from birl.config.schema import Data
from birl.config.schema import Env as Keys
from birl.data.tasks import load_tasks
from birl.envs.open import World, open_world
from birl.types import Feedback, Message, Task


def opened(kind: str, **options: str) -> World:
    return asyncio.run(open_world(Keys(kind=kind, options=options), str))


def tasks(world: World, split: str) -> list[Task]:
    assert world.rows is not None
    (found,) = load_tasks(Data(), split, chat=True, given=world.rows(split))  # type: ignore[arg-type]
    return list(found)


def row(prompt: str = "?", **columns: Any) -> Task:
    (found,) = load_tasks(Data(), "train", chat=True, given=[{"prompt": prompt, **columns}])
    return found[0]


def play(world: World, task: Task, *replies: str | Message) -> list[Feedback]:
    """The feedback to each reply."""

    async def run() -> list[Feedback]:
        env: Any = world.open(task)
        start = env.start()
        assert await start if asyncio.iscoroutine(start) else start
        found = []
        for reply in replies:
            assert not (found and found[-1].done), "the episode was over"
            said = Message(role="assistant", content=reply) if isinstance(reply, str) else reply
            feedback = env.step(said)
            found.append(await feedback if asyncio.iscoroutine(feedback) else feedback)
        await env.close()
        return found

    return asyncio.run(run())


def rewards(world: World, task: Task, *replies: str | Message) -> list[float]:
    return [f.reward for f in play(world, task, *replies)]
