"""HTTP gateway for agents: an address for each episode with OpenAI's and Anthropic's APIs, on loopback.

    http://127.0.0.1:PORT/s/SECRET/v1
        POST /chat/completions   POST /completions   GET /models        OpenAI
        POST /responses          POST /responses/input_tokens           OpenAI's Responses
        POST /messages           POST /messages/count_tokens            Anthropic
        POST /reward             {"reward": 1.0, "agent": "critic"}     reward of the episode

Each answer is a turn of the episode. Every client with the address may use it; it cannot be guessed. Answers whose
client has disconnected are aborted, and are no turns.
"""

import asyncio
import contextlib
import math
import secrets
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from birl.envs.calls import called
from birl.errors import Aborted, BirlError, EngineFailed, TooLong
from birl.rollout.session import PROMPTS, Session
from birl.server.agent_session import Answering, Reply, Visit
from birl.server.connections import uvicorn_server
from birl.server.dialects import modules
from birl.server.limits import TIMEOUT, Gone, Refused, check_bulk, check_length, disconnected, json_object, long
from birl.server.messages import typed
from birl.server.request_policy import Terms
from birl.text.chat import Chat
from birl.types import PAST

MOST_BYTES = 16 << 20  # maximum size of a request
LONGEST = 1 << 20  # maximum tokens, as an episode may have no bound
PING = 10.0  # interval of pings in a stream without an answer yet [s]

EVENTS = "text/event-stream"
OVER = "The episode is over."

Body = dict[str, Any]


class Gateway:
    """Serves `birl.rollout.session.Session`s. `sampling` "run": answers use the run's sampling parameters, whatever a
    client requests; "agent": a client's temperature, top_p, top_k and min_p are used."""

    def __init__(self, chat: Chat, sampling: str = "run") -> None:
        self.terms = Terms(chat=chat, sampling=sampling)
        self.visits: dict[str, Visit] = {}
        dialects = modules("REPLIES")
        self.replies = {route: reply for m in dialects for route, reply in m.REPLIES.items()}
        self.errors = [(path, m.error) for m in dialects if hasattr(m, "error") for _, path in m.REPLIES]
        self._url, self._lacking = "", False
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on a free port."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # with proto 0 Nagle stays on
        sock.bind(("127.0.0.1", 0))
        routes = [Route("/{path:path}", self._endpoint, methods=["GET", "POST"])]
        # Without file descriptors asyncio reports `backlog` errors a second; the kernel's queue is set below.
        self._server = uvicorn_server(Starlette(routes=routes), grace=1, backlog=16)
        asyncio.get_running_loop().set_exception_handler(self._reported)
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        sock.listen(4096)
        self._url = f"http://127.0.0.1:{sock.getsockname()[1]}"

    def _reported(self, loop: asyncio.AbstractEventLoop, context: Body) -> None:
        """Report errors of the loop as asyncio does, and a lack of file descriptors in one line."""
        if "out of system resource" not in context["message"]:
            loop.default_exception_handler(context)
        elif not self._lacking:
            self._lacking = True
            print(
                "The process has no file descriptors left, so connections of agents wait. Raise the limit (ulimit -n), "
                "or run fewer episodes at once (rollout.prompts, rollout.group_size).", flush=True,
            )  # fmt: skip

    def enter(self, session: Session) -> str:
        """Register a session; returns its address, valid until `leave`."""
        secret = secrets.token_urlsafe(24)
        self.visits[secret] = Visit(params=session.params, session=session)
        return f"{self._url}/s/{secret}/v1"

    def leave(self, session: Session) -> None:
        """Remove a session; its open answers are aborted."""
        for secret in [s for s, visit in self.visits.items() if visit.session is session]:
            self.visits.pop(secret).close()

    async def close(self) -> None:
        for visit in self.visits.values():
            visit.close()
        self.visits.clear()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def _endpoint(self, request: Request) -> Any:
        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            with contextlib.suppress(Gone):
                await (await self._answer(request))(scope, receive, send)

        return respond

    async def _answer(self, request: Request) -> Any:
        """A response, or an ASGI app for a stream."""
        empty, place, secret, *path = request.url.path.split("/") + [""] * 3
        where = "/".join(path).strip("/").removeprefix("v1/").removeprefix("v1/")  # Anthropic's client adds another v1
        error = next((error for path, error in self.errors if where.startswith(path)), Refused.body)
        visit = self.visits.get(secret) if not empty and place == "s" else None
        try:
            check_length(request.headers)
            if visit is None:
                raise Refused(404, "There is no such episode, or it is over.", "not_found_error")
            return await self._handled(visit, where, request)
        except Gone:
            raise
        except Exception as failure:
            refused = refusal(failure)
            # The clients of OpenAI and Anthropic retry unless a header forbids it: useless here.
            return JSONResponse(error(refused), refused.status, {**refused.headers, "x-should-retry": "false"})

    async def _handled(self, visit: Visit, where: str, request: Request) -> Any:
        match request.method, where:
            case "GET", "models":
                names = visit.session.policies or ("birl",)
                return JSONResponse({"object": "list", "data": [card(name) for name in names]})
            case "GET", name if name.startswith("models/"):
                return JSONResponse(card(name.removeprefix("models/")))
            case "POST", "reward":
                return reward(visit, await json_object(request, MOST_BYTES))
            case route if route in self.replies:
                data = await json_object(request, MOST_BYTES)
                check_bulk(data, min(visit.session.limits.tokens, LONGEST))
                policy = replying(data.get("model"), visit.session.policies)
                read = partial(self.replies[route], data, self.terms, visit)
                slow = long(request.headers) or route[1].endswith("tokens")  # which renders the prompt
                reply = await called(read, threads=PROMPTS) if slow else read()
            case _:
                raise Refused(404, f"{request.method} /{where}: there is no such address.", "not_found_error")
        if not isinstance(reply, Reply):
            return JSONResponse(reply)
        reply.agent, reply.policy = request.headers.get("x-birl-agent", reply.agent), policy
        return await answered(visit, reply, request)


