"""OpenAI's API: GET /v1/models, POST /v1/chat/completions and /v1/completions of a server, and for agents of an
episode.

Beyond OpenAI: `top_k`, `min_p`, `ignore_eos`, `stop_token_ids`, and `return_token_ids`, which adds `prompt_token_ids`
and, for each choice, `token_ids` and `weight_versions`. Log-probs are those of the sampling distribution.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from birl.engine.request import TopLogprobs
from birl.server import ask
from birl.server.agent_session import Answering, Answers, Reply
from birl.server.ask import Ask, choices, limit_of, sampled_logprobs, stops, streaming
from birl.server.limits import Refused, answered, json_object
from birl.server.messages import invalid, message, typed
from birl.server.openai_format import Pieces, Voice, event
from birl.server.request_policy import SAMPLING, Terms, speaker
from birl.server.service import Job, Scored, Service
from birl.server.stream import events, streamed
from birl.types import Completion, Stop

Body = dict[str, Any]
EMPTY = Completion.of((), (), (), Stop.LENGTH)
KNOWN = (
    *("model", "n", "stream", "stream_options", "stop", "stop_token_ids", "max_tokens", "logprobs"),
    *("return_token_ids", *SAMPLING),
)


async def models(service: Service, request: Request) -> Response:
    card = {"id": service.name, "object": "model", "created": service.created, "owned_by": "birl"}
    return JSONResponse({"object": "list", "data": [card | {"max_model_len": service.engine.context}]})


async def model(service: Service, request: Request) -> Response:
    if request.path_params["name"] != service.name:
        ask.known({"model": request.path_params["name"]}, (), service)
    return JSONResponse({"id": service.name, "object": "model", "created": service.created, "owned_by": "birl"})


async def completed(read: Callable[[Body, Service], Ask], service: Service, request: Request) -> Response:
    data = await json_object(request, service.most_bytes)
    asked = await answered(request, service.read(lambda: read(data, service), request.headers), service.timeout)
    each = [(prompt, p) for prompt in asked.prompts for p in service.seeded(asked.params, asked.n)]
    jobs = [Job(prompt=i, params=p, best=TopLogprobs(asked.top) if asked.top else None) for i, p in each]
    if asked.stream:
        return streamed(service, events(service, asked, jobs), len(jobs))  # pyright: ignore[reportReturnType]  what Starlette calls an ASGI app
    with service.gate.enter(len(jobs)):
        scored = await answered(request, scores(service, asked), service.timeout)  # first: answers reuse its pages
        result = [EMPTY] * len(jobs)
        if not asked.mute:
            result = await answered(request, service.all(jobs, asked.grammar), service.timeout)
    pieces = Pieces(service, asked)
    places = [job.places(slice(None)) for job in jobs]
    choices = [pieces.choice(i, c, p) for i, (c, p) in enumerate(zip(result, places, strict=True))]
    for i, choice in enumerate(choices):
        if asked.echo:
            pieces.echo(choice, i, scored)
        if asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = pieces.ranked(i, scored)
    return JSONResponse(pieces.head(chunk=False) | {"choices": choices, "usage": pieces.usage(result)})


async def scores(service: Service, asked: Ask) -> list[Scored]:
    """Log-probs of each prompt, if they are returned."""
    wanted = (asked.echo and asked.logprobs) or asked.prompt_logprobs is not None
    count = max(asked.prompt_logprobs or 0, asked.top, 1)
    return await service.together([service.score(ids, count) for ids in asked.prompts] if wanted else [])


ROUTES = {
    ("GET", "/v1/models"): models,
    ("GET", "/v1/models/{name:path}"): model,
    ("POST", "/v1/chat/completions"): partial(completed, ask.chat),
    ("POST", "/v1/completions"): partial(completed, ask.completion),
}


@dataclass(slots=True, kw_only=True)
class OpenAIReply(Reply):
    model: str
    talk: bool  # a chat, not a text completion
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False

    def pieces(self, answers: Answers) -> Pieces:
        turn = answers[0][1]
        asked = Ask(
            chat=self.talk, prompts=(tuple(turn.prompt.tolist()),), params=self.params, n=self.n, stream=self.stream,
            usage=self.usage, logprobs=self.logprobs, token_ids=self.token_ids, tools=tuple(self.tools),
        )  # fmt: skip
        return Pieces(Voice(self.model, int(turn.completion.versions.max(initial=0)), self.chat), asked)

    def whole(self, answers: Answers) -> dict[str, Any]:
        pieces = self.pieces(answers)
        choices = [
            pieces.spoken(i, turn.completion, reply.content, reply.tool_calls, reply.thinking)
            for i, (reply, turn) in enumerate(answers)
        ]
        usage = pieces.usage([turn.completion for _, turn in answers])
        return pieces.head(chunk=False) | {"choices": choices, "usage": usage}

    def chunks(self, answers: Answers) -> Iterator[bytes]:
        pieces = self.pieces(answers)
        for i, (reply, turn) in enumerate(answers):
            done = turn.completion
            yield event(pieces.delta(i, "", first=True, thinking=reply.thinking))
            tokens, logprobs, versions = (x.tolist() for x in (done.tokens, done.logprobs, done.versions))
            yield event(pieces.delta(i, reply.content, tokens=tokens, logprobs=logprobs, versions=versions))
            if reply.tool_calls:
                yield event(pieces.delta(i, "", calls=reply.tool_calls))
            yield event(pieces.delta(i, "", reason=pieces.reason(done.stop, reply.tool_calls)))
        if self.usage:
            usage = pieces.usage([turn.completion for _, turn in answers])
            yield event(pieces.head(chunk=True) | {"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def failed(self, refused: Refused) -> bytes:
        return event(refused.body())


def chat(data: Mapping[str, Any], terms: Terms, visit: Answering) -> OpenAIReply:
    """Parse POST /chat/completions. Raises `Refused`."""
    terms.check(data, (*KNOWN, "messages", "tools", "tool_choice", "max_completion_tokens"))
    messages = tuple(message(m, i) for i, m in enumerate(typed(data, "messages", list, None)))
    if not messages:
        raise invalid("messages", "is empty")
    logprobs = typed(data, "logprobs", bool, False)
    return _reply(data, terms, visit, conversation=messages, limit=limit_of(data), logprobs=logprobs, talk=True)


def completion(data: Mapping[str, Any], terms: Terms, visit: Answering) -> OpenAIReply:
    """Parse POST /completions. Raises `Refused`."""
    terms.check(data, (*KNOWN, "prompt"))
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise invalid("prompt", "must be text: an episode keeps the token ids itself")
    count = sampled_logprobs(data)
    if count:
        terms.vain("logprobs", count)
    return _reply(data, terms, visit, conversation=prompt, limit="max_tokens", logprobs=count is not None, talk=False)


def _reply(data: Mapping[str, Any], terms: Terms, visit: Answering, *, limit: str, **own: Any) -> OpenAIReply:
    stream, usage = streaming(data, terms)
    tools, form = terms.tools(data, typed(data, "tools", list, []), data.get("tool_choice"))
    return OpenAIReply(
        params=terms.params(data, visit.params, stops(data), limit),
        tools=tools,
        form=form,
        agent=speaker(data.get("model")),
        n=choices(data),
        stream=stream,
        chat=terms.chat,
        model=str(data.get("model") or "birl"),
        usage=usage,
        token_ids=typed(data, "return_token_ids", bool, False),
        **own,
    )


REPLIES = {("POST", "chat/completions"): chat, ("POST", "completions"): completion}
