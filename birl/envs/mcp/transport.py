"""Transports to an MCP server, a process or an address, with bounds: no message is longer than `MOST`, and the cause of
a server's end is recorded. The official client waits forever without these."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
from pydantic import ValidationError

from birl.envs.calls import CLOSING, called
from birl.errors import innermost, text_of
from birl.process import POLL, end_strays, kill
from birl.rewards.requests import trusted

MOST = 8 << 20  # bytes of one message, or of one HTTP answer
TAIL = 8192  # bytes of what a server prints on its standard error that are kept
PLAIN = {"accept-encoding": "identity"}  # a compressed answer could be a thousand times as long
GRACE = 2.0  # seconds to end in after its input is closed

# cause of the end of a server's session; set once
Problem = asyncio.Future[str]
Streams = tuple[Any, Any]  # of messages: from the server, and to it


def tell(problem: Problem, what: str) -> None:
    if not problem.done():
        problem.set_result(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start a server's process: `fds` are inherited, `folder` is its current one, `mark` is only in the
    environment of its processes."""

    words: Sequence[str]
    mark: str
    environment: Mapping[str, str]
    folder: str
    fds: Sequence[int] = ()


@asynccontextmanager
async def over_pipes(command: Command, problem: Problem) -> AsyncIterator[Streams]:
    """Start a process that communicates on its standard input and output; it ends with all its child processes."""
    process = await asyncio.create_subprocess_exec(
        *command.words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(command.environment),
        cwd=command.folder,
        pass_fds=command.fds,
        start_new_session=True,
        limit=MOST,
    )
    incoming, received = anyio.create_memory_object_stream[Any](0)
    sent, outgoing = anyio.create_memory_object_stream[Any](0)
    last = bytearray()
    reading, keeping, writing = (
        asyncio.create_task(_read(process, incoming, problem)),
        asyncio.create_task(_keep(process, last)),
        asyncio.create_task(_write(process, outgoing)),
    )
    watching = asyncio.create_task(_watch(process, (reading, keeping), incoming, problem, last))
    tasks = (reading, keeping, writing, watching)
    try:
        yield received, sent
    finally:
        try:
            await _end(process, command, tasks)
        finally:  # cancelled, too
            process._transport.close()  # pyright: ignore  # else the loop may end before the pipes have
            for stream in (incoming, received, sent, outgoing):
                stream.close()


async def _end(process: asyncio.subprocess.Process, command: Command, tasks: Sequence["asyncio.Task[None]"]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await _ended(process)
    finally:
        kill(process.pid)
        await called(end_strays, command.mark, threads=CLOSING)
    await asyncio.wait(tasks, timeout=1.0)  # they read to the end, or asyncio would wait for it
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _read(process: asyncio.subprocess.Process, incoming: Any, problem: Problem) -> None:
    """Read its messages, one a line; other lines are skipped, as programs may print anything."""
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCMessage

    assert process.stdout is not None
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the session has ended
        try:
            while line := await process.stdout.readline():
                try:
                    message = SessionMessage(JSONRPCMessage.model_validate_json(line))
                except ValueError as error:
                    if b'"jsonrpc"' not in line:
                        continue
                    message = error
                await incoming.send(message)
        except ValueError:  # of asyncio, for a line that is too long
            tell(problem, f"it sent a message of more than {MOST >> 20} MiB")
    while await process.stdout.read(1 << 18):
        pass


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the process itself: `wait` also waits for processes that hold its pipes."""
    while process.returncode is None:
        await asyncio.sleep(POLL)


async def _watch(
    process: asyncio.subprocess.Process,
    pipes: tuple["asyncio.Task[None]", "asyncio.Task[None]"],
    incoming: Any,
    problem: Problem,
    last: bytearray,
) -> None:
    """Report how it ended. Its pipes may still be open, if child processes hold them."""
    ends = asyncio.create_task(_ended(process))
    try:
        await asyncio.wait({ends, pipes[0]}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({ends, *pipes}, timeout=GRACE)  # what it sent and printed last is on its way
    finally:
        ends.cancel()
    if (code := process.returncode) is None:
        how = "it closed its standard output"
    else:
        how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
    lines = last.decode(errors="replace").strip().splitlines()
    tell(problem, f"{how}: {lines[-1].strip()[:300]}" if lines else how)
    incoming.close()


class Heard:
    """A server's messages. The official client skips an invalid message, and still waits for that response."""

    def __init__(self, stream: Any, problem: Problem) -> None:
        self.stream, self.problem = stream, problem

    async def __aenter__(self) -> "Heard":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stream.aclose()

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self.stream:
            if isinstance(message, Exception):
                tell(self.problem, f"it sent what is no message of MCP: {cause(message)}")
            else:
                yield message


def cause(error: BaseException) -> str:
    """The first line of the innermost error."""
    error = innermost(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return ": ".join((".".join(map(str, first["loc"])), first["msg"])).removeprefix(": ")[:300]
    return f"{type(error).__name__}: {text_of(error)}".partition("\n")[0][:300]


async def _write(process: asyncio.subprocess.Process, outgoing: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended, which is reported elsewhere
        async for one in outgoing:
            text = one.message.model_dump_json(by_alias=True, exclude_none=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _keep(process: asyncio.subprocess.Process, last: bytearray) -> None:
    assert process.stderr is not None
    while part := await process.stderr.read(1 << 16):
        last += part
        del last[:-TAIL]


@asynccontextmanager
async def over_http(url: str, problem: Problem) -> AsyncIterator[Streams]:
    """A server at an address (streamable HTTP). Deadlines are the caller's."""
    from mcp.client.streamable_http import streamable_http_client

    async with (
        httpx.AsyncClient(transport=Bounded(problem), timeout=None, headers=PLAIN, follow_redirects=True) as http,
        streamable_http_client(url, http_client=http) as (received, sent, _),
    ):
        yield received, sent


class Bounded(httpx.AsyncHTTPTransport):
    """Ends responses that are too long, and reports errors, which the client hides."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(verify=trusted())
        self.problem = problem

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await super().handle_async_request(request)
        except httpx.TransportError as error:
            if request.method == "POST":  # others are internal to the client
                tell(self.problem, f"{type(error).__name__}: {error}"[:300])
            raise
        if request.method == "POST" and response.status_code >= 400:
            tell(self.problem, f"it answered with status {response.status_code}")
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            tell(self.problem, f"it compressed an answer ({encoding}), which it was not asked for")
            raise httpx.DecodingError("compressed")
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = Counted(response.stream, self.problem, request.method, events)
        return response


class Counted(httpx.AsyncByteStream):
    def __init__(self, stream: Any, problem: Problem, method: str, events: bool) -> None:
        self.stream, self.problem, self.method, self.events = stream, problem, method, events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, resumed = 0, False  # events with ids are asked for again
        try:
            async for part in self.stream:
                size += len(part)
                resumed |= b"id:" in part
                if size > MOST:
                    tell(self.problem, f"it sent an answer of more than {MOST >> 20} MiB")
                    raise httpx.ReadError("too long")
                yield part
            if self.method == "POST" and self.events and not resumed:  # it is read up to its answer
                tell(self.problem, "it ended its events without an answer")
        except httpx.TransportError as error:
            if self.method == "POST":
                tell(self.problem, f"{type(error).__name__}: {error}"[:300])
            raise

    async def aclose(self) -> None:
        await self.stream.aclose()
