"""Engines in other processes, for `birl rl` and `birl eval`: started and stopped with the run, or attached to.

engine.kind=birl | vllm | sglang   their protocol; each has an adapter here, as have user-defined classes
engine.attach                      addresses, or a name under which `birl serve` was started
"""

import asyncio
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from birl.config import schema
from birl.config.decided import ENGINES, LAUNCHED, NAME, SERVERS, answers_at_once, kind_of, weights_method
from birl.data.tasks import Tasks
from birl.engine.open import cache_bytes
from birl.engines.attached import Following, look_up, other_kind, take
from birl.engines.kinds import Wanted, child, shares, speak
from birl.engines.router import Router
from birl.engines.spread import Counting
from birl.engines.wire import Remote
from birl.errors import BirlError
from birl.learner.learner import Learner
from birl.learner.policy import Policy
from birl.models.device import choose
from birl.models.digests import vocabulary_digest
from birl.named import module
from birl.process import Process, free_port
from birl.types import Completion, SamplingParams
from birl.waits import event
from birl.weights.canary import Canary
from birl.weights.publish import Sender, Volume, shared_memory
from birl.weights.publisher import published, released

if TYPE_CHECKING:  # only imported for weights.method=nccl
    from birl.weights.broadcast import Broadcast


@dataclass(slots=True, kw_only=True)
class Servers(Counting):
    """Engines in other processes behind a router; implements `birl.types.Engine`."""

    router: Router
    children: list[Process]
    remotes: dict[str, Remote]  # by address, not wrapped for the method of the weights
    broadcast: "Broadcast | None" = None
    following: asyncio.Task[None] | None = None  # follows a registered name
    say: Callable[[str], None] = lambda text: None
    renewed: bool = False  # being restarted with other weights
    vocabulary: int = 0  # tokens of the model; 0: unknown

    @property
    def version(self) -> int:
        return self.router.version

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        result = await self.counted(self.router.generate(prompt_ids, params, session))
        if 0 < self.vocabulary <= (most := int(result.tokens.max(initial=0))):
            raise BirlError(f"An engine answered with token id {most}, but the model has {self.vocabulary} tokens.")
        return result

    def ready(self) -> list[Remote]:
        return [m.remote for m in self.router.fleet.members if m.state == "ready"]

    def heard(self, name: str, **fields: object) -> None:
        """Log a change of an engine's state."""
        address = str(fields.get("address", ""))
        text = f"{name.replace('_', ' ')}: {address} {fields.get('error', '')}".strip()
        if name == "engine_down" and not self.children and "://" in address:  # no object of the user's class
            where = "under the same name" if self.following is not None else "at the same address"
            text += f"; the run waits for it: start it again {where}"
        event(text)
        if name != "retry":
            self.say(text)

    async def restart(self, remote: Remote) -> Remote:
        """Restart an engine that does not answer (called by the router)."""
        process = self.children[list(self.remotes).index(remote.address)]
        if not process.alive and not self.renewed:
            await process.restart()
        return remote

    async def renew(self, folder: str) -> None:
        """weights.method=checkpoint: restart every server from another folder. Open requests are sampled again."""

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
        if self.following is not None:
            self.following.cancel()
            await asyncio.gather(self.following, return_exceptions=True)
        with suppress(Exception):  # whatever happens, the processes must end
            await self.router.close()
        await asyncio.gather(*(child.terminate() for child in self.children))


async def open_servers(engine: schema.Engine, wanted: Wanted, learner: int = 0) -> Servers:
    """Start or find the servers; returns when each answers. `learner`: number of GPUs of this machine that it uses.
    Raises `BirlError`, with no server left running."""
    if wanted.method == "nccl" and engine.kind == "vllm" and choose(wanted.device).type != "cuda":
        raise BirlError("weights.method=nccl: vLLM's workers need NCCL, but the learner is on a CPU; use reload.")
    if engine.attach:
        token = os.environ.get("BIRL_TOKEN", "")
        remotes, children = await look_up(engine, wanted, token), []
    elif engine.kind not in SERVERS:
        remotes, children = [speak(engine, wanted, "", "", number) for number in range(engine.count)], []
    else:
        token = secrets.token_hex(16)
        ports = [free_port() for _ in range(engine.count)]
        remotes = [speak(engine, wanted, f"http://127.0.0.1:{port}", token) for port in ports]
        each = enumerate(zip(remotes, ports, shares(engine, wanted.device, learner), strict=True))
        children = [child(engine, wanted, remote, port, token, number, gpus) for number, (remote, port, gpus) in each]
    try:
        await start(engine, children)
        infos = await asyncio.gather(*(remote.info() for remote in remotes))
        if engine.attach:
            await take(engine, wanted, remotes, infos)
    except BaseException as error:
        hint = await other_kind(engine, remotes, token) if engine.attach and isinstance(error, Exception) else ""
        await asyncio.gather(*(c.terminate() for c in children))
        await asyncio.gather(*(remote.close() for remote in remotes))
        if isinstance(error, Exception) and (hint or not isinstance(error, BirlError)):
            key = f"engine.attach=[{','.join(engine.attach)}]" if engine.attach else f"engine.kind={engine.kind}"
            raise BirlError(f"{key}: {error}{hint}") from error
        raise
    plain = {remote.address: remote for remote in remotes}
    broadcast = broadcast_to(remotes, wanted) if wanted.method == "nccl" else None
    wrap = partial(wrapped, wanted=wanted, broadcast=broadcast)
    servers = Servers(
        router=Router(
            [wrap(remote) for remote in remotes],
            version=max(info.version for info in infos),
            timeout=engine.request_timeout * (engine.restarts + 1),
            attempt_timeout=engine.request_timeout,
            load_timeout=wanted.timeout,
            restart_timeout=engine.start_timeout,
        ),
        children=children,
        remotes=plain,
        broadcast=broadcast,
        vocabulary=wanted.vocabulary,
    )
    fleet = servers.router.fleet
    if broadcast is not None:
        fleet.expect = broadcast.expect
    fleet.on_event = servers.heard
    if children:
        fleet.restart = servers.restart
    if any(NAME.fullmatch(word) for word in engine.attach):
        limits = {"engine": engine, "wanted": wanted, "token": token}
        follow = Following(**limits, fleet=fleet, remotes=plain, wrap=wrap, heard=servers.heard)
        servers.following = asyncio.create_task(follow.run())
    return servers


