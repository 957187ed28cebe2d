"""An engine in another process, as everything that uses one sees it: `client.Client` speaks to `birl serve`, and the
adapters of vLLM and SGLang have the same methods."""

from collections.abc import Collection
from typing import Any, Protocol

import httpx

from birl.engines.wire import Info
from birl.types import Completion, Held, SamplingParams, Update


class Remote(Protocol):
    """`version` is the last that is known. Every method ends within a deadline of its own.

    `EngineDown`: the engine does not answer, or not as it should; another one may. `BirlError` from `generate`: the
    request itself is wrong, and would be anywhere. Cancelling `generate` ends the request in the engine too.
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
    async def close(self) -> None: ...  # of the connection; the engine goes on


MOST = 64 << 20  # bytes of an answer whose size does not depend on the question
A_TOKEN = 8 << 10  # bytes for each token of question and answer: its numbers, and which experts computed it
FRAMING = ("content-encoding", "content-length", "transfer-encoding")


class TooLarge(httpx.StreamError):
    """The answer does not end."""


async def fetch(client: httpx.AsyncClient, method: str, path: str, *, most: int = MOST, **keys: Any) -> httpx.Response:
    """The whole answer. Raises `TooLarge` beyond `most` bytes, and what httpx raises."""
    async with client.stream(method, path, **keys) as response:
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > most:
                raise TooLarge(f"the answer is larger than {most} bytes")
        headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() not in FRAMING]
        return httpx.Response(response.status_code, headers=headers, content=bytes(content), request=response.request)
