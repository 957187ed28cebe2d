"""OpenAI's Responses on a server: POST /v1/responses, by the code of the agents' gateway. What a response is continued
by, its tokens included, is kept within bounds; a stream grows while the answer is sampled."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from birl.errors import BirlError
from birl.rollout.session import continued, owner_of
from birl.server import ask, gateway_responses
from birl.server.bulk import check_bulk
from birl.server.limits import Refused, answered, json_object
from birl.server.responses_format import Events, ResponsesReply, named
from birl.server.service import Service
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
    opened: bool  # the prompt began the model's thinking

    def visible(self, service: Service) -> Visible:
        hidden = service.end_ids | frozenset(self.reply.params.stop_ids)
        fences = service.chat.fences(bool(self.reply.tools))
        return Visible(service.chat.tokenizer, hidden, self.reply.params.stop, fences)

    def message(self, service: Service, text: str) -> Message:
        return named(service.chat.parts(text, self.reply.tools, self.opened).message())

    def turn(self, completion: Completion) -> Turn:
        return Turn(prompt=np.array(self.prompt, np.int32), completion=completion)


async def responses(service: Service, request: Request) -> Response:
    data = await json_object(request, service.most_bytes)
    asked = await answered(request, service.read(lambda: read(data, service)), service.timeout)
    (params,) = service.seeded(asked.reply.params)
    if asked.reply.stream:
        return streamed(service, events(service, asked, params), 1, asked.reply.failed)  # pyright: ignore[reportReturnType]
    with service.gate.enter(1):
        work = service.all([(asked.prompt, params)], asked.grammar)
        (completion,) = await answered(request, work, service.timeout)
    shown = asked.visible(service)
    shown.feed(completion.ids)
    return JSONResponse(asked.reply.finished(asked.message(service, shown.whole()), asked.turn(completion)))


def read(data: dict[str, Any], service: Service) -> Asked:
    check_bulk(data, service.engine.context)
    ask.known({"model": data.get("model")}, ("model",), service)
    own = SamplingParams(max_tokens=service.engine.context)
    reply = gateway_responses.asked(data, service.terms, own, service.kept, service.name)
    before = service.kept.known(data.get("previous_response_id") or "")
    try:
        prompt, reply.talk = continued(before, service.chat, reply.conversation, reply.tools, owner_of(reply.tools))
        service.check_prompt(prompt)
    except BirlError as error:
        raise Refused(400, str(error), param="input", code="context_length_exceeded") from error
    opened = service.chat.thinks(prompt)
    grammar = reply.form and whole(service.chat, reply.form, opened)
    return Asked(reply=reply, prompt=prompt, grammar=grammar, opened=opened)


async def events(service: Service, asked: Asked, params: SamplingParams) -> AsyncIterator[bytes]:
    grown, shown = Events(asked.reply), asked.visible(service)
    thoughts = Growing(service.chat.tags, asked.opened)
    for chunk in grown.begin():
        yield chunk
    async with aclosing(sampled(service, [(asked.prompt, params)], asked.grammar)) as items:  # pyright: ignore[reportArgumentType]
        async for item in items:
            if len(item) == 2:
                new = grown.end(asked.message(service, shown.whole()), asked.turn(item[1]))
            else:
                new = grown.more(*thoughts.feed(shown.feed(item[1])), asked.reply.rows(item[1], item[2]))
            for chunk in new:
                yield chunk


ROUTES = {("POST", "/v1/responses"): responses}
