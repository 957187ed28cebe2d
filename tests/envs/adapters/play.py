"""Environments played by a script instead of a model."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from birl.config.schema import Env as Keys
from birl.envs.calls import called
from birl.envs.open import World, open_world
from birl.errors import BirlError
from birl.types import Completion, Feedback, Message, SamplingParams, Stop, Task, Turn


def installed(name: str) -> Any:
    """reasoning_gym or gem, which `make test` has only with a C compiler; the test is skipped without it."""
    if name == "gem" and sys.version_info >= (3, 12):
        pytest.skip("gem-llm can be installed on Python 3.11 only", allow_module_level=True)
    return pytest.importorskip(name, reason="reasoning-gym and gem-llm need a C compiler")


def world(kind: str, **options: Any) -> World:
    return asyncio.run(open_world(Keys(kind=kind, options=options), str))


def task(row: dict[str, Any]) -> Task:
    return Task(id="t", prompt=row["prompt"], answer=row.get("answer"), columns=row)


def opened(world: World, row: dict[str, Any]) -> Any:
    """One episode's environment or agent."""
    return world.open(task(row))


def reply(text: str) -> Message:
    return Message(role="assistant", content=text)


async def told(env: Any, texts: Sequence[str]) -> tuple[str, list[Feedback]]:
    """What an environment says first, and its answer to each reply. It is closed."""
    try:
        first = (await called(env.start))[-1].content
        return first, [await called(env.step, reply(text)) for text in texts]
    finally:
        await called(env.close)


def play(world: World, row: dict[str, Any], *texts: str) -> tuple[str, list[Feedback]]:
    return asyncio.run(told(world.open(task(row)), texts))


class Script:
    """A model that says what an agent's script says next."""

    base_url, params = "", SamplingParams(max_tokens=99)

    def __init__(self, **lines: list[Any]) -> None:
        self.lines = lines
        self.said: dict[str, tuple[Message, ...]] = {}
        self.tools: Sequence[Any] = ()

    async def ask(self, said: Any, *, tools: Sequence[Any] = (), agent: str = "") -> Message:
        """What comes before is what was said before: the tokens go on."""
        before = self.said.get(agent, ())
        assert said[: len(before)] == before and said[-1].role in ("user", "tool")
        self.tools = tools
        line = self.lines[agent or "model"].pop(0)
        if isinstance(line, Exception):
            raise line
        self.said[agent] = (*said, line if isinstance(line, Message) else reply(line))
        return self.said[agent][-1]

    async def answer(self, said: Any, params: Any, *, tools: Sequence[Any] = ()) -> tuple[Message, Turn]:
        """A line that ends with dots is cut."""
        result = await self.ask(said, tools=tools)
        stop = Stop.LENGTH if result.content.endswith("...") else Stop.STOP
        return result, Turn(prompt=np.zeros(1, np.int32), completion=Completion.of((), (), (), stop))


def mistake(kind: str, **options: Any) -> str:
    """What the user is told."""
    with pytest.raises(BirlError) as caught:
        world(kind, **options)
    return str(caught.value)


def without(module: str, kind: str) -> str:
    """What is told where a package is not installed."""
    code = (
        f"import sys, asyncio; sys.modules[{module!r}] = None\n"
        "from birl.config.schema import Env\nfrom birl.envs.open import open_world\n"
        f"asyncio.run(open_world(Env(kind={kind!r}), str))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stderr.strip().splitlines()[-1]
