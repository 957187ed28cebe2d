"""A server of another project (vLLM, SGLang): JSON over HTTP with deadlines, a list of its open requests, and the check
of a weights folder before such a server reads it."""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import httpx
import numpy as np
from torch import Tensor

from birl.engine.weights import check_age, read
from birl.engines.wire import Info, fetch
from birl.errors import BirlError, EngineDown, Malformed, WeightsFailed
from birl.models.digests import digests
from birl.samples import Support
from birl.text.pictures import Pictures, is_picture
from birl.types import Completion, Held, SamplingParams, Stop, Update

CONNECTIONS = 2048  # concurrent requests; more are queued
QUICK = 60.0  # deadline of a request that needs no computation [s]
STOPS = {"stop": Stop.STOP, "length": Stop.LENGTH, "abort": Stop.ABORT}


class Peer:
    """HTTP client of one server. `timeout`: deadline of an answer, including pauses of the server [s]."""

    def __init__(self, address: str, *, token: str = "", timeout: float = 1800.0) -> None:
        self.address, self.timeout = address.rstrip("/"), timeout
        self.client = httpx.AsyncClient(
            base_url=self.address,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            # These servers drop a connection that was idle for 5 s, maybe while the next request is being sent.
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=256, keepalive_expiry=2.0),
            trust_env=False,  # a proxy would cut long answers
        )
        self.open: dict[str, str] = {}  # id -> session

    async def call(self, method: str, path: str, *, timeout: float | None = None, **keys: Any) -> httpx.Response:
        """Send a request. Raises `EngineDown` without an answer or for 408, 429, 500 or more; else `BirlError`."""
        seconds = self.timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):  # httpx's own timeouts are for each read, not for the whole response
                limits = httpx.Timeout(seconds, connect=min(10.0, seconds))
                response = await fetch(self.client, method, path, timeout=limits, **keys)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise EngineDown(f"{self.address}{path} did not answer in time ({type(error).__name__}).") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise EngineDown(f"{self.address}{path}: {str(error) or type(error).__name__}") from error
        if response.status_code >= 500 or response.status_code in (408, 429):
            raise EngineDown(f"{self.address}{path}: {response.status_code}: {message(response)}")
        if response.status_code >= 400:
            raise BirlError(f"{self.address}{path}: {response.status_code}: {message(response)}")
        return response

    async def json(self, method: str, path: str, **keys: Any) -> Any:
        response = await self.call(method, path, **keys)
        try:
            return response.json()
        except (ValueError, RecursionError):
            self.strange(path, response.text)

    def strange(self, path: str, answer: object, error: Exception | None = None) -> NoReturn:
        raise Malformed(f"{self.address}{path} returned an unknown answer: {str(answer)[:300]}") from error

    @contextmanager
    def request(self, session: str) -> Iterator[str]:
        """A request id that is no prefix of another (SGLang aborts by prefix), listed in `open` within the block."""
        name = uuid.uuid4().hex
        self.open[name] = session
        try:
            yield name
        finally:
            del self.open[name]

    async def end(self, sessions: Collection[str] | None, tell: Callable[[list[str]], Awaitable[Any]]) -> int:
        """Let `tell` abort the open requests of these sessions, or all, until they have returned; returns their number.
        Repeated as needed: a request may still be on its way to the server."""
        chosen = [name for name, session in self.open.items() if sessions is None or session in sessions]
        deadline = time.monotonic() + QUICK
        while left := [name for name in chosen if name in self.open]:
            if time.monotonic() > deadline:
                raise EngineDown(
                    f"{self.address}: {len(left)} requests did not end within {QUICK:.0f} s of their abort."
                )
            await tell(left)
            await asyncio.sleep(0.05)
        return len(chosen)

    async def close(self) -> None:
        await self.client.aclose()


