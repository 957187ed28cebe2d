"""`env=mixture`: several environments in one run, each with its own tasks, keys and scores."""

import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from birl.config import schema
from birl.config.load import read_section
from birl.errors import BirlError
from birl.types import Agent, Env, Task

if TYPE_CHECKING:
    from birl.envs.open import World

Rows = list[dict[str, Any]]
#: keys of `env` that each part may set
OF_A_PART = ("max_turns", "timeout", "cut_turn", "mcp", "mcp_timeout", "mcp_longest", "mcp_sandbox")


@dataclass(frozen=True, slots=True)
class Parts:
    """The environments of a mixture by name, and the `env` section of each."""

    worlds: dict[str, "World"]
    sections: dict[str, schema.Env]

    def open(self, task: Task) -> Env | Agent:
        return self.worlds[self.name(task)].open(task)

    def section(self, task: Task) -> schema.Env:
        return self.sections[self.name(task)]

    def name(self, task: Task) -> str:
        """Name of the environment of a task. Raises `BirlError`."""
        name = task.columns.get("env", "")
        if not isinstance(name, str) or name not in self.worlds:
            raise BirlError(f"{task.place}: its column `env` is {name!r}; env.parts has {', '.join(self.worlds)}.")
        return name

    def rows(self, split: str) -> dict[str, Rows]:
        """The tasks of each part. Raises `BirlError` if one has none to train on."""
        result: dict[str, Rows] = {}
        for name, world in self.worlds.items():
            rows: Any = world.rows(split) if world.rows is not None else []  # of one set
            if not rows and split == "train":
                raise BirlError(
                    f"env.parts: {name} has no tasks of its own. Name data.train; a column env of its rows says which "
                    "environment each is for."
                )
            if rows:
                result[name] = [{**row, "env": name, "data_source": name} for row in rows]
        return result

    async def close(self) -> None:
        async with AsyncExitStack() as stack:  # each is closed, also if another one fails to
            for world in self.worlds.values():
                stack.push_async_callback(world.close)


class Mixture:
    """A task's column `env` names its environment. The tasks of each environment are a separate set, for `data.weights`
    and for figures."""

    @dataclass(kw_only=True)
    class Config:
        parts: list[str] = field(default_factory=list)
        """Environments with their keys, as in env.parts=['countdown','guess_number high=20 max_turns=6']. Limits
        (max_turns, timeout, cut_turn) and tools (mcp, ...) default to those of env."""

    @staticmethod
    def check(config: Config, env: schema.Env, checked: Callable[[schema.Env], None]) -> None:
        """Check the keys of each part. Raises `BirlError`."""
        for name, section in sections(config, env).items():
            with named(name):
                checked(section)

    @staticmethod
    async def parts(config: Config, env: schema.Env, opened: Callable[[schema.Env], Awaitable["World"]]) -> Parts:
        """Open each part. A second one of the same kind gets a numbered name. Raises `BirlError`."""
        result = Parts({}, sections(config, env))
        try:
            for name, section in result.sections.items():
                with named(name):
                    result.worlds[name] = await opened(section)
        except BaseException:
            await result.close()
            raise
        return result


@contextmanager
def named(part: str) -> Iterator[None]:
    """Name the part of env.parts in errors."""
    try:
        yield
    except BirlError as error:
        raise BirlError(f"env.parts: {part}: {error}") from error


def sections(config: Mixture.Config, env: schema.Env) -> dict[str, schema.Env]:
    """The `env` section of each part. Raises `BirlError`."""
    result: dict[str, schema.Env] = {}
    seen = Counter[str]()
    for text in config.parts:
        try:
            kind, *words = shlex.split(text) or [""]
        except ValueError as error:
            raise BirlError(f"env.parts: {text!r}: {error}.") from None
        if kind in ("", "mixture") or any("=" not in word for word in words):
            raise BirlError(
                f"env.parts: {text!r} is not an environment, followed by its keys, as in 'guess_number high=20'."
            )
        seen[kind] += 1
        name = kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"
        keys = dict(word.split("=", 1) for word in words)
        limits = {key: keys.pop(key) for key in OF_A_PART if key in keys}
        with named(name):
            own = read_section(schema.Env, limits, "env.")
        result[name] = replace(env, kind=kind, options=keys, **{key: getattr(own, key) for key in limits})
    if not result:
        raise BirlError("env.kind=mixture: env.parts is empty. Name environments, as in env.parts=[countdown,code].")
    return result
