"""vLLM as an engine: `engine.kind=vllm`."""

import os
from collections.abc import Mapping

from birl.config import schema
from birl.engines.kinds import Start, Wanted, common, cores_of
from birl.engines.remote import Remote


def speak(engine: schema.Engine, wanted: Wanted, address: str, token: str) -> Remote:
    from birl.engines.vllm.adapter import VLLM

    token = token if engine.attach else ""  # its own token does not guard its controls
    limits = {"recompute_kv": engine.recompute_kv, "end_ids": wanted.end_ids, "timeout": engine.request_timeout}
    return VLLM(address, token=token, **limits)  # pyright: ignore


def start(engine: schema.Engine, wanted: Wanted, one: Start) -> tuple[list[str], Mapping[str, str]]:
    """The command and the environment of a server."""
    from birl.engines.vllm import process

    own = cores_of(one.number, one.threads, sorted(os.sched_getaffinity(0)))
    bind = ",".join(map(str, own))
    env = process.environment(cpu=not one.gpu, kv_cache_gb=wanted.kv_cache_gb, threads=bind)
    return process.command(**common(engine, wanted, one)), env
