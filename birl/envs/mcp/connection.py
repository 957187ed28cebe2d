"""One session with one MCP server, held by a separate task: the client's contexts must end in the task in which they
began, and the steps of an episode are different tasks."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from pydantic import BaseModel

from birl.envs.mcp.transport import Heard, Problem, Streams, cause, tell
from birl.errors import BirlError, text_of
from birl.foreign import stop

T = TypeVar("T")
logging.getLogger("mcp").setLevel(logging.CRITICAL)  # errors are reported by the code that they concern
logging.getLogger().addFilter(lambda record: not record.pathname.endswith("/mcp/shared/session.py"))
MOST_TOOLS, MOST_PAGES = 1000, 100
PATIENCE = 10.0  # seconds that a session may take to end
CLOSED, INVALID = -32000, (-32600, -32601, -32602)  # codes of JSON-RPC: session ended, and invalid calls


class Result(BaseModel):
    """Result of a call, with parts of any type: the model gets a note about those that it cannot see."""

    content: list[dict[str, Any]] = []
    structuredContent: Any = None
    isError: bool = False


class Connection:
    """`open` opens the streams of a server; `name` is for messages; nothing takes longer than `seconds`.

    Example: connection = Connection("server.py", partial(over_http, "http://127.0.0.1:8000/mcp"), seconds=30)
              await connection.start(); await connection.call("add", {"a": 1, "b": 2}); await connection.close()
    """

    def __init__(
        self, name: str, open: Callable[[Problem], AbstractAsyncContextManager[Streams]], seconds: float
    ) -> None:
        self.name, self.open, self.seconds = name, open, seconds
        loop = asyncio.get_running_loop()
        self.problem: Problem = loop.create_future()
        self.ready: asyncio.Future[Any] = loop.create_future()
        self.closing = asyncio.Event()
        self.holding: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises `BirlError` with the cause if it does not start."""
        self.holding = asyncio.create_task(self._hold())
        self.holding.add_done_callback(lambda task: task.cancelled() or task.exception())  # retrieves the exception
        await self._answer(asyncio.shield(self.ready), "begin")

    async def tools(self) -> list[Any]:
        """All tools, in the client's format."""
        from mcp.types import PaginatedRequestParams

        result, cursor, pages = [], None, 0
        while len(result) < MOST_TOOLS and (pages := pages + 1) <= MOST_PAGES:  # one may be empty
            params = PaginatedRequestParams(cursor=cursor)
            page = await self._answer(self.ready.result().list_tools(params=params), "list its tools")
            result += page.tools
            if not (cursor := page.nextCursor):
                return result
        raise BirlError(f"{self.name}: it has more than {MOST_TOOLS} tools, or {MOST_PAGES} pages of them.")

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Result of a tool, in the server's format. Raises `Misused` for an invalid call, and `BirlError` with the
        cause if there is no result. (The client's `call_tool` lists all tools again in each session.)"""
        from mcp.types import CallToolRequest, CallToolRequestParams, ClientRequest

        params = CallToolRequestParams(name=tool, arguments=arguments)
        asking = self.ready.result().send_request(ClientRequest(CallToolRequest(params=params)), Result)
        return await self._answer(asking, f"answer a call of {tool}")

    async def close(self) -> None:
        self.closing.set()
        if self.holding is not None:
            if self.ready.done():
                await asyncio.wait({self.holding}, timeout=PATIENCE)
            await stop(self.holding)

    async def _hold(self) -> None:
        from mcp import ClientSession

        async with (
            self.open(self.problem) as (hear, say),
            ClientSession(Heard(hear, self.problem), say) as session,  # pyright: ignore[reportArgumentType]
        ):
            try:
                await session.initialize()
            except Exception as error:
                tell(self.problem, f"it did not begin: {cause(error)}")
                raise
            self.ready.set_result(session)
            await self.closing.wait()

    async def _answer(self, work: Awaitable[T], what: str) -> T:
        """Wait for the server's response. The server may end meanwhile, which the client does not always report."""
        assert self.holding is not None
        asking, ends = asyncio.ensure_future(work), {self.problem, self.holding}
        try:
            await asyncio.wait({asking, *ends}, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                late = f"it did not {what} within {self.seconds:g} s (env.mcp_timeout)"
                raise BirlError(f"{self.name}: {self._end() or late}.")
            if (error := asking.exception()) is None:
                return asking.result()
            code = getattr(getattr(error, "error", None), "code", 0)
            if code == CLOSED:  # the cause is on its way
                await asyncio.wait(ends, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            if code in INVALID and not self._end():
                raise Misused(text_of(error))
            raise BirlError(f"{self.name}: {self._end() or f'it did not {what}: {cause(error)}'}.")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _end(self) -> str:
        """Reason why the session has ended; empty if it has not."""
        assert self.holding is not None
        if self.problem.done():
            return self.problem.result()
        if not self.holding.done():
            return ""
        error = None if self.holding.cancelled() else self.holding.exception()
        return "the session is closed" if error is None else cause(error)


class Misused(Exception):
    """A call that the server refuses: the model's mistake, which is reported to it."""
