"""HTTP server of an engine: routes, access control, and errors."""

import functools
import time
import traceback
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.server import native
from birl.server.connections import routed
from birl.server.dialects import modules
from birl.server.limits import Gone, Refused, ambiguous, intruder
from birl.server.service import Service
from birl.server.stream import refusal

Handler = Callable[[Service, Request], Awaitable[Response]]
OPEN = ("/health", "/ready")  # without a token, for process monitors
CLOSED = 499  # status in the metrics if the client has disconnected

MODULES = [native, *modules("server")]
ROUTES: dict[tuple[str, str], Handler] = {route: handler for m in MODULES for route, handler in m.ROUTES.items()}
ERRORS = {path: m.error for m in MODULES if hasattr(m, "error") for _, path in m.ROUTES}  # path -> body of an error


def app(service: Service) -> Starlette:
    return routed(ROUTES, functools.partial(answer, service), _no_route)


async def answer(
    service: Service, handler: Handler, path: str, request: Request, scope: Scope, receive: Receive, send: Send
) -> None:
    """Handle one request; errors are counted, and sent unless the response has begun."""
    began, status, error = time.perf_counter(), 0, None

    async def noted(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        await send(message)

    try:
        if doubt := ambiguous(request.headers):
            raise doubt
        if path not in OPEN and (stranger := intruder(request.headers, service.token)):
            raise stranger
        service.owner.admit(path, request.headers)
        response = await handler(service, request)
        await response(scope, receive, noted)
    except Gone:
        status = CLOSED
    except WeightsFailed as failure:
        error = Refused(409, str(failure), "weights", cause=failure.cause)
    except (Refused, EngineDown, BirlError) as failure:
        error = refusal(failure)
    except Exception as failure:
        traceback.print_exception(failure)
        error = refusal(failure)
    if error is not None:
        if not status:
            body = ERRORS.get(path, Refused.body)(error)
            await JSONResponse(body, error.status, error.headers)(scope, receive, send)
        status = error.status
    service.metrics.requests.labels(path, str(status)).inc()
    service.metrics.seconds.labels(path).observe(time.perf_counter() - began)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    there = ", ".join(dict.fromkeys(path for _, path in ROUTES))
    what = f"{request.method} {request.url.path}: {error.detail}. There are {there}."
    return JSONResponse(Refused(error.status_code, what).body(), error.status_code, dict(error.headers or {}))
