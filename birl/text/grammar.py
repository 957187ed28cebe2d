"""Answers that must have a form: JSON, one of some texts, or calls of tools. A grammar in Lark's words, as the library
llguidance has it, says which tokens may come next (`Guide`)."""

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
    """The tokens that a grammar allows, one place after the other."""

    def __init__(self, chat: "Chat", grammar: str) -> None:
        from llguidance import LLMatcher

        self.matcher = LLMatcher(chat.words_of_grammars, grammar, log_level=0)

    def allowed(self, words: int) -> NDArray[np.bool_]:
        """Which of the first `words` tokens may come next, [words]; none where the library gave the grammar up."""
        bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")[:words]
        result = np.zeros(words, dtype=np.bool_)
        result[: len(bits)] = bits
        return result

    def take(self, token: int) -> bool:
        """Go on with this token; says whether the answer is complete and cannot grow."""
        return not self.matcher.consume_token(token) or self.matcher.is_stopped()


def words_of(chat: "Chat") -> Any:
    """The tokenizer as llguidance has it."""
    from llguidance.hf import from_tokenizer

    tokenizer: Any = chat.tokenizer
    return from_tokenizer(tokenizer, n_vocab=len(chat.tokenizer), eos_token=sorted(chat.end_ids))


def problem(chat: "Chat", grammar: str) -> str:
    """What is wrong with a grammar; empty where nothing is."""
    from llguidance import LLMatcher

    result = LLMatcher.validate_grammar(grammar, chat.words_of_grammars)
    return "" if result.startswith("WARNING") else result.split("\n")[0]


def json_of(schema: Mapping[str, Any], strict: bool = True) -> str:
    """JSON of this schema. Without `strict`, what the library does not know in a schema is left out."""
    return "%json " + json.dumps({**schema, "x-guidance": {**SPACING, "lenient": not strict}})


def whole(chat: "Chat", body: str, opened: bool) -> str:
    """A grammar of an answer whose text is `body`, behind the model's thinking. `opened`: the prompt began it."""
    if chat.tags is None:
        return f"start: body\nbody: {body}\n"
    start, end = (token(chat, tag) for tag in chat.tags)
    rules = f"think: {ANYTHING} {end}" if end.startswith("<[") else f"think[suffix={end}]: {ANYTHING}"
    rules += f"\nthoughts: {'' if opened else start} think /\\n*/"
    return f"start: thoughts{'' if opened else '?'} body\n{rules}\nbody: {body}\n"


def calls_of(chat: "Chat", tools: Tools, *, many: bool, text: str = "") -> str | None:
    """The body of an answer that calls `tools`, `many` or one. `text`: what else an answer may be; "any": text of any
    kind, calls in it included. None for formats whose calls have no grammar here."""
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
    """A piece of text, as the token that it is where it is one."""
    added = chat.tokenizer.get_added_vocab()  # pyright: ignore
    return f"<[{added[text]}]>" if text in added else json.dumps(text)


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
