"""Starts one engine in another process, on its share of the cores and GPUs, and makes the client for it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birl.allocator import cores
from birl.config import schema
from birl.config.decided import ENGINES, SERVERS
from birl.config.keys import documentation
from birl.engines import custom
from birl.engines.wire import Remote
from birl.errors import BirlError
from birl.models.device import choose, limits, visible
from birl.named import module
from birl.process import Process, answers
from birl.text.pictures import Pictures

MOST = 1024  # vLLM's own default on large GPUs
#: this process's rank among the learner's, which a server would use as its own
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PLACE += ("TORCHELASTIC_USE_AGENT_STORE",)  # torchrun's: a server's processes would start no store to meet at
KINDS = dict.fromkeys(documentation(schema.RL)["engine.kind"].choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Requirements on servers. `longest`: maximum length of a sequence [tokens]; `kv_cache_gb` [GiB]: enough for
    `max_batch` of them. `volume`: folder that servers poll for new weights; empty: none. `vocabulary_digest`: of tokens
    and end tokens; `run`: identifies the run, which excludes other runs; empty for an evaluation, which changes no
    weights. `vocabulary`: tokens of the model; 0: unknown. `fraction`: of a GPU shared with the learner that is left to
    the server; 0: not shared. `sequences`: concurrent requests of each server; 0: unknown. `pictures`: those of
    prompts, for a vision model."""

    folder: Path
    dtype: str
    device: str
    context: int
    longest: int
    kv_cache_gb: float
    end_ids: frozenset[int]
    logs: Path
    method: str = "reload"
    vocabulary_digest: str = ""
    volume: str = ""
    run: str = ""
    vocabulary: int = 0
    timeout: float = 300.0
    bucket_mb: int = 256
    fraction: float = 0.0
    sequences: int = 0
    pictures: Pictures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One server to start: its number, and its share of the machine."""

    port: int
    token: str
    number: int
    threads: int
    gpu: bool
    python: str


def common(engine: schema.Engine, wanted: Wanted, one: Start) -> dict[str, Any]:
    """Common arguments of the commands of vLLM and SGLang."""
    return {
        "model": str(wanted.folder),
        "port": one.port,
        "python": one.python,
        "dtype": wanted.dtype,
        "tensor_parallel": engine.tensor_parallel,
        "pipeline_parallel": engine.pipeline_parallel,
        "memory_fraction": wanted.fraction or engine.memory_fraction if one.gpu else None,
        "max_batch": most_at_once(engine, wanted.sequences),
        "context": wanted.context,
        "sleep": engine.sleep and one.gpu,
        "extra": engine.arguments,
    }


def most_at_once(engine: schema.Engine, asked: int) -> int:
    """Maximum batch of a vLLM or SGLang server: engine.max_batch or, if that is left at its default, enough for the
    `asked` concurrent requests."""
    default = engine.max_batch == schema.Engine().max_batch
    return max(engine.max_batch, min(asked, MOST)) if default else engine.max_batch


def spoken(engine: schema.Engine, wanted: Wanted) -> dict[str, Any]:
    """Common arguments of the adapters of vLLM and SGLang (`peer.Adapter`)."""
    return {"recompute_kv": engine.recompute_kv, "end_ids": wanted.end_ids, "timeout": engine.request_timeout}


def server_threads(engine: schema.Engine) -> int:
    return engine.threads or max((cores() - max(cores() // 2, 1)) // engine.count, 1)


def check_engine(engine: schema.Engine, trains: bool) -> None:
    """Raise `BirlError` if `engine.kind` names no engine, or a class without the methods that the run needs."""
    if engine.kind not in KINDS:
        needed = ("generate", *(("load",) if trains else ()), *(("sleep", "wake") if engine.sleep else ()))
        custom.named(engine.kind, KINDS, needed)


def speak(engine: schema.Engine, wanted: Wanted, address: str, token: str, number: int = 0) -> Remote:
    """The client for one address. A user-defined class has no address unless it is attached to."""
    if engine.kind in SERVERS:
        return module(f"engine.kind={engine.kind}", ENGINES[engine.kind].module).speak(engine, wanted, address, token)
    offered = {"model": wanted.folder, "address": address, "number": number, "arguments": engine.arguments}
    offered |= {name: getattr(wanted, name) for name in ("dtype", "device", "context", "end_ids")}
    limits = {"timeout": engine.request_timeout, "load_timeout": wanted.timeout}
    return custom.custom(engine.kind, KINDS, offered, **limits)


def cores_of(number: int, threads: int, among: Sequence[int]) -> Sequence[int]:
    """Cores of server `number`: the last ones for the first server, those before them for the second, and the last ones
    again if no others are left. Example: cores_of(1, 2, [0, 1, 2, 3, 4]) == [1, 2]"""
    end = len(among) - number % max(len(among) // threads, 1) * threads
    return among[max(end - threads, 0) : end]


def child(
    engine: schema.Engine,
    wanted: Wanted,
    remote: Remote,
    port: int,
    token: str,
    number: int | str,
    gpus: Sequence[str] = (),
) -> Process:
    """The process of one server. `gpus`: those that it sees; empty: all that this process sees."""
    one = Start(
        port=port,
        token=token,
        number=number if isinstance(number, int) else 0,
        threads=server_threads(engine),
        gpu=wanted.device != "cpu" and torch.cuda.is_available(),
        python=engine.python or sys.executable,
    )
    command, env = module(f"engine.kind={engine.kind}", ENGINES[engine.kind].module).start(engine, wanted, one)
    return Process(
        command,
        log=wanted.logs / f"engine-{number}.log",
        ready=answers(remote.info),
        env={**env, **dict.fromkeys(PLACE), **(dict.fromkeys(limits(), ",".join(gpus)) if gpus else {})},
        start_timeout=engine.start_timeout,
        max_restarts=engine.restarts,
    )


def shares(engine: schema.Engine, device: str, learner: int) -> list[tuple[str, ...]]:
    """The GPUs of each server, as in CUDA_VISIBLE_DEVICES: tensor_parallel x pipeline_parallel for each, after the
    first `learner` ones that this process sees; with engine.sleep including the learner's. Empty for each if no server
    is started or computes on a GPU. Raises `BirlError` if there are too few.

    Example: shares(Engine(kind="vllm", count=2), "auto", 1) == [("1",), ("2",)]
    """
    if engine.attach or engine.kind not in SERVERS or device == "cpu" or not torch.cuda.is_available():
        return [()] * engine.count
    names, size = visible_gpus(), engine.tensor_parallel * engine.pipeline_parallel
    if ":" in device:  # the learner's GPU comes first
        names.insert(0, names.pop(choose(device).index))
    first = 0 if engine.sleep else learner
    needed = first + engine.count * size
    if needed > len(names):
        beside = f" beside the learner's {learner}" if first else ""
        turns = ", engine.sleep=true where learner and servers take turns" if first else ""
        raise BirlError(
            f"engine.count={engine.count}: {engine.count} x {size} GPUs for {engine.kind} servers{beside} are "
            f"{needed}, and this machine shows {len(names)}{visible()}. Use fewer{turns}, or servers elsewhere: "
            "engine.attach."
        )
    return [tuple(names[start : start + size]) for start in range(first, needed, size)]


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as in CUDA_VISIBLE_DEVICES: by index or by UUID."""
    given = next((os.environ[name] for name in limits() if name in os.environ), None)
    count = torch.cuda.device_count()
    return list(map(str, range(count)) if given is None else map(str.strip, given.split(",")))[:count]
