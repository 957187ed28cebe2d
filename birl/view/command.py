"""`birl view`: the page's server, for this machine only: files of static/ and the routes of each part; and the command,
which prints the address, opens a browser, and waits for Ctrl-C."""

import mimetypes
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from birl.errors import INTERRUPTED, BirlError
from birl.flags import Flag, taken, whole
from birl.view import folders, metrics, rollouts, waiting
from birl.view.answer import error
from birl.view.folders import Runs

PORT = 8311
NEXT = 20  # further ports to try if the first is in use
USAGE = (
    "Usage: birl view [RUN ...] [--port N] [--no-browser]\n\n"
    "Serves a live page of runs: curves, comparison, rollouts, timeline. RUN is a run folder or a folder of runs\n"
    "(default: runs). Only this machine can open the page (127.0.0.1). It is read-only and also shows running runs.\n"
    f"--port: default {PORT}, or the next free port. Ctrl-C ends the page; runs are not affected."
)


def _port(text: str) -> int:
    if (number := whole(text)) > 65535:
        raise ValueError
    return number


PORT_FLAG = Flag(name="--port", value="N", takes="a number up to 65535, as in `birl view --port 8311`", read=_port)
QUIET = Flag(name="--no-browser")


def run(words: list[str]) -> int:
    flags, roots = taken("view", words, (PORT_FLAG, QUIET))
    for word in roots:
        if "=" in word and not Path(word).exists():
            raise BirlError(f"{word}: `birl view` takes folders, as in `birl view runs/demo`")
    if not roots and not Path("runs").is_dir():
        raise BirlError("There is no folder runs here. Name a run or a folder of runs: `birl view FOLDER`.")
    runs = Runs([Path(root) for root in roots or ["runs"]])
    listener, there = listen(flags.get(PORT_FLAG.name)), list(runs)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    if roots and 0 < len(there) <= 8:  # the page begins with the curves of named runs, else with the list
        url += "#/curves?" + "&".join(f"run={run.id}" for run in there)
    count = f"{len(there)} run{'s' * (len(there) != 1)}" if there else "No runs yet: the page will show them"
    print(f"birl view: {url}\n{count}. Ctrl-C ends it.", flush=True)
    screen = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if QUIET.name not in flags and screen:
        threading.Timer(0.3, webbrowser.open, (url,)).start()
    server(runs, listener).run([listener])  # ended by a signal, whose exception asyncio may lose
    return INTERRUPTED


def server(runs: Runs, listener: socket.socket) -> Any:
    """The page's `uvicorn.Server`, not started: `.run([listener])` blocks until a signal."""
    import uvicorn

    from birl.server.connections import Patient

    return uvicorn.Server(
        uvicorn.Config(
            app(runs, listener.getsockname()[1]), http=Patient, ws="none", lifespan="off", log_level="error",
            access_log=False, server_header=False, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip


def listen(port: int | None) -> socket.socket:
    """A socket on the loopback. `port` None: 8311 or the next free one; 0: any."""
    wanted = [port] if port is not None else range(PORT, PORT + NEXT)
    for number in wanted:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", number))
            listener.listen(128)
            return listener
        except OSError as problem:
            listener.close()
            reason = problem.strerror or str(problem)
    if port is not None:
        raise BirlError(f"--port {port} cannot be used ({reason}). Choose another, or leave --port out.")
    raise BirlError(f"The ports {PORT} to {PORT + NEXT - 1} are all taken. Name a free one with --port N.")


mimetypes.add_type("text/javascript", ".js")  # on Windows it may be text/plain, which browsers do not run
STATIC = Path(__file__).parent / "static"
POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    # Whatever a model has written: only our scripts run, and nothing is loaded from elsewhere.
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def app(runs: Runs, port: int) -> "Guard":
    """The page of these runs, for a server on 127.0.0.1:`port`."""
    index = Route("/", lambda request: FileResponse(STATIC / "index.html"))
    routes: list[Any] = [index, Mount("/static", StaticFiles(directory=STATIC))]
    routes += [route for part in (folders, metrics, rollouts, waiting) for route in part.routes(runs)]
    handlers: dict[Any, Any] = dict.fromkeys((BirlError, OSError, HTTPException, Exception), _failed)
    return Guard(Starlette(routes=routes, exception_handlers=handlers), port)


async def _failed(request: Request, problem: Exception) -> Response:
    match problem:
        case BirlError():
            return error(str(problem))
        case OSError():
            return error(f"{problem.filename}: {problem.strerror or problem}.")
        case HTTPException(status_code=404):
            return error(f"There is nothing at {request.url.path}; the page is at /.", 404)
        case HTTPException():
            return error(str(problem.detail), problem.status_code)
    what = f"{type(problem).__name__}: {problem}"
    return error(f"birl view failed ({what}). Its terminal shows where; please report it.", 500)


class Guard:
    """Refuses requests that do not come from this page, and adds `HEADERS` to every response.

    A website can resolve its own name to 127.0.0.1 (DNS rebinding) and could then read the responses; the Host header
    contains that name.
    """

    def __init__(self, inner: Starlette, port: int) -> None:
        self.inner, self.port = inner, port
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        if port == 80:
            self.hosts |= {"127.0.0.1", "localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                result = {name.lower().decode(): value for name, value in message.get("headers", [])}
                own = {name: value.encode() for name, value in HEADERS.items()} | {
                    name: value for name, value in result.items() if name == "content-security-policy"
                }
                message = {**message, "headers": [(k.encode(), v) for k, v in (result | own).items()]}
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self.inner)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return error(
                f"This page is for http://127.0.0.1:{self.port} alone. Through SSH, forward the same port: "
                f"ssh -L {self.port}:127.0.0.1:{self.port} HOST",
                403,
            )
        if scope["method"] != "GET":
            return error("This page only reads: GET is the one method.", 405)
        return None