def broadcast_to(remotes: Sequence[Remote], wanted: Wanted) -> "Broadcast":
    transport = module("weights.method=nccl", "birl.weights.broadcast")
    own = getattr(remotes[0], "transfer", None)  # for vLLM or SGLang
    limits = {"timeout": wanted.timeout, "bucket_mb": wanted.bucket_mb} | ({"group": own.group} if own else {})
    return transport.Broadcast([remote.address for remote in remotes], **limits)


def wrapped(remote: Remote, wanted: Wanted, broadcast: "Broadcast | None") -> Remote:
    """Wrap a remote for the method of the weights."""
    if broadcast is not None:
        return broadcast.joined(remote)  # pyright: ignore[reportArgumentType, reportReturnType]
    if wanted.method == "ipc":
        return module("weights.method=ipc", "birl.weights.lending").Lent(remote, wanted.bucket_mb)
    return Volume(remote, wanted.timeout) if wanted.method == "volume" else remote  # pyright: ignore[reportReturnType]


async def start(engine: schema.Engine, children: Sequence[Process]) -> None:
    """Start the processes. Raises `BirlError` with the end of the log of the first that fails."""
    try:
        await asyncio.gather(*(c.start() for c in children))
    except BirlError as error:
        hint = "keys: engine.python, engine.arguments for further arguments, engine.start_timeout"
        raise BirlError(f"engine.kind={engine.kind}: a server did not start ({hint}). {error}") from error


def wanted(
    config: schema.RL, policy: Policy, context: int, asked: Sequence[tuple[int, int]], run: Path, fraction: float = 0.0
) -> Wanted:
    """Requirements of a run on its servers. `fraction`: see `Wanted`."""
    longest = min(max(map(sum, asked)), context)
    size = config.engine.kv_cache_gb or (
        cache_bytes(policy.model, config.engine.max_batch, longest, device=choose(config.model.device)) / 2**30
    )
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
        pictures=policy.chat.pictures,
        vocabulary_digest=vocabulary_digest(policy.tokenizer.get_vocab(), policy.chat.end_ids),
        run=owner(config, run),
        vocabulary=policy.model.get_input_embeddings().weight.shape[0],  # pyright: ignore
        timeout=config.weights.timeout,
        bucket_mb=config.weights.bucket_mb,
        fraction=fraction,
        sequences=-(-answers_at_once(config) // config.engine.count),
    )


def owner(config: schema.RL, run: Path) -> str:
    """Identifies the run to attached servers. A launcher may restart the run on another machine, and its engines have
    no other user."""
    launched = [word for word in config.engine.attach if word.startswith(LAUNCHED)]
    return next(iter(launched), f"{socket.gethostname()}:{run.resolve()}" if config.engine.attach else "")


def check_writable(folder: Path) -> None:
    """Raise `BirlError` before servers are started if a folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BirlError(
            f"weights.folder={folder}: cannot be written ({error.strerror}). Name a folder that the servers can read."
        ) from error


def weights_folder(config: schema.RL, run: Path) -> Path:
    """Folder of the weight versions."""
    if weights_method(config) == "shared":
        return shared_memory()
    return Path(config.weights.folder).expanduser().resolve() if config.weights.folder else run.resolve() / "weights"


def owed(engine: schema.Engine, learner: Learner) -> int:
    """Minimum memory of a server on the learner's GPU: its share of the weights [bytes]; 0 on a CPU."""
    if learner.device.type != "cuda":
        return 0
    size = learner.dtype.itemsize * sum(p.numel() for p in learner.model.parameters())  # sharded parameters are float32
    return size // (engine.tensor_parallel * engine.pipeline_parallel)


def sender(
    config: schema.RL,
    policy: Policy,
    learner: Learner,
    servers: Servers,
    train: Sequence[Tasks],
    run: Path,
    say: Callable[[str], None],
) -> Sender:
    """The publisher that sends the learner's weights to the servers, with its canary."""
    prompts = [policy.chat.render(t[i].prompt) for t in train for i in range(min(len(t), config.weights.canary))]
    result = Sender(
        learner=learner,
        fleet=servers.router,
        remotes=servers.ready,
        method=weights_method(config),
        root=weights_folder(config, run),
        beside=run / "model",
        compute=policy.compute,
        canary=Canary(learner, prompts[: config.weights.canary], config.weights.max_gap),
        timeout=config.weights.timeout,
        tensors=published if ENGINES[kind_of(config.engine)].own else released,
        broadcast=servers.broadcast,
        keeps=config.weights.sync_every > 1,
        sleeping=servers.remotes.values() if config.engine.sleep else (),  # evaluated when used
        owed=owed(config.engine, learner) if config.engine.sleep else 0,
        recreate=servers.renew if weights_method(config) == "checkpoint" else None,
    )
    servers.router.fleet.prove = result.prove  # pyright: ignore[reportAttributeAccessIssue]
    servers.say = say
    return result
