"""Engines in other processes, for `birl rl` and `birl eval`: started with the run and ended with it, or attached to.

engine.kind=birl | vllm | sglang   what they speak; `serve/` has an adapter for each
engine.attach                      addresses, or a name under which `birl serve` was started
"""

import asyncio
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch

from birl.allocator import cores
from birl.config import schema
from birl.config.rules_engine import NAME, weights_method
from birl.data.tasks import Tasks
from birl.errors import BirlError
from birl.learner.learner import Learner
from birl.loops.policy import Policy, cache_bytes
from birl.loops.ranks import grid_of, rank_threads
from birl.models.digests import words
from birl.serve import names, sglang, vllm
from birl.serve.client import Client
from birl.serve.process import Process, answers, free_port
from birl.serve.remote import Remote
from birl.serve.router import Router
from birl.serve.spread import Counting
from birl.serve.wire import Info
from birl.types import Completion, SamplingParams
from birl.waits import event
from birl.weights.broadcast import Broadcast, Joined
from birl.weights.canary import Canary
from birl.weights.publish import Sender, Volume, published, released, shared_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What servers are started for. `longest`: no sequence has more tokens; `kv_cache_gb` [GiB] holds what `max_batch`
    of them need. `volume`: where they look for new weights by themselves; empty: nowhere. `words`: digest of the
    vocabulary; `run`: who asks, and keeps other runs out; empty for an evaluation, which changes no weights."""

    folder: Path
    dtype: str
    device: str
    context: int
    longest: int
    kv_cache_gb: float
    end_ids: frozenset[int]
    logs: Path
    method: str = "reload"
    words: str = ""
    volume: str = ""
    run: str = ""
    timeout: float = 300.0
    bucket_mb: int = 256


@dataclass(slots=True, kw_only=True)
class Servers(Counting):
    """Many engines as one: implements `birl.types.Engine`."""

    router: Router
    children: list[Process]
    remotes: dict[str, Remote]  # by address, without what the method of the weights puts around them
    broadcast: Broadcast | None = None
    say: Callable[[str], None] = lambda text: None
    renewed: bool = False  # they are just being started from other weights

    @property
    def version(self) -> int:
        return self.router.version

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        return await self.counted(self.router.generate(prompt_ids, params, session))

    def ready(self) -> list[Remote]:
        return [m.remote for m in self.router.fleet.members if m.state == "ready"]

    def heard(self, name: str, **fields: object) -> None:
        """Something has changed with an engine."""
        text = f"{name.replace('_', ' ')}: {fields.get('address', '')} {fields.get('error', '')}".strip()
        if name == "engine_down" and not self.children:
            text += "; the run waits for it: start it again at the same address"
        event(text)
        if name != "retry":
            self.say(text)

    async def restart(self, remote: Remote) -> Remote:
        """What the router calls for an engine that does not answer."""
        process = self.children[list(self.remotes).index(remote.address)]
        if not process.alive and not self.renewed:
            await process.restart()
        return remote

    async def renew(self, folder: str) -> None:
        """weights.method=checkpoint: end every server and start it from another folder. Answers that were under way
        are sampled anew."""

        async def one(process: Process) -> None:
            await process.terminate()
            for place, word in enumerate(process.command):
                if word.startswith("model.path="):
                    process.command[place] = f"model.path={folder}"
                elif word in ("--model", "--model-path"):
                    process.command[place + 1] = folder
            await process.start()

        self.renewed = True
        try:
            await asyncio.gather(*map(one, self.children))
        finally:
            self.renewed = False

    async def close(self) -> None:
        with suppress(Exception):  # whatever is wrong with them, the processes must end
            await self.router.close()
        await asyncio.gather(*(child.terminate() for child in self.children))


def learner_threads(config: schema.RL) -> int:
    """threads, where it is 0: half of the cores when servers on this machine have the others."""
    if grid_of(config).size > 1:
        return rank_threads(config)
    shares = config.engine.kind != "embedded" and not config.engine.attach
    if config.threads or not shares or config.model.device == "cuda" or torch.cuda.is_available():
        return config.threads
    return max(cores() // 2, 1)


def server_threads(engine: schema.Engine) -> int:
    return engine.threads or max((cores() - max(cores() // 2, 1)) // engine.count, 1)


async def open_servers(engine: schema.Engine, wanted: Wanted) -> Servers:
    """Start or find them; returns when each answers. Raises `BirlError`, and then none is left running."""
    if engine.attach:
        addresses = list(dict.fromkeys(a for name in engine.attach for a in find(name)))
        token = os.environ.get("BIRL_TOKEN", "")
        remotes, children = [speak(engine, wanted, a, token) for a in addresses], []
    else:
        token = secrets.token_hex(16)
        ports = [free_port() for _ in range(engine.count)]
        remotes = [speak(engine, wanted, f"http://127.0.0.1:{port}", token) for port in ports]
        pairs = enumerate(zip(remotes, ports, strict=True))
        children = [child(engine, wanted, remote, port, token, number) for number, (remote, port) in pairs]
    plain = {remote.address: remote for remote in remotes}
    try:
        await start(engine, children)
        infos = await asyncio.gather(*(remote.info() for remote in remotes))
        if engine.attach:
            await take(engine, wanted, remotes, infos)
    except BaseException as error:
        await asyncio.gather(*(c.terminate() for c in children))
        await asyncio.gather(*(remote.close() for remote in remotes))
        if isinstance(error, Exception) and not isinstance(error, BirlError):
            key = f"engine.attach=[{','.join(engine.attach)}]" if engine.attach else f"engine.kind={engine.kind}"
            raise BirlError(f"{key}: {error}") from error
        raise
    broadcast = None
    if wanted.method == "nccl":
        broadcast = Broadcast(list(plain), timeout=wanted.timeout, bucket_mb=wanted.bucket_mb)
        remotes = [Joined(remote, broadcast) for remote in plain.values()]  # pyright: ignore[reportArgumentType]
    if wanted.method == "volume":
        remotes = [Volume(remote, wanted.timeout) for remote in plain.values()]
    servers = Servers(
        router=Router(
            remotes,  # pyright: ignore[reportArgumentType]
            version=max(info.version for info in infos),
            timeout=engine.request_timeout * (engine.restarts + 1),
            attempt_timeout=engine.request_timeout,
            load_timeout=wanted.timeout,
            restart_timeout=engine.start_timeout,
        ),
        children=children,
        remotes=plain,
        broadcast=broadcast,
    )
    if broadcast is not None:
        servers.router.fleet.expect = broadcast.expect
    servers.router.fleet.on_event = servers.heard
    if children:
        servers.router.fleet.restart = servers.restart
    return servers


async def start(engine: schema.Engine, children: Sequence[Process]) -> None:
    """Raises `BirlError` with the end of the log of the first that does not get ready."""
    try:
        await asyncio.gather(*(c.start() for c in children))
    except BirlError as error:
        hint = "engine.python names its interpreter, engine.arguments its further words, engine.start_timeout its time"
        raise BirlError(f"engine.kind={engine.kind}: a server did not start ({hint}). {error}") from error


async def take(engine: schema.Engine, wanted: Wanted, remotes: Sequence[Remote], infos: Sequence[Info]) -> None:
    """Raises `BirlError` where servers that run already do not fit this model, or belong to another run."""
    for remote, info in zip(remotes, infos, strict=True):
        if found := unfit(engine, wanted, remote.address, info):
            raise BirlError(f"engine.attach: {remote.address} has the model {info.model}, which does not fit: {found}")
    for remote, info in zip(remotes, infos, strict=True):
        if isinstance(remote, Client) and wanted.run:
            await remote.claim()
        elif info.run:
            print(f"{remote.address} is used by the run {info.run}, which may change its weights.", flush=True)


def unfit(engine: schema.Engine, wanted: Wanted, address: str, info: Info) -> str:
    """Why a server can not stand in for the model, and what to do; empty where it can."""
    if info.words and wanted.words and info.words != wanted.words:
        return (
            "its vocabulary or its end tokens are others, so its tokens mean something else. Start it with this model."
        )
    if engine.kind == "birl" and info.dtype != wanted.dtype:
        return f"it computes in {info.dtype}. Set model.dtype={info.dtype} here, or start it with {wanted.dtype}."
    if info.context < wanted.longest:
        return (
            f"its context is {info.context} tokens, and prompt and answer may have {wanted.longest}. Start it with a "
            f"larger model.max_length or engine.kv_cache_gb, or lower rollout.max_tokens or data.max_prompt_tokens."
        )
    here = urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")  # else it may see it at another place
    elsewhere = info.volume != wanted.volume if here else not info.volume
    if engine.kind == "birl" and wanted.volume and elsewhere:
        return (
            f"it looks for new weights in {info.volume or 'no folder'}. Start it with volume={wanted.volume} (the "
            "folder as it sees it), or set weights.method=reload or direct."
        )
    if (info.asleep or info.paused) and not engine.sleep:
        return "it is paused or sleeps, as a run that was killed leaves it. Start it again."
    return ""


def find(name: str) -> list[str]:
    """The addresses behind one word of `engine.attach`."""
    if not NAME.fullmatch(name):
        return [name]
    found = names.find(name)
    if not found:
        raise BirlError(
            f"engine.attach={name}: no server has that name now. Start one in another shell: `birl serve name={name} "
            "model=...`."
        )
    return found


def speak(engine: schema.Engine, wanted: Wanted, address: str, token: str) -> Remote:
    """The adapter for one address."""
    seconds = engine.request_timeout
    if engine.kind == "birl":
        limits = {"timeout": seconds, "load_timeout": wanted.timeout, "bucket_mb": wanted.bucket_mb}
        return Client(address, token, **limits, run=wanted.run)
    kind = vllm.VLLM if engine.kind == "vllm" else sglang.SGLang
    token = token if engine.attach or engine.kind == "sglang" else ""  # vLLM's own token does not guard its controls
    return kind(address, token=token, recompute_kv=engine.recompute_kv, end_ids=wanted.end_ids, timeout=seconds)


def child(engine: schema.Engine, wanted: Wanted, remote: Remote, port: int, token: str, number: int) -> Process:
    """How one server is started."""
    threads = server_threads(engine)
    gpu = wanted.device != "cpu" and torch.cuda.is_available()
    python = engine.python or sys.executable
    if engine.kind == "birl":
        words = [f"model.path={wanted.folder}", f"model.dtype={wanted.dtype}", f"model.device={wanted.device}"]
        words += [f"model.max_length={wanted.context}", f"engine.max_batch={engine.max_batch}"]
        words += [f"engine.kv_cache_gb={wanted.kv_cache_gb:.4f}", f"engine.draft_rows={engine.draft_rows}"]
        words += [f"engine.recompute_kv={str(engine.recompute_kv).lower()}", f"threads={threads}", f"port={port}"]
        words += [f"volume={wanted.volume}"] if wanted.volume else []
        command = [python, "-m", "birl", "serve", *words, *engine.arguments]
        env: dict[str, str] = {"BIRL_TOKEN": token, "OMP_NUM_THREADS": str(threads)}
    else:
        common = {
            "model": str(wanted.folder),
            "port": port,
            "python": python,
            "dtype": wanted.dtype,
            "tensor_parallel": engine.tensor_parallel,
            "pipeline_parallel": engine.pipeline_parallel,
            "memory_fraction": engine.memory_fraction if gpu else None,
            "max_batch": engine.max_batch,
            "context": wanted.context,
            "extra": engine.arguments,
        }
        if engine.kind == "vllm":
            command = vllm.command(**common)
            own = sorted(os.sched_getaffinity(0))[-threads:]
            bind = f"{own[0]}-{own[-1]}" if len(own) > 1 else str(own[0])
            env = vllm.environment(cpu=not gpu, kv_cache_gb=wanted.kv_cache_gb, threads=bind)
        else:
            command = sglang.command(**common, token=token, cpu=not gpu)
            env = sglang.environment(cpu=not gpu) | {"OMP_NUM_THREADS": str(threads)}
    return Process(
        command,
        log=wanted.logs / f"engine-{number}.log",
        ready=answers(remote.info),
        env=env,
        start_timeout=engine.start_timeout,
        max_restarts=engine.restarts,
    )


def wanted(config: schema.RL, policy: Policy, context: int, asked: list[tuple[int, int]], run: Path) -> Wanted:
    longest = min(max(map(sum, asked)), context)
    size = config.engine.kv_cache_gb or cache_bytes(policy.model, config.engine.max_batch, longest) / 2**30
    method = weights_method(config)
    if method in ("reload", "volume", "checkpoint"):
        check_writable(weights_folder(config, run))
    return Wanted(
        folder=policy.folder,
        dtype=config.model.dtype,
        device=config.model.device,
        context=context,
        longest=longest,
        kv_cache_gb=size,
        end_ids=policy.chat.end_ids,
        logs=run / "engines",
        method=method,
        volume=str(weights_folder(config, run)) if method == "volume" else "",
        words=words(policy.tokenizer.get_vocab(), policy.chat.end_ids),
        run=f"{socket.gethostname()}:{run.resolve()}" if config.engine.attach else "",
        timeout=config.weights.timeout,
        bucket_mb=config.weights.bucket_mb,
    )


def check_writable(folder: Path) -> None:
    """Better to know before servers are started."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BirlError(
            f"weights.folder={folder}: cannot be written ({error.strerror}). Name another place that servers see too."
        ) from error


