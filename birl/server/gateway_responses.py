"""OpenAI's Responses API for agents: POST /responses, in one piece or as events.

The next request continues a response by `previous_response_id`, or sends its items again: reasoning, a message,
function calls. The ids of items contain the response's, so that references need no table.

Beyond OpenAI: `top_k`, `min_p`, `stop_token_ids`, and `return_token_ids`, which adds `prompt_token_ids`, `token_ids`
and `weight_versions`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from birl.server.agent_session import Answering, Kept
from birl.server.ask import likeliest
from birl.server.limits import NAMES, Refused
from birl.server.messages import call, invalid, message_content, typed
from birl.server.request_policy import FORMS, SAMPLING, Terms, speaker
from birl.server.responses_format import Item, ResponsesReply
from birl.types import Message, SamplingParams

KNOWN = (
    *("model", "input", "instructions", "previous_response_id", "max_output_tokens", "tools", "tool_choice", "text"),
    *("include", "store", "stream", "stream_options", "stop_token_ids", "return_token_ids", *SAMPLING),
)
SERVED = ("seed", "top_logprobs", "ignore_eos", "parallel_tool_calls", *FORMS)  # additional parameters on a server
INCLUDED = "message.output_text.logprobs", "reasoning.encrypted_content"  # the latter: text is in the item anyway
ROLES = ("user", "assistant", "system", "developer")
THOUGHT, CONTENT, CALL = range(3)  # parts of an answer, in order
ECHOED: dict[str, Any] = {
    **{"instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "tools": []},
    **{"previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "tool_choice": "auto"},
    **{"text": {"format": {"type": "text"}}, "store": True, "user": None, "top_logprobs": 0},
}


def response(data: Mapping[str, Any], terms: Terms, visit: Answering) -> ResponsesReply:
    """Parse POST /responses. Raises `Refused`."""
    return asked(data, terms, visit.params, visit.kept)


def asked(data: Mapping[str, Any], terms: Terms, own: SamplingParams, kept: Kept, name: str = "") -> ResponsesReply:
    """Parse a request; `own`: default parameters; `name`: the model's. Raises `Refused`."""
    terms.check(data, (*KNOWN, *(SERVED if terms.served else ())))
    included = typed(data, "include", list, [])
    told = {k: v if data.get(k) is None else data[k] for k, v in ECHOED.items()}
    for one in included:
        if one not in INCLUDED:
            terms.vain("include", one)
    instructions, more = typed(data, "instructions", str, ""), typed(data, "stream_options", dict, {})
    terms.vain_beside("stream_options", more, ("include_obfuscation",))
    begun = [Message(role="system", content=instructions)] if instructions else []
    items = [{"role": "user", "content": asked}] if isinstance(asked := data.get("input"), str) else asked
    given = (*begun, *continued(data, kept), *conversation(items, kept))
    check_results(given)
    tools = [tool(one, i) for i, one in enumerate(typed(data, "tools", list, []))]
    try:
        seen, form = terms.tools({**data, **form_of(data, terms)}, tools, data.get("tool_choice"))
    except Refused as error:
        param, _, what = str(error).partition(": ")
        if not param.startswith("response_format"):
            raise
        raise invalid(param.replace("response_format", "text.format"), what.removesuffix(".")) from None
    top = likeliest(data, True) if terms.served else 0
    told["store"] = typed(data, "store", bool, True)
    try:
        json.dumps([told, items], allow_nan=False)
    except ValueError:
        raise invalid("input", "has NaN or an infinite number, here or in metadata, which no JSON can repeat") from None
    return ResponsesReply(
        conversation=given,
        given=items,  # pyright: ignore[reportArgumentType]  `conversation` refuses anything else
        params=terms.params(data, own, (), "max_output_tokens"),
        tools=seen,
        form=form,
        agent=speaker(data.get("model")),
        stream=typed(data, "stream", bool, False),
        chat=terms.chat,
        model=name or str(data.get("model") or "birl"),
        kept=kept,
        told=told,
        own=len(begun),
        logprobs=INCLUDED[0] in included,
        top=top if INCLUDED[0] in included else 0,
        token_ids=typed(data, "return_token_ids", bool, False),
    )


def continued(data: Mapping[str, Any], kept: Kept) -> tuple[Message, ...]:
    """The conversation of the previous response, without its instructions."""
    id = typed(data, "previous_response_id", str, "")
    return talk_of(id, kept, "previous_response_id") if id else ()


def talk_of(id: str, kept: Kept, where: str) -> tuple[Message, ...]:
    if (talk := kept.cited(id)) is None:
        raise Refused(
            400, f"{where}: there is no response {id[:80]!r}: it is of another server or episode, deleted, requested "
            f"with store=false, or dropped for newer ones ({kept.bounds}). Send the whole conversation as input.",
            param=where, code="previous_response_not_found",
        )  # fmt: skip
    return talk


