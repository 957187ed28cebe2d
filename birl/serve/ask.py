"""What an OpenAI client asks for. What would change the answer and is not here is refused by name, never left out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from birl.errors import BirlError
from birl.serve.bulk import check_bulk, check_text, too_large
from birl.serve.limits import Refused, outside, problem
from birl.serve.messages import check_tool, invalid, message, typed
from birl.serve.service import Service
from birl.types import SamplingParams

CHOICES = 128  # most answers to one prompt

# Without an effect on the answer.
HARMLESS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "priority",
    "request_id",
)
# Parameters that birl does not have, at the values that say so.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{"frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,)},
    **{"logit_bias": ({},), "suffix": ("",), "response_format": ({"type": "text"},), "best_of": (1,)},
    **{"echo": (False,), "use_beam_search": (False,), "min_tokens": (0,), "parallel_tool_calls": (True,)},
    **{"modalities": (["text"],), "functions": ([],), "function_call": ("none",), "top_logprobs": (0,)},
    **{"add_generation_prompt": (True,), "continue_final_message": (False,), "include_stop_str_in_output": (False,)},
}
SHARED = (
    *("model", "n", "stream", "stream_options", "stop", "seed", "temperature", "top_p", "max_tokens", "logprobs"),
    *("min_p", "top_k", "ignore_eos", "stop_token_ids", "return_token_ids"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`n` answers to each of `prompts`; `usage`: the stream ends with token counts."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool
    tools: tuple[Mapping[str, Any], ...] = ()


def chat(data: Mapping[str, Any], service: Service) -> Ask:
    """POST /v1/chat/completions. Raises `Refused`."""
    check_bulk(data, service.engine.context)
    known(data, (*SHARED, "messages", "tools", "tool_choice", "max_completion_tokens"), service)
    tools, choice = typed(data, "tools", list, []), data.get("tool_choice")
    for place, tool in enumerate(tools):
        check_tool(tool, place)
    if choice not in (None, "auto", "none"):
        raise invalid("tool_choice", f"{json.dumps(choice)[:80]} cannot be kept: the model decides (auto | none)")
    if choice == "auto" and not tools:
        raise invalid("tool_choice", "is auto, and there are no tools")
    tools = [] if choice == "none" else tools
    messages = tuple(message(m, i) for i, m in enumerate(typed(data, "messages", list, None)))
    if not messages:
        raise invalid("messages", "is empty")
    try:
        ids = service.chat.render(messages, tools)
    except BirlError as error:
        raise Refused(400, str(error), param="tools" if tools else "messages") from error
    limit = data.get("max_completion_tokens")
    if limit is not None and data.get("max_tokens") not in (None, limit):
        raise invalid("max_tokens", "and max_completion_tokens differ; max_completion_tokens is the newer name")
    key = "max_tokens" if limit is None else "max_completion_tokens"
    return common(
        data, service, chat=True, prompts=(ids,), key=key, default=None, logprobs=typed(data, "logprobs", bool, False),
        tools=tuple(tools),
    )  # fmt: skip


def completion(data: Mapping[str, Any], service: Service) -> Ask:
    """POST /v1/completions. Raises `Refused`."""
    check_bulk(data, service.engine.context, ("prompt",))
    known(data, (*SHARED, "prompt"), service)
    given = prompts(data.get("prompt"), choices(data), service)
    return common(
        data, service, chat=False, prompts=given, key="max_tokens", default=16, logprobs=sampled_logprobs(data)
    )  # fmt: skip


def common(
    data: Mapping[str, Any],
    service: Service,
    *,
    chat: bool,
    prompts: tuple[tuple[int, ...], ...],
    key: str,
    default: int | None,
    logprobs: bool,
    tools: tuple[Mapping[str, Any], ...] = (),
) -> Ask:
    """`key` names the limit of an answer; without it and a `default`, what the context leaves."""
    for ids in prompts:
        try:
            service.check_prompt(ids)
        except BirlError as error:
            code = "context_length_exceeded" if ids else None
            raise Refused(400, str(error), param="messages" if chat else "prompt", code=code) from error
    n, stream = choices(data), typed(data, "stream", bool, False)
    options = typed(data, "stream_options", dict, {})
    if options and not stream:
        raise invalid("stream_options", "goes with stream=true only")
    if unknown := sorted(set(options) - {"include_usage", "include_obfuscation", "continuous_usage_stats"}):
        raise invalid(f"stream_options.{unknown[0]}", "there is no such option")
    if options.get("continuous_usage_stats"):
        raise invalid("stream_options.continuous_usage_stats", "cannot be had; include_usage counts at the end")
    return Ask(
        chat=chat,
        prompts=prompts,
        params=params(data, service, key, default),
        n=n,
        stream=stream,
        usage=bool(options.get("include_usage")),
        logprobs=logprobs,
        token_ids=typed(data, "return_token_ids", bool, False),
        tools=tools,
    )


def params(data: Mapping[str, Any], service: Service, key: str, default: int | None) -> SamplingParams:
    stop_ids = typed(data, "stop_token_ids", list, [])
    if not all(type(i) is int for i in stop_ids):
        raise invalid("stop_token_ids", "must be a list of token ids")
    seed, top_k = typed(data, "seed", int, None), typed(data, "top_k", int, 0)
    found = SamplingParams(
        max_tokens=typed(data, key, int, service.engine.context if default is None else default),
        temperature=typed(data, "temperature", float, 1.0),
        top_p=typed(data, "top_p", float, 1.0),
        top_k=max(top_k, 0) if top_k == -1 else top_k,  # vLLM's -1: off
        min_p=typed(data, "min_p", float, 0.0),
        stop=stops(data),
        stop_ids=tuple(stop_ids),
        ignore_eos=typed(data, "ignore_eos", bool, False),
        seed=None if seed is None else seed % 2**64,  # OpenAI's may be negative
    )
    if wrong := problem(found, service.vocabulary):
        raise invalid({"max_tokens": key, "stop_ids": "stop_token_ids"}.get(wrong[0], wrong[0]), wrong[1])
    return found


def choices(data: Mapping[str, Any]) -> int:
    """How many answers to each prompt."""
    n = typed(data, "n", int, 1)
    if not 1 <= n <= CHOICES:
        raise invalid("n", f"must be at least 1 and at most {CHOICES}, got {n}")
    return n


def stops(data: Mapping[str, Any]) -> tuple[str, ...]:
    given = data.get("stop")
    found = [given] if isinstance(given, str) else typed(data, "stop", list, [])
    if not all(isinstance(s, str) for s in found):
        raise invalid("stop", "must be a text or a list of texts")
    return tuple(found)


def sampled_logprobs(data: Mapping[str, Any]) -> bool:
    """Of /v1/completions, where 0 asks for those of the sampled tokens alone."""
    logprobs = typed(data, "logprobs", int, -1)
    if logprobs > 0:
        raise invalid("logprobs", f"is {logprobs}: only the sampled tokens have log-probs here; set logprobs=0")
    return logprobs == 0


def prompts(given: Any, n: int, service: Service) -> tuple[tuple[int, ...], ...]:
    """Text, a list of texts, token ids, or lists of token ids; `n` answers to each."""
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        raise invalid("prompt", "must be text, a list of texts, a list of token ids, or a list of such lists")
    if len(given) * n > service.gate.most:
        raise invalid("prompt", f"{len(given) * n} answers in one request; this server takes {service.gate.most}")
    found = []
    for one in given:
        if isinstance(one, str):
            check_text(one, "prompt", service.engine.context)
            found.append(service.chat.render(one))
        elif isinstance(one, list) and len(one) > service.engine.context:
            raise too_large("prompt", f"{len(one)} tokens", service.engine.context)
        elif isinstance(one, list) and all(type(i) is int for i in one):
            if (wrong := outside(tuple(one), service.vocabulary)) is not None:
                raise invalid("prompt", f"has {wrong}, which is no token; the model has {service.vocabulary}")
            found.append(tuple(one))
        else:
            raise invalid("prompt", f"has {json.dumps(one)[:80]}, which is neither text nor a list of token ids")
    return tuple(found)


def known(data: Mapping[str, Any], keys: tuple[str, ...], service: Service) -> None:
    """Refuse another model than ours, and every parameter that would change the answer and is not among `keys`."""
    model = data.get("model")
    if model not in (None, "", service.name):
        raise Refused(
            404, f"There is no model {model!r}; this server has {service.name!r}."[:300], "not_found_error",
            param="model", code="model_not_found",
        )  # fmt: skip
    check_keys(data, keys)


def check_keys(data: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key, value in data.items():
        if key in keys or key in HARMLESS or value is None:
            continue
        if key not in NEUTRAL:
            raise invalid(key, "there is no such parameter")
        if value not in NEUTRAL[key]:
            only = " | ".join(json.dumps(v) for v in NEUTRAL[key])
            raise invalid(key, f"is not supported, except as {only}")
