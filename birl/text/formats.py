"""Formats of tool calls: how each is detected from a chat template, parsed, and rendered."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from birl.text import calls
from birl.text.calls import Read, Tools
from birl.text.thinking import ParsedReply, split

Dict = dict[str, Any]
MARK = "birl-probe-reply"  # placeholder of the model's reply


def unchanged(messages: Sequence[Mapping[str, Any]]) -> list[Dict]:
    return [dict(m) for m in messages]


def text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Dict]:
    """Arguments as JSON text, for DeepSeek's templates."""
    result = unchanged(messages)
    for message in result:
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
    return result


def nine_characters(messages: Sequence[Mapping[str, Any]]) -> list[Dict]:
    """Ids of nine letters and digits for calls and their results, for Mistral's templates, and Gemma 4's, which finds
    the name of a result's function by its id. Missing ids are numbered, and results are assigned to the calls in order;
    other ids are shortened by a hash."""
    result, open_ids, n = unchanged(messages), list[str](), 0
    for message in result:
        if message.get("tool_calls"):
            open_ids = []
            message["tool_calls"] = [dict(call) for call in message["tool_calls"]]
            for call in message["tool_calls"]:
                n += 1
                call["id"] = _nine(call["id"]) if call.get("id") else f"{n:09d}"
                open_ids.append(call["id"])
        elif message["role"] == "tool":
            own = _nine(message["tool_call_id"]) if message.get("tool_call_id") else ""
            own = own if own in open_ids or not open_ids else open_ids[0]
            message["tool_call_id"] = own or f"{0:09d}"
            open_ids = [i for i in open_ids if i != own]
    return result


def one_voice(messages: Sequence[Mapping[str, Any]]) -> list[Dict]:
    """Either thinking or content in a message with calls, for GPT-OSS's template."""
    result = unchanged(messages)
    for message in result:
        if message.get("tool_calls") and message.get("content") and message.get("reasoning_content"):
            message["reasoning_content"] += "\n\n" + message["content"]
            message["content"] = ""
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of tool calls. `read`: parses the calls of a reply without its thinking; `channels`, instead: parses a
    whole reply on channels. `marks`: texts in chat templates of this format; `openings`: texts at which a call may
    begin; `closing`: pattern of the text after the last argument of the last call; `ends`: end tokens of the template
    where the model samples another; `fit`: converts messages for such templates."""

    read: Callable[[str, Tools], Read] | None = None
    channels: Callable[[str, Tools], ParsedReply] | None = None
    marks: tuple[str, ...]
    openings: tuple[str, ...]
    closing: str
    ends: tuple[str, ...] = ()
    fit: Callable[[Sequence[Mapping[str, Any]]], list[Dict]] = unchanged


FORMATS: dict[str, Format] = {
    "harmony": Format(
        channels=calls.harmony,
        marks=("<|channel|>", "<|message|>"),
        openings=("<|channel|>", "<|start|>", " to=", "to="),
        closing=r'"\s*\}',
        ends=("<|end|>",),
        fit=one_voice,
    ),
    "deepseek": Format(
        read=calls.deepseek,
        marks=("<｜tool▁calls▁begin｜>",),
        openings=("<｜tool▁calls▁begin｜>",),
        closing="<｜tool▁calls▁end｜>",
        fit=text_arguments,
    ),
    "mistral": Format(
        read=calls.mistral,
        marks=("[TOOL_CALLS]",),
        openings=("[TOOL_CALLS]",),
        closing=r'"\s*\}(?:[^\[\]{}]*\}\s*\]|)',
        fit=nine_characters,
    ),
    "function_gemma": Format(
        read=calls.function_gemma,
        marks=("<start_function_call>",),
        openings=("<start_function_call>",),
        closing="<end_function_call>",
    ),
    "gemma4": Format(
        read=calls.gemma4,
        marks=("<|tool_call>",),
        openings=("<|tool_call>",),
        closing=r"<tool_call\|>",
        fit=nine_characters,
    ),
    "qwen_coder": Format(
        read=calls.qwen_coder, marks=("<tool_call>", "<function="), openings=("<tool_call>",), closing="</tool_call>"
    ),
    "hermes": Format(read=calls.hermes, marks=("<tool_call>",), openings=("<tool_call>",), closing="</tool_call>"),
    "llama": Format(
        read=calls.llama, marks=('"parameters"',), openings=("{", "<|python_tag|>"), closing=r'"\s*\}\s*\}'
    ),
}


def parts(
    text: str, form: Format | None, tags: tuple[str, str] | None, tools: Tools, opened: bool = False
) -> ParsedReply:
    """Parse a reply's text, which has no end token."""
    if form is not None and form.channels is not None:
        return form.channels(text, tools)
    thinking, rest, closed = split(text, tags, opened)
    content, result = form.read(rest, tools) if form is not None and form.read is not None and tools else (rest, ())
    return ParsedReply(thinking=thinking, content=content, calls=result, closed=closed)


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _nine(id: str) -> str:
    return id if len(id) == 9 and id.isascii() and id.isalnum() else hashlib.sha256(id.encode()).hexdigest()[:9]
