"""OpenEnv: environments served over HTTP, one session for each episode.

birl rl env=openenv env.url=http://127.0.0.1:8000
birl rl env=openenv env.command="python -m my_env.server.app --port {port}"
"""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx

from birl.envs.adapters.package import Seeded, imported, seed_of, seeds, unknown
from birl.envs.calls import called
from birl.errors import BirlError
from birl.process import free_port, kill, tied
from birl.rewards.requests import LOCAL
from birl.types import Feedback, Message, Task

KIND = "openenv"
LONGEST = 3600.0  # seconds for one response of the server; an episode's own deadline is env.timeout
AGAIN = 0.2  # seconds until a full server is tried again
STARTS = 60.0  # seconds that a server may take to start
ANSWERS = 3.0  # seconds until a server that should run must respond
ENDS = 10.0  # seconds until it is killed
OWN = {"metadata", "done", "reward"}  # fields of every action or observation


class Server:
    """Server of the environments. `action`: the field for the reply, `see`: the field that the model sees; empty if the
    reply is the whole action, or the model sees everything, as JSON."""

    def __init__(self, url: str, process: subprocess.Popen | None = None) -> None:
        self.url, self.process = url.rstrip("/"), process
        self.action = self.see = ""

    def ready(self) -> None:
        """Wait until it responds. Raises `BirlError`."""
        end = time.monotonic() + (STARTS if self.process else ANSWERS)
        while True:
            if self.process is not None and self.process.poll() is not None:
                raise BirlError(f"env.command: the server ended with status {self.process.returncode}.")
            try:
                if self.ask("health", 5).is_success:
                    return
                problem = "its /health is no success"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() > end:
                raise BirlError(f"env.url={self.url}: no OpenEnv server answers there ({problem}).")
            time.sleep(0.1)

    def learn(self, action: str, see: str) -> None:
        """Find the text fields in the schemas of the server's actions and observations. Raises `BirlError`."""
        result = self.ask("schema", 30).raise_for_status().json()
        self.action = text_field(result["action"], "env.action", action)
        self.see = text_field(result["observation"], "env.see", see)

    def ask(self, path: str, seconds: float) -> httpx.Response:
        """Send a request; without a proxy if the server is on this machine, as OpenEnv's own client does."""
        return httpx.get(f"{self.url}/{path}", timeout=seconds, trust_env=urlsplit(self.url).hostname not in LOCAL)

    def close(self) -> None:
        """End a server that was started here, and its child processes, whether it still runs or not."""
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDS)
        kill(self.process.pid)
        self.process.wait()
        self.process = None


def started(command: str) -> Server:
    """Start a server on a free port, which ends with the starting thread."""
    if "{port}" not in command:
        raise BirlError(f"env.command={command}: it needs {{port}} where the server takes its port.")
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    if words[0] == "python":
        words[0] = sys.executable  # the interpreter that has the package
    if shutil.which(words[0]) is None:
        raise BirlError(f"env.command={command}: there is no program {words[0]}.")
    process = subprocess.Popen(tied(words), start_new_session=True, stdin=subprocess.DEVNULL)
    return Server(f"http://127.0.0.1:{port}", process)


def text_field(schema: dict[str, Any], key: str, chosen: str) -> str:
    """The chosen field, or the only text field, if no other field is required."""
    fields = {name: f for name, f in schema.get("properties", {}).items() if name not in OWN}
    if chosen and chosen not in fields:
        raise unknown(key, chosen, fields)
    texts = [name for name, f in fields.items() if f.get("type") == "string"]
    needed = set(schema.get("required", ())) - set(texts)
    return chosen or (texts[0] if len(texts) == 1 and not needed else "")


class OpenEnv:
    @dataclass(kw_only=True)
    class Config(Seeded):
        url: str = ""
        """Address of a running server."""
        command: str = ""
        """Command that starts a server instead; {port} is replaced by a free port. The server ends with the run."""
        action: str = ""
        """Action field for the reply. Empty: the only text field; for actions with several fields the reply must be
        JSON."""
        see: str = ""
        """Observation field for the model. Empty: the only text field, or the whole observation as JSON."""

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
        """Open a session; waits for one if the server is full."""
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
        """The action of a reply; None if it has none."""
        if self.server.action:
            return {self.server.action: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            action = None
        return action if isinstance(action, dict) else None

    def told(self, observation: dict[str, Any]) -> Message:
        see = self.server.see
        return Message(
            role="user", content=str(observation.get(see, "")) if see else json.dumps(observation, ensure_ascii=False)
        )


async def last_words(client: Any) -> str:
    """A server's message before it closed the connection, which may arrive before the request to it."""
    try:
        return str(await called(client._receive))
    except Exception:
        return ""
