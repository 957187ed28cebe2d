"""OpenAI's Responses API on a server: POST /v1/responses, with the code of the agents' gateway. Responses are stored
with their tokens, within bounds, to be continued; a stream is sent while the answer is sampled."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from birl.engine.request import TopLogprobs
from birl.errors import BirlError
from birl.rollout.session import continued, owner_of
from birl.server import ask, gateway_responses
from birl.server.agent_session import Answering
from birl.server.limits import Refused, answered
from birl.server.responses_format import Events, ResponsesReply, named
from birl.server.service import Job, Service
from birl.server.stream import sampled, streamed
from birl.text.grammar import whole
from birl.text.thinking import Growing
from birl.text.visible import Visible
from birl.types import Completion, Message, SamplingParams, Turn


@dataclass(slots=True, kw_only=True)
class Asked:
    reply: ResponsesReply
    prompt: tuple[int, ...]
    grammar: str
    opened: bool  # the prompt starts the model's thinking

    def job(self, params: SamplingParams) -> Job:
        best = TopLogprobs(self.reply.top) if self.reply.top else None
        self.reply.places = best.places if best is not None else ()
        return Job(prompt=self.prompt, params=params, session=self.reply.id, best=best)

    def visible(self, service: Service) -> Visible:
        hidden = service.end_ids | frozenset(self.reply.params.stop_ids)
        fences = service.chat.fences(bool(self.reply.tools))
        return Visible(service.chat.tokenizer, hidden, self.reply.params.stop, fences)

    def message(self, service: Service, text: str) -> Message:
        return named(service.chat.parts(text, self.reply.tools, self.opened).message())

    def turn(self, completion: Completion) -> Turn:
        return Turn(prompt=np.array(self.prompt, np.int32), completion=completion)


async def responses(service: Service, request: Request) -> Response:
    asked = await ask.parsed(service, request, lambda data: read(data, service))
    (params,) = service.seeded(asked.reply.params)
    if asked.reply.stream:
        return streamed(service, events(service, asked, params), 1, asked.reply.failed)  # pyright: ignore[reportReturnType]
    with service.gate.enter(1):
        work = service.all([asked.job(params)], asked.grammar)
        (completion,) = await answered(request, work, service.timeout)
    shown = asked.visible(service)
    shown.feed(completion.ids)
    return JSONResponse(asked.reply.finished(asked.message(service, shown.whole()), asked.turn(completion)))


async def input_tokens(service: Service, request: Request) -> Response:
    own = Answering(params=SamplingParams(max_tokens=service.engine.context), kept=service.kept)
    count = partial(gateway_responses.input_tokens, terms=service.terms, visit=own)
    return JSONResponse(await ask.parsed(service, request, count))


async def compact(service: Service, request: Request) -> Response:
    gateway_responses.compact()


def read(data: dict[str, Any], service: Service) -> Asked:
    own = SamplingParams(max_tokens=service.engine.context)
    reply = gateway_responses.asked(data, service.terms, own, service.kept, service.name)
    service.terms.check_size(reply.conversation, "input")
    before = service.kept.known(data.get("previous_response_id") or "")
    try:
        prompt, reply.talk = continued(before, service.chat, reply.conversation, reply.tools, owner_of(reply.tools))
    except BirlError as error:
        raise Refused(400, str(error), param="input") from error
    try:
        service.check_prompt(prompt)
    except BirlError as error:
        raise Refused(400, str(error), param="input", code="context_length_exceeded") from error
    opened = service.chat.thinks(prompt)
    grammar = reply.form and whole(service.chat, reply.form, opened)
    return Asked(reply=reply, prompt=prompt, grammar=grammar, opened=opened)


async def events(service: Service, asked: Asked, params: SamplingParams) -> AsyncIterator[bytes]:
    grown, shown, id = Events(asked.reply), asked.visible(service), asked.reply.id
    thoughts, ended = Growing(service.chat.tags, asked.opened), asyncio.Event()
    service.growing[id] = asked.reply, ended
    try:
        for chunk in grown.begin():
            yield chunk
        async with aclosing(sampled(service, [asked.job(params)], asked.grammar)) as items:  # pyright: ignore[reportArgumentType]
            async for item in items:
                if len(item) == 2:
                    new = grown.end(asked.message(service, shown.whole()), asked.turn(item[1]))
                else:
                    new = grown.more(*thoughts.feed(shown.feed(item[1])), asked.reply.rows(item[1], item[2], item[4]))
                for chunk in new:
                    yield chunk
    finally:
        ended.set()
        del service.growing[id]


async def retrieve(service: Service, request: Request) -> Response:
    id = request.path_params["id"]
    if request.query_params.get("stream") == "true":
        raise Refused(400, "stream: an answer cannot be streamed a second time.", param="stream")
    if id in service.growing:
        return JSONResponse(service.growing[id][0].head("in_progress"))
    return JSONResponse(stored(service, id)[0])


async def input_items(service: Service, request: Request) -> Response:
    """Input items of a response, the newest first, `limit` of them after the one whose id is `after`."""
    items, asked = stored(service, request.path_params["id"])[1], request.query_params
    if asked.get("order", "desc") == "desc":
        items = items[::-1]
    limit = int(text[:4]) if (text := asked.get("limit", "20")).isdecimal() else 0
    if not 1 <= limit <= 100:
        raise Refused(400, "limit must be from 1 to 100.", param="limit")
    if after := asked.get("after"):
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise Refused(400, f"after: there is no item {after[:80]!r}.", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > limit})


async def delete(service: Service, request: Request) -> Response:
    id = request.path_params["id"]
    if not service.kept.drop(id):
        raise absent(service, id)
    return JSONResponse({"id": id, "object": "response", "deleted": True})


async def cancel(service: Service, request: Request) -> Response:
    """End a streamed response with the tokens it has; its stream ends too."""
    id = request.path_params["id"]
    if id not in service.growing:
        status = stored(service, id)[0]["status"]
        raise Refused(400, f"The response is {status}: only one that is being streamed can be cancelled.", param="id")
    reply, ended = service.growing[id]
    while not ended.is_set():  # it may not have reached the engine yet
        await service.engine.abort({id})
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.2)
    return JSONResponse(stored(service, id)[0] if reply.told["store"] else reply.head("cancelled"))


def stored(service: Service, id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The response and the input items of its request. Raises `Refused`."""
    if not (told := service.kept.told(id)) or not id.startswith("resp_"):  # other APIs store other bodies
        raise absent(service, id)
    response, items = json.loads(told)
    return response, items


def absent(service: Service, id: str) -> Refused:
    return Refused(
        404, f"There is no response {id[:80]!r}: it was sent with store=false, was deleted, is of another server, or "
        f"was dropped for newer ones ({service.kept.bounds}).", "not_found_error",
    )  # fmt: skip


ROUTES = {
    ("POST", "/v1/responses"): responses,
    ("POST", "/v1/responses/input_tokens"): input_tokens,
    ("POST", "/v1/responses/compact"): compact,
    ("GET", "/v1/responses/{id}"): retrieve,
    ("DELETE", "/v1/responses/{id}"): delete,
    ("GET", "/v1/responses/{id}/input_items"): input_items,
    ("POST", "/v1/responses/{id}/cancel"): cancel,
}
