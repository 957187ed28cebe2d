"""Client of one `birl serve` in birl's native protocol (`wire.py`). Without retries: the router does these."""

import asyncio
import contextlib
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import httpx
from safetensors.torch import save
from torch import Tensor

from birl.engines import wire
from birl.engines.wire import AdapterParams, Info, Invitation, header
from birl.errors import BirlError, EngineDown, Malformed, WeightsFailed
from birl.models.low_rank import AdapterWeights
from birl.text.pictures import Files, is_picture
from birl.types import Completion, Held, SamplingParams, Update

SENT = 4096  # number of adapters remembered as sent to the engine
CONTROL = 16  # connections beside those of `generate`: a full engine still answers control requests
RELEASE = 5.0  # deadline of a release request [s]
IDLE = 2.0  # [s]; less than the 5 s after which uvicorn closes an idle connection, perhaps during a request


class MissingAdapter(BirlError):
    """The engine does not have the adapter, or not any more."""


class Client:
    """Implements `Remote`. Times in seconds: `timeout` for an answer, `load_timeout` for new weights, sleep and wake,
    `control_timeout` for everything else. At most `connections` requests are open at a time (each takes a file
    descriptor), further ones queue here. Weights given as tensors are sent in buckets of `bucket_mb` [MiB]. `run`
    identifies the run of the client, which may `claim` the engine.

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
        self.pictures: Files | None = None  # files of the prompts' images, for a vision model
        self.adapters: Mapping[str, AdapterWeights] = {}  # adapters that `AdapterParams` refer to, by name
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
            trust_env=False,  # a proxy of the environment is not for engines
        )

    async def info(self) -> Info:
        result = await self._json("GET", "/info", seconds=self.control_timeout)
        try:
            info = info_from(result)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineDown(f"{self.address} is not a birl engine: GET /info returned {_first(result)}") from error
        self.version = info.version
        return info

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        """Sample an answer. Raises `EngineDown`, also after `timeout`, and `BirlError` for a rejected request."""
        body = {"prompt_ids": prompt_ids, "params": wire.params_to(params), "session": session}
        if is_picture(max(prompt_ids, default=0)) and self.pictures is not None:
            files = await asyncio.to_thread(self.pictures, prompt_ids)
            body["pictures"] = {digest: b64encode(data).decode("ascii") for digest, data in files.items()}
        what = f"session {session!r} on {self.address}"
        try:
            async with asyncio.timeout(self.timeout), self._room:
                how = {"json": body, "headers": {"Accept": wire.BINARY}, "seconds": self.timeout, "what": what}
                how["most"] = wire.MOST + wire.A_TOKEN * (len(prompt_ids) + params.max_tokens) + told(params)
                result = await self._answer(how, params.adapter if isinstance(params, AdapterParams) else "")
        except TimeoutError as error:
            raise EngineDown(f"{what} got no answer within {self.timeout:g} s") from error
        try:
            return checked_completion(wire.completion_from(result), params)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Malformed(f"{self.address} returned no completion: {_first(result)} ({error})") from error

    async def _answer(self, how: Mapping[str, Any], adapter: str) -> dict[str, Any]:
        """Send a request; an adapter is sent once, and again if the engine has lost it."""
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
            while bucket := await asyncio.to_thread(next, sent, None):  # may wait for the learner
                data = await asyncio.to_thread(packed, bucket)
                await self._json("PUT", f"/stage/{update.version}", content=data, seconds=self.load_timeout)
            if not update.tensors:
                body["folder"] = update.folder
            return await self._loaded(body)
        except Malformed as error:  # a retry would give the same answer
            raise WeightsFailed("mismatch", f"Version {update.version} of the weights: {error}") from error
        except EngineDown as error:
            raise WeightsFailed("unreachable", f"Version {update.version} of the weights: {error}") from error

    async def ranks(self) -> int:
        """Number of ranks that it needs in a group (`Transfer.ranks`)."""
        return 1

    async def join(self, invitation: Invitation) -> None:
        """Join a group; returns when every rank has joined. Raises `EngineDown`, `WeightsFailed`, `BirlError`."""
        await self._json("POST", "/join", json=asdict(invitation), seconds=self.load_timeout)

    async def lend(self, version: int, memory: Mapping[str, Any], tensors: list[list[Any]]) -> None:
        """Offer a bucket in shared memory; returns when the engine has copied it. Raises `EngineDown`, `BirlError`."""
        body = {"memory": memory, "tensors": tensors}
        await self._json("POST", f"/stage/{version}", json=body, seconds=self.load_timeout)

    async def receive(self, update: Update, group: str = "") -> Held:
        """As `load`, for staged weights, or from rank 0 of a joined group. Raises `EngineDown` if the engine itself is
        lost, and `WeightsFailed` "unreachable" if it reports that others are."""
        body = {"version": update.version, "digests": dict(update.digests), "anew": update.anew}
        return await self._loaded(body | ({"group": group} if group else {}))

    async def leave(self) -> None:
        await self._json("POST", "/leave", json={}, seconds=self.control_timeout)

    async def _loaded(self, body: dict[str, Any]) -> Held:
        result = await self._json("POST", "/load", json=body, seconds=self.load_timeout)
        try:
            held = wire.held_from(result)
        except (KeyError, TypeError) as error:
            raise Malformed(f"{self.address} returned no answer to a load: {error!r}") from error
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
        """Reserve the engine for this run until `close`. Raises `BirlError` if another run has it."""
        self._claimed = True  # it may succeed although its response is lost
        await self._json("POST", "/claim", json={}, seconds=self.control_timeout)

    async def close(self) -> None:
        if self._claimed:
            self._claimed = False
            with contextlib.suppress(EngineDown, BirlError):  # then the claim expires after a while
                await self._json("POST", "/release", json={}, seconds=min(RELEASE, self.control_timeout))
        await self._http.aclose()

    async def _json(
        self, method: str, path: str, *, seconds: float, what: str = "", most: int = wire.MOST, **body: Any
    ) -> dict[str, Any]:
        """JSON object of a response. Raises `EngineDown`, `BirlError` (a rejected request), `WeightsFailed`."""
        what = what or f"{method} {path} on {self.address}"
        if self._http.is_closed:
            raise EngineDown(f"{what}: the client was closed")
        limits = httpx.Timeout(seconds, connect=min(5.0, seconds))
        try:
            async with asyncio.timeout(seconds):  # httpx's own timeouts are for each read, not for the whole response
                response = await wire.fetch(self._http, method, path, most=most, timeout=limits, **body)
        except (TimeoutError, httpx.TimeoutException) as error:
            kind = "could not be reached" if isinstance(error, httpx.ConnectTimeout) else "got no answer"
            raise EngineDown(f"{what} {kind} within {limits.connect if 'reached' in kind else seconds:g} s") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise EngineDown(f"{what}: {type(error).__name__}{f': {error}' if str(error) else ''}") from error
        try:
            binary = response.headers.get("content-type") == wire.BINARY
            result = wire.unpacked(response.content) if binary else response.json()
        except (ValueError, RecursionError):
            result = None
        if response.status_code >= 300 or not isinstance(result, dict):
            raise refusal(what, response, result)
        return result


def told(params: SamplingParams) -> int:
    """Maximum size of the supports in an answer [bytes]."""
    return 12 * params.top_k * params.max_tokens if params.support else 0


def refusal(what: str, response: httpx.Response, body: Any) -> EngineDown | BirlError:
    """The error of an unsuccessful response: the engine is not well, or the request was wrong."""
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
        return EngineDown(f"{message} The client reads it from the environment variable BIRL_TOKEN.")
    if status == 429:
        return EngineDown(message, retry_after=_seconds(response.headers.get("Retry-After", "")))
    if status in (400, 409, 413, 422):
        return BirlError(message)
    return EngineDown(message)


def checked_address(address: str) -> str:
    try:
        url = httpx.URL(address)
    except (httpx.InvalidURL, TypeError) as error:
        raise BirlError(f"{address!r} is not an engine's address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.path.strip("/") or url.query:
        raise BirlError(f"{address!r} is not an engine's address, such as http://127.0.0.1:8000")
    return address.rstrip("/")


def checked_completion(completion: Completion, params: SamplingParams) -> Completion:
    """The completion, if it can be an answer to this request. Raises `ValueError` otherwise."""
    tokens, forced = completion.tokens, params.forced[: params.max_tokens]
    if len(tokens) > params.max_tokens:
        raise ValueError(f"{len(tokens)} tokens where {params.max_tokens} were requested")
    if tuple(tokens[: len(forced)].tolist()) != forced[: len(tokens)]:
        raise ValueError("it does not begin with the given tokens")
    return completion.possible()


def info_from(data: Mapping[str, Any]) -> Info:
    """Info of a response. Unknown keys are ignored: a newer engine may have more. Raises `KeyError` and `TypeError`."""
    result = {f.name: data[f.name] for f in fields(Info) if f.name in data or f.name != "counters"}
    for key in ("version", "pid", "running", "waiting"):
        if not isinstance(result[key], int):
            raise TypeError(f"{key} is {result[key]!r}")
    return Info(**result)


def buckets(tensors: Mapping[str, Tensor], bucket_mb: float) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, in buckets of at most `bucket_mb`, unless a single tensor is larger."""
    bucket: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if bucket and sum(t.nbytes for t in bucket.values()) + tensor.nbytes > bucket_mb * 2**20:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


def packed(bucket: Mapping[str, Tensor]) -> bytes:
    """A bucket as a safetensors file, which cannot have tensors that share memory: an update has none."""
    return save({name: t.detach().cpu().contiguous() for name, t in bucket.items()})


def _first(text: Any, most: int = 200) -> str:
    return " ".join(str(text).split())[:most]


def _seconds(header: str) -> float:
    try:
        return min(max(float(header), 0.05), 60.0)
    except ValueError:
        return 1.0
