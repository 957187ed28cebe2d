"""Connections of a server: each has a deadline for its request, and their number is bounded by the file descriptors of
the process. Idle ones are closed for new ones."""

import asyncio
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import DEFAULT_MAX_INCOMPLETE_EVENT_SIZE, H11Protocol

HEAD = 20.0  # timeout of the first request's head [s]
KEEP = 75.0  # timeout of the next request's head [s]
GRACE = 5
RESERVE = 64  # file descriptors for files, engines and clients
WANTED = 8192  # maximum number of connections
PIECES, SMALL = 2000, 64  # number and bytes of small pieces of a body: reading each takes 30 microseconds
BURST = 100  # pieces that are read before other connections have their turn
LINES = 200  # maximum lines of a head
LOOK, PROBE = 0.2, 10.0  # intervals of checks of half-closed connections, and of their probes [s]
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # ignored by clients of HTTP/1.1; the host of a closed one resets


def room() -> int:
    """Maximum number of connections. Raises the process's soft limit of file descriptors if possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED + 4 * RESERVE
    if 0 <= soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard < 0 else min(most, hard), hard))
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = RESERVE
    return WANTED if soft < 0 else max(min(WANTED, soft - used - RESERVE), 8)


def uvicorn_server(served: ASGIApp, grace: int = GRACE, backlog: int = 2048) -> uvicorn.Server:
    """The uvicorn server. `grace`: seconds for connections to receive answers, after sampling has ended."""
    server = uvicorn.Server(
        uvicorn.Config(
            served, http=Patient, ws="none", lifespan="off", log_level="error", access_log=False,
            timeout_graceful_shutdown=grace, timeout_keep_alive=75, server_header=False, backlog=backlog,
        )
    )  # fmt: skip
    server.capture_signals = nullcontext  # pyright: ignore[reportAttributeAccessIssue]  uvicorn would raise the signal again
    return server


def routed(routes: Mapping[tuple[str, str], Any], answer: Callable[..., Awaitable[None]], no_route: Any) -> Starlette:
    """A Starlette app that calls `answer(handler, path, request, scope, receive, send)` for each request of a route."""

    def endpoint(handler: Any, path: str) -> Callable[[Request], Awaitable[Any]]:
        async def endpoint(request: Request) -> ASGIApp:
            return partial(answer, handler, path, request)

        return endpoint

    every = [Route(path, endpoint(handler, path), methods=[method]) for (method, path), handler in routes.items()]
    return Starlette(routes=every, exception_handlers={HTTPException: no_route})


class Whole(h11.Connection):
    """h11's connection with bounds: h11 would read a head of thousands of lines and a body byte by byte, which blocks
    everything else."""

    small = 0  # small pieces of this body

    def __init__(self, later: Callable[[], object]) -> None:
        super().__init__(h11.SERVER, DEFAULT_MAX_INCOMPLETE_EVENT_SIZE)
        self.later, self.burst = later, 0

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE and self.trailing_data[0].partition(b"\r\n\r\n")[0].count(b"\n") > LINES:
            raise h11.RemoteProtocolError("the head has too many lines")
        if self.small - self.burst >= BURST:
            self.burst = self.small
            self.later()
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.small = self.burst = 0
        self.small += isinstance(event, h11.Data) and len(event.data) < SMALL
        if self.small > PIECES:
            raise h11.RemoteProtocolError("the body comes in too many small pieces")
        return event


class Patient(H11Protocol):
    """uvicorn's protocol with timeouts: uvicorn's would wait for the head of a request forever."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.conn = Whole(self.give_way)

    most = 0  # maximum connections; 0: not determined yet
    late: asyncio.TimerHandle | None = None
    since = 0.0  # when it began to wait for a request [s of the loop]
    ended = False  # half-closed by the client
    probed = -PROBE  # time of the last probe [s of the loop]

    @property
    def asking(self) -> bool:
        """Whether a request is being answered, or its body being read."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        Patient.most = Patient.most or room()
        self.wait(HEAD)
        if len(self.connections) > self.most:
            others = (c for c in self.connections if isinstance(c, Patient) and c is not self)
            idle = [c for c in others if not (c.asking and not c.cycle.more_body) and not c.transport.is_closing()]
            min(idle, key=lambda c: c.since, default=self).transport.abort()

    def wait(self, seconds: float) -> None:
        self.patience_over()
        self.since = self.loop.time()
        self.late = self.loop.call_later(seconds, self.close_idle)

    def close_idle(self) -> None:
        if not self.asking and not self.transport.is_closing():
            self.transport.abort()

    def patience_over(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None

    def give_way(self) -> None:
        """Let other connections have their turn; data that the client sends meanwhile stays in the kernel."""
        self.flow.pause_reading()
        self.loop.call_soon(self.go_on)

    def go_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.handle_events()

    def handle_events(self) -> None:
        super().handle_events()
        if self.asking:
            self.patience_over()

    def eof_received(self) -> bool:
        """Whether to keep a half-closed connection: a client may close its sending side alone (nc, clients of HTTP/1.0)
        and still wait for the answer. One that has closed both looks the same until something is sent."""
        if not self.asking or self.cycle.more_body:
            return False
        if not self.ended:
            self.ended = True
            if self.conn.their_http_version == b"1.0":  # must not be sent CONTINUE; keep-alive takes about a minute
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
                    if hasattr(socket, name):
                        self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(int(PROBE), 1))
            self.look()
        return True

    def look(self) -> None:
        """Abort an answer whose client is gone."""
        if not self.asking or self.transport.is_closing():
            return
        if self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        now, modern = self.loop.time(), self.conn.their_http_version != b"1.0"
        if modern and not self.cycle.response_started and now >= self.probed + PROBE:
            self.probed = now
            self.transport.write(CONTINUE)
        self.loop.call_later(LOOK, self.look)

    @property
    def socket(self) -> Any:
        return self.transport.get_extra_info("socket")

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
            if self.cycle is not None:  # the reader of the body must not answer any more
                self.cycle.disconnected = True
        else:  # an answer has begun
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.asking or self.transport.is_closing():
            return
        if self.ended:
            self.transport.close()
        else:
            self.wait(KEEP)

    def connection_lost(self, exc: Exception | None) -> None:
        self.patience_over()
        super().connection_lost(exc)
