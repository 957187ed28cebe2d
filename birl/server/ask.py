"""Parses the requests of OpenAI clients. Unsupported parameters that would change the answer are rejected by name."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from birl.errors import BirlError
from birl.server.limits import Refused, answered, check_bulk, json_object, outside, too_large
from birl.server.messages import invalid, message, typed
from birl.server.request_policy import FORMS, Terms, speaker
from birl.server.service import Service
from birl.text.grammar import whole
from birl.types import SamplingParams

T = TypeVar("T")
CHOICES = 128  # maximum number of answers to one prompt
LIKELIEST = 20  # maximum top_logprobs, as for OpenAI's chats and vLLM

SHARED = (
    *("model", "n", "stream", "stream_options", "stop", "seed", "temperature", "top_p", "max_tokens", "logprobs"),
    *("min_p", "top_k", "ignore_eos", "stop_token_ids", "return_token_ids", *FORMS),
)
CHAT = ("messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs")
ANY = ("", "any", "default", "birl")  # names for the served model; also birl/NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A parsed request: `n` answers to each of `prompts`; `usage`: the stream ends with token counts."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int
    stream: bool
    usage: bool
    logprobs: bool
    top: int = 0  # number of top log-probs of each sampled token
    token_ids: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    echo: bool = False
    mute: bool = False  # nothing is sampled
    prompt_logprobs: int | None = None  # number of top log-probs of each prompt token, beside its own
    grammar: str = ""


def chat(data: Mapping[str, Any], service: Service) -> Ask:
    """Parse POST /v1/chat/completions. Raises `Refused`."""
    check_bulk(data, service.engine.context)
    known(data, (*SHARED, *CHAT), service)
    tools, form = service.terms.tools(data, typed(data, "tools", list, []), data.get("tool_choice"))
    messages = tuple(message(m, i, service.finder) for i, m in enumerate(typed(data, "messages", list, None)))
    if not messages:
        raise invalid("messages", "is empty")
    try:
        ids = service.terms.render(messages, tools)
    except BirlError as error:
        raise Refused(400, str(error), param="tools" if tools else "messages") from error
    logprobs = typed(data, "logprobs", bool, False)
    return common(
        data, service, chat=True, prompts=(ids,), key=limit_of(data), default=service.engine.context,
        logprobs=logprobs, top=likeliest(data, logprobs), tools=tuple(tools),
        grammar=form and whole(service.chat, form, service.chat.thinks(ids)),
    )  # fmt: skip


def completion(data: Mapping[str, Any], service: Service) -> Ask:
    """Parse POST /v1/completions. Raises `Refused`."""
    check_bulk(data, service.engine.context, ("prompt",))
    known(data, (*SHARED, "prompt", "echo", "prompt_logprobs"), service)
    echo, (_, form) = typed(data, "echo", bool, False), service.terms.tools(data, [], None)
    given, count = prompts(data.get("prompt"), choices(data), service), sampled_logprobs(data)
    return common(
        data, service, chat=False, prompts=given, key="max_tokens", default=16,
        logprobs=count is not None, top=count or 0, echo=echo, prompt_logprobs=prompt_logprobs(data),
        grammar=form and f"start: body\nbody: {form}\n",
    )  # fmt: skip


def common(
    data: Mapping[str, Any],
    service: Service,
    *,
    chat: bool,
    prompts: tuple[tuple[int, ...], ...],
    key: str,
    default: int,
    echo: bool = False,
    **own: Any,
) -> Ask:
    """Parse the common parameters. `key`: name of the token limit (`default` if absent); `own`: fields of `Ask`."""
    mute = echo and data.get(key) == 0 and type(data[key]) is int
    for ids in prompts:
        try:
            service.check_prompt(ids, mute)
        except BirlError as error:
            code = "context_length_exceeded" if ids else None
            raise Refused(400, str(error), param="messages" if chat else "prompt", code=code) from error
    n, (stream, usage) = choices(data), streaming(data, service.terms)
    data = {**data, key: 1} if mute else data
    if echo and stream:
        raise invalid("echo", "cannot be combined with stream")
    return Ask(
        chat=chat,
        prompts=prompts,
        params=service.terms.params(data, SamplingParams(max_tokens=default), stops(data), key),
        n=n,
        stream=stream,
        usage=usage,
        token_ids=typed(data, "return_token_ids", bool, False),
        echo=echo,
        mute=mute,
        **own,
    )


def limit_of(data: Mapping[str, Any]) -> str:
    """Name of a chat's token limit. Raises `Refused` if both names have different values."""
    limit = data.get("max_completion_tokens")
    if limit is not None and data.get("max_tokens") not in (None, limit):
        raise invalid("max_tokens", "and max_completion_tokens differ; max_completion_tokens is the newer name")
    return "max_tokens" if limit is None else "max_completion_tokens"


