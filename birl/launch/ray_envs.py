"""`env=ray`: environments in actors of a Ray cluster; rank 0 still runs the episodes.

    birl launch ray rl env=ray env.inner=webarena env.most=8 ...

Only messages are sent to actors and back, no tokens or weights. Episodes wait for a free slot before their timeout
starts, so slow environments limit sampling. Actors are added while episodes wait, and ended when they are idle.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from birl.errors import BirlError
from birl.launch.ray_cluster import connect
from birl.launch.ray_collectors import Collectors, Config, Place
from birl.types import Conversation, Feedback, Message, Task


class RayEnv:
    """Environment of one episode, which runs in an actor."""

    Config = Config

    def __init__(self, task: Task, shared: Collectors) -> None:
        self.task, self.all = replace(task, columns=dict(task.columns)), shared
        self.place: Place | None = None
        self.number = 0
        self.tools: Sequence[Any] = ()

    @classmethod
    async def shared(cls, config: Config) -> Collectors:
        if not config.inner or config.inner == "ray":
            raise BirlError(
                "env.inner is empty: name the environment that runs in the actors, as in env.inner=webarena."
            )
        if not 1 <= config.least <= config.most:
            raise BirlError(f"env.least={config.least} must be at least 1 and at most env.most={config.most}.")
        options: dict[str, str] = {}
        for word in config.keys:
            name, equals, value = word.partition("=")
            if not equals:
                raise BirlError(f"env.keys=[{word}]: has no value; write env.keys=[{word}=VALUE].")
            options[name.strip()] = value.strip()
        return await Collectors.start(connect(config.address, start=True, private=True), config, options)

    @staticmethod
    def tasks(config: Config, split: str, shared: Collectors) -> list[dict[str, Any]]:
        return shared.rows(split)

    async def admit(self) -> None:
        """Wait for a slot and create the environment there. A lost actor is replaced until the first message."""
        while True:
            self.place, self.number = await self.all.room()
            try:
                self.tools = await self._call("admit", self.task)
                return
            except Lost:
                self._leave()
            except BaseException:
                await self.close()
                raise

    async def start(self) -> Conversation:
        return await self._call("start")

    async def step(self, reply: Message) -> Feedback:
        return await self._call("step", reply)

    async def close(self) -> None:
        try:
            if self.place is not None:
                with suppress(Lost):
                    await self._call("close")
        finally:
            self._leave()

    def _leave(self) -> None:
        if self.place is not None:
            self.all.leave(self.place, self.number)
            self.place = None

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the actor. Raises the environment's exception, or `Lost`."""
        assert self.place is not None
        errors = self.all.ray.exceptions
        try:
            return await getattr(self.place.actor, method).remote(self.number, *arguments)
        except errors.RayTaskError as error:
            cause = error.cause
            raise (
                cause if isinstance(cause, BirlError) else RuntimeError(f"{type(cause).__name__}: {cause}")
            ) from error
        except errors.RayActorError as error:
            self.all.gone(self.place)
            raise Lost(
                f"the actor {self.place.name} on {self.place.node} that held the environment was lost"
            ) from error


class Lost(BirlError):
    """The actor of an episode was lost."""
