"""OpenAI's API: GET /v1/models, POST /v1/chat/completions and /v1/completions.

Beyond OpenAI: `top_k`, `min_p`, `ignore_eos`, `stop_token_ids`, and `return_token_ids`, which adds `prompt_token_ids`
and, for each choice, `token_ids` and `weight_versions`. Log-probs are those of the sampling distribution.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from birl.engine.request import TopLogprobs
from birl.server import ask
from birl.server.ask import Ask
from birl.server.limits import answered, json_object
from birl.server.openai_format import Pieces
from birl.server.service import Job, Scored, Service
from birl.server.stream import events, streamed
from birl.types import Completion, Stop

Body = dict[str, Any]
EMPTY = Completion.of((), (), (), Stop.LENGTH)


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
