"""Interface of an engine in another process: `client.Client` for `birl serve`; the adapters of vLLM and SGLang have the
same methods."""

from collections.abc import Collection
from typing import Any, Protocol

import httpx

from birl.engines.wire import Info
from birl.types import Completion, Held, SamplingParams, Update


class Remote(Protocol):
    """An engine in another process. `version`: last known one. Every method has its own deadline.

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


MOST = 64 << 20  # maximum bytes of a response whose size does not depend on the request
A_TOKEN = 8 << 10  # bytes for each token of prompt and answer: its numbers, and the experts that computed it
FRAMING = ("content-encoding", "content-length", "transfer-encoding")


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
