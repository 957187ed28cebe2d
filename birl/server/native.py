"""birl's native API: the routes of `birl/engines/wire.py`."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from birl.engines import wire
from birl.engines.collective import store_address
from birl.engines.handles import borrowed, parts
from birl.engines.wire import HEADER
from birl.errors import BirlError
from birl.server.limits import Refused, answered, body, json_object, outside, problem
from birl.server.service import Service
from birl.server.staging import read
from birl.text.parts import decoded
from birl.text.pictures import is_picture
from birl.types import Picture, Update


def reply(data: Mapping[str, Any], status: int = 200) -> Response:
    """JSON with all digits of floats, and -Infinity for such a log-prob."""
    return Response(json.dumps(data), status, media_type="application/json")


async def claim(service: Service, request: Request) -> Response:
    """Reserve the server for a run (`service.py`)."""
    only(await json_object(request, service.most_bytes))
    if not service.owner.now():
        raise Refused(400, f"A claim must name its run in the header {HEADER}.")
    return reply({"run": service.owner.name})


async def release(service: Service, request: Request) -> Response:
    only(await json_object(request, service.most_bytes))
    service.owner.release(request.headers)
    return reply({"run": service.owner.now()})


async def generate(service: Service, request: Request) -> Response:
    data = await json_object(request, service.most_bytes)
    only(data, "prompt_ids", "params", "session", "pictures")
    await service.read(lambda: take_pictures(data, service))
    prompt = ids(data, "prompt_ids", service.vocabulary, pictures=service.chat.pictures is not None)
    if not prompt:
        raise Refused(400, "prompt_ids is empty: there is nothing to predict the first token from.")
    params, session = data.get("params"), data.get("session", "")
    if not isinstance(params, dict):
        raise Refused(400, "params must be an object such as {\"max_tokens\": 64}.")  # fmt: skip
    if not isinstance(session, str):
        raise Refused(400, "session must be text.")
    try:
        asked = wire.params_from(params)
    except ValueError as error:
        raise Refused(400, str(error)) from None
    if result := problem(asked, service.vocabulary):
        raise Refused(400, f"params.{result[0]} {result[1]}.")
    with service.gate.enter(1):
        (seeded,) = service.seeded(asked)
        completion = await answered(request, service.generate(prompt, seeded, session), service.timeout)
    if request.headers.get("accept") == wire.BINARY:
        return Response(wire.packed(completion), media_type=wire.BINARY)
    return reply(wire.completion_to(completion))


async def load(service: Service, request: Request) -> Response:
    data = await json_object(request, service.most_bytes)
    only(data, "version", "digests", "folder", "anew", "group")
    number, digests, folder = data.get("version"), data.get("digests", {}), data.get("folder", "")
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise Refused(400, f"version must be a whole number of at least 0, got {number!r}.")
    if not isinstance(digests, dict) or not all(isinstance(d, str) for d in digests.values()):
        raise Refused(400, "digests must be an object of texts: the digest of each tensor by its name.")
    if not isinstance(folder, str) or "\0" in folder:
        raise Refused(400, "folder must be a path, or empty for what was staged.")
    if not isinstance(anew := data.get("anew", False), bool):
        raise Refused(400, f"anew must be true or false, got {anew!r}.")
    if not isinstance(group := data.get("group", ""), str) or (group and folder):
        raise Refused(400, "group must be the name of the joined group, without a folder.")
    update = Update(version=number, digests=digests, folder=folder, anew=anew)
    if group:  # other requests do not wait for the transfer
        update = await service.received(update, group)
    async with service.control():
        held = await service.load(update)
    return reply(asdict(held))


async def join(service: Service, request: Request) -> Response:
    data = await json_object(request, service.most_bytes)
    try:
        invitation = wire.invitation_from(data)
        store_address(invitation.store)
    except ValueError as error:
        raise Refused(400, f"{error}.") from None
    await service.membership.join(invitation)
    return reply({"group": invitation.group, "rank": invitation.rank})


async def leave(service: Service, request: Request) -> Response:
    only(await json_object(request, service.most_bytes))
    service.membership.leave()
    return reply({})


async def stage(service: Service, request: Request) -> Response:
    version = request.path_params["version"]
    service.staging.begin(version)
    data = await body(request, service.staging.most + 2**24)  # a header of safetensors is smaller than that
    size = service.staging.put(version, await asyncio.to_thread(read, data, f"A piece of version {version}"))
    return reply({"version": version, "tensors": len(service.staging.tensors), "bytes": size})


async def adapter(service: Service, request: Request) -> Response:
    """Store a LoRA adapter that requests may name."""
    name = request.path_params["name"]
    data = await body(request, service.staging.most + 2**24)
    tensors = await asyncio.to_thread(read, data, f"adapters/{name[:80]}")
    await asyncio.get_running_loop().run_in_executor(service.engine.compute, service.adapters.put, name, tensors)
    return reply({"adapter": name})


async def borrow(service: Service, request: Request) -> Response:
    """Copy a bucket from the learner's memory (`handles.py`)."""
    version, data = request.path_params["version"], await json_object(request, service.most_bytes)
    only(data, "memory", "tensors")
    if not isinstance(memory := data.get("memory"), dict):
        raise Refused(400, "memory must be an object.")
    service.staging.begin(version)
    try:
        flat = await asyncio.to_thread(borrowed, memory, service.membership.device, service.staging.most)
        piece = parts(flat, data.get("tensors"))
    except ValueError as error:
        raise Refused(400, f"{error}.") from None
    size = service.staging.put(version, piece)
    return reply({"version": version, "tensors": len(service.staging.tensors), "bytes": size})


