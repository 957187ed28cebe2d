"""`env.mcp`: the tools of MCP servers, in addition to those of an environment.

    env.mcp=[python my_server.py, http://127.0.0.1:8000/mcp]

Calls of such a tool are sent to its server, in a session of the episode; all else is the environment's. A server's
refusal is reported to the model; a server that fails ends the episode as an `env_error`.
"""

import asyncio
import json
import mimetypes
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from birl.config import schema
from birl.envs.calls import called, full_names, search_path
from birl.envs.mcp.connection import Connection, Misused
from birl.envs.mcp.transport import Command, Problem, Streams, over_http, over_pipes
from birl.errors import BirlError
from birl.hub import addressed
from birl.process import guarded
from birl.sandbox.attach import Confinement, confinement
from birl.sandbox.command import SYSTEM_PATH
from birl.types import Conversation, Env, Feedback, Message, ToolCall

PROCESSES = 16  # concurrent episodes with server processes
SHOWN = ("/etc/ssl/openssl.cnf", *mimetypes.knownfiles)  # files that Node and Python read automatically


@dataclass(slots=True, kw_only=True)
class Servers:
    """The servers of a run. `owners`: server of each tool; `confined`: confinement of their processes, None for none;
    `longest`: maximum characters of a result, or of a tool's description, for the model."""

    rows: Sequence[str]
    seconds: float
    longest: int
    confined: Confinement | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    owners: dict[str, int] = field(default_factory=dict)
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PROCESSES))

    @property
    def started(self) -> bool:
        """Whether some servers are processes."""
        return not all(map(addressed, self.rows))

    def connection(self, number: int) -> Connection:
        row = self.rows[number]
        way = partial(over_http, row) if addressed(row) else partial(process, words(row), self.confined)
        return Connection(f"env.mcp: {row}", way, self.seconds)

    async def learn(self) -> None:
        """List the servers' tools. Raises `BirlError`."""
        tools: list[Mapping[str, Any]] = []
        for number, row in enumerate(self.rows):
            connection = self.connection(number)
            try:
                await connection.start()
                listed = await connection.tools()
            finally:
                await connection.close()
            for tool in listed:
                if (other := self.owners.get(tool.name)) is not None:
                    both = f"{self.rows[other]} and {row} both have a" if other != number else f"{row} has two of the"
                    raise BirlError(f"env.mcp: {both} tool {tool.name}.")
                self.owners[tool.name] = number
                told = (tool.description or "")[: self.longest]
                function = {"name": tool.name, "description": told, "parameters": tool.inputSchema}
                tools.append({"type": "function", "function": function})
        self.tools = tuple(tools)


async def servers_of(config: schema.Env) -> Servers:
    """The servers of `env.mcp`, each tried once. Raises `BirlError` with the one that fails, and its cause."""
    commands = [words(row) for row in config.mcp if not addressed(row)]
    confined = None
    if commands and config.mcp_sandbox != "none":
        places = [place for command in commands for place in seen(command)]
        confined = await confinement(config.mcp_sandbox, places, "env.mcp_sandbox")
    result = Servers(rows=config.mcp, seconds=config.mcp_timeout, longest=config.mcp_longest, confined=confined)
    await result.learn()
    return result


def check_servers(config: schema.Env) -> None:
    """Checks before anything starts. Raises `BirlError`."""
    if find_spec("mcp") is None or version("mcp").partition(".")[0] != "1":
        raise BirlError("env.mcp needs version 1 of the package mcp: pip install 'birl[mcp]'")
    for row in config.mcp:
        if not addressed(row):
            words(row)


def words(row: str) -> list[str]:
    """Words of the command that starts a server. Raises `BirlError`."""
    try:
        result = shlex.split(row)
    except ValueError as error:
        raise BirlError(f"env.mcp: {row}: {error}.") from None
    if not result:
        raise BirlError("env.mcp: an entry is empty. Name a command or an address, as in env.mcp=[python server.py].")
    return full_names(result, "env.mcp", row)


def seen(command: Sequence[str]) -> list[str]:
    """Files and folders that a confined server can read: the Python that runs birl with its packages, the program, and
    the command's files; of a file its folder, which has its modules."""
    own = [sys.prefix, sys.base_prefix, *(p for p in sys.path if p.endswith("-packages")), *SHOWN]
    programs = [command[0], os.path.realpath(command[0])]
    own += [str(Path(p).parent) for p in (*programs, *command[1:]) if os.path.isabs(p) and os.path.isfile(p)]
    own += [p for p in command[1:] if os.path.isabs(p) and os.path.isdir(p)]
    return [p for p in own if os.path.exists(p) and not p.startswith("/usr/") and p not in ("/", "/bin", "/usr")]


