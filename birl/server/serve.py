"""`birl serve`: an HTTP server of a model, in a separate process: its start, routes, access control and errors."""

import asyncio
import functools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import replace
from math import inf
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from birl.config import schema
from birl.engine.engine import EmbeddedEngine
from birl.engine.open import check_cache, open_engine
from birl.engines import names
from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.hosts import bind, own_address, token_for
from birl.kernels.tensors import PAGE
from birl.learner.policy import DTYPES, Policy, load_policy
from birl.models.device import choose
from birl.models.digests import vocabulary_digest
from birl.models.load import cast
from birl.models.released import shapes_of
from birl.parallel.machine import compute_thread
from birl.server import native
from birl.server.connections import routed, uvicorn_server
from birl.server.dialects import modules
from birl.server.limits import Gate, Gone, Refused, check_access, check_length
from birl.server.metrics import Metrics
from birl.server.service import Service
from birl.server.staging import Adapters, Membership, Staging
from birl.server.stream import refusal
from birl.types import Update
from birl.weights import folder

LOOK = 0.1  # interval of polls of `volume` [s]
Handler = Callable[[Service, Request], Awaitable[Response]]
OPEN = ("/health", "/ready")  # without a token, for process monitors
CLOSED = 499  # status in the metrics if the client has disconnected

MODULES = [native, *modules("ROUTES")]
ROUTES: dict[tuple[str, str], Handler] = {route: handler for m in MODULES for route, handler in m.ROUTES.items()}
ERRORS = {path: m.error for m in MODULES if hasattr(m, "error") for _, path in m.ROUTES}  # path -> body of an error


def run(config: schema.Serve) -> int:
    """Serve until a signal; returns its exit code. Raises `BirlError` for mistakes known before the model is loaded."""
    token = token_for(config.host)
    if config.name:
        names.folder(config.name)
    volume = Path(config.volume).expanduser()
    if config.volume and volume.exists() and not volume.is_dir():
        raise BirlError(f"volume={config.volume}: is a file; name a folder.")
    device = choose(config.model.device)
    with bind(config.host, config.port) as sock, compute_thread(config.threads, device) as compute:
        return asyncio.run(_run(config, token, sock, compute))


def listen(sock: socket.socket) -> None:
    try:
        sock.listen(2048)
    except OSError as error:  # another process took the port while the model was loading
        raise BirlError(f"port={sock.getsockname()[1]}: cannot be taken ({error.strerror or error}).") from error


def address(sock: socket.socket, reachable: bool = False) -> str:
    """URL of a socket. `reachable`: for other machines, as 0.0.0.0 is no destination."""
    host, port = sock.getsockname()[:2]
    if reachable and host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _run(config: schema.Serve, token: str, sock: socket.socket, compute: Executor) -> int:
    service = await asyncio.get_running_loop().run_in_executor(compute, load, config, token, compute)
    watching, entry, beating = asyncio.create_task(service.watch()), None, None
    looking = asyncio.create_task(look(service, Path(service.volume))) if config.volume else None

    def leave() -> None:
        """Remove the server's registration."""
        if entry is not None and beating is not None:
            beating.cancel()
            names.forget(entry)

    try:
        await service.start()
        server = uvicorn_server(app(service))
        listen(sock)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if config.name and not serving.done():
            entry = names.register(config.name, address(sock, reachable=True), os.getpid(), service.name)
            beating = asyncio.create_task(names.beat(entry))
        told = _listen_to_signals(service, server, config.drain_timeout, leave)
        print(f"birl serve: {service.name} at {address(sock)} (version {service.engine.version})", flush=True)
        await serving
        return 128 + told[0] if told else 0
    finally:
        watching.cancel()
        if looking is not None:
            looking.cancel()
        leave()
        service.membership.leave()
        await service.engine.close()


async def look(service: Service, root: Path) -> None:
    """Load each version announced in `root` (weights.method=volume). A failure is reported once, and retried after the
    next announcement. A sleeping engine loads it after waking."""
    tried: Update | None = None
    shown = ""
    while True:
        try:
            update = await asyncio.to_thread(folder.latest, root)
            awake = service.hollow and update is not None and update.version == service.engine.version
            if update is not None and (update != tried or awake) and not service.engine.asleep:
                tried = update
                async with service.control():
                    await service.load(update)
        except Exception as error:
            known = isinstance(error, (WeightsFailed, Refused, OSError))
            if (why := str(error) if known else f"{type(error).__name__}: {error}") != shown:
                shown = why
                print(f"birl serve: volume={root}: {shown}", flush=True)
        await asyncio.sleep(LOOK)