async def pause(service: Service, request: Request) -> Response:
    data = await json_object(request, service.most_bytes)
    only(data, "mode")
    mode = data.get("mode", "keep")
    if mode not in ("keep", "abort"):
        raise Refused(400, f"mode must be keep | abort, got {mode!r}.")
    async with service.control():
        await service.engine.pause(abort=mode == "abort")
    return reply(state(service))


async def abort(service: Service, request: Request) -> Response:
    """Abort requests; `sessions` null or absent: all."""
    data = await json_object(request, service.most_bytes)
    only(data, "sessions")
    sessions = data.get("sessions")
    if sessions is not None and not (isinstance(sessions, list) and all(isinstance(s, str) for s in sessions)):
        raise Refused(400, "sessions must be a list of texts, or null for all.")
    async with service.control():
        count = await service.engine.abort(None if sessions is None else set(sessions))
    return reply({"aborted": count})


async def controlled(change: Callable[[Service], Awaitable[None]], service: Service, request: Request) -> Response:
    only(await json_object(request, service.most_bytes))
    async with service.control():
        await change(service)
    return reply(state(service))


async def health(service: Service, request: Request) -> Response:
    why = service.stuck()
    if why:
        raise Refused(503, f"The engine is stuck: {why}.", "stuck")
    return reply({"status": "ok"})


async def ready(service: Service, request: Request) -> Response:
    why = service.unready() or service.stuck()
    if why:
        raise Refused(503, f"Not ready: {why}.", "not_ready", retry_after=1)
    return reply({"status": "ready", "version": service.engine.version})


async def info(service: Service, request: Request) -> Response:
    engine = service.engine
    result = wire.Info(
        engine="birl",
        model=service.name,
        digest=service.digest,
        dtype=service.dtype,
        context=engine.context,
        vocabulary=service.vocabulary,
        vocabulary_digest=service.vocabulary_digest,
        volume=service.volume,
        run=service.owner.now(),
        running=len(engine.scheduler.running),
        waiting=max(service.gate.open - len(engine.scheduler.running), 0),
        pid=os.getpid(),
        counters=asdict(engine.counters),
        **state(service),
    )
    return reply(asdict(result))


async def digests(service: Service, request: Request) -> Response:
    """Digests of the weights in the engine's memory now."""
    async with service.control():
        result = await service.digests()
        return reply({"version": service.engine.version, "digests": result})


async def metrics(service: Service, request: Request) -> Response:
    return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")


def state(service: Service) -> dict[str, Any]:
    engine = service.engine
    return {"version": engine.version, "paused": engine.paused, "asleep": engine.asleep}


def only(data: Mapping[str, Any], *keys: str) -> None:
    """Raise `Refused` naming an unknown key."""
    if unknown := sorted(set(data) - set(keys)):
        there = f"there are {', '.join(keys)}" if keys else "this takes none"
        raise Refused(400, f"{unknown[0]}: there is no such key; {there}.")


def take_pictures(data: Mapping[str, Any], service: Service) -> None:
    """Store the image files of a prompt, base64 by digest. Raises `Refused`."""
    given = data.get("pictures") or {}
    if not isinstance(given, dict) or (given and service.chat.pictures is None):
        raise Refused(400, "pictures must be files in base64 by digest, and the model needs a vision tower.")
    for digest, text in given.items():
        try:
            picture = Picture.of(decoded(text))
            if picture.digest != digest:
                raise BirlError(f"{digest[:80]!r} is not its digest")
            service.chat.pictures.add(picture)  # pyright: ignore
        except (BirlError, TypeError, AttributeError) as error:
            raise Refused(400, f"pictures: {error}.") from error


def ids(data: Mapping[str, Any], key: str, vocabulary: int, pictures: bool = False) -> tuple[int, ...]:
    """Token ids of a request. Raises `Refused` if it is no list of such; `pictures`: image placeholders are allowed."""
    if key not in data:
        raise Refused(400, f"{key} is missing.")
    result = data[key]
    if not isinstance(result, list) or not all(type(i) is int for i in result):
        raise Refused(400, f"{key} must be a list of token ids.")
    wrong = outside(tuple(i for i in result if not (pictures and is_picture(i))), vocabulary)
    if wrong is not None:
        raise Refused(400, f"{key}: {wrong} is not a token id; the model has {vocabulary}.")
    return tuple(result)


ROUTES = {
    ("POST", "/claim"): claim,
    ("POST", "/release"): release,
    ("POST", "/generate"): generate,
    ("POST", "/load"): load,
    ("PUT", "/stage/{version:int}"): stage,
    ("PUT", "/adapters/{name}"): adapter,
    ("POST", "/stage/{version:int}"): borrow,
    ("POST", "/join"): join,
    ("POST", "/leave"): leave,
    ("POST", "/pause"): pause,
    ("POST", "/resume"): partial(controlled, Service.resume),
    ("POST", "/abort"): abort,
    ("POST", "/sleep"): partial(controlled, Service.sleep),
    ("POST", "/wake"): partial(controlled, lambda service: service.engine.wake()),
    ("GET", "/health"): health,
    ("GET", "/ready"): ready,
    ("GET", "/info"): info,
    ("GET", "/digests"): digests,
    ("GET", "/metrics"): metrics,
}