@asynccontextmanager
async def process(command: list[str], confined: Confinement | None, problem: Problem) -> AsyncIterator[Streams]:
    """Start a server in an empty temporary folder. Confined, it has no network and no environment variables."""
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="birl-mcp-", ignore_cleanup_errors=True))
        mark, fds = {"BIRL_MCP": folder}, []
        if confined is None:
            line, place, environment = command, folder, {**os.environ, "PATH": search_path(), **mark}
        else:
            home = "/tmp" if confined.kind == "bubblewrap" else folder
            own = {"PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "HOME": home, "TMPDIR": home}
            line, fds = confined.words(command, {**own, "LANG": "C.UTF-8", **mark}, folder, opened)
            place, environment = "/", {"PATH": SYSTEM_PATH}
        line = guarded(line, folder)
        start = Command(words=line, mark=f"BIRL_MCP={folder}", environment=environment, folder=place, fds=fds)
        async with over_pipes(start, problem) as streams:
            yield streams


class Equipped:
    """An environment whose model may also call the servers' tools."""

    def __init__(self, env: Env, servers: Servers) -> None:
        self.env, self.servers = env, servers
        self.own = tuple(getattr(env, "tools", ()))
        for name in sorted({tool["function"]["name"] for tool in self.own} & set(servers.owners)):
            raise BirlError(f"env.mcp: {servers.rows[servers.owners[name]]} has a tool {name}, as the environment has.")
        self.tools = (*self.own, *servers.tools)
        self.connections: list[Connection] = []
        self.calls = self.refused = 0
        self.placed = False

    def __getattr__(self, name: str) -> Any:  # such as `policy` and `pictures`
        return getattr(self.env, name)

    async def admit(self) -> None:
        if hasattr(self.env, "admit"):
            await called(self.env.admit)  # pyright: ignore[reportAttributeAccessIssue]
        if self.servers.started:
            await self.servers.places.acquire()
            self.placed = True

    async def start(self) -> Conversation:
        for number in range(len(self.servers.rows)):
            self.connections.append(self.servers.connection(number))
            await self.connections[-1].start()
        return await called(self.env.start)

    async def step(self, reply: Message) -> Feedback:
        """Calls of the servers' tools are answered first, in their order."""
        rest = tuple(call for call in reply.tool_calls if call.name not in self.servers.owners and self.own)
        told = tuple([await self.answer(call) for call in reply.tool_calls if call not in rest])
        if told and not rest:
            return Feedback(messages=told, done=False, info=self.counted())
        feedback = await called(self.env.step, replace(reply, tool_calls=rest) if told else reply)
        return replace(feedback, messages=(*told, *feedback.messages), info={**feedback.info, **self.counted()})

    def counted(self) -> dict[str, float]:
        return {"mcp/calls": float(self.calls), "mcp/refused": float(self.refused)}

    async def answer(self, call: ToolCall) -> Message:
        self.calls += 1
        try:
            text, good = await self.result(call)
        except Misused as error:
            text, good = str(error), False
        self.refused += not good
        if len(text) > self.servers.longest:
            text = f"{text[: self.servers.longest]}\n({len(text) - self.servers.longest} more characters)"
        content = text if good else f"Error: {text}"
        return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)

    async def result(self, call: ToolCall) -> tuple[str, bool]:
        """Text of a tool's result, and whether it is a result. Raises `Misused` and `BirlError`."""
        if call.name not in self.servers.owners:
            raise Misused(f"there is no tool {call.name[:100]}; there are {', '.join(self.servers.owners)}.")
        result = await self.connections[self.servers.owners[call.name]].call(call.name, json.loads(call.arguments))
        parts = [written(part) for part in result.content]
        if not parts and result.structuredContent is not None:
            parts = [json.dumps(result.structuredContent, ensure_ascii=False)]
        return "\n".join(parts) or "(nothing)", not result.isError

    async def close(self) -> None:
        try:
            await asyncio.gather(*(connection.close() for connection in self.connections))
        finally:
            if self.placed:
                self.placed = False
                self.servers.places.release()
            close = getattr(self.env, "close", None)
            if close is not None:
                await called(close)


def written(part: Mapping[str, Any]) -> str:
    """A part of a result as text for the model."""
    if isinstance(text := part.get("text"), str):
        return text
    if isinstance(resource := part.get("resource"), Mapping):
        text = resource.get("text")
        return text if isinstance(text, str) else f"(a resource: {resource.get('uri')})"
    kind = part.get("mimeType") or part.get("type")
    return f"(not text: {kind}, {part.get('uri', '')})".replace(", )", ")")
