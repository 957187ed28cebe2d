"""Limits of a server: concurrency, sizes, deadlines, and access control."""

import asyncio
import contextlib
import hmac
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request

from birl.hosts import is_own_name
from birl.samples import MOST
from birl.text.bounds import CHARACTERS, LONG
from birl.text.parts import IMAGES
from birl.types import SamplingParams

T = TypeVar("T")
COLDEST = 0.001  # lower temperatures overflow float32; 0 is greedy
HOTTEST = sys.float_info.max  # JSON's integers have no bound
QUIET, SLOWEST = 60.0, 10_000  # timeout of a body [s], plus one second for this many bytes
STOPS, STOP_CHARACTERS, STOP_IDS = 256, 4096, 4096  # each token of an answer is compared with all of them
MOST_COST = 1_200_000  # limit of the cost of parsing, which blocks everything else: a million numbers take 0.2 s
COST = {",": 1, "[": 4, "{": 4, ":": 4, ".": 4, "e": 4, "E": 4}  # outside of strings
INVALID, OVERLOADED, TIMEOUT = "invalid_request_error", "overloaded", "timeout"


class Refused(Exception):
    """An error response: HTTP status, and a message with the fix. `more`: further fields of the body; `close`: close
    the connection without reading more."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        retry_after: int | None = None,
        close: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.retry_after, self.close, self.more = status, kind, retry_after, close, more

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": None} | self.more}

    @property
    def headers(self) -> dict[str, str]:
        result = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return result | ({"connection": "close"} if self.close else {})


class Gone(Exception):
    """The client has disconnected: no answer can be sent."""


@dataclass(slots=True, kw_only=True)
class Gate:
    """Limits the open sequences to `most`; closed when the server ends."""

    most: int
    open: int = 0
    draining: bool = False
    _empty: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def enter(self, sequences: int) -> Iterator[None]:
        """Count open sequences. Raises `Refused`: 503 while draining, 429 if too many are open, 400 if above `most`."""
        if self.draining:
            raise Refused(503, "The server is shutting down and takes no more requests.", OVERLOADED, 1)
        if sequences > self.most:
            raise Refused(400, f"{sequences} answers in one request; this server takes {self.most} at once.")
        if self.open + sequences > self.most:
            raise Refused(
                429, f"{self.open} requests are open and the server takes {self.most}; try again.", OVERLOADED, 1
            )
        self.open += sequences
        try:
            yield
        finally:
            self.open -= sequences
            if not self.open:
                self._empty.set()

    async def drain(self, timeout: float) -> bool:
        """Accept no more requests; returns whether all open ones ended within `timeout` [s]."""
        self.draining = True
        self._empty.clear()
        if not self.open:
            return True
        try:
            await asyncio.wait_for(self._empty.wait(), timeout)
        except TimeoutError:
            return False
        return True


def check_length(headers: Mapping[str, str]) -> None:
    """Raise `Refused` for a body with two lengths: a proxy may use the other one."""
    if "transfer-encoding" in headers and "content-length" in headers:
        raise Refused(400, "Content-Length and Transfer-Encoding cannot be combined: send one of them.", close=True)


def announced(request: Request, most: int) -> int:
    """Expected bytes of a body, at most `most`, which is used if its length is unknown."""
    told = request.headers.get("content-length", "0")
    return most if "transfer-encoding" in request.headers else min(int(told), most) if told.isdigit() else 0


async def body(request: Request, most: int) -> bytes:
    """The whole body. Raises `Refused` beyond `most` bytes, without reading on, if it is too slow, or compressed, and
    `Gone`."""
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise Refused(415, f"Content-Encoding: {encoding[:40]} is not supported; send the body as it is.", close=True)
    told = request.headers.get("content-length", "0")
    parts: list[bytes] = []
    size = int(told) if told.isdigit() else 0
    if size <= most:
        size, began = 0, time.monotonic()
        while True:
            left = began + QUIET + size / SLOWEST - time.monotonic()
            try:
                message = await asyncio.wait_for(request.receive(), left)
            except TimeoutError:
                what = f"The body comes too slowly: {size} bytes after {time.monotonic() - began:.0f} s."
                raise Refused(408, what, TIMEOUT, close=True) from None
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                break
            if not message.get("more_body", False):
                return b"".join(parts)
    what = f"The request is larger than the {most} bytes that this server takes (max_request_mb)."
    raise Refused(413, what, close=True)


async def json_object(request: Request, most: int) -> dict[str, Any]:
    """The JSON object of a body; {} for an empty one. Raises `Refused` if it is none."""
    raw = await body(request, most)
    if len(raw) * 4 > MOST_COST and await asyncio.to_thread(_cost, raw) > MOST_COST:
        limit = f"{MOST_COST // 4:,} lists, objects and keys, or {MOST_COST:,} numbers"
        raise Refused(400, f"The body has more than {limit}. Send several requests.")
    try:
        result = json.loads(raw.decode("utf-8-sig")) if raw.strip() else {}  # bytes would allow other encodings
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not JSON: {error}.") from None
    if not isinstance(result, dict):
        raise Refused(400, "The body must be a JSON object.")
    if b"\\ud" in raw.lower():  # JSON may contain half a surrogate pair, which no tokenizer accepts
        try:
            json.dumps(result, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refused(
                400, "The body has half of a surrogate pair (\\ud800 to \\udfff), which is no text."
            ) from None
    return result


def _cost(raw: bytes) -> int:
    """Cost of parsing, in linear time whatever the body contains."""
    text = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    within = np.add.accumulate(text == ord('"'), dtype=np.uint8) & 1
    outside = text[within == 0]
    return sum(price * int(np.count_nonzero(outside == ord(mark))) for mark, price in COST.items())


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def answered(request: Request, work: Awaitable[T], timeout: float) -> T:
    """The result of `work`, which is cancelled if the client disconnects (`Gone`) or after `timeout` [s] (504)."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise Gone
        raise Refused(504, f"The answer took longer than {timeout:g} s (request_timeout).", TIMEOUT)
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def long(headers: Mapping[str, str]) -> bool:
    """Whether a body takes long to read: it is large, or of unknown length."""
    told = headers.get("content-length", "")
    return not told.isdigit() or int(told) > LONG


