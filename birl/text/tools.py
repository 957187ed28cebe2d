"""Conversations with tools: rendered by the model's own chat template, and calls read back from what it says, in the
format of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from birl.errors import BirlError
from birl.types import Message, ToolCall

if TYPE_CHECKING:
    from birl.text.chat import Chat

OPENING = "<tool_call>"
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
TEMPLATE = "Take a model that was trained with tools, or another template (model.chat_template=FILE.jinja)."


def as_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates know it."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            | ({"id": c.id} if c.id else {})
            for c in message.tool_calls
        ]
    return found | {key: v for key in ("name", "tool_call_id") if (v := getattr(message, key))}


def render(
    chat: "Chat", messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[int, ...]:
    """Ids of a prompt, up to where the assistant's answer starts. `messages` are dicts as chat templates know them: an
    assistant's `tool_calls` have their arguments as a mapping. Raises `BirlError` where the template would leave out
    the tools, a call, or what a tool said."""
    made = text(chat, messages, tools)
    if tools and made == text(chat, messages, ()):
        raise BirlError(f"The model's chat template leaves out tools, so the model would not see them. {TEMPLATE}")
    for place, message in enumerate(messages):
        if message.get("tool_calls"):
            bare = {key: value for key, value in message.items() if key != "tool_calls"}
            if made == text(chat, [*messages[:place], bare, *messages[place + 1 :]], tools):
                raise BirlError(
                    f"The model's chat template leaves out tool_calls (messages.{place}), so the model would not "
                    f"see them. {TEMPLATE}"
                )
        if message["role"] == "tool" and message["content"] and str(message["content"]).strip() not in made:
            raise BirlError(
                f"The model's chat template leaves out messages of role tool (messages.{place}), so the model would "
                f"not see what they say. {TEMPLATE}"
            )
    return chat.encode(made)


def text(
    chat: "Chat",
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    answer: bool = True,
) -> str:
    """What the template makes of messages, up to where an `answer` begins."""
    if not chat.has_template:
        raise BirlError(
            "The tokenizer has no chat template, so messages cannot be made into a prompt. Name one with "
            "model.chat_template=FILE.jinja, or use text prompts (of a server: /v1/completions)."
        )
    try:
        made = chat.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=answer,
            tokenize=False,
        )
    except Exception as error:  # Jinja raises whatever the template wants
        roles = ", ".join(str(m["role"]) for m in messages)
        raise BirlError(f"The chat template refuses a conversation of {roles}: {error}") from error
    return str(made)


def parse(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """What is said beside the calls, and the calls. What is no call in that format stays text."""
    calls: list[ToolCall] = []
    rest, done = "", 0
    for found in CALL.finditer(text):
        call = read(found[1])
        if call is not None:
            calls.append(call)
            rest += text[done : found.start()]
            done = found.end()
    rest += text[done:]
    return (rest.rstrip() if calls else rest), tuple(calls)


def read(text: str) -> ToolCall | None:
    """None where the text is no call."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name=data["name"], arguments=json.dumps(arguments, ensure_ascii=False))
