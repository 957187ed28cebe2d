"""Questions to a server that scores: many at once with a bound, one deadline for all, and another try where that can
help. A question that stays without an answer is a `NoAnswer` in its place, so that the others still count."""

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

TOKEN = "BIRL_REWARD_TOKEN"
ATTEMPTS = 5
FIRST_PAUSE = 0.25  # seconds before the second attempt; then twice as long each time
SHARE = 0.9  # of the reward's deadline: what is late then is reported, before the worker is killed
AGAIN = (408, 425, 429, 500, 502, 503, 504, 529)
MOST = 4 * 2**20  # bytes of one answer
LOCAL = ("localhost", "127.0.0.1", "::1")


class NoAnswer(Exception):
    """Why a question has no answer that can be used."""


class Hiccup(Exception):
    """An error that a retry may solve. `pause`: what the server asks for [s]."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.pause = pause


async def ask_all(
    address: str,
    bodies: Sequence[dict[str, Any]],
    read: Callable[[Any], Any],
    *,
    concurrency: int,
    timeout: float,
) -> list[Any]:
    """What `read` makes of each answer, or a `NoAnswer`. `timeout` is the reward's own [s]. `read` raises `ValueError`
    for an answer of another form than expected."""
    until = time.monotonic() + SHARE * timeout
    bound = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(
        headers=headers(),
        timeout=None,  # the deadline below holds for everything
        limits=httpx.Limits(max_connections=concurrency),
        trust_env=urlsplit(address).hostname not in LOCAL,  # a proxy of the environment is for the world outside
    ) as client:

        async def one(body: dict[str, Any]) -> Any:
            last = ""
            try:
                async with asyncio.timeout(until - time.monotonic()), bound:
                    for attempt in range(ATTEMPTS):
                        try:
                            return read(await answer(client, address, body))
                        except Hiccup as hiccup:
                            last = str(hiccup)
                            if attempt + 1 < ATTEMPTS:
                                await asyncio.sleep(pause(attempt, hiccup.pause))
                    return NoAnswer(f"{last} ({ATTEMPTS} attempts)")
            except TimeoutError:
                why = f"; the last attempt: {last}" if last else ""
                return NoAnswer(
                    f"{address} gave no answer within {round(SHARE * timeout, 2):g} s of reward.timeout{why}"
                )
            except (NoAnswer, ValueError) as error:
                return error if isinstance(error, NoAnswer) else NoAnswer(f"{address}: {error}")

        return await asyncio.gather(*(one(body) for body in bodies))


async def answer(client: httpx.AsyncClient, address: str, body: dict[str, Any]) -> Any:
    """The JSON that one POST gives. Raises `Hiccup` and `NoAnswer`."""
    data = b""
    try:
        async with client.stream("POST", address, json=body) as reply:
            async for piece in reply.aiter_bytes():
                data += piece
                if len(data) > MOST:
                    raise NoAnswer(f"{address} answers with more than {MOST >> 20} MiB")
    except httpx.ConnectError as error:
        raise Hiccup(f"{address} cannot be reached: {error}") from error
    except httpx.TransportError as error:
        raise Hiccup(f"{address}: {type(error).__name__}: {error}") from error
    except (httpx.InvalidURL, httpx.DecodingError) as error:
        raise NoAnswer(f"{address}: {error}") from error
    start = data[:200].decode(errors="replace").replace("\n", " ")
    if reply.status_code in AGAIN:
        raise Hiccup(f"{address} says {reply.status_code}: {start}", seconds(reply.headers.get("retry-after", "")))
    if reply.status_code != 200:
        hint = f" Its token goes into {TOKEN}." if reply.status_code in (401, 403) else ""
        raise NoAnswer(f"{address} says {reply.status_code}: {start}{hint}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Hiccup(f"{address} gave no JSON: {start}") from None


def headers() -> dict[str, str]:
    token = os.environ.get(TOKEN, "")
    return {"authorization": f"Bearer {token}"} if token else {}


def pause(attempt: int, asked: float) -> float:
    """Longer each time, and not the same for all who wait."""
    return max(asked, FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1.0))


def seconds(text: str) -> float:
    """Of a Retry-After header; a date counts as nothing."""
    try:
        return max(0.0, float(text)) if float(text) < float("inf") else 0.0
    except ValueError:
        return 0.0
