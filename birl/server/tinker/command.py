"""`birl tinker`: training as a service, in one process."""

import asyncio
import os
import signal
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from socket import socket

from birl.config import schema
from birl.engine.engine import EmbeddedEngine
from birl.engine.open import cache_bytes
from birl.errors import BirlError
from birl.hosts import is_loopback
from birl.kernels import PAGE
from birl.learner.low_rank_run import SharedBase
from birl.learner.policy import DTYPES, Policy, load_policy
from birl.models.decoder import decoder_for
from birl.models.device import choose
from birl.models.load import cast, end_ids
from birl.parallel.machine import compute_thread
from birl.regular import check_target
from birl.server.serve import address, bind, listen, short_name, uvicorn_server
from birl.server.tinker import tenants
from birl.server.tinker.checkpoints import Checkpoints
from birl.server.tinker.futures import Promises
from birl.server.tinker.inputs import Reader
from birl.server.tinker.passes import Passes
from birl.server.tinker.routes import app
from birl.server.tinker.runs import Runs
from birl.server.tinker.sampling import Sampling
from birl.server.tinker.service import TinkerService
from birl.server.tinker.sessions import Sessions
from birl.server.tinker.store import Store
from birl.server.tinker.tenants import VARIABLE, Quota, Tenants
from birl.server.tinker.work import Work


def run(config: schema.Tinker) -> int:
    """Until a signal, whose exit code it gives. Raises `BirlError` for what can be known before the model is loaded."""
    known = tenants.read(config.keys)
    if not is_loopback(config.host) and not known.keys:
        raise BirlError(
            f"host={config.host}: others could reach the server, so it needs keys: name a file (keys=FILE), or set the "
            f"environment variable {VARIABLE}, or leave host at 127.0.0.1."
        )
    device = choose(config.model.device)
    root = Path(config.folder).expanduser().resolve()
    with alone(root), bind(config.host, config.port) as sock, compute_thread(config.threads, device) as compute:
        return asyncio.run(_serve(config, known, root, sock, compute))


class alone:
    """The folder for one process: two would do each other's requests."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> None:
        import fcntl

        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_target(self.root / "lock")
        self.file = (self.root / "lock").open("a")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise BirlError(
                f"folder={self.root}: another server has it. Name another folder, or stop that one."
            ) from None

    def __exit__(self, *_: object) -> None:
        self.file.close()


async def _serve(config: schema.Tinker, known: Tenants, root: Path, sock: socket, compute: Executor) -> int:
    loop = asyncio.get_running_loop()
    service = await loop.run_in_executor(compute, load, config, known, root, compute)
    server = uvicorn_server(app(service))
    listen(sock)
    told: list[int] = []

    def tell(number: int) -> None:
        if told:
            os._exit(128 + number)
        told.append(number)
        service.ending = service.work.ending = True
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, tell, number)
    left = service.restore()
    tidying = asyncio.create_task(service.tidy())
    again = f", {left} requests to do again" if left else ""
    print(f"birl tinker: {', '.join(service.names)} at {address(sock)}{again}", flush=True)
    try:
        await server.serve(sockets=[sock])
    finally:
        tidying.cancel()
        with suppress(asyncio.CancelledError):
            await tidying
        await service.close(config.drain_timeout)
    return 128 + told[0] if told else 0


def load(config: schema.Tinker, known: Tenants, root: Path, compute: Executor) -> TinkerService:
    """Everything but the sockets."""
    policy = load_policy(config.model, compute)
    dtype = DTYPES[config.model.dtype]
    cast(policy.model, dtype).requires_grad_(False)
    context = min(config.model.max_length or policy.context, policy.context)
    return service_of(config, policy, known, Store(root), context)


def service_of(config: schema.Tinker, policy: Policy, known: Tenants, store: Store, context: int) -> TinkerService:
    model, compute = policy.model, policy.compute
    base = SharedBase(model, DTYPES[config.model.dtype], config.tokens_per_pass)
    cache = config.kv_cache_gb or cache_bytes(model, config.max_batch, min(context, 4096)) / 2**30
    engine = EmbeddedEngine(
        model, policy.tokenizer, end_ids=end_ids(model, policy.tokenizer), context=context, compute=compute,
        version=lambda: 0, max_batch=config.max_batch, kv_cache_gb=cache, draft_rows=0,
    )  # fmt: skip
    engine.context = min(context, engine.scheduler.pages.total * PAGE)
    decoder = decoder_for(model)
    memory, promises = int(config.adapters_gb * 2**30), Promises()
    passes = Passes(base, compute, together=decoder is not None and decoder.head.on_kernels is not None)
    runs = Runs(store, base, promises, memory)
    quota = Quota(
        sessions=config.quota_sessions, runs=config.quota_runs, samplers=config.quota_samplers,
        tokens=config.quota_tokens, requests=config.quota_requests, checkpoints=config.quota_checkpoints,
        disk=int(config.quota_gb * 2**30),
    )  # fmt: skip
    sessions = Sessions(store)
    checkpoints = Checkpoints(store, base, memory, quota, sessions)
    words, seen = model.get_input_embeddings().weight.shape[0], policy.chat.pictures  # pyright: ignore
    if seen is not None:
        seen.forgets = True
    work = Work(runs, passes, checkpoints, known, compute, Reader(words, engine.context, seen))
    own = config.names or [short_name(str(policy.folder))]
    return TinkerService(
        names=tuple(dict.fromkeys([*own, short_name(str(policy.folder)), config.model.path])),
        tenants=known, quota=quota, store=store, sessions=sessions, promises=promises, runs=runs, work=work,
        checkpoints=checkpoints, sampling=Sampling(base, engine, compute), most_rank=config.max_rank,
        most_bytes=int(config.max_request_mb * 2**20), idle=config.idle_timeout,
    )  # fmt: skip
