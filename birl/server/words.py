"""Tokenization, as in vLLM's server: POST /tokenize and /detokenize, GET /tokenizer_info and /version."""

from importlib.metadata import version as version_of
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from birl.server import ask
from birl.server.limits import answered, check_bulk, json_object, too_large
from birl.server.messages import invalid, message, typed
from birl.server.native import ids
from birl.server.service import Service

NAMES = ("model", "prompt", "messages", "tools", "add_special_tokens", "return_token_strs")


async def tokenize(service: Service, request: Request) -> Response:
    """`prompt`, or `messages` and `tools` -> `count`, `max_model_len`, `tokens`, and `token_strs` if requested."""
    data = await json_object(request, service.most_bytes)

    def read() -> tuple[int, ...]:
        check_bulk(data, service.engine.context)
        ask.known(data, NAMES, service)
        if "messages" in data:
            messages = tuple(message(m, i) for i, m in enumerate(typed(data, "messages", list, None)))
            return service.terms.render(messages, service.terms.tools({}, typed(data, "tools", list, []), None)[0])
        prompt = typed(data, "prompt", str, None)
        if prompt is None:
            raise invalid("prompt", "is missing; so are messages")
        special = typed(data, "add_special_tokens", bool, True)
        return service.chat.render(prompt) if special and prompt else service.chat.encode(prompt)

    tokens = await answered(request, service.read(read, request.headers), service.timeout)
    texts = [service.chat.tokenizer.convert_ids_to_tokens(t) for t in tokens] if data.get("return_token_strs") else None
    result = {"count": len(tokens), "max_model_len": service.engine.context, "tokens": tokens, "token_strs": texts}
    return JSONResponse(result)


async def detokenize(service: Service, request: Request) -> Response:
    data = await json_object(request, service.most_bytes)
    ask.known(data, ("model", "tokens"), service)
    tokens = ids(data, "tokens", service.vocabulary)
    if len(tokens) > service.engine.context:
        raise too_large("tokens", f"{len(tokens)} tokens", service.engine.context)
    return JSONResponse({"prompt": await service.read(lambda: service.chat.decode(tokens), request.headers)})


async def tokenizer_info(service: Service, request: Request) -> Response:
    tokenizer = service.chat.tokenizer
    result: dict[str, Any] = {"tokenizer_class": type(tokenizer).__name__, "model_max_length": service.engine.context}
    result |= {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    result |= {f"{key}_id": getattr(tokenizer, f"{key}_id", None) for key in ("eos_token", "bos_token", "pad_token")}
    return JSONResponse(result | {"vocab_size": service.vocabulary, "chat_template": tokenizer.chat_template})


async def version(service: Service, request: Request) -> Response:
    return JSONResponse({"version": version_of("birl")})


ROUTES = {
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
    ("GET", "/tokenizer_info"): tokenizer_info,
    ("GET", "/version"): version,
}