def load(config: schema.Serve, token: str, compute: Executor) -> Service:
    """Build the service, without sockets."""
    policy = load_policy(config.model, compute)
    if policy.chat.pictures is not None:
        policy.chat.pictures.forgets = True
    cast(policy.model, DTYPES[config.model.dtype]).requires_grad_(False)
    context = min(config.model.max_length or policy.context, policy.context)
    engine = open_engine(policy, config.engine, context, None)
    check_cache(config.engine, engine, 1, 1)
    room = engine.scheduler.pages.total * PAGE
    if room < engine.context:
        print(f"The KV cache holds {room} tokens, so the context is {room} instead of {engine.context}.", flush=True)
        engine.context = room
    return replace(
        service_of(policy, engine, token, config.model.dtype),
        name=config.served_name or short_name(config.model.path),
        volume=str(Path(config.volume).expanduser().resolve()) if config.volume else "",
        gate=Gate(most=config.engine.max_batch + config.max_waiting),
        timeout=config.request_timeout,
        most_bytes=int(config.max_request_mb * 2**20),
        seed=config.seed,
    )


def service_of(policy: Policy, engine: EmbeddedEngine, token: str, dtype: str) -> Service:
    """A service for clients with the token, without limits."""
    weights = dict(engine.runner.model.named_parameters())
    return Service(
        engine=engine,
        chat=policy.chat,
        name=short_name(str(policy.folder)),
        vocabulary_digest=vocabulary_digest(policy.tokenizer.get_vocab(), engine.end_ids),
        vocabulary=policy.model.get_input_embeddings().weight.shape[0],  # pyright: ignore
        dtype=dtype,
        gate=Gate(most=sys.maxsize),
        metrics=Metrics(engine),
        staging=Staging(most=sum(p.nbytes for p in weights.values())),
        adapters=Adapters(engine.runner.model),
        membership=Membership(shapes=shapes_of(weights), device=next(iter(weights.values())).device),
        timeout=inf,
        most_bytes=sys.maxsize,
        token=token,
    )


def hosted(service: Service) -> str:
    """Serve in a thread until the process ends, for the other ranks of a learner; returns the address."""
    sock = bind(own_address(os.environ["MASTER_ADDR"]), 0)  # as seen by rank 0
    sock.listen(2048)
    server = uvicorn_server(app(service))
    threading.Thread(target=server.run, args=([sock],), name="engine", daemon=True).start()
    return address(sock)


def short_name(path: str) -> str:
    """Short name of a model: smollm2 for smollm2, model for /path/to/model/ and model.gguf."""
    return Path(path).expanduser().resolve().name.removesuffix(".gguf")


def _listen_to_signals(
    service: Service, server: uvicorn.Server, timeout: float, leave: Callable[[], None]
) -> list[int]:
    """Handle signals: the first one drains, the second ends the process at once. Returns the list of received ones."""
    loop = asyncio.get_running_loop()
    told: list[int] = []
    tasks: list[asyncio.Task[None]] = []  # keeps references, as asyncio does not

    def tell(number: int) -> None:
        leave()
        if told:
            os._exit(128 + number)
        told.append(number)
        tasks.append(loop.create_task(_drain(service, server, timeout)))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, tell, number)
    return told


async def _drain(service: Service, server: uvicorn.Server, timeout: float) -> None:
    if service.gate.open:
        print(
            f"birl serve: stopping; {service.gate.open} requests are open and have {timeout:g} s (once more: at once)",
            flush=True,
        )
    service.membership.leave()
    if not await service.gate.drain(timeout):
        print(f"birl serve: {service.gate.open} requests were not finished", flush=True)
    await service.engine.close()
    server.should_exit = True


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
        check_length(request.headers)
        if path not in OPEN:
            check_access(request.headers, service.token)
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
    what = f"{request.method} {request.url.path}: {error.detail}. Routes: {there}."
    return JSONResponse(Refused(error.status_code, what).body(), error.status_code, dict(error.headers or {}))
