"""`birl tinker`: training as a service, in one process, or with ranks that share each pass (`parallel.*`), started by
`restarts.py`."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket
from typing import Any

import torch

from birl.allocator import keep_memory
from birl.config import schema
from birl.config.file import to_yaml
from birl.config.load import load as load_config
from birl.engine.engine import EmbeddedEngine, cache_pages
from birl.engine.open import cache_bytes
from birl.engines.kinds import Wanted
from birl.engines.servers import open_servers
from birl.errors import MISTAKE, BirlError, tell
from birl.hosts import bind, is_loopback
from birl.kernels.tensors import PAGE
from birl.learner.low_rank_ranks import Copy, RankedBase, SplitBase
from birl.learner.low_rank_run import SharedBase
from birl.learner.policy import DTYPES, Policy, load_policy
from birl.models.device import choose, device_of
from birl.models.load import cast, end_ids
from birl.models.slices import sketched
from birl.models.slots import page_bytes, state_bytes
from birl.models.vision import give, language_model, pictures_of
from birl.parallel import processes
from birl.parallel.crew import RankGroup
from birl.parallel.grid import end_with_torchrun, grid_of, leads, rank_threads, ranks_here, started
from birl.parallel.machine import compute_thread
from birl.parallel.processes import rank_processes
from birl.parallel.ranks import Ranks
from birl.regular import check_target
from birl.server.connections import uvicorn_server
from birl.server.serve import address, listen, short_name
from birl.server.tinker import tenants
from birl.server.tinker.checkpoints import Checkpoints
from birl.server.tinker.futures import Promises
from birl.server.tinker.inputs import Reader
from birl.server.tinker.passes import Passes
from birl.server.tinker.restarts import SOCKET
from birl.server.tinker.routes import app
from birl.server.tinker.runs import Runs
from birl.server.tinker.sampling import ManyEngines, Sampling
from birl.server.tinker.service import TinkerService
from birl.server.tinker.store import Store
from birl.server.tinker.tenants import VARIABLE, Quota, Sessions, Tenants, Turns
from birl.server.tinker.work import Work

RESERVE = 8  # one of this many answers at once is reserved for tenants that have none running


def run(config: schema.Tinker) -> int:
    """Serve until a signal; returns its exit code. Raises `BirlError` for mistakes known before the model is loaded."""
    known = tenants.read(config.keys)
    if not is_loopback(config.host) and not known.keys:
        raise BirlError(
            f"host={config.host}: others could reach the server, so it needs keys: name a file (keys=FILE), or set the "
            f"environment variable {VARIABLE}, or leave host at 127.0.0.1."
        )
    end_with_torchrun()
    if (count := started()) > 1 and grid_of(config).size == 1:
        raise BirlError(f"parallel.ddp=1: {count} processes were started; set it to {count}.")
    if not leads():
        return follow(config)
    device, threads = choose(config.model.device), rank_threads(config)
    root = Path(config.folder).expanduser().resolve()
    with alone(root), listener(config) as sock, ranks(config, root) as crew, compute_thread(threads, device) as compute:
        return asyncio.run(_serve(config, known, root, sock, compute, crew))


def listener(config: schema.Tinker) -> socket:
    """The inherited listening socket, or a new one."""
    given = os.environ.pop(SOCKET, "")
    return socket(fileno=int(given)) if given else bind(config.host, config.port)


@contextmanager
def ranks(config: schema.Tinker, root: Path) -> Iterator[RankGroup]:
    """The group of ranks (rank 0); starts the others unless a launcher did. They print to rank-N.log."""
    grid = grid_of(config)
    if grid.size == 1:
        yield RankGroup(Ranks())
        return
    words = [sys.executable, "-m", "birl.server.tinker.command"]
    how = choose(config.model.device), config.parallel.timeout, words, to_yaml(config), rank_threads(config), root
    with rank_processes(grid, *how) as crew:
        yield crew


def follow(config: schema.Tinker) -> int:
    """Run a rank other than 0: its copy of the base, which executes the calls of rank 0 until that ends."""

    def make(crew: RankGroup, compute: Executor) -> Copy:
        return Copy(base_of(config, loaded(config, compute, crew.ranks), crew), crew.ranks)

    device = choose(config.model.device)
    processes.follow(grid_of(config), device, config.parallel.timeout, rank_threads(config), make)
    return 0


def main() -> int:
    """Entry point: python -m birl.server.tinker.command < the configuration"""
    keep_memory()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(sys.stdin.read())
        file.flush()
        config: Any = load_config(schema.Tinker, [file.name])
    try:
        return run(config)
    except BirlError as error:
        tell(error)
        return MISTAKE


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Lock the folder for one process: two would execute each other's requests."""
    import fcntl

    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BirlError(f"folder={root}: cannot be made ({error.strerror}). Name another folder.") from None
    check_target(root / "lock")
    with (root / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BirlError(f"folder={root}: another server has it. Name another folder, or stop that one.") from None
        yield


async def _serve(
    config: schema.Tinker, known: Tenants, root: Path, sock: socket, compute: Executor, crew: RankGroup
) -> int:
    loop = asyncio.get_running_loop()
    service = await loop.run_in_executor(compute, load, config, known, root, compute, crew)
    crew.failed = service.work.fail
    if isinstance(engine := service.sampling.engine, ManyEngines):
        keys = schema.Engine(kind="birl", count=config.engines, max_batch=config.max_batch, draft_rows=0)
        engine.use(await open_servers(keys, engine.wanted, ranks_here(config)))
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


def load(
    config: schema.Tinker, known: Tenants, root: Path, compute: Executor, crew: RankGroup | None = None
) -> TinkerService:
    """Build the service, without sockets."""
    crew = crew or RankGroup(Ranks())
    policy = loaded(config, compute, crew.ranks if config.engines else None)
    context = min(config.model.max_length or policy.context, policy.context)
    base = base_of(config, policy, crew)
    return service_of(config, policy, base, known, Store(root), context)


def loaded(config: schema.Tinker, compute: Executor, ranks: Ranks | None = None) -> Policy:
    """Load the model, without weights if they will be sharded over `ranks`."""
    policy = load_policy(config.model, compute, ranks)
    cast(policy.model, DTYPES[config.model.dtype]).requires_grad_(False)
    if policy.chat.pictures is not None:
        policy.chat.pictures.forgets = True
    return policy


def base_of(config: schema.Tinker, policy: Policy, crew: RankGroup) -> SharedBase:
    """The base of this rank; on rank 0 with several ranks the view of all, with a full copy if it samples itself."""
    model, ranks, how = policy.model, crew.ranks, (DTYPES[config.model.dtype], config.tokens_per_pass)
    if ranks.alone or not (crew.leads or ranks.sharded):
        return SharedBase(model, *how)
    if not ranks.sharded:
        return RankedBase(model, *how, crew)
    if not crew.leads:
        return SplitBase(model, *how, ranks)
    part = sketched(policy.folder, device_of(model), pictures=language_model(model) is not None)
    give(part, pictures_of(model), frozen=True)
    return RankedBase(model, *how, crew, SplitBase(part, *how, ranks))


def engine_of(
    config: schema.Tinker, policy: Policy, device: torch.device, context: int, root: Path
) -> EmbeddedEngine | ManyEngines:
    """The engine that samples, with a KV cache that holds at least one sequence of its context, at most `context`."""
    model, ends = policy.model, end_ids(policy.model, policy.tokenizer)
    cache = config.kv_cache_gb or cache_bytes(model, config.max_batch, min(context, 4096), device=device) / 2**30
    pages = cache_pages(model, config.max_batch, context, cache)
    context = min(context, pages * PAGE)
    if not config.engines:
        return EmbeddedEngine(
            model, policy.tokenizer, end_ids=ends, context=context, compute=policy.compute, version=lambda: 0,
            max_batch=config.max_batch, kv_cache_gb=cache, draft_rows=0,
        )  # fmt: skip
    size = pages * page_bytes(model) + config.max_batch * state_bytes(model)
    wanted = Wanted(
        folder=policy.folder, dtype=config.model.dtype, device=config.model.device, context=context, longest=context,
        kv_cache_gb=size / 2**30 + 1e-4, end_ids=ends, logs=root / "engines", sequences=config.max_batch,
        pictures=policy.chat.pictures,
    )  # fmt: skip
    return ManyEngines(wanted)


def service_of(
    config: schema.Tinker, policy: Policy, base: SharedBase, known: Tenants, store: Store, context: int
) -> TinkerService:
    model, compute = policy.model, policy.compute
    engine = engine_of(config, policy, base.device, context, store.root)
    memory, promises = int(config.adapters_gb * 2**30), Promises()
    passes = Passes(base, compute, together=base.alike)
    runs = Runs(store, base, promises, memory)
    quota = Quota(
        sessions=config.quota_sessions, runs=config.quota_runs, samplers=config.quota_samplers,
        tokens=config.quota_tokens, requests=config.quota_requests, checkpoints=config.quota_checkpoints,
        disk=int(config.quota_gb * 2**30),
    )  # fmt: skip
    sessions = Sessions(store)
    checkpoints = Checkpoints(store, base, memory, quota, sessions)
    words, seen = model.get_input_embeddings().weight.shape[0], policy.chat.pictures  # pyright: ignore
    work = Work(runs, passes, checkpoints, known, compute, Reader(words, engine.context, seen))
    room = config.max_batch * max(config.engines, 1)
    turns = Turns(room, room // RESERVE if len(known.keys) > 1 else 0)
    own = config.names or [short_name(str(policy.folder))]
    return TinkerService(
        names=tuple(dict.fromkeys([*own, short_name(str(policy.folder)), config.model.path])),
        tenants=known, quota=quota, store=store, sessions=sessions, promises=promises, runs=runs, work=work,
        checkpoints=checkpoints, sampling=Sampling(base, engine, compute, turns),
        most_rank=config.max_rank, most_bytes=int(config.max_request_mb * 2**20), idle=config.idle_timeout,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
