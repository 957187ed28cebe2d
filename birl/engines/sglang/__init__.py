"""SGLang as an engine: `engine.kind=sglang`."""

from collections.abc import Mapping

from birl.config import schema
from birl.engines.kinds import Start, Wanted, common
from birl.engines.remote import Remote


def speak(engine: schema.Engine, wanted: Wanted, address: str, token: str) -> Remote:
    from birl.engines.sglang.adapter import SGLang

    limits = {"recompute_kv": engine.recompute_kv, "end_ids": wanted.end_ids, "timeout": engine.request_timeout}
    return SGLang(address, token=token, **limits)  # pyright: ignore


def start(engine: schema.Engine, wanted: Wanted, one: Start) -> tuple[list[str], Mapping[str, str]]:
    """The command and the environment of a server."""
    from birl.engines.sglang import process

    env = process.environment(cpu=not one.gpu) | {"OMP_NUM_THREADS": str(one.threads)}
    return process.command(**common(engine, wanted, one), token=one.token, cpu=not one.gpu), env
