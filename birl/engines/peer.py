"""A server of another project (vLLM, SGLang): JSON over HTTP with deadlines, a list of what is open there, and the
proof of a folder of weights before such a server reads it."""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

import httpx
import numpy as np
from torch import Tensor

from birl.engine.weights import check_age, read
from birl.engines.remote import fetch
from birl.engines.wire import Info
from birl.errors import BirlError, EngineDown, Malformed, WeightsFailed
from birl.models.digests import digests
from birl.text.pictures import is_picture
from birl.types import Completion, Held, SamplingParams, Stop, Update

CONNECTIONS = 2048  # requests at the same time; more wait for their turn
QUICK = 60.0  # deadline of a question that needs no computing [s]


class Peer:
    """One client for one server. `timeout` is the deadline of an answer, a pause of the server included [s]."""

    def __init__(self, address: str, *, token: str = "", timeout: float = 1800.0) -> None:
        self.address, self.timeout = address.rstrip("/"), timeout
        self.client = httpx.AsyncClient(
            base_url=self.address,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            # These servers drop a connection that was idle for 5 s, maybe while the next request is on its way.
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=256, keepalive_expiry=2.0),
            trust_env=False,  # a proxy in between would cut long answers
        )
        self.open: dict[str, str] = {}  # id -> session

    async def call(self, method: str, path: str, *, timeout: float | None = None, **keys: Any) -> httpx.Response:
        """Raises `EngineDown` when there is no answer, or one of 500 or more; `BirlError` when it refuses (400-499)."""
        seconds = self.timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):  # httpx's own deadlines are for each read, not for the answer
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
        raise Malformed(f"{self.address}{path} gave an answer that birl does not know: {str(answer)[:300]}") from error

    @contextmanager
    def request(self, session: str) -> Iterator[str]:
        """An id that no other begins with (SGLang aborts by the beginning), listed while it is open."""
        name = uuid.uuid4().hex
        self.open[name] = session
        try:
            yield name
        finally:
            del self.open[name]

    async def end(self, sessions: Collection[str] | None, tell: Callable[[list[str]], Awaitable[Any]]) -> int:
        """Let `tell` abort the open requests of these sessions, or all, until they have come back; says how many. Told
        once more where it did not help: a request may still be on its way to the server."""
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
    """`end_ids` are those of the model, for given answers (`SamplingParams.forced`); the server knows its own.
    `timeout` is that of one answer, pauses included [s]."""

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
        self.empty = False  # slept, and still without weights
        self.cacheless = False  # slept, and still without a cache
        self.broken = ""  # why its weights are not to be trusted
        self.context = 0  # [tokens], once that is known
        self.takes = 0  # how often its weights were changed
        self._control, self._asking = asyncio.Lock(), asyncio.Lock()

    async def info(self) -> Info:
        """Raises `EngineDown`."""
        raise NotImplementedError

    async def take(self, update: Update, change: Callable[[], Awaitable[Any]]) -> None:
        """Pause, put the new weights in place by `change`, go on. Raises `WeightsFailed`; then it is broken."""
        raise NotImplementedError

    async def replaced(self, update: Update, change: Callable[[], Awaitable[Any]], size: int) -> Held:
        """`take`, and nothing else meanwhile. `size` [bytes]. Raises `WeightsFailed`."""
        async with self._control:
            check_age(update, self.version)
            return await self._replaced(update, change, size)

    async def _replaced(self, update: Update, change: Callable[[], Awaitable[Any]], size: int) -> Held:
        began = time.perf_counter()
        await self.take(update, change)
        return Held(version=update.version, seconds=time.perf_counter() - began, bytes=size)

    async def longest(self) -> int:
        """The context [tokens], asked for once."""
        async with self._asking:
            return self.context or (await self.info()).context

    def check_awake(self) -> None:
        """Raises `BirlError` where there are no weights to go on with."""
        if self.asleep or self.empty:
            raise BirlError("The engine sleeps: wake it and load weights first.")

    async def close(self) -> None:
        """Of this client: the server goes on."""
        await self.peer.close()


def message(response: httpx.Response) -> str:
    """What the body of an error says."""
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
    """The version that an engine's label of its weights means; "default" are those that it was started with."""
    if label == "default":
        return 0
    if not label.isdecimal():
        raise BirlError(
            f"The engine calls its weights {label!r}, and birl counts them: "
            'give them a number with POST /update_weight_version {"new_version": "0"}.'
        )
    return int(label)


