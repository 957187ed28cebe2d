"""OpenEnv: environments behind a server, one session of it for each episode.

birl rl env=openenv env.url=http://127.0.0.1:8000
birl rl env=openenv env.command="python -m my_env.server.app --port {port}"
"""

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from birl.envs.adapters.openenv_server import Server, started
from birl.envs.adapters.package import Seeded, imported, seed_of, seeds
from birl.envs.calls import called
from birl.errors import BirlError
from birl.types import Feedback, Message, Task

KIND = "openenv"
LONGEST = 3600.0  # seconds for one answer of the server; an episode's own deadline is env.timeout
AGAIN = 0.2  # seconds until a full server is asked again


class OpenEnv:
    @dataclass(kw_only=True)
    class Config(Seeded):
        url: str = ""
        """Address of a server that runs."""
        command: str = ""
        """Starts one instead; {port} becomes a free port. It is ended with the run."""
        action: str = ""
        """The field of the action that takes the reply. Empty: its only text field; an action of several fields is
        the reply itself, as JSON."""
        see: str = ""
        """The field of the observation that the model sees. Empty: its only text field, or all of it as JSON."""

    @staticmethod
    async def shared(config: Config) -> Server:
        await called(imported, "openenv.core", KIND)
        if bool(config.url) == bool(config.command):
            raise BirlError("env=openenv needs either env.url, a server that runs, or env.command, which starts one.")
        server = started(config.command) if config.command else Server(config.url)
        try:
            await called(server.ready)
            await called(server.learn, config.action, config.see)
        except BaseException:
            server.close()
            raise
        return server

    @staticmethod
    def tasks(config: Config, split: str) -> list[dict[str, Any]]:
        return seeds(config, "openenv", split)

    def __init__(self, task: Task, config: Config, shared: Server) -> None:
        self.server, self.seed = shared, seed_of(task)
        self.client: Any = None
        self.rewarded = False

    async def start(self) -> tuple[Message, ...]:
        """A session; waits for one where the server has no more."""
        while True:
            self.client = imported("openenv.core.generic_client", KIND).GenericEnvClient(
                base_url=self.server.url, message_timeout_s=LONGEST
            )
            try:
                result = await called(partial(self.client.reset, seed=self.seed))
                return (self.told(result.observation),)
            except Exception as error:
                told = str(error) if isinstance(error, RuntimeError) else await last_words(self.client)
                if "CAPACITY_REACHED" not in told:
                    raise
            await called(self.client.close)
            await asyncio.sleep(AGAIN)

    async def step(self, reply: Message) -> Feedback:
        action = self.action(reply.content)
        if action is None:
            again = (Message(role="user", content="That is no action. An action is a JSON object and nothing else."),)
            return Feedback(messages=again, info={"invalid": 1.0}, done=False)
        result = await called(self.client.step, action)
        self.rewarded |= result.reward is not None
        if result.done and not self.rewarded:
            raise ValueError("the episode is over, and the server gave no reward for any of its steps")
        told, reward = (self.told(result.observation),), float(result.reward or 0)
        return Feedback(messages=told, reward=reward, info={"invalid": 0.0}, done=result.done)

    async def close(self) -> None:
        if self.client is not None:
            await called(self.client.close)

    def action(self, text: str) -> dict[str, Any] | None:
        """The action that a reply is; None for none."""
        if self.server.action:
            return {self.server.action: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            action = None
        return action if isinstance(action, dict) else None

    def told(self, observation: dict[str, Any]) -> Message:
        see = self.server.see
        return Message(role="user", content=str(observation.get(see, "")) if see else json.dumps(observation))


async def last_words(client: Any) -> str:
    """A server's message before it closed the connection: a full one may be faster than the question to it."""
    try:
        return str(await called(client._receive))
    except Exception:
        return ""
