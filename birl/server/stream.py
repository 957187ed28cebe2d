"""Streamed answers: server-sent events in OpenAI's format."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, suppress

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from birl.engine.request import Place
from birl.engine.request import Request as Sampling
from birl.errors import BirlError, EngineDown
from birl.server.ask import Ask
from birl.server.limits import Gone, Refused, answered
from birl.server.openai_format import Pieces, event
from birl.server.service import Job, Service
from birl.text.visible import Visible
from birl.types import Completion

#: index of the answer, its new tokens, their log-probs, versions and top log-probs
Told = tuple[int, list[int], list[float], list[int], list[Place]]
LAST_WORDS = 10.0  # timeout of the last event of a failed stream [s]


def streamed(
    service: Service, chunks: AsyncIterator[bytes], sequences: int, failed: Callable[[Refused], bytes] | None = None
) -> ASGIApp:
    """A response that streams `chunks` of `sequences` answers. Raises `Refused` at once if there is no room; later
    errors are sent by `failed`, by default as an error event, and raised."""
    room = ExitStack()
    room.enter_context(service.gate.enter(sequences))
    failed = failed or (lambda error: event(error.body()))

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        with room:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await answered(Request(scope, receive), _send_all(chunks, send), service.timeout)
            except Gone:
                raise
            except Exception as failure:
                error = refusal(failure)
                with suppress(TimeoutError):  # a client that does not read
                    last = send({"type": "http.response.body", "body": failed(error)})
                    await asyncio.wait_for(last, LAST_WORDS)
                raise error from None

    return respond


def refusal(error: BaseException) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, EngineDown):
        return Refused(503, f"The answer was not finished: {error}.", "engine_down")
    if isinstance(error, BirlError):
        return Refused(400, str(error))
    return Refused(500, f"The engine failed: {type(error).__name__}: {error}", "server_error")


async def _send_all(source: AsyncIterator[bytes], send: Send) -> None:
    async with aclosing(source) as chunks:  # pyright: ignore[reportArgumentType]  a generator
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events(service: Service, asked: Ask, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
    """Chunks as they come, in order for each answer. Closing it aborts unfinished answers."""
    pieces = Pieces(service, asked)
    answers = [Growing(pieces, i) for i in range(len(jobs))]
    finished: dict[int, Completion] = {}
    for answer in answers if asked.chat else []:
        yield event(answer.first())
    async with aclosing(sampled(service, jobs, asked.grammar)) as items:  # pyright: ignore[reportArgumentType]
        async for item in items:
            if len(item) == 2:
                finished[item[0]] = item[1]
                for chunk in answers[item[0]].end(item[1]):
                    yield event(chunk)
            elif (chunk := answers[item[0]].more(*item[1:])) is not None:
                yield event(chunk)
    if asked.usage:
        yield event(
            pieces.head(chunk=True) | {"choices": [], "usage": pieces.usage([finished[i] for i in sorted(finished)])}
        )
    yield b"data: [DONE]\n\n"


async def sampled(service: Service, jobs: Sequence[Job], grammar: str) -> AsyncIterator[Told | tuple[int, Completion]]:
    """New tokens of all answers as they come, and each complete answer. Closing it aborts the others."""
    queue: asyncio.Queue[Told | tuple[int, Completion] | BaseException] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_one(service, i, job, queue, grammar)) for i, job in enumerate(jobs)]
    left = len(jobs)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= len(item) == 2
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _one(service: Service, index: int, job: Job, queue: asyncio.Queue, grammar: str) -> None:
    def watch(request: Sampling) -> None:
        new = slice(request.told, None)
        queue.put_nowait((index, request.tokens[new], request.logprobs[new], request.versions[new], job.places(new)))

    try:
        completion = await service.generate(job.prompt, job.params, job.session, watch, best=job.best, grammar=grammar)
        queue.put_nowait((index, completion))
    except Exception as error:
        queue.put_nowait(error)


class Growing:
    """One growing answer: what was sampled, and what was sent."""

    def __init__(self, pieces: Pieces, index: int) -> None:
        self.pieces, self.index = pieces, index
        self.shown: Visible = pieces.visible()
        self.thoughts = pieces.thoughts(index)
        self.fresh = True  # nothing sent yet
        self.offset = 0

    def first(self) -> dict:
        self.fresh = False
        return self.pieces.delta(self.index, "", first=True)

    def more(self, tokens: list[int], logprobs: list[float], versions: list[int], places: list[Place]) -> dict | None:
        """The chunk of new tokens; None if there is nothing to send yet."""
        thinking, text = self.thoughts.feed(self.shown.feed(tokens))
        asked = self.pieces.asked
        if not thinking and not text and not asked.token_ids and not asked.logprobs:
            return None
        chunk = self.pieces.delta(
            self.index, text, tokens=tokens, logprobs=logprobs, versions=versions, offset=self.offset,
            thinking=thinking, first=self.fresh, places=places,
        )  # fmt: skip
        self.offset += sum(len(self.pieces.speaker.chat.decode([t])) for t in tokens) if asked.logprobs else 0
        self.fresh = False
        return chunk

    def end(self, completion: Completion) -> list[dict]:
        """The last chunks: held-back text, tool calls, and the finish reason."""
        reply = self.pieces.parsed(self.index, self.shown.whole())
        thinking, content = (
            (s or "")[len(t) :] for s, t in zip((reply.thinking, reply.content), self.thoughts.told, strict=True)
        )
        chunks = [self.pieces.delta(self.index, content, thinking=thinking)] if thinking or content else []
        if reply.calls:
            chunks.append(self.pieces.delta(self.index, "", calls=reply.calls))
        reason = self.pieces.reason(completion.stop, reply.calls)
        return [*chunks, self.pieces.delta(self.index, "", reason=reason, first=self.fresh and not chunks)]
