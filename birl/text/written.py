"""Tools for a chat template that has none: written into the messages, in the format of Hermes.

The system message ends with the tools and with how to call one, a call is part of the assistant's text, and results
are user messages. Where the template takes no system message the first user message has all that."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Dict = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]

BEFORE = "You may call these functions. Their signatures are within <tools></tools>:\n<tools>\n"
BEHIND = (
    "</tools>\nTo call one, write a JSON object with its name and arguments within <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": "the_function", "arguments": {"the_argument": 1}}\n</tool_call>\n'
    "What it gives comes within <tool_response></tool_response>."
)
NOTE = (
    "birl: the model's chat template leaves out tools, so they are written into the {} message in the hermes format "
    "(model.chat_template=hermes, or FILE.jinja, is a template with tools)."
)


def written(messages: Messages, tools: Sequence[Mapping[str, Any]], system: bool) -> list[Dict]:
    """The same conversation in messages that have text alone. `system`: the template takes a system message."""
    result: list[Dict] = []
    answers = False  # is the newest message made of results?
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if answers and role in ("tool", "user"):  # some templates want user and assistant in turns
            result[-1]["content"] += f"\n{content}"
        else:
            own = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
            calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
            own["content"] = "\n".join([*([content] if content else []), *calls])
            result.append({**own, "role": "user"} if role == "tool" else own)
        answers = role == "tool"
    return _told(result, tools, system) if tools else result


def _told(messages: list[Dict], tools: Sequence[Mapping[str, Any]], system: bool) -> list[Dict]:
    signatures = "".join(f"{_json(tool.get('function', tool))}\n" for tool in tools)
    first = messages[0] if messages else {}
    if first.get("role") == ("system" if system else "user"):
        text = f"{first['content']}\n\n{BEFORE}{signatures}{BEHIND}"
        return [{**first, "content": text}, *messages[1:]]
    return [{"role": "system" if system else "user", "content": BEFORE + signatures + BEHIND}, *messages]


def _call(function: Mapping[str, Any]) -> str:
    name, arguments = _json(function["name"]), _json(function["arguments"])
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