def check_access(headers: Mapping[str, str], token: str) -> None:
    """Raise `Refused` for an unauthorised request. Without a token every user of this machine is authorised, but no web
    page in a browser, which may be anybody's: neither with an Origin header, nor by a host name that resolves here."""
    if not token:
        if "origin" in headers:
            raise Refused(
                403, "Requests from web pages need a token: start the server with BIRL_TOKEN set.", "forbidden"
            )
        host = headers.get("host")
        if host is not None and not is_own_name(host):
            raise Refused(
                403, f"Host {host[:100]!r} is not this machine's own name: use 127.0.0.1 or localhost, or start the "
                "server with BIRL_TOKEN set.", "forbidden",
            )  # fmt: skip
        return
    kind, _, credentials = headers.get("authorization", f"bearer {headers.get('x-api-key', '')}").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(credentials.strip().encode(), token.encode()):
        raise Refused(
            401, "The token is missing or wrong: send `Authorization: Bearer TOKEN`, with the server's BIRL_TOKEN.",
            "authentication_error", code="invalid_api_key",
        )  # fmt: skip


def problem(params: SamplingParams, vocabulary: int) -> tuple[str, str] | None:
    """The first invalid parameter, and what is wrong with it. An id outside of the vocabulary would fail the engine's
    step, and with it all answers."""
    p = params
    ranges = (
        ("max_tokens", p.max_tokens >= 1, "must be at least 1"),
        ("temperature", p.temperature == 0 or COLDEST <= p.temperature <= HOTTEST, f"must be 0 or at least {COLDEST}"),
        ("top_p", 0 < p.top_p <= 1, "must be more than 0 and at most 1"),
        ("top_k", 0 <= p.top_k < 2**31, "must be at least 0 (0: off) and less than 2^31"),
        ("support", not p.support or 0 < p.top_k <= MOST, f"needs top_k, from 1 to {MOST}"),
        ("min_p", 0 <= p.min_p <= 1, "must be at least 0 and at most 1"),
        ("seed", p.seed is None or 0 <= p.seed < 2**64, "must be at least 0 and less than 2^64"),
        ("stop", all(p.stop), "must not have an empty string"),
        ("stop", len(p.stop) <= STOPS, f"must have at most {STOPS} strings"),
        ("stop", all(len(s) <= STOP_CHARACTERS for s in p.stop), f"must have at most {STOP_CHARACTERS} characters"),
        ("stop_ids", len(p.stop_ids) <= STOP_IDS, f"must be at most {STOP_IDS} token ids"),
        ("stop_ids", outside(p.stop_ids, vocabulary) is None, f"must be token ids below {vocabulary}"),
        ("forced", outside(p.forced, vocabulary) is None, f"must be token ids below {vocabulary}"),
    )
    return next(((key, f"{what}, got {getattr(p, key)!r}"[:300]) for key, good, what in ranges if not good), None)


