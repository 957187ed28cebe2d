"""Answers of another server, read up to a bound: a broken or hostile one could send without end."""

from typing import Any

import httpx

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
