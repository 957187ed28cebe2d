"""One engine in another process: what it is started with, and how one speaks to it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from birl.allocator import cores
from birl.config import schema
from birl.config.decided import SERVERS
from birl.config.keys import documentation
from birl.engines import custom, sglang, sglang_process, vllm, vllm_process
from birl.engines.client import Client
from birl.engines.remote import Remote
from birl.process import Process, answers

KINDS = dict.fromkeys(documentation(schema.RL)["engine.kind"].choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What servers are started for. `longest`: no sequence has more tokens; `kv_cache_gb` [GiB] holds what `max_batch`
    of them need. `volume`: where they look for new weights by themselves; empty: nowhere. `words`: digest of the
    vocabulary; `run`: who asks, and keeps other runs out; empty for an evaluation, which changes no weights.
    `vocabulary`: tokens of the model; 0: not known."""

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
    vocabulary: int = 0
    timeout: float = 300.0
    bucket_mb: int = 256


def server_threads(engine: schema.Engine) -> int:
    return engine.threads or max((cores() - max(cores() // 2, 1)) // engine.count, 1)


def check_engine(engine: schema.Engine, trains: bool) -> None:
    """Raises `BirlError` where `engine.kind` names no engine, or a class that cannot do what the run needs of it."""
    if engine.kind not in KINDS:
        needed = ("generate", *(("load",) if trains else ()), *(("sleep", "wake") if engine.sleep else ()))
        custom.named(engine.kind, KINDS, needed)


def speak(engine: schema.Engine, wanted: Wanted, address: str, token: str, number: int = 0) -> Remote:
    """The adapter for one address. A class of the user's has none where it is not attached to."""
    limits = {"timeout": engine.request_timeout, "load_timeout": wanted.timeout}
    if engine.kind == "birl":
        return Client(address, token, bucket_mb=wanted.bucket_mb, run=wanted.run, **limits)  # pyright: ignore
    if engine.kind not in SERVERS:
        offered = {"model": wanted.folder, "address": address, "number": number, "arguments": engine.arguments}
        offered |= {name: getattr(wanted, name) for name in ("dtype", "device", "context", "end_ids")}
        return custom.custom(engine.kind, KINDS, offered, **limits)
    kind = vllm.VLLM if engine.kind == "vllm" else sglang.SGLang
    token = token if engine.attach or engine.kind == "sglang" else ""  # vLLM's own token does not guard its controls
    seconds = engine.request_timeout
    return kind(address, token=token, recompute_kv=engine.recompute_kv, end_ids=wanted.end_ids, timeout=seconds)


def serve_words(engine: schema.Engine, wanted: Wanted) -> list[str]:
    """The arguments of `birl serve`, except its address."""
    words = [f"model.path={wanted.folder}", f"model.dtype={wanted.dtype}", f"model.device={wanted.device}"]
    words += [f"model.max_length={wanted.context}", f"engine.max_batch={engine.max_batch}"]
    words += [f"engine.kv_cache_gb={wanted.kv_cache_gb:.4f}", f"engine.draft_rows={engine.draft_rows}"]
    words += [f"engine.recompute_kv={str(engine.recompute_kv).lower()}", f"threads={server_threads(engine)}"]
    return words + ([f"volume={wanted.volume}"] if wanted.volume else [])


def cores_of(number: int, threads: int, among: Sequence[int]) -> Sequence[int]:
    """Of server `number`: the last cores for the first one, those before them for the second, and the last ones again
    where no others are left. Example: cores_of(1, 2, [0, 1, 2, 3, 4]) == [1, 2]
    """
    end = len(among) - number % max(len(among) // threads, 1) * threads
    return among[max(end - threads, 0) : end]


def child(engine: schema.Engine, wanted: Wanted, remote: Remote, port: int, token: str, number: int | str) -> Process:
    """How one server is started."""
    threads = server_threads(engine)
    gpu = wanted.device != "cpu" and torch.cuda.is_available()
    python = engine.python or sys.executable
    if engine.kind == "birl":
        command = [python, "-m", "birl", "serve", *serve_words(engine, wanted), f"port={port}", *engine.arguments]
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
            command = vllm_process.command(**common)
            own = cores_of(number if isinstance(number, int) else 0, threads, sorted(os.sched_getaffinity(0)))
            bind = ",".join(map(str, own))
            env = vllm_process.environment(cpu=not gpu, kv_cache_gb=wanted.kv_cache_gb, threads=bind)
        else:
            command = sglang_process.command(**common, token=token, cpu=not gpu)
            env = sglang_process.environment(cpu=not gpu) | {"OMP_NUM_THREADS": str(threads)}
    return Process(
        command,
        log=wanted.logs / f"engine-{number}.log",
        ready=answers(remote.info),
        env=env,
        start_timeout=engine.start_timeout,
        max_restarts=engine.restarts,
    )
