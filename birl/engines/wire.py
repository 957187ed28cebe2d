"""An engine in another process: its interface (`Remote`), and birl's native protocol, JSON over HTTP. Token ids and
log-probs are exact (a float is written with all its digits). Answers of /generate come as arrays in the format of
safetensors (`BINARY`) to those that accept it: 12 bytes per token instead of 31, and a hundredth of the time.

    POST /generate   {prompt_ids, params, session}          -> {tokens, logprobs, versions, stop}, and routes (base64)
                                                               of an engine that records the experts of tokens;
                                                               support {counts, ids} if params.support is set
    POST /load       {version, digests, folder, anew}       -> {version, digest, seconds, bytes}
    PUT  /stage/{version}   safetensors bytes, a bucket of tensors; then /load without a folder
    PUT  /adapters/{name}   safetensors bytes, LAYER.A [R, K] and LAYER.B [N, R]; then params.adapter of /generate
    POST /stage/{version}   {memory, tensors}   the same, read from shared memory (`handles.py`)
    POST /join      {store, group, rank, size, ...}         -> {group, rank}   when all have joined (`Invitation`)
    POST /load      {version, digests, anew, group}         the tensors come from rank 0 of that group
    POST /leave     {}                                      -> {}              calls that wait for the group fail
    POST /claim   /release   of the run in the header birl-run (`server/service.py`)
    POST /pause {mode: keep | abort}   /resume   /abort {sessions}   /sleep   /wake
    GET  /health   /ready   /info   /digests   /metrics

An error is {"error": {"message", "type"}} with a status of 400 or more; a refused load has the type "weights" and its
`cause` beside it (`WeightsFailed`).
"""

from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol
from urllib.parse import quote

import httpx
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from birl.samples import Support
from birl.types import Completion, Held, SamplingParams, Stop, Update

BINARY = "application/vnd.birl.safetensors"
HEADER = "birl-run"  # host:folder of the client's run
MOST = 64 << 20  # maximum bytes of a response whose size does not depend on the request
A_TOKEN = 8 << 10  # bytes for each token of prompt and answer: its numbers, and the experts that computed it
FRAMING = ("content-encoding", "content-length", "transfer-encoding")


