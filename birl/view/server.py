"""The page's server: files of static/ and the routes of each part, for this machine only."""

import mimetypes
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from birl.errors import BirlError
from birl.view import folders, metrics, rollouts, waiting
from birl.view.answer import error
from birl.view.folders import Runs

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
    routes: list[Any] = [Route("/", _index), Mount("/static", StaticFiles(directory=STATIC))]
    routes += [route for part in (folders, metrics, rollouts, waiting) for route in part.routes(runs)]
    handlers: dict[Any, Any] = {BirlError: _mistake, OSError: _unreadable, HTTPException: _refused, Exception: _broken}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), port)


async def _index(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


async def _mistake(request: Request, problem: Exception) -> Response:
    return error(str(problem))


async def _unreadable(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, OSError)
    return error(f"{problem.filename}: {problem.strerror or problem}.")


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    if problem.status_code == 404:
        return error(f"There is nothing at {request.url.path}; the page is at /.", 404)
    return error(str(problem.detail), problem.status_code)


async def _broken(request: Request, problem: Exception) -> Response:
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
