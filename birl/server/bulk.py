"""How much a request may hold: looked at before anything of it is rendered or tokenized."""

from collections.abc import Mapping, Sequence
from typing import Any

from birl.server.limits import Refused
from birl.text.bounds import CHARACTERS
from birl.text.parts import IMAGES

THINGS = 32  # keys and values of JSON for each token,
SPARE = 20_000  # and beside them: settings, schemas
DEPTH = 100
NAMES = 256  # characters of a role, a name or an id
TOOLS = 1024  # each is rendered, and looked up by its name


def check_bulk(data: Mapping[str, Any], context: int, but: Sequence[str] = ()) -> None:
    """`data` is a request, `but` keys that are looked at elsewhere. Raises `Refused` for what cannot fit into `context`
    tokens."""
    if isinstance(tools := data.get("tools"), list) and len(tools) > TOOLS:
        raise Refused(400, f"tools: {len(tools)} tools; at most {TOOLS} are taken.", param="tools")
    for key, value in data.items():
        if key not in but:
            _measure(key, value, context)
    messages = data.get("messages")
    if not isinstance(messages, list):
        return
    if len(messages) > context:
        raise too_large("messages", f"{len(messages)} messages", context)
    for place, message in enumerate(messages):
        for key in ("role", "name", "tool_call_id") if isinstance(message, dict) else ():
            if isinstance(message.get(key), str) and len(message[key]) > NAMES:
                raise Refused(
                    400, f"messages.{place}.{key}: has {len(message[key])} characters; at most {NAMES} are taken.",
                    param=f"messages.{place}.{key}",
                )  # fmt: skip


def check_text(text: str, key: str, context: int) -> None:
    if len(text) > CHARACTERS * context:
        raise too_large(key, f"{len(text)} characters", context)


def too_large(key: str, what: str, context: int) -> Refused:
    return Refused(
        400, f"{key}: {what} cannot fit into the context of {context} tokens.",
        param=key, code="context_length_exceeded",
    )  # fmt: skip


def _measure(key: str, value: Any, context: int) -> None:
    characters, things, level, depth = 0, 0, [value], 0
    while level:
        depth += 1
        if depth > DEPTH:
            raise Refused(400, f"{key}: is nested more than {DEPTH} deep.", param=key)
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                characters += len(one)
            elif isinstance(one, dict) and one.get("type") in IMAGES:
                pass  # its bytes are no text: what a request may have of them bounds them
            elif isinstance(one, dict):
                characters += sum(map(len, one))
                below += one.values()
            elif isinstance(one, list):
                below += one
        things += len(level)
        if characters > CHARACTERS * context + SPARE:
            raise too_large(key, f"{characters} characters", context)
        if things + len(below) > THINGS * context + SPARE:
            raise too_large(key, f"{things + len(below)} keys and values", context)
        level = below
