"""Converts messages of OpenAI clients to birl's messages, with checks. What the model cannot read is rejected by
name."""

import json
from collections.abc import Mapping
from typing import Any

from birl.errors import BirlError
from birl.server.limits import Refused
from birl.text.parts import TEXTS, Finder, content
from birl.types import Message, ToolCall

NOWHERE = Finder()  # images are in the request itself


def message(given: Any, place: int, finder: Finder = NOWHERE) -> Message:
    """One message of a request; `finder` loads its images. Raises `Refused`."""
    where = f"messages.{place}"
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise invalid(where, "must be an object with a role and a content")
    if given.get("function_call") is not None or given.get("audio") is not None:
        raise invalid(where, "has function_call or audio, which cannot be taken; tool_calls can")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls", "must be a list")
    if not calls and given.get("content") is None and given["role"] != "assistant":
        raise invalid(f"{where}.content", "is missing")
    told: dict[str, Any] = {key: v for key in ("name", "tool_call_id") if isinstance(v := given.get(key), str)}
    thinking = given.get("reasoning_content") or given.get("reasoning")
    return Message(
        role="system" if given["role"] == "developer" else given["role"],  # newer name of the system role
        **message_content("" if given.get("content") is None else given["content"], f"{where}.content", finder),
        thinking=thinking if isinstance(thinking, str) else "",
        tool_calls=tuple(call(one, f"{where}.tool_calls.{i}") for i, one in enumerate(calls)),
        **told,
    )


def message_content(given: Any, where: str, finder: Finder = NOWHERE) -> dict[str, Any]:
    """Content and images of a message: text, or a list of parts. Raises `Refused`."""
    if not isinstance(given, list):
        return {"content": text(given, where)}
    try:
        words, pictures = content(given, finder)
    except BirlError as error:
        raise invalid(where, f"{error}".strip()[:300]) from error
    return {"content": words, "pictures": tuple(pictures)}


def text(given: Any, where: str) -> str:
    """A text, or the joined texts of a list of parts. Raises `Refused`."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid(where, "must be text or a list of parts")
    for part in given:
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise invalid(where, f"has a part of type {kind!r}; the model reads text only"[:200])
    return "".join(part["text"] for part in given)


def call(given: Any, where: str) -> ToolCall:
    """An earlier tool call of the assistant."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(where, "must have a function with a name and arguments")
    arguments = function.get("arguments") or "{}"
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        text = json.dumps(read, ensure_ascii=False)
        text.encode()  # raises for half a surrogate pair, which nested JSON may contain
    except (ValueError, RecursionError):
        read, text = None, ""
    if not isinstance(read, dict):
        raise invalid(f"{where}.function.arguments", "must be JSON text of an object")
    own = given["id"] if isinstance(given.get("id"), str) else ""
    return ToolCall(name=function["name"], arguments=text, id=own)


def check_tool(tool: Any, place: int) -> None:
    """Check a client's tool. Raises `Refused`."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"tools.{place}", 'must be {"type": "function", "function": {"name": ...}}')
    if not isinstance(function.get("parameters"), dict | None):
        raise invalid(f"tools.{place}.function.parameters", "must be a JSON schema: an object")


def typed(data: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """The value of `key`; null counts as absent. Raises `Refused` for another type."""
    value = data.get(key)
    if value is None:
        if default is None and kind is list:
            raise invalid(key, "is missing")
        return default
    good = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not good or (isinstance(value, bool) and kind is not bool):
        words = {bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
        words[str] = "text"
        raise invalid(key, f"must be {words[kind]}, got {json.dumps(value)[:80]}")
    try:
        return float(value) if kind is float else value
    except OverflowError:
        raise invalid(key, "is too large") from None


def invalid(key: str, what: str) -> Refused:
    return Refused(400, f"{key}: {what}{'' if what.endswith(('?', '.')) else '.'}", param=key)
