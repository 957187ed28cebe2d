"""`birl serve` as an engine: `engine.kind=birl`."""

from collections.abc import Mapping

from birl.config import schema
from birl.engines.client import Client
from birl.engines.kinds import Start, Wanted, server_threads
from birl.engines.wire import Remote


def speak(engine: schema.Engine, wanted: Wanted, address: str, token: str) -> Remote:
    limits = {"timeout": engine.request_timeout, "load_timeout": wanted.timeout}
    result = Client(address, token, bucket_mb=wanted.bucket_mb, run=wanted.run, **limits)  # pyright: ignore
    result.pictures = wanted.pictures.used if wanted.pictures else None
    return result


def start(engine: schema.Engine, wanted: Wanted, one: Start) -> tuple[list[str], Mapping[str, str]]:
    """Command and environment of a server."""
    words = [*serve_words(engine, wanted), f"port={one.port}", *engine.arguments]
    return [one.python, "-m", "birl", "serve", *words], {"BIRL_TOKEN": one.token, "OMP_NUM_THREADS": str(one.threads)}


def serve_words(engine: schema.Engine, wanted: Wanted) -> list[str]:
    """Arguments of `birl serve`, except its address."""
    device = wanted.device.partition(":")[0]  # it only sees its own GPUs, numbered from 0
    words = [f"model.path={wanted.folder}", f"model.dtype={wanted.dtype}", f"model.device={device}"]
    words += [f"model.max_length={wanted.context}", f"engine.max_batch={engine.max_batch}"]
    words += [f"engine.kv_cache_gb={wanted.kv_cache_gb:.4f}", f"engine.draft_rows={engine.draft_rows}"]
    words += [f"engine.recompute_kv={str(engine.recompute_kv).lower()}", f"threads={server_threads(engine)}"]
    words += ["model.pictures=true"] if wanted.pictures else []
    return words + ([f"volume={wanted.volume}"] if wanted.volume else [])