def replying(model: Any, policies: Sequence[str]) -> str:
    """The policy named by a request's `model`; empty if there is only one, whatever the name. Raises `Refused`."""
    name = model.removeprefix("birl/") if isinstance(model, str) else ""
    if name in policies:
        return name
    if sum(not known.endswith(PAST) for known in policies) < 2:
        return ""
    raise Refused(404, f"model={name!r}: there is no such policy; there are {', '.join(policies)}.", "model_not_found")


async def answered(visit: Answering, reply: Reply, request: Request, timeout: float = math.inf) -> Any:
    """The answer in one piece, or as a stream once it is complete. Raises `Gone` if its client has disconnected, and
    `Refused` after `timeout` [s]."""
    asking = visit.ask(reply)
    gone = asyncio.ensure_future(disconnected(request.receive))
    finished = False
    try:
        first = PING if reply.stream else None if math.isinf(timeout) else timeout
        await asyncio.wait({asking, gone}, timeout=first, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise Gone
        if not asking.done() and not reply.stream:
            raise Refused(504, f"The answer took longer than {timeout:g} s (request_timeout).", TIMEOUT)
        if not asking.done():
            stream = Stream(visit, reply, asking, gone)
            finished = True
            return stream
        if asking.cancelled():
            raise Refused(503, OVER, "episode_over")
        result = asking.result()
        finished = True
        if not reply.stream:
            return JSONResponse(reply.whole(result))
        return Response(b"".join(reply.chunks(result)), headers={"cache-control": "no-cache"}, media_type=EVENTS)
    finally:
        if not finished:
            await visit.drop(asking)
        if not finished or asking.done():
            gone.cancel()


@dataclass(slots=True)
class Stream:
    """A stream whose answer takes long: sends pings until it is complete."""

    visit: Answering
    reply: Reply
    asking: "asyncio.Task[Any]"
    gone: "asyncio.Future[None]"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-cache")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not self.asking.done():
                await send({"type": "http.response.body", "body": self.reply.ping, "more_body": True})
                waits: set[asyncio.Future[Any]] = {self.asking, self.gone}
                await asyncio.wait(waits, timeout=PING, return_when=asyncio.FIRST_COMPLETED)
                if self.gone.done():
                    return
            try:
                body = b"".join(self.reply.chunks(self.asking.result()))
            except (Exception, asyncio.CancelledError) as failure:
                body = self.reply.failed(refusal(failure))
            await send({"type": "http.response.body", "body": body, "more_body": False})
        finally:
            if self.gone.done() or not self.asking.done():
                await self.visit.drop(self.asking)
            self.gone.cancel()


def refusal(failure: BaseException) -> Refused:
    match failure:
        case Refused():
            return failure
        case TooLong():
            return Refused(400, f"{failure}.", code="context_length_exceeded")
        case EngineFailed():
            return Refused(503, f"The engine failed: {failure.__cause__!r}"[:500], "engine_down")
        case Aborted():
            return Refused(503, "The answer was aborted.", "engine_down")
        case asyncio.CancelledError():
            return Refused(503, OVER, "episode_over")
        case BirlError():
            return Refused(400, str(failure))
        case _:
            traceback.print_exception(failure)
            return Refused(500, f"{type(failure).__name__}: {failure}"[:500], "server_error")


def reward(visit: Visit, data: Body) -> Response:
    value, agent = typed(data, "reward", float, math.nan), data.get("agent") or ""
    if not math.isfinite(value):
        raise Refused(400, f"reward must be a finite number, got {data.get('reward')!r}"[:200], param="reward")
    if not isinstance(agent, str):
        raise Refused(400, "agent must be a name.", param="agent")
    if unknown := sorted(set(data) - {"reward", "agent"}):
        raise Refused(400, f"{unknown[0]}: there is no such key; there are reward and agent.", param=unknown[0])
    visit.session.rewarded(value, agent)
    return JSONResponse({"reward": data["reward"], "agent": agent})


def card(name: str) -> Body:
    return {"id": name, "object": "model", "created": 0, "owned_by": "birl", "type": "model", "display_name": name}