def versions(spans: Collection[Any], count: int) -> tuple[int, ...]:
    """[{version, start, end}, ...] without gaps -> one for each token. Raises `ValueError` where that is not so."""
    result: list[int] = []
    for span in spans:
        if span["start"] != len(result):
            raise ValueError(f"weight_versions has a gap at token {len(result)}")
        result += [number(span["version"])] * (span["end"] - span["start"])
    if len(result) != count:
        raise ValueError(f"weight_versions tells of {len(result)} tokens, there are {count}")
    return tuple(result)


def scorable(params: SamplingParams, engine: str) -> None:
    """Given tokens are scored as a part of the prompt, under the model itself. Raises `BirlError` where that is not the
    distribution that is asked for."""
    if params.temperature not in (0.0, 1.0) or params.top_p < 1 or params.top_k or params.min_p:
        raise BirlError(
            f"{engine} scores given tokens under the model itself, not under temperature {params.temperature:g}, top_p "
            f"{params.top_p:g}, top_k {params.top_k}, min_p {params.min_p:g}: ask with temperature=1 and without them."
        )


def cut(params: SamplingParams, end_ids: Collection[int], room: int) -> tuple[tuple[int, ...], bool]:
    """The given tokens as far as an answer with them would have gone, and whether an end token is their last."""
    ends = {*params.stop_ids, *(() if params.ignore_eos else end_ids)}
    given = params.forced[:room]
    first = next((i for i, token in enumerate(given) if token in ends), None)
    return (given, False) if first is None else (given[: first + 1], True)


class Scores(Protocol):
    """What `answer_given` needs of an adapter. `takes` counts how often the engine's weights were changed; `ask` gives
    the engine's own answer, `parse` the tokens that it sampled, `scores` the log-probs of the given ones."""

    address: str
    context: int
    end_ids: frozenset[int]
    takes: int

    async def ask(
        self, token_ids: tuple[int, ...], params: SamplingParams, count: int, session: str, scored: int = 0
    ) -> Any: ...
    def parse(self, answer: Any, count: int) -> Completion: ...
    def scores(self, answer: Any, given: tuple[int, ...]) -> tuple[float, ...]: ...


def refuse_pictures(prompt: Sequence[int], engine: str) -> None:
    """Raises `BirlError` for a prompt with pictures, which only birl's own engines are given."""
    if is_picture(max(prompt)):
        raise BirlError(
            f"The prompt has a picture, and {engine} is sent tokens alone: set engine.kind=embedded or birl."
        )


async def answer_given(
    adapter: Scores,
    engine: str,
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    room: int,
    session: str,
    exact: bool = False,
) -> Completion:
    """An answer that begins with `params.forced`, of at most `room` tokens: the given ones are scored as a part of the
    prompt. `exact`: the engine computes all of it anew when its weights change meanwhile."""
    scorable(params, engine)
    given, ended = cut(params, adapter.end_ids, room)
    if len(prompt_ids) + len(given) == adapter.context:
        raise BirlError(
            f"{engine} scores at most {adapter.context - 1} tokens, prompt and answer, one less than its context: "
            "start it with a context of one token more."
        )
    more = 0 if ended else room - len(given)
    for _ in range(3):
        known = adapter.takes
        answer = await adapter.ask(prompt_ids + given, params, max(more, 1), session, scored=len(given))
        rest = adapter.parse(answer, max(more, 1))
        # Scores are of one version, and its label is that of the first token after them.
        if adapter.takes == known or exact or not len(rest.versions):
            break
    else:
        raise EngineDown(f"{adapter.address}: its weights changed three times while it scored one answer.")
    if not len(rest.versions):  # aborted before there was anything
        return rest
    scores = adapter.scores(answer, given)
    keep = len(rest.tokens) if more else 0
    return Completion(
        tokens=np.append(np.array(given, np.int32), rest.tokens[:keep]),
        logprobs=np.append(np.array(scores, np.float32), rest.logprobs[:keep]),
        versions=np.append(np.repeat(rest.versions[:1], len(given)), rest.versions[:keep]),
        stop=rest.stop if more else Stop.STOP if ended else Stop.LENGTH,
    )


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
    """Raises `WeightsFailed` for an update that is older than what the engine has, or has no folder."""
    check_age(update, current)
    if not update.folder:
        raise WeightsFailed(
            "missing", f"Version {update.version} of the weights is in no folder: this engine reads them from one."
        )


def size(folder: str) -> int:
    """Of the weights in a folder [bytes]; 0 where it is not on this machine."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def config(model: str) -> dict[str, Any]:
    """Of a model folder; empty where it is not on this machine."""
    try:
        return json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return {}


def vocabulary(model: str) -> int:
    """[tokens]; 0 where it is not known."""
    return int(config(model).get("vocab_size", 0))


def tied(model: str) -> bool:
    """Are its embeddings its output layer as well?"""
    return bool(config(model).get("tie_word_embeddings", False))
