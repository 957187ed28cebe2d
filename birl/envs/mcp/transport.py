"""The two ways to an MCP server, a process or an address, with bounds: no message is longer than `MOST`, and the cause
of a server's end is known. The official client waits for ever where it should received of either."""

import asyncio
import contextlib
import signal
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import anyio
import httpx

from birl.process import kill

MOST = 8 << 20  # bytes of one message, or of one HTTP answer
TAIL = 8192  # bytes of what a server prints on its standard error that are kept
GRACE = 2.0  # seconds to end in, once its input is closed

#: what a server did that ends its session; set once
Problem = asyncio.Future[str]
Streams = tuple[Any, Any]  # of messages: from the server, and to it


def tell(problem: Problem, what: str) -> None:
    if not problem.done():
        problem.set_result(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a server's process starts: `fds` are inherited, `folder` is its current one."""

    words: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    fds: Sequence[int] = ()


@asynccontextmanager
async def over_pipes(command: Command, problem: Problem) -> AsyncIterator[Streams]:
    """A process that speaks on its standard input and output; it ends with all that it started."""
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
    tasks = [
        asyncio.create_task(_read(process, incoming, problem, last)),
        asyncio.create_task(_write(process, outgoing)),
        asyncio.create_task(_keep(process, last)),
    ]
    try:
        yield received, sent
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE)
        kill(process.pid)
        await asyncio.wait(tasks, timeout=1.0)  # they read to the end, or asyncio would wait for it
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (incoming, received, sent, outgoing):
            stream.close()


async def _read(process: asyncio.subprocess.Process, incoming: Any, problem: Problem, last: bytearray) -> None:
    """Its messages, one a line; other lines are skipped, as programs print what they like."""
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCMessage

    assert process.stdout is not None
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the session has ended
        try:
            while line := await process.stdout.readline():
                with contextlib.suppress(ValueError):
                    await incoming.send(SessionMessage(JSONRPCMessage.model_validate_json(line)))
        except ValueError:  # of asyncio, for a line that is too long
            tell(problem, f"it sent a message of more than {MOST >> 20} MiB")
    while await process.stdout.read(1 << 18):
        pass
    code = await process.wait()
    await asyncio.sleep(0.05)  # what it printed last is on its way
    lines = last.decode(errors="replace").strip().splitlines()
    how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
    tell(problem, f"{how}: {lines[-1].strip()[:300]}" if lines else how)
    incoming.close()


async def _write(process: asyncio.subprocess.Process, outgoing: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended, which is told elsewhere
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
        httpx.AsyncClient(transport=Bounded(problem), timeout=None) as http,
        streamable_http_client(url, http_client=http) as (received, sent, _),
    ):
        yield received, sent


@cache
def trusted() -> ssl.SSLContext:
    """The certificates of authorities, read once: that takes a tenth of a second, and every episode has a session."""
    return httpx.create_ssl_context()


class Bounded(httpx.AsyncHTTPTransport):
    """Ends answers that are too long, and tells what went wrong: the client keeps it to itself."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(verify=trusted())
        self.problem = problem

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await super().handle_async_request(request)
        except httpx.TransportError as error:
            if request.method == "POST":  # others are the client's own affairs
                tell(self.problem, f"{type(error).__name__}: {error}"[:300])
            raise
        if request.method == "POST" and response.status_code >= 400:
            tell(self.problem, f"it answered with status {response.status_code}")
        response.stream = Counted(response.stream, self.problem, request.method)
        return response


class Counted(httpx.AsyncByteStream):
    def __init__(self, stream: Any, problem: Problem, method: str) -> None:
        self.stream, self.problem, self.method = stream, problem, method

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for part in self.stream:
                size += len(part)
                if size > MOST:
                    tell(self.problem, f"it sent an answer of more than {MOST >> 20} MiB")
                    raise httpx.ReadError("too long")
                yield part
        except httpx.TransportError as error:
            if self.method == "POST":
                tell(self.problem, f"{type(error).__name__}: {error}"[:300])
            raise

    async def aclose(self) -> None:
        await self.stream.aclose()