def outside(ids: tuple[int, ...], vocabulary: int) -> int | None:
    """The first id outside of the vocabulary, or None."""
    return next((i for i in ids if not 0 <= i < vocabulary), None)


THINGS = 32  # JSON keys and values for each token,
SPARE = 20_000  # and beside them for settings, schemas
DEPTH = 100
NAMES = 256  # characters of a role, a name or an id
TOOLS = 1024  # maximum; each is rendered, and looked up by name


def check_bulk(data: Mapping[str, Any], context: int, but: Sequence[str] = ()) -> None:
    """Check the size of a request `data`, except of the keys `but`, which are checked elsewhere. Raises `Refused` for
    what cannot fit into `context` tokens."""
    if isinstance(tools := data.get("tools"), list) and len(tools) > TOOLS:
        raise Refused(400, f"tools: {len(tools)} tools; at most {TOOLS} are taken.", param="tools")
    for key, value in data.items():
        if key not in but:
            _measure(key, value, context)
    messages = data.get("messages")
    if not isinstance(messages, list):
        return
    if len(messages) > context:
        raise too_large("messages", f"{len(messages)} messages", context)
    for place, message in enumerate(messages):
        for key in ("role", "name", "tool_call_id") if isinstance(message, dict) else ():
            if isinstance(message.get(key), str) and len(message[key]) > NAMES:
                raise Refused(
                    400, f"messages.{place}.{key}: has {len(message[key])} characters; at most {NAMES} are taken.",
                    param=f"messages.{place}.{key}",
                )  # fmt: skip


def too_large(key: str, what: str, context: int) -> Refused:
    return Refused(
        400, f"{key}: {what} cannot fit into the context of {context} tokens.",
        param=key, code="context_length_exceeded",
    )  # fmt: skip


def _measure(key: str, value: Any, context: int) -> None:
    characters, things, level, depth = 0, 0, [value], 0
    while level:
        depth += 1
        if depth > DEPTH:
            raise Refused(400, f"{key}: is nested more than {DEPTH} deep.", param=key)
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                characters += len(one)
            elif isinstance(one, dict) and one.get("type") in IMAGES and key in ("messages", "input"):
                pass  # image data is no text and has its own limits; `Terms.render` checks what was parsed as text
            elif isinstance(one, dict):
                characters += sum(map(len, one))
                below += one.values()
            elif isinstance(one, list):
                below += one
        things += len(level)
        if characters > CHARACTERS * context + SPARE:
            raise too_large(key, f"{characters} characters", context)
        if things + len(below) > THINGS * context + SPARE:
            raise too_large(key, f"{things + len(below)} keys and values", context)
        level = below
