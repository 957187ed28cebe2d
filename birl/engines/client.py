"""Speaks to one `birl serve` in its own dialect (`wire.py`). Nothing is tried twice here: that is the router's."""

import asyncio
import contextlib
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import httpx
from safetensors.torch import save
from torch import Tensor

from birl.engines.remote import A_TOKEN, MOST, fetch
from birl.engines.wire import (
    BINARY,
    AdapterParams,
    Info,
    Invitation,
    completion_from,
    header,
    held_from,
    params_to,
    unpacked,
)
from birl.errors import BirlError, EngineDown, Malformed, WeightsFailed
from birl.models.low_rank import AdapterWeights
from birl.text.pictures import Files, is_picture
from birl.types import Completion, Held, SamplingParams, Update

SENT = 4096  # adapters of which it is known that the engine was sent them
CONTROL = 16  # connections beside those of `generate`: a full engine can still be asked how it is
RELEASE = 5.0  # s in which a server should have heard that it is free
IDLE = 2.0  # s; less than the 5 s after which uvicorn closes a quiet connection, perhaps while a request is on its way


class MissingAdapter(BirlError):
    """The engine does not have the adapter, or no longer."""


class Client:
    """Implements `Remote`. Times in seconds: `timeout` for an answer, `load_timeout` for new weights, sleep and wake,
    `control_timeout` for everything else. At most `connections` answers are waited for at a time (each takes a file
    descriptor), further ones queue here. Weights that come as tensors are sent in buckets of `bucket_mb` [MiB].
    `run` says for which run it asks, and may `claim` the engine.

    Example: Client("http://127.0.0.1:8000", token=os.environ.get("BIRL_TOKEN", ""))
    """

    def __init__(
        self,
        address: str,
        token: str = "",
        *,
        timeout: float = 600.0,
        control_timeout: float = 10.0,
        load_timeout: float = 300.0,
        connections: int = 512,
        bucket_mb: float = 64.0,
        run: str = "",
    ) -> None:
        self.address, self.version = checked_address(address), -1
        self.pictures: Files | None = None  # of the prompts' pictures, where the model sees
        self.adapters: Mapping[str, AdapterWeights] = {}  # those that `AdapterParams` name
        self._sent: dict[str, asyncio.Task[None]] = {}
        self.timeout, self.control_timeout, self.load_timeout = timeout, control_timeout, load_timeout
        self.bucket_mb, self._run, self._claimed = bucket_mb, run, False
        self._room = asyncio.Semaphore(connections)
        self._http = httpx.AsyncClient(
            base_url=self.address,
            headers=({"Authorization": f"Bearer {token}"} if token else {}) | header(run),
            timeout=httpx.Timeout(control_timeout, connect=min(5.0, control_timeout)),
            limits=httpx.Limits(
                max_connections=connections + CONTROL,
                max_keepalive_connections=connections + CONTROL,
                keepalive_expiry=IDLE,
            ),
            trust_env=False,  # the proxy of the environment is for the world outside
        )

    async def info(self) -> Info:
        result = await self._json("GET", "/info", seconds=self.control_timeout)
        try:
            info = info_from(result)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineDown(f"{self.address} is no birl engine: GET /info gave {_first(result)}") from error
        self.version = info.version
        return info

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        """Raises `EngineDown`, also after `timeout`, and `BirlError` where the engine finds the request wrong."""
        body = {"prompt_ids": prompt_ids, "params": params_to(params), "session": session}
        if is_picture(max(prompt_ids, default=0)) and self.pictures is not None:
            files = await asyncio.to_thread(self.pictures, prompt_ids)
            body["pictures"] = {digest: b64encode(data).decode("ascii") for digest, data in files.items()}
        what = f"session {session!r} on {self.address}"
        try:
            async with asyncio.timeout(self.timeout), self._room:
                how = {"json": body, "headers": {"Accept": BINARY}, "seconds": self.timeout, "what": what}
                how["most"] = MOST + A_TOKEN * (len(prompt_ids) + params.max_tokens) + told(params)
                result = await self._answer(how, params.adapter if isinstance(params, AdapterParams) else "")
        except TimeoutError as error:
            raise EngineDown(f"{what} had no answer within {self.timeout:g} s") from error
        try:
            return checked_completion(completion_from(result), params)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Malformed(f"{self.address} gave no completion: {_first(result)} ({error})") from error

    async def _answer(self, how: Mapping[str, Any], adapter: str) -> dict[str, Any]:
        """An adapter is sent once, and again to an engine that has lost it."""
        sent = await self._send(adapter, None)
        try:
            return await self._json("POST", "/generate", **how)
        except MissingAdapter:
            await self._send(adapter, sent)
            return await self._json("POST", "/generate", **how)

    async def _send(self, name: str, lost: asyncio.Task[None] | None) -> asyncio.Task[None] | None:
        if name and self._sent.get(name) is lost:
            self._sent[name] = asyncio.create_task(self._put(name))
            for old in list(self._sent)[:-SENT]:
                del self._sent[old]
        sent = self._sent.get(name)
        if sent is not None:
            try:
                await asyncio.shield(sent)
            except (BirlError, EngineDown):
                if self._sent.get(name) is sent:
                    del self._sent[name]
                raise
        return sent

    async def _put(self, name: str) -> None:
        factors = self.adapters[name].factors
        tensors = {f"{layer}.{key}": m for layer, f in factors.items() for key, m in (("A", f.a), ("B", f.b))}
        data = await asyncio.to_thread(packed, tensors)
        await self._json("PUT", f"/adapters/{name}", content=data, seconds=self.load_timeout)

    async def load(self, update: Update) -> Held:
        body: dict[str, Any] = {"version": update.version, "digests": dict(update.digests), "anew": update.anew}
        try:
            sent = buckets(update.tensors, self.bucket_mb)
            while bucket := await asyncio.to_thread(next, sent, None):  # it may wait for the learner
                data = await asyncio.to_thread(packed, bucket)
                await self._json("PUT", f"/stage/{update.version}", content=data, seconds=self.load_timeout)
            if not update.tensors:
                body["folder"] = update.folder
            return await self._loaded(body)
        except Malformed as error:  # another try would be answered alike
            raise WeightsFailed("mismatch", f"Version {update.version} of the weights: {error}") from error
        except EngineDown as error:
            raise WeightsFailed("unreachable", f"Version {update.version} of the weights: {error}") from error

    async def ranks(self) -> int:
        """That it needs in a group (`Transfer.ranks`)."""
        return 1

    async def join(self, invitation: Invitation) -> None:
        """Returns when every rank has come. Raises `EngineDown`, `WeightsFailed`, `BirlError`."""
        await self._json("POST", "/join", json=asdict(invitation), seconds=self.load_timeout)

    async def lend(self, version: int, memory: Mapping[str, Any], tensors: list[list[Any]]) -> None:
        """Returns when the engine has copied a bucket (`handles.py`). Raises `EngineDown`, `BirlError`."""
        body = {"memory": memory, "tensors": tensors}
        await self._json("POST", f"/stage/{version}", json=body, seconds=self.load_timeout)

    async def receive(self, update: Update, group: str = "") -> Held:
        """As `load`, of what was staged, or from rank 0 of a group that was joined. Raises `EngineDown` where the
        engine is gone itself, and `WeightsFailed` "unreachable" where it says that others are."""
        body = {"version": update.version, "digests": dict(update.digests), "anew": update.anew}
        return await self._loaded(body | ({"group": group} if group else {}))

    async def leave(self) -> None:
        await self._json("POST", "/leave", json={}, seconds=self.control_timeout)

    async def _loaded(self, body: dict[str, Any]) -> Held:
        result = await self._json("POST", "/load", json=body, seconds=self.load_timeout)
        try:
            held = held_from(result)
        except (KeyError, TypeError) as error:
            raise Malformed(f"{self.address} gave no answer to a load: {error!r}") from error
        self.version = held.version
        return held

    async def pause(self, abort: bool = False) -> None:
        await self._json("POST", "/pause", json={"mode": "abort" if abort else "keep"}, seconds=self.control_timeout)

    async def resume(self) -> None:
        await self._json("POST", "/resume", json={}, seconds=self.control_timeout)

    async def abort(self, sessions: Collection[str] | None = None) -> int:
        body = {} if sessions is None else {"sessions": sorted(sessions)}
        result = await self._json("POST", "/abort", json=body, seconds=self.control_timeout)
        return int(result.get("aborted", 0))

    async def sleep(self) -> None:
        await self._json("POST", "/sleep", json={}, seconds=self.load_timeout)

    async def wake(self) -> None:
        await self._json("POST", "/wake", json={}, seconds=self.load_timeout)

    async def claim(self) -> None:
        """No other run may use it until this is closed. Raises `BirlError` where one does."""
        self._claimed = True  # it may be heard although its answer is not
        await self._json("POST", "/claim", json={}, seconds=self.control_timeout)

    async def close(self) -> None:
        if self._claimed:
            self._claimed = False
            with contextlib.suppress(EngineDown, BirlError):  # then it is free after a while
                await self._json("POST", "/release", json={}, seconds=min(RELEASE, self.control_timeout))
        await self._http.aclose()

    async def _json(
        self, method: str, path: str, *, seconds: float, what: str = "", most: int = MOST, **body: Any
    ) -> dict[str, Any]:
        """The object that a call gives. Raises `EngineDown`, `BirlError` (a refused request), `WeightsFailed`."""
        what = what or f"{method} {path} on {self.address}"
        if self._http.is_closed:
            raise EngineDown(f"{what}: the client was closed")
        limits = httpx.Timeout(seconds, connect=min(5.0, seconds))
        try:
            async with asyncio.timeout(seconds):  # httpx's own deadlines are for each read, not for the answer
                response = await fetch(self._http, method, path, most=most, timeout=limits, **body)
        except (TimeoutError, httpx.TimeoutException) as error:
            kind = "could not be reached" if isinstance(error, httpx.ConnectTimeout) else "had no answer"
            raise EngineDown(f"{what} {kind} within {limits.connect if 'reached' in kind else seconds:g} s") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise EngineDown(f"{what}: {type(error).__name__}{f': {error}' if str(error) else ''}") from error
        try:
            binary = response.headers.get("content-type") == BINARY
            result = unpacked(response.content) if binary else response.json()
        except (ValueError, RecursionError):
            result = None
        if response.status_code >= 300 or not isinstance(result, dict):
            raise refusal(what, response, result)
        return result


