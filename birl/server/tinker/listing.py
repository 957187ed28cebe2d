"""Resources of a tenant: sessions, runs, checkpoints; lists, download links, publishing and deletion."""

import base64
import functools
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from birl.errors import BirlError
from birl.server import limits
from birl.server.limits import Refused
from birl.server.tinker import requests
from birl.server.tinker.checkpoints import LONGEST, SHORTEST
from birl.server.tinker.service import TinkerService
from birl.server.tinker.store import KINDS, Checkpoint
from birl.server.tinker.tenants import Session, Tenant

LINK = 3600.0  # validity of a download link [s]
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


async def search_sessions(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Sessions that match the client's `SessionSearchRequest`, the newest first."""
    data, by_id = await limits.json_object(request, service.most_bytes), service.sessions.by_id
    limit, until, fits = requests.whole(data, "limit", 50, 1, 200), _cursor(data), _search(tenant, data)
    own = [id for id in service.sessions.of(tenant.name)[::-1] if until is None or _place(by_id[id], id) < until]
    rows = [id for id in own if fits(id, by_id[id])]
    sizes: dict[str, list[int]] = {}
    for checkpoint in service.store.of(tenant.name):
        sizes.setdefault(checkpoint.run.partition(":")[0], []).append(checkpoint.size)
    after = None
    if len(rows) > limit:
        after = {"last_created_at": moment(by_id[rows[limit - 1]].made), "last_session_id": rows[limit - 1]}
    result = [described_session(by_id[id], id, sizes.get(id, [])) for id in rows[:limit]]
    return JSONResponse({"sessions": result, "next_cursor": after})


def _place(session: Session, id: str) -> tuple[datetime, str]:
    return datetime.fromtimestamp(session.made, UTC), id


def _cursor(data: Mapping[str, Any]) -> tuple[datetime, str] | None:
    """End of the previous page, or None. Raises `BirlError`."""
    if data.get("cursor") is None:
        return None
    cursor = requests.mapping(data["cursor"], "cursor")
    try:
        when = datetime.fromisoformat(requests.words(cursor, "last_created_at")).astimezone(UTC)
    except (ValueError, OverflowError):
        raise BirlError("cursor.last_created_at: must be a time, as the page before gave it.") from None
    return when, requests.words(cursor, "last_session_id")


def _search(tenant: Tenant, data: Mapping[str, Any]) -> Callable[[str, Session], bool]:
    """Filter for the tenant's sessions. Raises `BirlError` for unsupported queries."""
    if data.get("project_ids"):
        raise BirlError("project_ids: this server has no projects.")
    name, one = requests.words(data, "display_name").lower(), requests.words(data, "session_id")
    about, owner = requests.metadata(data).items(), requests.mapping(data.get("owner") or {}, "owner")
    urns, statuses = owner.get("owner_urns") or [], data.get("statuses") or []
    if not isinstance(urns, list) or not isinstance(statuses, list):
        raise BirlError("owner.owner_urns and statuses: must be lists.")
    status = [requests.mapping(s, "statuses") for s in statuses]
    mine = owner.get("type") != "user" or tenant.urn in urns

    def fits(id: str, session: Session) -> bool:
        named = bool(name) and all(word in session.name.lower() for word in name.split())
        return (
            mine
            and (named or one == id or not (name or one))
            and all(session.metadata.get(key) == value for key, value in about)
            and (not status or any(session.has(str(s.get("type")), s.get("reasons")) for s in status))
        )

    return fits


def described_session(session: Session, id: str, sizes: list[int]) -> dict[str, Any]:
    """JSON of a session. `sizes`: of its checkpoints [bytes]."""
    return {
        "session_id": id, "created_at": moment(session.made), "owner": Tenant(name=session.owner).urn,
        "project_id": "", "status": session.status, "display_name": session.name or None,
        "user_metadata": session.metadata, "checkpoints_count": len(sizes), "checkpoint_storage_bytes": sum(sizes),
    }  # fmt: skip


async def storage(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Storage used by a tenant's checkpoints."""
    sizes = [c.size for c in service.store.of(tenant.name)]
    row = {"user_name": tenant.name, "checkpoint_count": len(sizes), "size_bytes": sum(sizes)}
    return JSONResponse({"data": [row | {"size_gigabytes": sum(sizes) / 1e9}]})


async def weights_info(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    checkpoint = service.checkpoints.readable(
        requests.words(await limits.json_object(request, service.most_bytes), "tinker_path"), tenant.name
    )
    config = checkpoint.info["config"]
    about = {"train_unembed": config["unembed"], "train_mlp": config["mlp"], "train_attn": config["attention"]}
    return JSONResponse({"base_model": checkpoint.info["base"], "is_lora": True, "lora_rank": config["rank"], **about})


async def list_runs(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    own = [described_run(service, r.id) for r in service.runs.by_id.values() if r.owner == tenant.name]
    rows, cursor = page(own[::-1], request)
    return JSONResponse({"training_runs": rows, "cursor": cursor})


async def get_run(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    return JSONResponse(described_run(service, service.run(request.path_params["run"], tenant).id))


async def list_checkpoints(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Checkpoints of one run, or all of a tenant."""
    run = request.path_params.get("run")
    if run is not None:
        service.run(run, tenant)
    own = [described_checkpoint(c) for c in service.store.checkpoints(run) if c.owner == tenant.name]
    rows, cursor = page(own, request)
    return JSONResponse({"checkpoints": rows, "cursor": None if run else cursor})


def addressed(service: TinkerService, tenant: Tenant, request: Request) -> Checkpoint:
    """The checkpoint in a request's path. Raises `Refused` (404) if the tenant has none of that name."""
    parts = request.path_params
    try:
        return service.checkpoints.own(f"tinker://{parts['run']}/{parts['kind']}/{parts['name']}", tenant.name)
    except BirlError as error:
        raise Refused(404, str(error), "user") from None


async def delete_checkpoint(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    checkpoint = addressed(service, tenant, request)
    service.checkpoints.kept.pop(checkpoint.path, None)
    service.store.delete(checkpoint)
    service.store.note(tenant.name, "delete_checkpoint", path=checkpoint.path)
    return JSONResponse({})


async def publish(public: bool, service: TinkerService, tenant: Tenant, request: Request) -> Response:
    checkpoint = addressed(service, tenant, request)
    checkpoint.public = public
    service.store.change(checkpoint)
    service.store.note(tenant.name, "publish" if public else "unpublish", path=checkpoint.path)
    return JSONResponse({})


async def set_ttl(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    checkpoint, data = addressed(service, tenant, request), await limits.json_object(request, service.most_bytes)
    seconds = requests.whole(data, "ttl_seconds", 0, SHORTEST, LONGEST)
    checkpoint.expires = time.time() + seconds if seconds else None
    service.store.change(checkpoint)
    service.store.note(tenant.name, "set_ttl", path=checkpoint.path, seconds=seconds)
    return JSONResponse({})


async def export_urls(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    """Temporary download links that need no key."""
    checkpoint, until = addressed(service, tenant, request), service.clock() + LINK
    base, urls = str(request.base_url).rstrip("/"), {}
    for file in sorted(service.store.folder(checkpoint).iterdir()):
        if file.name != "checkpoint.json":
            link = json.dumps([checkpoint.path, file.name, until]).encode()
            sign = hmac.new(service.secret, link, hashlib.sha256).digest()
            urls[file.name] = f"{base}/api/v1/download/{base64.urlsafe_b64encode(sign + link).decode()}"
    service.store.note(tenant.name, "external_weights_urls", path=checkpoint.path)
    return JSONResponse({"urls": urls, "expires": moment(time.time() + LINK)})


async def download(service: TinkerService, tenant: Tenant, request: Request) -> Response:
    try:
        raw = base64.urlsafe_b64decode(request.path_params["link"])
    except ValueError:
        raise Refused(403, "This link is invalid.", "user") from None
    sign, link = raw[:32], raw[32:]
    if not hmac.compare_digest(sign, hmac.new(service.secret, link, hashlib.sha256).digest()):
        raise Refused(403, "This link is invalid, or from before the server was started.", "user")
    path, name, until = json.loads(link)
    checkpoint = service.store.find(path)
    if until < service.clock() or checkpoint is None:
        raise Refused(410, "This link has expired, or the checkpoint was deleted.", "user")
    service.store.note(checkpoint.owner, "download", path=path, file=name)
    return FileResponse(service.store.folder(checkpoint) / name, filename=name)


def page(rows: list[Any], request: Request) -> tuple[list[Any], dict[str, int]]:
    limit, offset = _number(request, "limit", 100), _number(request, "offset", 0)
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _number(request: Request, key: str, default: int) -> int:
    """A number of the query. Raises `BirlError`."""
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
    ("POST", "/api/v1/sessions/search"): search_sessions,
    ("GET", "/api/v1/billing/usage/checkpoints/current"): storage,
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
