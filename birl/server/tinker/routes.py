"""HTTP routes of Tinker's API, with responses as the client's types."""

import asyncio
import functools
import json
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from birl.errors import BirlError
from birl.server import limits
from birl.server.connections import routed
from birl.server.limits import Gone, Refused
from birl.server.tinker import listing, requests
from birl.server.tinker.checkpoints import Sampler
from birl.server.tinker.futures import Promise
from birl.server.tinker.service import CLONES, TinkerService
from birl.server.tinker.store import Record
from birl.server.tinker.tenants import Tenant

POLL = 25.0  # seconds that a poll for an answer waits; the client's own timeout is 45
BODIES = 4  # maximum bodies of the largest size that a tenant may be sending at once
OPEN = ("/api/v1/healthz", listing.DOWNLOAD)

Handler = Callable[[TinkerService, Tenant, Request], Awaitable[Response]]


async def constant(answer: Mapping[str, Any], service: TinkerService, tenant: Tenant, request: Request) -> Response:
    return JSONResponse(answer)


#: everything else has the client's defaults
CLIENT, DYNAMIC = (
    {"pjwt_auth_enabled": False, "sample_join_sampling_session": True},
    {"refresh_interval_sec": 300, "sample_cancel_enabled": True},
)


async def telemetry(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Accept telemetry without storing it."""
    await limits.body(request, service.most_bytes)
    return JSONResponse({"status": "accepted"})


async def capabilities(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    context = service.work.reader.context
    models = [
        {"model_name": n, "max_context_length": context, "trainable": True, "sampleable": True} for n in service.names
    ]
    return JSONResponse({"supported_models": models})


async def create_session(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    id = service.open_session(tenant, await body(service, request))
    return JSONResponse({"type": "create_session", "session_id": id})


async def heartbeat(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    session = service.session(requests.words(await body(service, request), "session_id"), tenant)
    if session.finished:
        raise Refused(410, "The session is finished.", "user")
    return JSONResponse({"type": "session_heartbeat"})


async def finish_session(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    id = request.path_params["session"]
    session, data = service.session(id, tenant), await body(service, request)
    if not session.finished:  # the first reason counts
        reason = data.get("reason")
        session.finished = True
        session.reason = str(reason.get("type") or "")[:20] if isinstance(reason, dict) else ""
        service.sessions.keep(id)
        service.promises.abandon(id, time.monotonic())
    return JSONResponse({})


async def create_model(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    return promised(await service.create(tenant, await body(service, request)))


async def get_info(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    run = service.run(requests.words(await body(service, request), "model_id"), tenant)
    data = {"arch": type(service.work.passes.base.model).__name__, "model_name": run.base}
    rank = run.config.rank if run.config else None
    about = {"model_id": run.id, "is_lora": True, "lora_rank": rank, "model_name": run.base}
    return JSONResponse({"type": "get_info", "model_data": data, **about})


async def forward_backward(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Accept a training request. Invalid data become the future's error: a missing number would block the run."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "Compressed bodies are not taken (this server's client/config says so).", "user")
    raw = await limits.body(request, service.most_bytes)
    async with tenant.reading:  # other tenants are served meanwhile
        to = await asyncio.to_thread(requests.address, raw)
    run = service.run(to.model, tenant)
    record = Record(to.seq, "forward_backward", raw)
    return promised(service.submit(tenant, run, record, to.tokens), run.id)


async def ordered(kind: str, service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """A JSON request of a run."""
    data = await body(service, request)
    run = service.run(requests.words(data, "model_id"), tenant)
    seq = requests.whole(data, "seq_id", run.newest + 1, 1, 2**31)
    service.store.note(tenant.name, kind, run=run.id, seq=seq)
    return promised(service.submit(tenant, run, Record(seq, kind, json.dumps(data).encode())), run.id)


async def load_weights(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    run, promise = service.load(tenant, await body(service, request))
    return promised(promise, run.id)


async def create_sampler(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    data = await body(service, request)
    session = requests.words(data, "session_id")
    service.opened(session, tenant)
    id = f"{session}:sample:{requests.whole(data, 'sampling_session_seq_id', 0, 0, 999_999)}"
    path = requests.words(data, "model_path") or None
    base = requests.words(data, "base_model")
    if path is not None:
        checkpoint = service.checkpoints.readable(path, tenant.name)
        base = str(checkpoint.info["base"])
    service.known(base)
    service.checkpoints.add_sampler(Sampler(id, tenant.name, base, path))
    service.store.note(tenant.name, "create_sampling_session", sampler=id, path=path)
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": id})


async def join_sampler(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    sampler = service.sampler(requests.words(await body(service, request), "sampling_session_id"), tenant)
    sampler.clients += 1
    service.checkpoints.add_sampler(sampler)
    return JSONResponse({"type": "join_sampling_session", "client_counter": sampler.clients})


async def get_sampler(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    sampler = service.sampler(request.path_params["sampler"], tenant)
    return JSONResponse({"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path})


async def sample(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    data = await body(service, request)
    if data.get("sampling_session_id") is None:
        raise Refused(400, "sampling_session_id is missing: make one with create_sampling_session.", "user")
    sampler = service.sampler(requests.words(data, "sampling_session_id"), tenant)
    seq = requests.whole(data, "seq_id", 0, 0, CLONES * CLONES)
    promise, ids = await service.sample(tenant, sampler, seq, data)
    return JSONResponse({"request_id": promise.id, "sample_sequence_ids": ids})


async def retrieve(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """The answer when it is ready; 408 after `POLL` seconds, and the client polls again."""
    id = requests.words(await body(service, request), "request_id")
    promise = service.promises.find(id, tenant.name)
    if promise is None:
        raise Refused(410, f"There is no request {id[:100]!r}, or no longer: send it again.", "user")
    answer = await promise.wait(POLL)
    if answer is None:
        again = {"type": "try_again", "request_id": id, "queue_state": "active"}
        return JSONResponse(again, 408)
    promise.fetched = promise.fetched or time.monotonic()
    return Response(answer.body, media_type=answer.media_type)


async def cancel(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    promise = service.promises.find(requests.words(await body(service, request), "request_id"), tenant.name)
    if promise is not None and promise.task is not None:
        promise.task.cancel()
    return JSONResponse({})


async def whoami(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    return JSONResponse({"user_urn": tenant.urn, "org_urn": "urn:birl:org:local"})


async def body(service: TinkerService, request: Request) -> dict[str, Any]:
    return await limits.json_object(request, service.most_bytes)


def promised(promise: Promise, run: str | None = None) -> Response:
    return JSONResponse({"request_id": promise.id, "model_id": run or promise.id.partition("#")[0]})


ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/api/v1/healthz"): functools.partial(constant, {"status": "ok"}),
    ("POST", "/api/v1/client/config"): functools.partial(constant, CLIENT),
    ("POST", "/api/v1/client/dynamic_config"): functools.partial(constant, DYNAMIC),
    ("POST", "/api/v1/telemetry"): telemetry,
    ("GET", "/api/v1/get_server_capabilities"): capabilities,
    ("GET", "/api/v1/whoami"): whoami,
    ("POST", "/api/v1/create_session"): create_session,
    ("POST", "/api/v1/session_heartbeat"): heartbeat,
    ("POST", "/api/v1/sessions/{session}/finish"): finish_session,
    ("POST", "/api/v1/create_model"): create_model,
    ("POST", "/api/v1/get_info"): get_info,
    ("POST", "/api/v1/forward_backward"): forward_backward,
    ("POST", "/api/v1/load_weights"): load_weights,
    **{
        ("POST", f"/api/v1/{kind}"): functools.partial(ordered, kind)
        for kind in ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external", "unload_model")
    },
    ("POST", "/api/v1/create_sampling_session"): create_sampler,
    ("POST", "/api/v1/join_sampling_session"): join_sampler,
    ("GET", "/api/v1/samplers/{sampler}"): get_sampler,
    ("POST", "/api/v1/asample"): sample,
    ("POST", "/api/v1/retrieve_future"): retrieve,
    ("POST", "/api/v1/cancel_future"): cancel,
    **listing.ROUTES,
}


PROJECTS, BILLING = "This server has no projects.", "This server has no billing."
NOT_OFFERED = {
    ("POST", "/api/v1/copy_weights"): f"{PROJECTS} Make a run from the weights, and save it.",
    ("PUT", "/api/v1/sessions/{session}/project"): PROJECTS,
    ("GET", "/api/v1/sessions/{session}/trace_export"): "This server keeps no traces of sessions.",
    ("GET", "/api/v1/billing/usage/events"): BILLING,
    ("GET", "/api/v1/audit"): "The audit is for who runs this server: audit.jsonl in its folder.",
    ("POST", "/api/v1/create_custom_loss"): "Custom losses run at the client (this server's client/config says so).",
    ("POST", "/api/v1/retrieve_futures"): "Ask for one future at a time (this server's client/config says so).",
    ("POST", "/api/v1/auth/token"): "Keys are sent as they are (this server's client/config says so).",
}


async def not_offered(reason: str, service: TinkerService, tenant: Tenant, request: Request) -> Response:
    raise Refused(400, f"{reason} See docs/tinker.md.", "user")


ROUTES |= {route: functools.partial(not_offered, reason) for route, reason in NOT_OFFERED.items()}


def app(service: TinkerService) -> Starlette:
    return routed(ROUTES, functools.partial(_answer, service), _no_route)


async def _answer(
    service: TinkerService, handler: Handler, path: str, request: Request, scope: Scope, receive: Receive, send: Send
) -> None:
    """Handle one request; errors become responses with the reason."""
    try:
        limits.check_length(request.headers)
        if not service.tenants.keys:
            limits.check_access(request.headers, "")
        tenant = service.tenants.named("") if path in OPEN else service.tenants.of(request.headers)
        with tenant.taking(limits.announced(request, service.most_bytes), BODIES * service.most_bytes):
            response = await handler(service, tenant, request)
    except Gone:
        return
    except Refused as refusal:
        response = refused(refusal.status, str(refusal), refusal.headers)
    except BirlError as error:
        response = refused(400, str(error), {})
    except Exception as error:
        traceback.print_exception(error)
        response = refused(500, f"{type(error).__name__}: {error}", {})
    await response(scope, receive, send)


def refused(status: int, message: str, headers: Mapping[str, str]) -> Response:
    body = {"error": message, "detail": message, "category": "user" if status < 500 else "server"}
    return JSONResponse(body, status, dict(headers))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: this server does not offer that ({error.detail}); see docs/tinker.md."
    return refused(error.status_code, what, error.headers or {})