def told(params: SamplingParams) -> int:
    """The most bytes that supports take in an answer."""
    return 12 * params.top_k * params.max_tokens if params.support else 0


def refusal(what: str, response: httpx.Response, body: Any) -> EngineDown | BirlError:
    """What an answer that is none means: the engine is not well, or the request was not."""
    status, told = response.status_code, body.get("error") if isinstance(body, dict) else None
    error: Mapping[str, Any] = told if isinstance(told, dict) else {}
    why = _first(error["message"], 1000) if "message" in error else _first(response.text)
    message = f"{what}: {status} {why}"
    if status == 409 and error.get("type") == "adapter":
        return MissingAdapter(message)
    if status == 409 and error.get("type") == "weights":
        return WeightsFailed(str(error.get("cause", "mismatch")), message)
    if status < 300:
        return Malformed(message)
    if status in (401, 403):
        return EngineDown(f"{message} Here it is taken from the environment variable BIRL_TOKEN.")
    if status == 429:
        return EngineDown(message, retry_after=_seconds(response.headers.get("Retry-After", "")))
    if status in (400, 409, 413, 422):
        return BirlError(message)
    return EngineDown(message)


def checked_address(address: str) -> str:
    try:
        url = httpx.URL(address)
    except (httpx.InvalidURL, TypeError) as error:
        raise BirlError(f"{address!r} is no address of an engine: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.path.strip("/") or url.query:
        raise BirlError(f"{address!r} is no address of an engine; one is http://127.0.0.1:8000")
    return address.rstrip("/")


def checked_completion(completion: Completion, params: SamplingParams) -> Completion:
    """Raises `ValueError` where that can not be an answer to this question."""
    tokens, forced = completion.tokens, params.forced[: params.max_tokens]
    if len(tokens) > params.max_tokens:
        raise ValueError(f"{len(tokens)} tokens where {params.max_tokens} were asked for")
    if tuple(tokens[: len(forced)].tolist()) != forced[: len(tokens)]:
        raise ValueError("it does not begin with the tokens that were given")
    return completion.possible()


def info_from(data: Mapping[str, Any]) -> Info:
    """Keys that are not known are left out: a newer engine may tell more. Raises `KeyError` and `TypeError`."""
    result = {f.name: data[f.name] for f in fields(Info) if f.name in data or f.name != "counters"}
    for key in ("version", "pid", "running", "waiting"):
        if not isinstance(result[key], int):
            raise TypeError(f"{key} is {result[key]!r}")
    return Info(**result)


def buckets(tensors: Mapping[str, Tensor], bucket_mb: float) -> Iterator[dict[str, Tensor]]:
    """In order, at most `bucket_mb` each, unless one tensor alone is larger."""
    bucket: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if bucket and sum(t.nbytes for t in bucket.values()) + tensor.nbytes > bucket_mb * 2**20:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


def packed(bucket: Mapping[str, Tensor]) -> bytes:
    """As a safetensors file. safetensors refuses tensors that are views of the same memory: an update has none."""
    return save({name: t.detach().cpu().contiguous() for name, t in bucket.items()})


def _first(text: Any, most: int = 200) -> str:
    return " ".join(str(text).split())[:most]


def _seconds(header: str) -> float:
    try:
        return min(max(float(header), 0.05), 60.0)
    except ValueError:
        return 1.0
