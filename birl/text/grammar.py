"""Constrained decoding: answers that must be JSON, one of some texts, or tool calls. A grammar in Lark's syntax for the
library llguidance determines the tokens that may come next (`Guide`)."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from birl.text.calls import Tools
from birl.text.formats import FORMATS

if TYPE_CHECKING:
    from birl.text.chat import Chat

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANYTHING = r"/(.|\n)*/"


class Guide:
    """The tokens that a grammar allows at each position."""

    def __init__(self, chat: "Chat", grammar: str) -> None:
        from llguidance import LLMatcher

        self.matcher = LLMatcher(chat.words_of_grammars, grammar, log_level=0)

    def allowed(self, words: int) -> NDArray[np.bool_]:
        """Mask of the first `words` tokens that may come next, [words]; all False if the library gave up."""
        bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")[:words]
        result = np.zeros(words, dtype=np.bool_)
        result[: len(bits)] = bits
        return result

    def take(self, token: int) -> bool:
        """Advance by this token; returns whether the answer is complete and cannot grow."""
        return not self.matcher.consume_token(token) or self.matcher.is_stopped()


def words_of(chat: "Chat") -> Any:
    """The tokenizer in llguidance's form."""
    from llguidance.hf import from_tokenizer

    tokenizer: Any = chat.tokenizer
    return from_tokenizer(tokenizer, n_vocab=len(chat.tokenizer), eos_token=sorted(chat.end_ids))


def problem(chat: "Chat", grammar: str) -> str:
    """Error of a grammar; empty if it is valid."""
    from llguidance import LLMatcher

    result = LLMatcher.validate_grammar(grammar, chat.words_of_grammars)
    return "" if result.startswith("WARNING") else result.split("\n")[0]


def json_of(schema: Mapping[str, Any], strict: bool = True) -> str:
    """JSON grammar of a schema. Without `strict`, features that the library does not know are ignored."""
    return "%json " + json.dumps({**schema, "x-guidance": {**SPACING, "lenient": not strict}})


def whole(chat: "Chat", body: str, opened: bool) -> str:
    """Grammar of an answer with the text `body`, after the model's thinking. `opened`: the prompt has opened it."""
    if chat.tags is None:
        return f"start: body\nbody: {body}\n"
    start, end = (token(chat, tag) for tag in chat.tags)
    rules = f"think: {ANYTHING} {end}" if end.startswith("<[") else f"think[suffix={end}]: {ANYTHING}"
    rules += f"\nthoughts: {'' if opened else start} think /\\n*/"
    return f"start: thoughts{'' if opened else '?'} body\n{rules}\nbody: {body}\n"


def calls_of(chat: "Chat", tools: Tools, *, many: bool, text: str = "") -> str | None:
    """Grammar of an answer's text that calls `tools`, `many` or one. `text`: another answer that is allowed; "any": any
    text, also with calls. None for formats whose calls have no grammar here."""
    functions = [tool["function"] for tool in tools]
    name = next((n for n, form in FORMATS.items() if form is chat.format), "")
    if name == "hermes":
        opening, closing = token(chat, "<tool_call>"), token(chat, "</tool_call>")
        body = " | ".join(f"({_object(f, 'arguments')})" for f in functions)
        rest = f'/\\n/ ({body}) "\\n" {closing}'
        if text == "any":
            lead = f"{ANYTHING} {opening}"
            rules = f"lead: {lead}" if opening.startswith("<[") else f"lead[lazy]: {lead}"
            return f"(lead {rest})* tail\n{rules}\ntail: {ANYTHING}"
        result = f"{opening} {rest}" + (f' ("\\n" {opening} {rest})*' if many else "")
    elif name == "llama" and text != "any":
        result = " | ".join(_object(f, "parameters") for f in functions)
    elif name == "mistral" and text != "any":
        tag = token(chat, "[TOOL_CALLS]")
        if "[ARGS]" in str(chat.tokenizer.chat_template):
            separator = token(chat, "[ARGS]")
            one = " | ".join(f"({tag} {json.dumps(f['name'])} {separator} {_arguments(f)})" for f in functions)
            result = f"({one})" + ("+" if many else "")
        else:
            one = " | ".join(f"({_object(f, 'arguments')})" for f in functions)
            more = f'(", " ({one}))*' if many else ""
            result = f'{tag} "[" ({one}) {more} "]"'
    else:
        return None
    return f"({result}) | ({text})" if text else result


def token(chat: "Chat", text: str) -> str:
    """A text in a grammar: as a token if it is or begins with one, else as a string."""
    added: dict[str, int] = chat.tokenizer.get_added_vocab()  # pyright: ignore
    own = max((name for name in added if text.startswith(name)), key=len, default="")
    rest = json.dumps(text.removeprefix(own))
    return f"<[{added[own]}]>" + (f" {rest}" if own != text else "") if own else rest


def _object(function: Mapping[str, Any], key: str) -> str:
    head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    return f'{json.dumps(head)} {_arguments(function)} "}}"'


def _arguments(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {"properties": {}}
    closed = "properties" in schema and not schema.keys() & {"allOf", "anyOf", "oneOf", "$ref"}  # arguments have names
    return json_of(
        {"type": "object"} | ({"additionalProperties": False} if closed else {}) | dict(schema),
        strict=bool(function.get("strict")),
    )
