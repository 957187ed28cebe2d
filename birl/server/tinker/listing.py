"""What a tenant has: sessions, runs, checkpoints; their lists, links to files, publishing and removal."""

import base64
import functools
import hashlib
import hmac
import json
import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from birl.errors import BirlError
from birl.server import limits
from birl.server.limits import Refused
from birl.server.tinker import requests
from birl.server.tinker.service import TinkerService
from birl.server.tinker.store import KINDS, Checkpoint
from birl.server.tinker.tenants import Tenant

LINK = 3600.0  # seconds that a link to a file is good for
DOWNLOAD = "/api/v1/download/{link}"


async def get_session(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    id = request.path_params["session"]
    session = service.session(id, tenant)
    runs = [r for r in service.runs.by_id if r.startswith(f"{id}:")]
    samplers = [s for s in service.checkpoints.samplers if s.startswith(f"{id}:")]
    about = {"user_metadata": session.metadata, "display_name": session.name}
    return JSONResponse({"training_run_ids": runs, "sampler_ids": samplers, **about})


async def list_sessions(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    return JSONResponse({"sessions": page(service.sessions.of(tenant.name)[::-1], request)[0]})


async def weights_info(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    found = service.checkpoints.readable(
        requests.words(await limits.json_object(request, service.most_bytes), "tinker_path"), tenant.name
    )
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
    found, data = addressed(service, tenant, request), await limits.json_object(request, service.most_bytes)
    seconds = requests.whole(data, "ttl_seconds", 0, 3600, 10 * 366 * 24 * 3600)
    found.expires = time.time() + seconds if seconds else None
    service.store.change(found)
    return JSONResponse({})


async def export_urls(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Links that need no key, for some time."""
    found, until = addressed(service, tenant, request), service.clock() + LINK
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
    if until < service.clock() or found is None:
        raise Refused(410, "This link has expired, or the checkpoint was deleted.", "user")
    service.store.note(found.owner, "download", path=path, file=name)
    return FileResponse(service.store.folder(found) / name, filename=name)


def page(rows: list[Any], request: Request) -> tuple[list[Any], dict[str, int]]:
    limit, offset = (_number(request, "limit", 100), _number(request, "offset", 0))
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _number(request: Request, key: str, default: int) -> int:
    """Raises `BirlError`."""
    value = request.query_params.get(key, str(default))
    if not value.isascii() or not value.isdigit() or len(value) > 15:
        raise BirlError(f"{key}: must be a whole number of at least 0, not {value[:50]!r}.")
    return int(value)


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
ROUTES = {
    ("GET", "/api/v1/sessions"): list_sessions,
    ("GET", "/api/v1/sessions/{session}"): get_session,
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
    ("GET", DOWNLOAD): download,
}
