"""A small server that speaks birl's dialect over a real engine: `python -m tests.serve.app FOLDER PORT [SECONDS]`, the
last being how much longer each step of the engine takes."""

import asyncio
import contextlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import uvicorn
from safetensors.torch import load as unpack
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from birl.engine.engine import EmbeddedEngine
from birl.errors import BirlError, WeightsFailed
from birl.models.digests import whole
from birl.models.load import cast, load_model, load_tokenizer
from birl.serve import wire
from birl.types import Update


def tiny_engine(folder: Path, slow: float = 0.0) -> EmbeddedEngine:
    model = cast(load_model(folder), torch.bfloat16).requires_grad_(False)
    compute = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    keys: dict[str, Any] = {"end_ids": frozenset({2}), "context": 512, "compute": compute, "kv_cache_gb": 0.01}
    engine = EmbeddedEngine(model, load_tokenizer(folder), draft_rows=0, **keys)
    step = engine.step
    engine.step = lambda: (time.sleep(slow), step())[1]  # type: ignore[method-assign]
    return engine


def app(engine: EmbeddedEngine, token: str = "") -> Starlette:
    staged: dict[int, dict[str, torch.Tensor]] = {}
    held = [""]  # digest of the weights, read when they had come

    def answer(data: Any, status: int = 200) -> Response:
        return Response(json.dumps(data), status, media_type="application/json")

    async def generate(request: Request) -> Response:
        data = await request.json()
        work = engine.generate(tuple(data["prompt_ids"]), wire.params_from(data["params"]), data["session"])
        task = asyncio.create_task(work)
        left = asyncio.create_task(disconnected(request))
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return answer(wire.completion_to(await task))
        return answer({}, 499)

    async def disconnected(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def stage(request: Request) -> Response:
        staged.setdefault(request.path_params["version"], {}).update(unpack(await request.body()))
        return answer({})

    async def load(request: Request) -> Response:
        data = await request.json()
        tensors = staged.pop(data["version"], {})
        found = await engine.load(Update(tensors=tensors, **{"folder": ""} | data))
        held[0] = found.digest
        return answer(wire.held_to(found))

    async def command(request: Request) -> Response:
        data, name = await request.json(), request.url.path[1:]
        if name == "pause":
            return answer({"done": await engine.pause(data["mode"] == "abort")})
        if name == "abort":
            return answer({"aborted": await engine.abort(data.get("sessions"))})
        return answer({"done": await {"resume": engine.resume, "sleep": engine.sleep, "wake": engine.wake}[name]()})

    async def info(request: Request) -> Response:
        held[0] = held[0] or whole(await engine.digests())
        told = wire.Info(
            **{"engine": "birl", "model": "tiny", "dtype": "bfloat16", "context": 512, "vocabulary": 320},
            version=engine.version,
            digest="" if engine.asleep else held[0],
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting),
            paused=engine.paused,
            asleep=engine.asleep,
            pid=os.getpid(),
            counters=asdict(engine.counters),
        )
        return answer(asdict(told))

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, WeightsFailed):
            return answer({"error": {"message": str(error), "type": "weights", "cause": error.cause}}, 409)
        return answer({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)

    posts = {"/generate": generate, "/load": load, **dict.fromkeys(("/pause", "/resume", "/abort"), command)}
    posts |= dict.fromkeys(("/sleep", "/wake"), command)
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
    routes += [Route("/stage/{version:int}", stage, methods=["PUT"]), Route("/info", info)]
    handlers = dict.fromkeys((BirlError, ValueError, KeyError), refused)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"").decode()
        if scope["type"] == "http" and token and given != f"Bearer {token}":
            return await answer({"error": {"message": "wrong token"}}, 401)(scope, receive, send)
        await inner(scope, receive, send)

    inner = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    return guarded  # type: ignore[return-value]


if __name__ == "__main__":
    torch.set_num_threads(1)
    slow = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    uvicorn.run(app(tiny_engine(Path(sys.argv[1]), slow)), port=int(sys.argv[2]), log_level="warning")
