"""Real browsers for tests."""

import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from birl.config.schema import Env as Keys
from birl.envs.browser.env import interpreter, program
from birl.envs.open import World, open_world
from birl.errors import BirlError
from birl.types import Feedback, Message, Task


def missing() -> bool:
    """Whether there is no browser here. Where everything is tested, there must be one."""
    if os.environ.get("CI"):
        return False
    try:
        program("")
    except BirlError:
        return True
    return ".venv-browser" not in interpreter("")


needs_browser = pytest.mark.skipif(missing(), reason="no browser: make setup-browser")


async def with_world(kind: str, options: dict[str, Any], use: Callable[[World], Coroutine[Any, Any, Any]]) -> Any:
    world = await open_world(Keys(kind=kind, options=options), lambda prompt: "")
    try:
        return await use(world)
    finally:
        await world.close()


def made(world: World, task: str, seed: int = 0) -> Any:
    return world.open(Task(id=task, prompt="", columns={"task": task, "seed": seed}))


async def said(env: Any, text: str) -> Feedback:
    return await env.step(Message(role="assistant", content=text))


@contextmanager
def nothing_left() -> Iterator[Path]:
    """A folder for what workers write; afterwards it is empty, and none of the processes that had it is left."""
    before, folder = tempfile.tempdir, Path(tempfile.mkdtemp(prefix="bb-"))
    tempfile.tempdir = str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = before
    end = time.monotonic() + 5
    while (left := processes(folder)) and time.monotonic() < end:
        time.sleep(0.1)  # a killed process is seen until its parent has taken note
    assert not left, left
    folder.rmdir()  # says so where it is not empty


def processes(folder: Path) -> list[int]:
    """Those that workers started, by their folder in the environment, which children inherit."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if f"TMPDIR={folder}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
