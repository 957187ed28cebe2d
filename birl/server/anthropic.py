"""Anthropic's API on a server: POST /v1/messages and /v1/messages/count_tokens, with the code of the agents'
gateway."""

from dataclasses import dataclass

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from birl.server import ask, gateway_anthropic
from birl.server.agent_session import Answering, Reply
from birl.server.gateway import answered as replied
from birl.server.limits import answered, check_bulk, json_object
from birl.server.service import Service
from birl.text.grammar import whole
from birl.text.visible import Visible
from birl.types import Message, SamplingParams, Turn


@dataclass(slots=True, kw_only=True)
class Direct(Answering):
    """Answers requests with the server's own engine."""

    service: Service
    prompt: tuple[int, ...] = ()

    async def one(self, reply: Reply) -> tuple[Message, Turn]:
        service, prompt = self.service, self.prompt
        grammar = reply.form and whole(service.chat, reply.form, service.chat.thinks(prompt))
        (params,) = service.seeded(reply.params)
        with service.gate.enter(1):
            result = await service.generate(prompt, params, grammar=grammar)
        shown = Visible(service.chat.tokenizer, service.end_ids | frozenset(params.stop_ids), params.stop)
        shown.feed(result.ids)
        message = service.chat.parts(shown.whole(), reply.tools, service.chat.thinks(prompt)).message()
        return message, Turn(prompt=np.array(prompt, np.int32), completion=result)


async def messages(service: Service, request: Request) -> Response:
    data = await json_object(request, service.most_bytes)
    context = service.engine.context
    visit = Direct(params=SamplingParams(max_tokens=context), service=service, kept=service.kept)

    def read() -> Reply:
        check_bulk(data, context)
        ask.known({"model": data.get("model")}, ("model",), service)
        reply = gateway_anthropic.message(data, service.terms, visit)
        visit.prompt = service.chat.render(reply.conversation, reply.tools)
        service.check_prompt(visit.prompt)
        return reply

    reply = await answered(request, service.read(read, request.headers), service.timeout)
    return await replied(visit, reply, request, service.timeout)


async def count_tokens(service: Service, request: Request) -> Response:
    data = await json_object(request, service.most_bytes)

    def count() -> int:
        check_bulk(data, service.engine.context)
        ask.known({"model": data.get("model")}, ("model",), service)
        return len(service.chat.render(*gateway_anthropic.conversation(data)))

    return JSONResponse(
        {"input_tokens": await answered(request, service.read(count, request.headers), service.timeout)}
    )


error = gateway_anthropic.error
ROUTES = {
    ("POST", "/v1/messages"): messages,
    ("POST", "/v1/v1/messages"): messages,  # its client adds a v1 to the base_url, which for OpenAI's ends with one
    ("POST", "/v1/messages/count_tokens"): count_tokens,
    ("POST", "/v1/v1/messages/count_tokens"): count_tokens,
}
