"""Requests to a scoring server: concurrent with a limit, one deadline for all, and retries if they can help. A request
without a response becomes a `NoAnswer` in its place, so that the others still count. And the reward function
`endpoint`."""

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cache
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from birl.config.schema import Reward
from birl.errors import BirlError

TOKEN = "BIRL_REWARD_TOKEN"
ATTEMPTS = 5
FIRST_PAUSE = 0.25  # seconds before the second attempt; doubles each time
SHARE = 0.9  # fraction of the reward's deadline: later responses are reported before the worker is killed
AGAIN = (408, 425, 429, 500, 502, 503, 504, 529)
MOST = 4 * 2**20  # largest response [bytes]
PATIENCE = 10.0  # seconds for a connection at the start of a run
LOCAL = ("localhost", "127.0.0.1", "::1")


class Failure(StrEnum):
    """Why there is no answer: no connection, the deadline, a refusal (a status other than 200, or a judge that
    declines), a response of another form than agreed."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    UNREADABLE = "unreadable"


class NoAnswer(Exception):
    """Why a request has no usable answer."""

    def __init__(self, why: str, kind: Failure = Failure.UNREADABLE) -> None:
        super().__init__(why)
        self.kind = kind


class Hiccup(NoAnswer):
    """An error that a retry may fix. `pause`: delay that the server requests [s]."""

    def __init__(self, why: str, kind: Failure, pause: float = 0.0) -> None:
        super().__init__(why, kind)
        self.pause = pause


class Pace:
    """Rate limit: at most `rate` requests per minute, evenly spaced. 0: no limit."""

    def __init__(self, rate: float = 0.0) -> None:
        self.gap = 60 / rate if rate else 0.0
        self.free = 0.0  # when the next request may start, on the monotonic clock [s]

    async def turn(self) -> None:
        """Wait for a turn. A call that is cancelled meanwhile uses none up."""
        while (wait := self.free - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        self.free = time.monotonic() + self.gap


async def ask_all(
    address: str,
    bodies: Sequence[dict[str, Any]],
    read: Callable[[Any], Any],
    *,
    concurrency: int,
    timeout: float,
    token: str | None = None,
    pace: Pace | None = None,
) -> list[Any]:
    """Send all requests. Returns the result of `read` for each response, or a `NoAnswer`. `timeout`: the reward's [s].
    `read` raises `ValueError` for a response of another form. `token` None: from the environment."""
    until = time.monotonic() + SHARE * timeout
    bound, pace = asyncio.Semaphore(concurrency), pace or Pace()
    async with httpx.AsyncClient(
        headers=headers(tokens([address])[0] if token is None else token),
        timeout=None,  # the deadline below holds for everything
        limits=httpx.Limits(max_connections=concurrency),
        verify=trusted(),
        trust_env=urlsplit(address).hostname not in LOCAL,  # a proxy is only for other machines
    ) as client:

        async def one(body: dict[str, Any]) -> Any:
            last = Hiccup("", Failure.UNREACHABLE)
            try:
                async with asyncio.timeout(until - time.monotonic()), bound:
                    for attempt in range(ATTEMPTS):
                        await pace.turn()
                        try:
                            return read(await answer(client, address, body))
                        except Hiccup as hiccup:
                            last = hiccup
                            if attempt + 1 < ATTEMPTS:
                                await asyncio.sleep(pause(attempt, hiccup.pause))
                    return NoAnswer(f"{last} ({ATTEMPTS} attempts)", last.kind)
            except TimeoutError:
                why = f"; the last attempt: {last}" if str(last) else ""
                return NoAnswer(
                    f"{address} gave no answer within {round(SHARE * timeout, 2):g} s of reward.timeout{why}",
                    Failure.TIMEOUT,
                )
            except (NoAnswer, ValueError) as error:
                return error if isinstance(error, NoAnswer) else NoAnswer(f"{address}: {error}")

        return await asyncio.gather(*(one(body) for body in bodies))


async def answer(client: httpx.AsyncClient, address: str, body: dict[str, Any]) -> Any:
    """The JSON response to one POST. Raises `Hiccup` and `NoAnswer`."""
    data = b""
    try:
        async with client.stream("POST", address, json=body) as reply:
            async for piece in reply.aiter_bytes():
                data += piece
                if len(data) > MOST:
                    raise NoAnswer(f"{address} answers with more than {MOST >> 20} MiB")
    except httpx.ConnectError as error:
        raise Hiccup(f"{address} cannot be reached: {error}", Failure.UNREACHABLE) from error
    except httpx.TransportError as error:
        raise Hiccup(f"{address}: {type(error).__name__}: {error}", Failure.UNREACHABLE) from error
    except httpx.InvalidURL as error:
        raise NoAnswer(f"{address}: {error}", Failure.UNREACHABLE) from error
    except httpx.DecodingError as error:
        raise NoAnswer(f"{address}: {error}") from error
    start = data[:200].decode(errors="replace").replace("\n", " ")
    if reply.status_code in AGAIN:
        asked = seconds(reply.headers.get("retry-after", ""))
        raise Hiccup(f"{address} says {reply.status_code}: {start}", Failure.REFUSED, asked)
    if reply.status_code != 200:
        hint = f" Its token goes into {TOKEN}." if reply.status_code in (401, 403) else ""
        raise NoAnswer(f"{address} says {reply.status_code}: {start}{hint}", Failure.REFUSED)
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Hiccup(f"{address} gave no JSON: {start}", Failure.UNREADABLE) from None


async def reachable(key: str, address: str) -> None:
    """Raises `BirlError` that names the `key` if nothing listens at an address. Not checked if a proxy is used."""
    place = urlsplit(address)
    host = place.hostname or ""
    if host not in LOCAL and place.scheme in getproxies() and not proxy_bypass(host):
        return
    try:
        async with asyncio.timeout(PATIENCE):
            _, line = await asyncio.open_connection(host, place.port or (443 if place.scheme == "https" else 80))
        line.close()
    except (OSError, ValueError) as error:  # TimeoutError is one
        why = getattr(error, "strerror", None) or str(error) or f"no answer within {PATIENCE:g} s"
        raise BirlError(
            f"{key}={address}: cannot be reached ({why}). Start that server first, or correct the address."
        ) from error


def tokens(addresses: Sequence[str]) -> list[str]:
    """The token of each address: the only one of the environment, or one for each, separated by commas. Raises
    `BirlError` if one token would be sent to several hosts."""
    given = os.environ.get(TOKEN, "").split(",")
    if len(given) == len(addresses):
        return [token.strip() for token in given]
    hosts = {urlsplit(address).netloc for address in addresses}
    if len(given) > 1 or (given[0] and len(hosts) > 1):
        raise BirlError(
            f"{TOKEN} has {len(given)} of {len(addresses)} tokens. Give one for each address, in their order, with "
            "commas between them and nothing for an address that needs none; one host's token is not sent to another."
        )
    return given * len(addresses)


@cache
def trusted() -> SSLContext:
    """The certificates of authorities, loaded once: it takes a tenth of a second, and every group or episode needs
    them."""
    return httpx.create_ssl_context()


def headers(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


def pause(attempt: int, asked: float) -> float:
    """Delay before a retry [s]: exponential, with jitter."""
    return max(asked, FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1.0))


def seconds(text: str) -> float:
    """Seconds in a Retry-After header; 0 for a date."""
    try:
        return max(0.0, float(text)) if float(text) < float("inf") else 0.0
    except ValueError:
        return 0.0


async def endpoint(
    completions: list[str],
    prompts: list[Any],
    *,
    address: str = "",
    concurrency: int = Reward.concurrency,
    timeout: float = Reward.timeout,
) -> list[float | NoAnswer]:
    """One score for each completion of a served reward model: vLLM's `/pooling` (`vllm serve MODEL --runner pooling`)
    and compatible servers. It is the last number of the server's response for each conversation.

    Requests have `{"messages": [...]}`, so that the server applies its own chat template.
    """
    bodies = []
    for prompt, completion in zip(prompts, completions, strict=True):
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        talk = [*asked, {"role": "assistant", "content": completion}]
        bodies.append({"messages": talk, "add_generation_prompt": False})
    return await ask_all(address, bodies, _score, concurrency=concurrency, timeout=timeout)


def _score(reply: Any) -> float:
    try:
        value = reply["data"][0]["data"]
        while isinstance(value, list):
            value = value[-1]
        score = float(value)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"gave no score: {json.dumps(reply)[:200]}")
    return score