def conversation(given: Any, kept: Kept) -> tuple[Message, ...]:
    """Messages of `input`, a list of items. Consecutive reasoning, message and calls become one answer. Raises
    `Refused`."""
    if not isinstance(given, list) or not given:
        raise invalid("input", "must be text or a list of items, and not empty")
    result: list[Message] = []
    highest = -1  # last part of the current answer
    for place, one in enumerate(given):
        message, part = item(one, f"input.{place}", kept)
        if message.role == "assistant" and (0 <= highest < part or highest == part == CALL):
            last = result.pop()
            message = replace(
                message, thinking=last.thinking + message.thinking, content=last.content + message.content,
                pictures=(*last.pictures, *message.pictures),
                tool_calls=(*last.tool_calls, *message.tool_calls),
            )  # fmt: skip
        result.append(message)
        highest = part if message.role == "assistant" else -1
    return tuple(result)


def check_results(talk: tuple[Message, ...]) -> None:
    """Raise `Refused` for the result of a call that the assistant did not make."""
    made: set[str] = set()
    for message in talk:
        if message.role == "tool" and message.tool_call_id not in made:
            raise invalid("input", f"no earlier function_call has the call_id {message.tool_call_id!r} of an output")
        made |= {call.id for call in message.tool_calls}


def item(given: Any, where: str, kept: Kept) -> tuple[Message, int]:
    """The message of an item, and its part of an answer."""
    if not isinstance(given, dict):
        raise invalid(where, "must be an object with a type, or a role and a content")
    match given:
        case {"type": "reasoning"}:
            parts = given.get("content") or given.get("summary") or []
            if not isinstance(parts, list):
                raise invalid(f"{where}.{'content' if given.get('content') else 'summary'}", "must be a list of parts")
            thinking = "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))
            return Message(role="assistant", content="", thinking=thinking), THOUGHT
        case {"type": "function_call", "call_id": str(id)}:
            function = {"name": given.get("name"), "arguments": given.get("arguments")}
            one = call({"function": function, "id": short(id, where)}, where)
            return Message(role="assistant", content="", tool_calls=(one,)), CALL
        case {"type": "function_call_output", "call_id": str(id)}:
            output = message_content(given.get("output"), f"{where}.output")
            return Message(role="tool", **output, tool_call_id=short(id, where)), CONTENT
        case {"id": str(id)} if given.get("type") == "item_reference" or len(given) == 1:
            return referred(id, where, kept)
        case {"role": str(role)} if given.get("type") in (None, "message") and role in ROLES:
            role = "system" if role == "developer" else role
            return Message(role=role, **message_content(given.get("content"), f"{where}.content")), CONTENT
        case _:
            kind = given.get("type") or f"message of role {given.get('role')!r}"
            raise invalid(
                where, f"is a {kind}, or one without its call_id; the model reads messages, reasoning, function_call "
                "and function_call_output"[:300],
            )  # fmt: skip


def referred(id: str, where: str, kept: Kept) -> tuple[Message, int]:
    """An item of a stored response."""
    kind, _, rest = id.partition("_")
    rest, _, number = rest.partition("_")
    last = talk_of(f"resp_{rest}", kept, f"{where}.id")[-1]
    match kind:
        case "rs":
            return replace(last, content="", tool_calls=()), THOUGHT
        case "msg":
            return replace(last, thinking="", tool_calls=()), CONTENT
        case "fc" if number.isdecimal() and len(number) < 9 and int(number) < len(last.tool_calls):
            return replace(last, thinking="", content="", tool_calls=(last.tool_calls[int(number)],)), CALL
        case _:
            raise invalid(f"{where}.id", f"is {id[:80]!r}, which is no item of a response; send the item itself")


def short(id: str, where: str) -> str:
    if len(id) > NAMES:
        raise invalid(f"{where}.call_id", f"has {len(id)} characters; at most {NAMES} are taken")
    return id


def tool(given: Any, place: int) -> Item:
    """A tool in the form of chats."""
    kind = given.get("type") if isinstance(given, dict) else given
    if kind != "function":
        raise invalid(
            f"tools.{place}", f"is of type {str(kind)[:40]!r}, which only the vendor runs; define your own function"
        )
    return {"type": "function", "function": {k: v for k, v in given.items() if k != "type" and v is not None}}


def form_of(data: Mapping[str, Any], terms: Terms) -> Item:
    """`text` in the form of chats (response_format)."""
    words = typed(data, "text", dict, {})
    terms.vain_beside("text", words, ("format",))
    given = typed(words, "format", dict, {})
    if given.get("type") == "json_schema" and not isinstance(given.get("schema"), dict):
        raise invalid("text.format.schema", "must be a JSON schema: an object")
    if given.get("type", "text") != "text" and not terms.served:
        terms.vain("text.format", given)
    return {"response_format": {"type": given.get("type"), "json_schema": given}} if given else {}


def input_tokens(data: Mapping[str, Any], terms: Terms, visit: Answering) -> Item:
    """Handle POST /responses/input_tokens: length of the prompt. Raises `Refused`."""
    reply = response(data, terms, visit)
    count = len(terms.render(reply.conversation, reply.tools))
    return {"object": "response.input_tokens", "input_tokens": count}


def compact(*_: Any) -> NoReturn:
    raise Refused(400, "Compaction is not supported: send fewer items, or a summary of them, as input.")


REPLIES = {
    ("POST", "responses"): response,
    ("POST", "responses/input_tokens"): input_tokens,
    ("POST", "responses/compact"): compact,
}
