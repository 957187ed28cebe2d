"""A list of {role, content} in a row -> `Message`s, as the chat templates of OpenAI, transformers and TRL have them.

content       text, or a list of text and picture parts (`birl/text/parts.py`); null or absent if an assistant only
              calls tools
tool_calls    {"function": {"name", "arguments"}} or {"name", "arguments"}; arguments as an object or as JSON text
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from birl.errors import BirlError, did_you_mean
from birl.text.parts import Finder, content
from birl.types import PLACE, Message, Picture, ToolCall

COLUMNS = ("images", "image")

KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
LEARNED = {"weight": 1, "train": True, "training": True}  # fields by which some formats exclude a message from training

# Roles of chat templates. Others would be rendered by some templates and left out by others.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "environment")
ALIASES = {
    **dict.fromkeys(("bot", "model", "gpt", "ai", "chatbot", "agent", "chatgpt", "answer"), "assistant"),
    **dict.fromkeys(("human", "prompter", "question"), "user"),
}
# a list of messages that became text, by json.dumps or str
WRITTEN = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
SPEAKS = re.compile(r"""["']role["']\s*:\s*["'](system|user|assistant)["']""")


@dataclass(slots=True)
class Shown:
    """The pictures of a row's column `images` or `image`, and the finder of all others."""

    finder: Finder = field(default_factory=Finder)
    beside: tuple[Picture, ...] = ()

    @classmethod
    def of(cls, row: Mapping[str, Any], finder: Finder, where: str) -> "Shown":
        """Raises `BirlError`."""
        name = next((name for name in COLUMNS if row.get(name)), None)
        if name is None:
            return cls(finder)
        given = row[name] if isinstance(row[name], list) else [row[name]]
        try:
            return cls(finder, tuple(finder.picture(one) for one in given))
        except BirlError as error:
            raise BirlError(f"{where}: `{name}` {error}.") from error

    def placed(self, messages: tuple[Message, ...], taken: int) -> tuple[Message, ...]:
        """Put the row's pictures before the text of the first user message if no message shows them (as TRL does)."""
        if taken == len(self.beside):
            return messages
        first = next((i for i, m in enumerate(messages) if m.role == "user"), 0)
        if taken:
            raise BirlError(
                f"The messages show {taken} of {len(self.beside)} pictures of column `images`: show each, or none"
            )
        own = messages[first]
        text = PLACE * len(self.beside) + own.content
        shown = replace(own, content=text, pictures=(*self.beside, *own.pictures))
        return (*messages[:first], shown, *messages[first + 1 :])


def kind(value: Any) -> str:
    return KINDS.get(type(value), f"a {type(value).__name__}")


