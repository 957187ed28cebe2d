"""Tinker's routes: what is asked over HTTP, and what the client's own types want as an answer."""

import base64
import functools
import hashlib
import hmac
import json
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from birl.errors import BirlError
from birl.server import limits
from birl.server.limits import Gone, Refused
from birl.server.tinker import requests
from birl.server.tinker.checkpoints import Sampler
from birl.server.tinker.futures import Promise
from birl.server.tinker.service import CLONES, TinkerService
from birl.server.tinker.store import KINDS, Checkpoint, Record
from birl.server.tinker.tenants import Tenant

POLL = 25.0  # seconds that a question for an answer waits; the client's own limit is 45
LINK = 3600.0  # seconds that a link to a file is good for
OPEN = ("/api/v1/healthz", "/api/v1/download/{link}")

Handler = Callable[[TinkerService, Tenant, Request], Awaitable[Response]]


async def health(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def client_config(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Everything else as the client has it by default."""
    return JSONResponse({"pjwt_auth_enabled": False, "sample_join_sampling_session": True})


async def dynamic_config(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


async def telemetry(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Taken and not kept."""
    await limits.body(request, service.most_bytes)
    return JSONResponse({"status": "accepted"})


async def capabilities(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    context = service.work.context
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
    session = service.session(id, tenant)
    session.finished = True
    service.store.write("sessions", id, session.about())
    return JSONResponse({})


async def get_session(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    id = request.path_params["session"]
    session = service.session(id, tenant)
    runs = [r for r in service.runs.by_id if r.startswith(f"{id}:")]
    samplers = [s for s in service.checkpoints.samplers if s.startswith(f"{id}:")]
    about = {"user_metadata": session.metadata, "display_name": session.name}
    return JSONResponse({"training_run_ids": runs, "sampler_ids": samplers, **about})


async def list_sessions(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    own = [id for id, s in service.sessions.items() if s.owner == tenant.name]
    return JSONResponse({"sessions": page(own[::-1], request)[0]})


async def create_model(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    return promised(service.create(tenant, await body(service, request)))


async def get_info(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    run = service.run(requests.words(await body(service, request), "model_id"), tenant)
    data = {"arch": type(service.work.passes.base.model).__name__, "model_name": run.base}
    rank = run.config.rank if run.config else None
    about = {"model_id": run.id, "is_lora": True, "lora_rank": rank, "model_name": run.base}
    return JSONResponse({"type": "get_info", "model_data": data, **about})


async def forward_backward(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """What is wrong with the data is the promise's answer, as a number that is missing would stop the run."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "Compressed bodies are not taken (this server's client/config says so).", "user")
    raw = await limits.body(request, service.most_bytes)
    to = requests.address(raw)
    run = service.run(to.model, tenant)
    record = Record(to.seq, "forward_backward", raw)
    return promised(service.submit(tenant, run, record, tokens=len(raw) // 4), run.id)


async def ordered(kind: str, service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """A request of a run that is JSON."""
    data = await body(service, request)
    run = service.run(requests.words(data, "model_id"), tenant)
    seq = requests.whole(data, "seq_id", max(run.promises, default=0) + 1, 1, 2**31)
    service.store.note(tenant.name, kind, run=run.id, seq=seq)
    return promised(service.submit(tenant, run, Record(seq, kind, json.dumps(data).encode())), run.id)


async def load_weights(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    run, promise = service.load(tenant, await body(service, request))
    return promised(promise, run.id)


async def create_sampler(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    data = await body(service, request)
    session = requests.words(data, "session_id")
    service.session(session, tenant)
    id = f"{session}:sample:{requests.whole(data, 'sampling_session_seq_id', 0, 0, 999_999)}"
    path = requests.words(data, "model_path") or None
    base = requests.words(data, "base_model")
    if path is not None:
        found = service.checkpoints.readable(path, tenant.name)
        base = str(found.info["base"])
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
    promise, ids = service.sample(tenant, sampler, seq, data)
    return JSONResponse({"request_id": promise.id, "sample_sequence_ids": ids})


async def retrieve(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """The answer, as soon as there is one; 408 where that takes long, and the client asks again."""
    id = requests.words(await body(service, request), "request_id")
    promise = service.promises.find(id, tenant.name)
    if promise is None:
        raise Refused(410, f"There is no request {id[:100]!r}, or no longer: ask anew.", "user")
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


async def weights_info(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    found = service.checkpoints.readable(requests.words(await body(service, request), "tinker_path"), tenant.name)
    config = found.info["config"]
    about = {"train_unembed": config["unembed"], "train_mlp": config["mlp"], "train_attn": config["attention"]}
    return JSONResponse({"base_model": found.info["base"], "is_lora": True, "lora_rank": config["rank"], **about})


async def list_runs(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    own = [described_run(service, r.id) for r in service.runs.by_id.values() if r.owner == tenant.name]
    rows, cursor = page(own[::-1], request)
    return JSONResponse({"training_runs": rows, "cursor": cursor})


async def get_run(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    return JSONResponse(described_run(service, service.run(request.path_params["run"], tenant).id))


async def list_checkpoints(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Of one run, or of all of a tenant's."""
    run = request.path_params.get("run")
    if run is not None:
        service.run(run, tenant)
    own = [described_checkpoint(c) for c in service.store.checkpoints(run) if c.owner == tenant.name]
    rows, cursor = page(own, request)
    return JSONResponse({"checkpoints": rows, "cursor": None if run else cursor})


def addressed(service: TinkerService, tenant: Tenant, request: Request) -> Checkpoint:
    """The one that a path names. Raises `Refused` (404) where the tenant has none of that name."""
    parts = request.path_params
    try:
        return service.checkpoints.own(f"tinker://{parts['run']}/{parts['kind']}/{parts['name']}", tenant.name)
    except BirlError as error:
        raise Refused(404, str(error), "user") from None


async def delete_checkpoint(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    found = addressed(service, tenant, request)
    service.checkpoints.kept.pop(found.path, None)
    service.store.delete(found)
    service.store.note(tenant.name, "delete_checkpoint", path=found.path)
    return JSONResponse({})


async def publish(public: bool, service: TinkerService, tenant: Tenant, request: Request) -> Response:
    found = addressed(service, tenant, request)
    found.public = public
    service.store.change(found)
    service.store.note(tenant.name, "publish" if public else "unpublish", path=found.path)
    return JSONResponse({})


async def set_ttl(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    found, data = addressed(service, tenant, request), await body(service, request)
    seconds = requests.whole(data, "ttl_seconds", 0, 3600, 10 * 366 * 24 * 3600)
    found.expires = time.time() + seconds if seconds else None
    service.store.change(found)
    return JSONResponse({})


async def export_urls(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Links that need no key, for some time."""
    found, until = addressed(service, tenant, request), time.time() + LINK
    base, urls = str(request.base_url).rstrip("/"), {}
    for file in sorted(service.store.folder(found).iterdir()):
        if file.name != "checkpoint.json":
            link = json.dumps([found.path, file.name, until]).encode()
            sign = hmac.new(service.secret, link, hashlib.sha256).digest()
            urls[file.name] = f"{base}/api/v1/download/{base64.urlsafe_b64encode(sign + link).decode()}"
    service.store.note(tenant.name, "external_weights_urls", path=found.path)
    return JSONResponse({"urls": urls, "expires": moment(until)})


async def download(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    try:
        raw = base64.urlsafe_b64decode(request.path_params["link"])
    except ValueError:
        raise Refused(403, "This link is none.", "user") from None
    sign, link = raw[:32], raw[32:]
    if not hmac.compare_digest(sign, hmac.new(service.secret, link, hashlib.sha256).digest()):
        raise Refused(403, "This link is none, or from before the server was started.", "user")
    path, name, until = json.loads(link)
    found = service.store.find(path)
    if until < time.time() or found is None:
        raise Refused(410, "This link has expired, or the checkpoint was deleted.", "user")
    return FileResponse(service.store.folder(found) / name, filename=name)


async def whoami(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    return JSONResponse({"user_urn": f"urn:birl:user:{tenant.name}", "org_urn": "urn:birl:org:local"})


async def body(service: TinkerService, request: Request) -> dict[str, Any]:
    return await limits.json_object(request, service.most_bytes)


def promised(promise: Promise, run: str | None = None) -> Response:
    return JSONResponse({"request_id": promise.id, "model_id": run or promise.id.partition("#")[0]})


def page(rows: list[Any], request: Request) -> tuple[list[Any], dict[str, int]]:
    asked = request.query_params
    limit, offset = (
        int(asked.get(k, d)) if asked.get(k, d).isdigit() else int(d) for k, d in (("limit", "100"), ("offset", "0"))
    )
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def described_run(service: TinkerService, id: str) -> dict[str, Any]:
    run = service.runs.by_id[id]
    last: dict[str, dict[str, Any]] = {}
    for checkpoint in sorted(service.store.checkpoints(id), key=lambda c: c.made):
        last[checkpoint.kind] = described_checkpoint(checkpoint)
    return {
        "training_run_id": id, "base_model": run.base, "model_owner": run.owner, "is_lora": True, "corrupted": False,
        "lora_rank": run.config.rank if run.config else None, "last_request_time": moment(run.used),
        "last_checkpoint": last.get("weights"), "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": run.metadata,
    }  # fmt: skip


def described_checkpoint(c: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{c.kind}/{c.name}", "checkpoint_type": KINDS[c.kind], "time": moment(c.made),
        "tinker_path": c.path, "size_bytes": c.size, "public": c.public, "user_metadata": c.metadata,
        "expires_at": None if c.expires is None else moment(c.expires),
    }  # fmt: skip


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


RUN = "/api/v1/training_runs/{run}"
ONE = RUN + "/checkpoints/{kind}/{name}"
ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/api/v1/healthz"): health,
    ("POST", "/api/v1/client/config"): client_config,
    ("POST", "/api/v1/client/dynamic_config"): dynamic_config,
    ("POST", "/api/v1/telemetry"): telemetry,
    ("GET", "/api/v1/get_server_capabilities"): capabilities,
    ("GET", "/api/v1/whoami"): whoami,
    ("POST", "/api/v1/create_session"): create_session,
    ("POST", "/api/v1/session_heartbeat"): heartbeat,
    ("GET", "/api/v1/sessions"): list_sessions,
    ("GET", "/api/v1/sessions/{session}"): get_session,
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
    ("POST", "/api/v1/weights_info"): weights_info,
    ("GET", "/api/v1/training_runs"): list_runs,
    ("GET", RUN): get_run,
    ("GET", RUN + "/checkpoints"): list_checkpoints,
    ("GET", "/api/v1/checkpoints"): list_checkpoints,
    ("DELETE", ONE): delete_checkpoint,
    ("POST", ONE + "/publish"): functools.partial(publish, True),
    ("DELETE", ONE + "/publish"): functools.partial(publish, False),
    ("PUT", ONE + "/ttl"): set_ttl,
    ("GET", ONE + "/external_weights_urls"): export_urls,
    ("GET", "/api/v1/download/{link}"): download,
}


def app(service: TinkerService) -> Starlette:
    routes = [
        Route(path, _endpoint(service, handler, path), methods=[method]) for (method, path), handler in ROUTES.items()
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


def _endpoint(service: TinkerService, handler: Handler, path: str) -> Callable[[Request], Awaitable[Any]]:
    async def endpoint(request: Request) -> ASGIApp:
        return functools.partial(_answer, service, handler, path, request)

    return endpoint


async def _answer(
    service: TinkerService, handler: Handler, path: str, request: Request, scope: Scope, receive: Receive, send: Send
) -> None:
    """From beginning to end; whatever is wrong becomes an answer with the reason."""
    try:
        if doubt := limits.ambiguous(request.headers):
            raise doubt
        if not service.tenants.keys and (stranger := limits.intruder(request.headers, "")):
            raise stranger
        tenant = service.tenants.named("") if path in OPEN else service.tenants.of(request.headers)
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