class Adapter:
    """Implements `birl.types.Engine` with the requests of one project. `end_ids` are those of the model, for given
    answers (`SamplingParams.forced`); the server has its own. `timeout` of an answer, including pauses [s]."""

    name = ""  # name of the project
    anew = False  # a whole answer is recomputed if the weights change meanwhile
    pictures: Pictures | None = None  # those of prompts, if the server takes them

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        recompute_kv: bool = True,
        end_ids: frozenset[int] = frozenset(),
        timeout: float = 1800.0,
    ) -> None:
        self.peer = Peer(address, token=token, timeout=timeout)
        self.address, self.version = self.peer.address, 0
        self.recompute_kv, self.end_ids, self.timeout = recompute_kv, end_ids, timeout
        self.paused = self.asleep = False
        self.empty = False  # slept, and has no weights yet
        self.cacheless = False  # slept, and has no KV cache yet
        self.broken = ""  # why its weights are invalid
        self.context = 0  # [tokens], once known
        self.takes = 0  # number of weight updates
        self._control, self._asking = asyncio.Lock(), asyncio.Lock()

    async def info(self) -> Info:
        """Info of the server. Raises `EngineDown`."""
        known = None if self._control.locked() else self.takes
        try:
            label, fields = await self.reported()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self.peer.strange("", repr(error), error)
        self.context, words = fields["context"], vocabulary(fields["model"])
        version = number(label)
        if known == self.takes and not self._control.locked():  # else a load overtook the response
            self.version = version
        return Info(version=version, digest="", vocabulary=words, asleep=self.asleep, pid=0, **fields)

    async def reported(self) -> tuple[str, dict[str, Any]]:
        """The label of the server's weights, and the other fields of `info` that it reports."""
        raise NotImplementedError

    async def let_in(self, params: SamplingParams, session: str) -> bool:
        """Wait until a request may be sent; False if it was aborted. Raises `BirlError` for unsupported parameters."""
        return True

    async def ask(
        self, token_ids: tuple[int, ...], params: SamplingParams, count: int, session: str, scored: int = 0
    ) -> Any:
        """The server's response; `scored`: number of last tokens that also get log-probs."""
        raise NotImplementedError

    def parse(self, answer: Any, count: int) -> Completion:
        """The sampled tokens."""
        raise NotImplementedError

    def scores(self, answer: Any, given: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probs of the given tokens."""
        raise NotImplementedError

    async def halt(self) -> None:
        """Stop between two tokens, unless paused already."""
        raise NotImplementedError

    async def relabelled(self, label: str) -> str:
        """Set the label of the new weights; returns the label that the server reports."""
        raise NotImplementedError

    async def go_on(self) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        """Release the callers of a broken engine."""
        raise NotImplementedError

    async def occupy(self, what: str) -> None:
        """Allocate its memory again: weights | kv_cache."""
        raise NotImplementedError

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        """Sample an answer. Raises `EngineDown`, and `BirlError` for requests that are rejected or unsupported."""
        if not prompt_ids:
            raise BirlError("The prompt is empty: there is nothing to predict the first token from.")
        if is_picture(max(prompt_ids)) and self.pictures is None:
            raise BirlError(
                f"The prompt has a picture, but {self.name} gets tokens only: set engine.kind=embedded, birl or vllm."
            )
        if not await self.let_in(params, session):
            return Completion.of((), (), (), Stop.ABORT)
        if self.broken:
            raise EngineDown(f"{self.address}: {self.broken}")
        room = min(params.max_tokens, await self.longest() - len(prompt_ids))
        if room <= 0:
            return Completion.of((), (), (), Stop.LENGTH)
        if params.forced:
            return await self._given(prompt_ids, params, room, session)
        answer = await self.ask(prompt_ids, params, room, session)
        result = self.parse(answer, room)
        return replace(result, support=self.kept(answer)) if params.told else result

    def ends(self, params: SamplingParams) -> list[int]:
        """The tokens that end an answer. The server itself knows those of its files, not that of the chat template."""
        return sorted({*params.stop_ids, *(() if params.ignore_eos else self.end_ids)})

    def kept(self, answer: Any) -> Support:
        """The support that each token was sampled from."""
        raise NotImplementedError

    async def _given(self, prompt_ids: tuple[int, ...], params: SamplingParams, room: int, session: str) -> Completion:
        """An answer that begins with `params.forced`, of at most `room` tokens: the given ones are scored as part of
        the prompt, under the model itself. Raises `BirlError` if that is not the requested distribution."""
        if params.temperature not in (0.0, 1.0) or params.top_p < 1 or params.top_k or params.min_p:
            raise BirlError(
                f"{self.name} scores given tokens under the model itself, not under temperature "
                f"{params.temperature:g}, top_p {params.top_p:g}, top_k {params.top_k}, min_p {params.min_p:g}: ask "
                "with temperature=1 and without them."
            )
        given, ended = cut(params, self.ends(params), room)
        if len(prompt_ids) + len(given) == self.context:
            raise BirlError(
                f"{self.name} scores at most {self.context - 1} tokens, prompt and answer, one less than its context: "
                "start it with a context of one token more."
            )
        more = 0 if ended else room - len(given)
        for _ in range(3):
            known = self.takes
            answer = await self.ask(prompt_ids + given, params, max(more, 1), session, scored=len(given))
            rest = self.parse(answer, max(more, 1))
            # Scores are of one version, whose label is that of the first token after them.
            if self.takes == known or self.anew or not len(rest.versions):
                break
        else:
            raise EngineDown(f"{self.address}: its weights changed three times while it scored one answer.")
        if not len(rest.versions):  # aborted before the first token
            return rest
        keep = len(rest.tokens) if more else 0
        return Completion(
            tokens=np.append(np.array(given, np.int32), rest.tokens[:keep]),
            logprobs=np.append(np.array(self.scores(answer, given), np.float32), rest.logprobs[:keep]),
            versions=np.append(np.repeat(rest.versions[:1], len(given)), rest.versions[:keep]),
            stop=rest.stop if more else Stop.STOP if ended else Stop.LENGTH,
        )

    async def take(self, update: Update, change: Callable[[], Awaitable[Any]]) -> None:
        """Load new weights with `change`, between two tokens. Raises `WeightsFailed`; then the engine is broken, with
        neither the old nor the new weights."""
        label = str(update.version)
        self.takes += 1
        try:
            await self.halt()
            await change()
            result = await self.relabelled(label)
            if result != label:
                raise WeightsFailed("stale", f"{self.address} reports version {result}, not {label}.")
            self.version, self.broken, self.empty = update.version, "", False
            if not self.paused:
                await self.go_on()
        except (EngineDown, BirlError, asyncio.CancelledError) as error:
            self.broken = f"loading version {label} of the weights failed half-way ({error or 'cancelled'})"
            with suppress(EngineDown, BirlError):  # it is down as well: waiting callers know
                await asyncio.shield(self.release())
            if isinstance(error, asyncio.CancelledError):
                raise
            failed = refusal(update, error)
            raise WeightsFailed(
                failed.cause, f"{failed} The engine is broken: it has neither the old nor the new weights."
            ) from error

    async def replaced(self, update: Update, change: Callable[[], Awaitable[Any]], size: int) -> Held:
        """`take`, exclusively. `size` [bytes]. Raises `WeightsFailed`."""
        async with self._control:
            check_age(update, self.version)
            return await self._replaced(update, change, size)

    async def _replaced(self, update: Update, change: Callable[[], Awaitable[Any]], size: int) -> Held:
        began = time.perf_counter()
        await self.take(update, change)
        return Held(version=update.version, seconds=time.perf_counter() - began, bytes=size)

    async def longest(self) -> int:
        """The context [tokens], requested once."""
        async with self._asking:
            return self.context or (await self.info()).context

    async def resume(self) -> None:
        async with self._control:
            if self.asleep or self.empty:
                raise BirlError("The engine sleeps: wake it and load weights first.")
            if self.cacheless:
                await self.occupy("kv_cache")
                self.cacheless = False
            await self.go_on()
            self.paused = False

    async def wake(self) -> None:
        """Allocate memory for weights again: then call `load`, then `resume`, which allocates the KV cache, as engines
        compute as soon as they have both."""
        async with self._control:
            if self.asleep:
                await self.occupy("weights")
                self.asleep = False

    async def close(self) -> None:
        """Close this client; the server keeps running."""
        await self.peer.close()


def message(response: httpx.Response) -> str:
    """Message in the body of an error."""
    try:
        result = response.json()
    except (ValueError, RecursionError):
        return response.text[:500]
    while isinstance(result, dict) and (
        inner := next((result[k] for k in ("error", "message", "detail") if k in result), None)
    ):
        result = inner
    return str(result)[:2000]


def number(label: str) -> int:
    """Version number of an engine's weight label; "default" is that of the weights it was started with."""
    if label == "default":
        return 0
    if not label.isdecimal():
        raise BirlError(
            f"The engine's weights have version {label!r}, but birl needs a number: "
            'set one with POST /update_weight_version {"new_version": "0"}.'
        )
    return int(label)


def versions(spans: Collection[Any], count: int) -> tuple[int, ...]:
    """[{version, start, end}, ...] without gaps -> version of each token. Raises `ValueError` if there are gaps."""
    result: list[int] = []
    for span in spans:
        if span["start"] != len(result):
            raise ValueError(f"weight_versions has a gap at token {len(result)}")
        result += [number(span["version"])] * (span["end"] - span["start"])
    if len(result) != count:
        raise ValueError(f"weight_versions has {len(result)} tokens instead of {count}")
    return tuple(result)


def cut(params: SamplingParams, ends: Collection[int], room: int) -> tuple[tuple[int, ...], bool]:
    """The given tokens up to the end of the answer that they make, and whether it ends with one of `ends`."""
    given = params.forced[:room]
    first = next((i for i, token in enumerate(given) if token in ends), None)
    return (given, False) if first is None else (given[: first + 1], True)


def refusal(update: Update, error: Exception) -> WeightsFailed:
    """The error as `WeightsFailed`, with its cause if known."""
    cause = error.cause if isinstance(error, WeightsFailed) else "unreachable"
    return WeightsFailed(cause, f"Version {update.version} of the weights: {error}.")


def check_folder(update: Update, current: int) -> dict[str, Tensor]:
    """The tensors in the folder of an update, compared with its digests. Reads all of it. Raises `WeightsFailed`."""
    fresh(update, current)
    result = read(Path(update.folder))
    if update.digests:
        where = f"Version {update.version} of the weights in {update.folder}"
        if odd := sorted(update.digests.keys() ^ result.keys()):
            told = "is missing" if odd[0] in update.digests else "is not in the model"
            raise WeightsFailed("missing", f"{where}: {odd[0]} {told}.")
        arrived = digests(result)
        if wrong := [name for name in result if arrived[name] != update.digests[name]]:
            raise WeightsFailed("mismatch", f"{where} has other bytes than were sent: {', '.join(wrong[:4])}.")
    return result


def fresh(update: Update, current: int) -> None:
    """Raise `WeightsFailed` if an update is older than the engine's weights, or has no folder."""
    check_age(update, current)
    if not update.folder:
        raise WeightsFailed(
            "missing", f"Version {update.version} of the weights has no folder, from which this engine reads them."
        )


def size(folder: str) -> int:
    """Size of the weights in a folder [bytes]; 0 if it is not on this machine."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def vocabulary(model: str) -> int:
    """Size of the vocabulary of a model folder [tokens]; 0 if unknown, or it is not on this machine."""
    try:
        return int(json.loads((Path(model) / "config.json").read_text()).get("vocab_size", 0))
    except (OSError, ValueError):
        return 0