def weights_folder(config: schema.RL, run: Path) -> Path:
    """Where the versions of the weights are written."""
    if weights_method(config) == "shared":
        return shared_memory()
    return Path(config.weights.folder).expanduser().resolve() if config.weights.folder else run.resolve() / "weights"


def sender(
    config: schema.RL,
    policy: Policy,
    learner: Learner,
    servers: Servers,
    train: Sequence[Tasks],
    run: Path,
    say: Callable[[str], None],
) -> Sender:
    """How the learner's weights come to the servers, and what they are compared with."""
    prompts = [policy.chat.render(t[i].prompt) for t in train for i in range(min(len(t), config.weights.canary))]
    found = Sender(
        learner=learner,
        fleet=servers.router,
        remotes=servers.ready,
        method=weights_method(config),
        root=weights_folder(config, run),
        beside=run / "model",
        compute=policy.compute,
        canary=Canary(learner, prompts[: config.weights.canary], config.weights.max_gap),
        timeout=config.weights.timeout,
        tensors=published if config.engine.kind == "birl" else released,
        broadcast=servers.broadcast,
        sleeping=list(servers.remotes.values()) if config.engine.sleep else (),
        recreate=servers.renew if weights_method(config) == "checkpoint" else None,
    )
    servers.router.fleet.prove = found.prove  # pyright: ignore[reportAttributeAccessIssue]
    servers.say = say
    return found
