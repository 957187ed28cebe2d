"""A list of {role, content} in a row -> `Message`s, as the chat templates of OpenAI, transformers and TRL have them.

content       text, or a list of {"type": "text", "text": ...}; null or left out where an assistant only calls
tool_calls    {"function": {"name", "arguments"}} or {"name", "arguments"}; arguments as an object or as JSON text
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from birl.errors import BirlError, did_you_mean
from birl.types import Message, ToolCall

KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
THOUGHTS = ("reasoning_content", "thinking")

# Those of chat templates. Another one would be rendered by some templates and left out by others.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "environment")
ALIASES = {
    **dict.fromkeys(("bot", "model", "gpt", "ai", "chatbot", "agent", "chatgpt", "answer"), "assistant"),
    **dict.fromkeys(("human", "prompter", "question"), "user"),
}


def kind(value: Any) -> str:
    return KINDS.get(type(value), f"a {type(value).__name__}")


def text_of(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise BirlError(f"{where}: {field} is {kind(value)}, it needs to be text.")
    if not value.strip():
        raise BirlError(f"{where}: {field} is empty. Remove the row.")
    return value


def messages_of(value: Any, where: str, field: str, whole: bool = False) -> tuple[Message, ...]:
    """A list of {role, content}. Unless it is the `whole` conversation, something must be left to answer. Raises
    `BirlError`, also for what a message says beside its content: a model would learn an answer without it."""
    if not isinstance(value, list):
        raise BirlError(f"{where}: {field} is {kind(value)}, it needs to be text or a list of messages.")
    if not value:
        raise BirlError(f"{where}: `{field}` is empty. Remove the row.")
    unread = ("function_call", *(THOUGHTS if whole else ()))
    result = tuple(_message(m, where, f"{field}[{i}]", unread) for i, m in enumerate(value))
    if whole:
        return result
    if result[-1].role == "assistant":
        raise BirlError(
            f"{where}: {field} ends with an assistant message, so there is nothing left to answer. "
            "Move that message into a column `answer`; whole conversations are for `birl sft`."
        )
    text_of(result[-1].content, where, f"{field}[{len(result) - 1}].content")
    return result


def _message(value: Any, where: str, field: str, unread: Sequence[str]) -> Message:
    says = isinstance(value, Mapping) and (value.get("tool_calls") or "content" in value)
    if not isinstance(value, Mapping) or value.get("role") is None or not says:
        result = f"has {', '.join(value)}" if isinstance(value, Mapping) else f"is {kind(value)}"
        raise BirlError(f'{where}: {field} {result}; a message is {{"role": "user", "content": "..."}}.')
    if name := next((name for name in unread if value.get(name)), None):
        raise BirlError(
            f"{where}: {field}.{name} is not read. Put what the model says into `content`, as its template writes it."
        )
    role = value["role"]
    if not isinstance(role, str):
        raise BirlError(f"{where}: {field}.role is {kind(role)}, it needs to be text.")
    if role not in ROLES:
        near = ALIASES.get(role.lower(), "")
        hint = f" Did you mean {near}?" if near else did_you_mean(role, ROLES)
        raise BirlError(f"{where}: {field}.role is {role[:80]!r}; roles are {', '.join(ROLES)}.{hint}")
    calls = _calls(value.get("tool_calls"), where, f"{field}.tool_calls", role)
    content, answers = value.get("content"), role == "tool"
    return Message(
        role=role,
        content="" if calls and content is None else _content(content, where, f"{field}.content"),
        tool_calls=calls,
        tool_call_id=_optional(value, "tool_call_id", where, field) if answers else "",
        name=_optional(value, "name", where, field) if answers else "",
    )


def _optional(value: Mapping[str, Any], name: str, where: str, field: str) -> str:
    result = value.get(name)
    if result is not None and not isinstance(result, str):
        raise BirlError(f"{where}: {field}.{name} is {kind(result)}, it needs to be text.")
    return result or ""


def _content(value: Any, where: str, field: str) -> str:
    """Text, or parts that are all text, joined as templates join them."""
    if not isinstance(value, list):
        if not isinstance(value, str):
            raise BirlError(f"{where}: {field} is {kind(value)}, it needs to be text.")
        return value
    for i, part in enumerate(value):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise BirlError(f'{where}: {field}[{i}] is {kind(part)}; a part is {{"type": "text", "text": "..."}}.')
        if part["type"] != "text":
            raise BirlError(
                f"{where}: {field}[{i}] is of type {part['type'][:80]!r}: only text is read, no pictures or sounds. "
                "Remove the row."
            )
        if not isinstance(part.get("text"), str):
            raise BirlError(f"{where}: {field}[{i}].text is {kind(part.get('text'))}, it needs to be text.")
    return "".join(part["text"] for part in value)


def _calls(value: Any, where: str, field: str, role: str) -> tuple[ToolCall, ...]:
    if not value:
        return ()
    if not isinstance(value, list) or role != "assistant":
        why = "is of an assistant's messages only" if isinstance(value, list) else f"is {kind(value)}, it needs a list"
        raise BirlError(f"{where}: {field} {why}.")
    return tuple(_call(call, where, f"{field}[{i}]") for i, call in enumerate(value))


def _call(value: Any, where: str, field: str) -> ToolCall:
    function = value.get("function") or value if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BirlError(
            f'{where}: {field} names no function; a call is {{"function": {{"name": "...", "arguments": {{}}}}}}.'
        )
    arguments = function.get("arguments") or {}
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, Mapping):
        raise BirlError(f"{where}: {field}: the arguments of {function['name']} are no object, nor JSON text of one.")
    text = arguments if isinstance(arguments, str) else json.dumps(given, ensure_ascii=False)
    return ToolCall(name=function["name"], arguments=text, id=_optional(value, "id", where, field))