def header(run: str) -> dict[str, str]:
    """Header that identifies the client's run."""
    return {HEADER: quote(run)} if run else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterParams(SamplingParams):
    """`adapter`: name of PUT /adapters/{name}, whose low-rank matrices are added to the weights; empty: none."""

    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """Response of GET /info. `digest`: `whole` of the current weights; `context` and `vocabulary` in tokens; `counters`
    since the engine's start. Only of `birl serve`: `vocabulary_digest`, of tokens and end tokens; `volume`, the folder
    that it polls for new weights; `run`, whose weights it has."""

    engine: str
    model: str
    version: int
    digest: str
    dtype: str
    context: int
    vocabulary: int
    running: int
    waiting: int
    paused: bool
    asleep: bool
    pid: int
    vocabulary_digest: str = ""
    volume: str = ""
    run: str = ""
    counters: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Body of POST /join: become `rank` of `size` in a group that meets at the store host:port under the name `group`;
    rank 0 is the learner, and hosts the store. `backend`: gloo | nccl; `gpu`: the learner's. `timeout` of joining and
    of an update [s]. `tensors`: (name, shape, type) of what rank 0 will send, sorted, in buckets of `bucket_mb`
    [MiB]."""

    store: str
    group: str
    rank: int
    size: int
    backend: str
    timeout: float
    bucket_mb: float
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    gpu: str = ""


def invitation_from(data: Mapping[str, Any]) -> Invitation:
    """Parse an invitation. Raises `ValueError` naming the key that is unknown, missing or wrong."""
    kinds = {
        **{"store": str, "group": str, "backend": str, "gpu": str, "rank": int, "size": int, "tensors": list},
        **{"timeout": float, "bucket_mb": float},
    }
    if unknown := sorted(set(data) - set(kinds)):
        raise ValueError(f"{unknown[0]}: there is no such key; there are {', '.join(sorted(kinds))}")
    for key, kind in kinds.items():
        if key not in data and key != "gpu":
            raise ValueError(f"{key} is missing")
        value = data.get(key, "")
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            raise ValueError(f"{key}: {value!r} is not of type {kind.__name__}")
    if data["size"] < 2 or not 0 < data["rank"] < data["size"]:
        raise ValueError(f"rank {data['rank']} of {data['size']}: rank 0 is the learner, an engine is 1 to size - 1")
    if data["backend"] not in ("gloo", "nccl"):
        raise ValueError(f"backend must be gloo | nccl, got {data['backend']!r}")
    if not 0 < data["timeout"] < 1e6 or not 0 < data["bucket_mb"] < 1e6:
        raise ValueError("timeout and bucket_mb must be above 0")
    try:
        tensors = tuple((str(name), tuple(map(int, shape)), str(dtype)) for name, shape, dtype in data["tensors"])
    except (TypeError, ValueError):
        raise ValueError("tensors must be a list of [name, shape, type]") from None
    names = [name for name, _, _ in tensors]
    if names != sorted(set(names)):
        raise ValueError("tensors must be sorted by name, each once: all ranks send and take them in one order")
    return Invitation(**{**data, "tensors": tensors})


def params_to(params: SamplingParams) -> dict[str, Any]:
    """Parameters as JSON, only those that differ from the defaults."""
    default = type(params)(max_tokens=params.max_tokens)
    result = {f.name: getattr(params, f.name) for f in fields(params)}
    return {k: v for k, v in result.items() if k == "max_tokens" or v != getattr(default, k)}


def params_from(data: Mapping[str, Any]) -> SamplingParams:
    """Parse parameters. Raises `ValueError` naming the key that is unknown, missing or of a wrong type."""
    kinds = {
        **{"max_tokens": int, "top_k": int, "seed": int, "ignore_eos": bool, "support": bool, "adapter": str},
        **{"temperature": float, "top_p": float, "min_p": float, "stop": str, "stop_ids": int, "forced": int},
    }
    if unknown := sorted(set(data) - set(kinds)):
        raise ValueError(f"params.{unknown[0]}: there is no such key; there are {', '.join(sorted(kinds))}")
    if "max_tokens" not in data:
        raise ValueError("params.max_tokens is missing")
    result: dict[str, Any] = {}
    for key, value in data.items():
        listed = key in ("stop", "stop_ids", "forced")
        if key == "seed" and value is None:
            continue
        if listed and not isinstance(value, list | tuple):
            raise ValueError(f"params.{key} must be a list")
        for item in value if listed else [value]:
            good = isinstance(item, kinds[key]) or (kinds[key] is float and isinstance(item, int))
            if not good or (isinstance(item, bool) and kinds[key] is not bool):
                raise ValueError(f"params.{key}: {item!r} is not of type {kinds[key].__name__}")
        result[key] = tuple(value) if listed else value
    return AdapterParams(**result) if "adapter" in result else SamplingParams(**result)


def completion_to(completion: Completion) -> dict[str, Any]:
    result = {
        "tokens": completion.ids,
        "logprobs": completion.logprobs.tolist(),
        "versions": completion.versions.tolist(),
        "stop": str(completion.stop),
    }
    result |= {"cached": completion.cached} if completion.cached else {}
    if (support := completion.support) is not None:
        result["support"] = {"counts": support.counts.tolist(), "ids": support.ids.tolist()}
    return result | {"routes": b64encode(completion.routes).decode()} if completion.routes else result


def packed(completion: Completion) -> bytes:
    """A completion in the binary format."""
    columns = {name: getattr(completion, name) for name in ("tokens", "logprobs", "versions")}
    if (support := completion.support) is not None:
        columns |= {"support_counts": support.counts, "support_ids": support.ids}
    texts = {"stop": str(completion.stop).encode(), "routes": completion.routes, "cached": b"%d" % completion.cached}
    return save(columns | {name: np.frombuffer(text, np.uint8) for name, text in texts.items()})


def unpacked(data: bytes) -> dict[str, Any]:
    """Columns of the binary format, for `completion_from`. Raises `ValueError`."""
    try:
        columns = load(data)
        texts = {name: bytes(columns[name]) for name in ("stop", "routes", "cached")}
        told = {name: columns.pop(f"support_{name}") for name in ("counts", "ids") if f"support_{name}" in columns}
        return columns | texts | {"stop": texts["stop"].decode()} | ({"support": told} if told else {})
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"no completion in the binary form: {error!r}") from error


def completion_from(data: Mapping[str, Any]) -> Completion:
    """Parse a completion. Raises `ValueError` or `KeyError` if it is malformed."""
    routes, support = data.get("routes", ""), data.get("support")
    return Completion(
        tokens=data["tokens"],
        logprobs=data["logprobs"],
        versions=data["versions"],
        stop=Stop(data["stop"]),
        routes=routes if isinstance(routes, bytes) else b64decode(routes, validate=True),
        support=None if support is None else Support(counts=support["counts"], ids=support["ids"]),
        cached=int(data.get("cached", 0)),
    )


def held_from(data: Mapping[str, Any]) -> Held:
    return Held(**{f.name: data[f.name] for f in fields(Held)})


class Remote(Protocol):
    """An engine in another process: `client.Client` for `birl serve`; the adapters of vLLM and SGLang have the same
    methods. `version`: last known one. Every method has its own deadline.

    `EngineDown`: the engine does not answer, or wrongly; another one may. `BirlError` from `generate`: the request
    itself is wrong, on any engine. Cancelling `generate` ends the request in the engine too.
    """

    address: str
    version: int

    async def info(self) -> Info: ...  # raises EngineDown
    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion: ...
    async def load(self, update: Update) -> Held: ...  # raises WeightsFailed; "unreachable" without an answer
    async def pause(self, abort: bool = False) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self, sessions: Collection[str] | None = None) -> int: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def close(self) -> None: ...  # closes the connection; the engine keeps running


class TooLarge(httpx.StreamError):
    """The response exceeds its size limit."""


async def fetch(client: httpx.AsyncClient, method: str, path: str, *, most: int = MOST, **keys: Any) -> httpx.Response:
    """The whole response. Raises `TooLarge` beyond `most` bytes, and httpx's errors."""
    async with client.stream(method, path, **keys) as response:
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > most:
                raise TooLarge(f"the answer is larger than {most} bytes")
        headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() not in FRAMING]
        return httpx.Response(response.status_code, headers=headers, content=bytes(content), request=response.request)