def streaming(data: Mapping[str, Any], terms: Terms) -> tuple[bool, bool]:
    """Whether the answer is streamed, and whether the stream ends with token counts."""
    stream, options = typed(data, "stream", bool, False), typed(data, "stream_options", dict, {})
    if options and not stream:
        raise invalid("stream_options", "requires stream=true")
    terms.vain_beside("stream_options", options, ("include_usage", "include_obfuscation"))
    return stream, bool(options.get("include_usage"))


def choices(data: Mapping[str, Any]) -> int:
    """Number of answers to each prompt."""
    n = typed(data, "n", int, 1)
    if not 1 <= n <= CHOICES:
        raise invalid("n", f"must be at least 1 and at most {CHOICES}, got {n}")
    return n


def stops(data: Mapping[str, Any]) -> tuple[str, ...]:
    given = data.get("stop")
    result: Any = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(result, list) or not all(isinstance(s, str) for s in result):
        raise invalid("stop", "must be a text or a list of texts")
    return tuple(result)


def likeliest(data: Mapping[str, Any], logprobs: bool) -> int:
    """`top_logprobs` of a chat or a response."""
    result = within(data, "top_logprobs") or 0
    if result and not logprobs:
        raise invalid("top_logprobs", "requires log-probs: logprobs=true, or include in Responses")
    return result


def sampled_logprobs(data: Mapping[str, Any]) -> int | None:
    """`logprobs` of /v1/completions: 0 for those of the sampled tokens only, more for the most likely ones too; None
    for none."""
    if isinstance(logprobs := data.get("logprobs"), bool):  # as in chats
        return 0 if logprobs else None
    return within(data, "logprobs")


def within(data: Mapping[str, Any], key: str) -> int | None:
    """Number of top log-probs requested; None if not given."""
    if data.get(key) is None:
        return None
    result = typed(data, key, int, 0)
    if not 0 <= result <= LIKELIEST:
        raise invalid(key, f"must be at least 0 and at most {LIKELIEST}, got {result}")
    return result


def prompt_logprobs(data: Mapping[str, Any]) -> int | None:
    """`prompt_logprobs` as in vLLM: 0 for those of the prompt's own tokens only; None for none."""
    result = within(data, "prompt_logprobs")
    if result is not None and data.get("stream"):
        raise invalid("prompt_logprobs", "cannot be combined with stream")
    return result


def prompts(given: Any, n: int, service: Service) -> tuple[tuple[int, ...], ...]:
    """Token ids of a text, a list of texts, token ids, or lists of token ids; `n` answers to each."""
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        raise invalid("prompt", "must be text, a list of texts, a list of token ids, or a list of such lists")
    if len(given) * n > service.gate.most:
        raise invalid("prompt", f"{len(given) * n} answers in one request; this server takes {service.gate.most}")
    result = []
    for one in given:
        if isinstance(one, str):
            result.append(service.terms.render(one, key="prompt"))
        elif isinstance(one, list) and len(one) > service.engine.context:
            raise too_large("prompt", f"{len(one)} tokens", service.engine.context)
        elif isinstance(one, list) and all(type(i) is int for i in one):
            if (wrong := outside(tuple(one), service.vocabulary)) is not None:
                raise invalid("prompt", f"has {wrong}, which is not a token id; the model has {service.vocabulary}")
            result.append(tuple(one))
        else:
            raise invalid("prompt", f"has {json.dumps(one)[:80]}, which is neither text nor a list of token ids")
    return tuple(result)


def known(data: Mapping[str, Any], keys: tuple[str, ...], service: Service) -> None:
    """Reject another model than the served one, and unsupported parameters; `keys` are supported."""
    model = typed(data, "model", str, None)
    if model not in (None, *ANY, service.name) and not speaker(model):
        raise Refused(
            404, f"There is no model {str(model)[:100]!r}; this server has {service.name!r} (served_name=NAME)."[:300],
            "not_found_error",
            param="model", code="model_not_found",
        )  # fmt: skip
    service.terms.check(data, keys)


async def parsed(service: Service, request: Request, read: Callable[[dict[str, Any]], T]) -> T:
    """The result of `read` for the JSON object of a request to the served model, outside of the event loop. Raises
    `Refused`."""
    data = await json_object(request, service.most_bytes)

    def parse() -> T:
        check_bulk(data, service.engine.context)
        known({"model": data.get("model")}, ("model",), service)
        return read(data)

    return await answered(request, service.read(parse, request.headers), service.timeout)