def text_of(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise BirlError(f"{where}: {field} is {kind(value)}, it needs to be text.")
    if not value.strip():
        raise BirlError(f"{where}: {field} is empty. Remove the row.")
    return _whole(value, where, field)


def plain_text(value: Any, where: str, field: str) -> str:
    """Return a text column. Raises `BirlError` if it is a list of messages written as text, as in CSV: a model would
    read its brackets and quotes."""
    text = text_of(value, where, field)
    if WRITTEN.match(text) and SPEAKS.search(text):
        raise BirlError(
            f"{where}: `{field}` is a list of messages written as text. Write the list itself, in JSONL or Parquet."
        )
    return text


NO_TOOLS = "tools are not supported in these prompts. Write them into the system message, or remove the column."


def check_input(row: Mapping[str, Any], prompt: str | None, where: str, alone: bool = False) -> None:
    """Raises `BirlError` for columns that would be missing in the prompt: `input` beside Alpaca's `instruction`, and
    tools if the row is `alone`, without an environment that may have them."""
    if alone and row.get("tools"):
        raise BirlError(f"{where}: `tools` would be ignored: {NO_TOOLS} An environment can have tools.")
    if prompt == "instruction" and row.get("input"):
        raise BirlError(
            f"{where}: `input` would be ignored, as `instruction` alone is the prompt. Make one text of both."
        )


def _whole(value: str, where: str, field: str) -> str:
    """Raises `BirlError` for a lone surrogate, which no tokenizer accepts; rows of a program may have one."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BirlError(f"{where}: {field} has half a surrogate pair (\\ud800 to \\udfff). Correct the row.") from None
    return value


def messages_of(
    value: Any, where: str, field: str, whole: bool = False, shown: Shown | None = None
) -> tuple[Message, ...]:
    """Parse a list of {role, content}. Unless it is the `whole` conversation, it must not end with an answer. `shown`:
    the row's pictures. Raises `BirlError`, also for parts of a message beside its content, such as thoughts: a model
    would learn an answer without them."""
    if not isinstance(value, list):
        raise BirlError(f"{where}: {field} is {kind(value)}, it needs to be text or a list of messages.")
    if not value:
        raise BirlError(f"{where}: `{field}` is empty. Remove the row.")
    unread = ("function_call", *(THOUGHTS if whole else ()))
    shown = shown or Shown()
    left = iter(shown.beside)
    result = tuple(_message(m, where, f"{field}[{i}]", unread, (shown.finder, left)) for i, m in enumerate(value))
    try:
        result = shown.placed(result, len(shown.beside) - sum(1 for _ in left))
    except BirlError as error:
        raise BirlError(f"{where}: {field}: {error}.") from error
    if whole:
        return result
    if result[-1].role == "assistant":
        raise BirlError(
            f"{where}: {field} ends with an assistant message, so there is nothing left to answer. "
            "Move that message into a column `answer`; whole conversations are for `birl sft`."
        )
    text_of(result[-1].content, where, f"{field}[{len(result) - 1}].content")
    return result


Given = tuple[Finder, Iterator[Picture]]


def _message(value: Any, where: str, field: str, unread: Sequence[str], given: Given) -> Message:
    says = isinstance(value, Mapping) and (value.get("tool_calls") or "content" in value)
    if not isinstance(value, Mapping) or value.get("role") is None or not says:
        result = f"has {', '.join(value)}" if isinstance(value, Mapping) else f"is {kind(value)}"
        raise BirlError(f'{where}: {field} {result}; a message is {{"role": "user", "content": "..."}}.')
    if name := next((name for name in unread if value.get(name)), None):
        raise BirlError(
            f"{where}: {field}.{name} is not supported. Put the text into `content`, as the model's template writes it."
        )
    for name, learned in LEARNED.items() if THOUGHTS[0] in unread else ():
        if value.get(name) not in (None, learned):
            raise BirlError(
                f"{where}: {field}.{name} is {value[name]!r:.20}, which is not supported: data.train_on selects the "
                "trained roles. Put untrained messages into `prompt`, and the rest into `completion`."
            )
    role = value["role"]
    if not isinstance(role, str):
        raise BirlError(f"{where}: {field}.role is {kind(role)}, it needs to be text.")
    if role not in ROLES:
        near = ALIASES.get(role.lower(), "")
        hint = f" Did you mean {near}?" if near else did_you_mean(role, ROLES)
        raise BirlError(f"{where}: {field}.role is {role[:80]!r}; roles are {', '.join(ROLES)}.{hint}")
    calls = _calls(value.get("tool_calls"), where, f"{field}.tool_calls", role)
    body, answers = value.get("content"), role == "tool"
    text, pictures = ("", ()) if calls and body is None else _content(body, where, f"{field}.content", given)
    return Message(
        role=role,
        content=text,
        pictures=pictures,
        tool_calls=calls,
        tool_call_id=_optional(value, "tool_call_id", where, field) if answers else "",
        name=_optional(value, "name", where, field) if answers else "",
    )


def _optional(value: Mapping[str, Any], name: str, where: str, field: str) -> str:
    result = value.get(name)
    if result is not None and not isinstance(result, str):
        raise BirlError(f"{where}: {field}.{name} is {kind(result)}, it needs to be text.")
    return result or ""


def _content(value: Any, where: str, field: str, given: Given) -> tuple[str, tuple[Picture, ...]]:
    """Return the text, or the parts joined as templates do, and their pictures."""
    if not isinstance(value, list):
        if not isinstance(value, str):
            raise BirlError(f"{where}: {field} is {kind(value)}, it needs to be text.")
        return _whole(value, where, field), ()
    for i, part in enumerate(value):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise BirlError(f'{where}: {field}[{i}] is {kind(part)}; a part is {{"type": "text", "text": "..."}}.')
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise BirlError(f"{where}: {field}[{i}].text is {kind(part.get('text'))}, it needs to be text.")
    try:
        text, pictures = content(value, *given)
    except BirlError as error:
        raise BirlError(f"{where}: {field}{error}. Correct or remove the row.") from error
    return _whole(text, where, field), tuple(pictures)


def _calls(value: Any, where: str, field: str, role: str) -> tuple[ToolCall, ...]:
    if not value:
        return ()
    if not isinstance(value, list) or role != "assistant":
        why = "is for assistant messages only" if isinstance(value, list) else f"is {kind(value)}, it needs a list"
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
        raise BirlError(f"{where}: {field}: the arguments of {function['name']} are not an object or JSON text of one.")
    text = arguments if isinstance(arguments, str) else json.dumps(given, ensure_ascii=False)
    return ToolCall(name=function["name"], arguments=text, id=_optional(value, "id", where, field))
