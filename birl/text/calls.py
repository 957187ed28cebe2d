"""Parsers of tool calls in replies, one for each format: text and declared tools -> the remaining text, and the calls.
Invalid calls stay in the text."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from birl.text.thinking import ParsedReply
from birl.types import ToolCall

Tools = Sequence[Mapping[str, Any]]
Read = tuple[str, tuple[ToolCall, ...]]
#: parses calls at a position: the calls and their end; None if there are none
At = Callable[[str, int], tuple[list[ToolCall], int] | None]

SPACE = re.compile(r"\s*")
CODER = re.compile(r"<tool_call>\s*<function=([^<>\s]+)>\s*")
CODER_END = re.compile(r"\s*</function>\s*</tool_call>")
PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))\s*", re.DOTALL)
MISTRAL_NAME = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]{}]+))?\[ARGS\]")
DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\s<]+)\s*```json\s*|([^\s<]+)<｜tool▁sep｜>\s*)"
)
DEEPSEEK_END = re.compile(r"\s*(?:```\s*)?<｜tool▁call▁end｜>")
DEEPSEEK_LAST = re.compile(r"\s*<｜tool▁calls▁end｜>")
GEMMA_CALL = re.compile(r"\s*call:([^\s{}:<>]+)\{")
GEMMA_KEY = re.compile(r"\s*([^\s:{}\[\],<>]+):")
GEMMA_ATOM = re.compile(r"[^,{}\[\]<>]+")
LLAMA4 = re.compile(r"\s*<\|python_start\|>(.*?)<\|python_end\|>(.*)", re.DOTALL)
#: as Jinja's `string` filter writes JSON's values: the templates of Qwen 3.5 and the first one of Gemma 4
WRITTEN = {"True": "true", "False": "false", "None": "null"}
#: types of a JSON schema by those of Python, text aside
KINDS: dict[type, set[str]] = {
    **{bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}},
    **{list: {"array"}, dict: {"object"}, str: set()},
}


def hermes(text: str, tools: Tools) -> Read:
    """<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>"""

    def at(text: str, place: int) -> tuple[list[ToolCall], int] | None:
        data, end = value(text, place + len("<tool_call>"))
        end = past(text, end)
        call = named(data)
        return ([call], end + len("</tool_call>")) if call and text.startswith("</tool_call>", end) else None

    return beside(text, "<tool_call>", at)


def qwen_coder(text: str, tools: Tools) -> Read:
    """<tool_call><function=add><parameter=a>3</parameter></function></tool_call>: a value is text if the tool's schema
    says string, or nothing; else JSON."""
    known = schemas(tools)

    def at(text: str, place: int) -> tuple[list[ToolCall], int] | None:
        if not (opened := CODER.match(text, place)):
            return None
        result: dict[str, Any] = {}
        end = opened.end()
        while text.find("</parameter>", end) >= 0 and (parameter := PARAMETER.match(text, end)):  # else a long search
            result[parameter[1]] = typed(parameter[2], parameter[1], known.get(opened[1], {}))
            end = parameter.end()
        closed = CODER_END.match(text, end)
        call = made(opened[1], result)
        return ([call], closed.end()) if call and closed else None

    return beside(text, "<tool_call>", at)


def llama(text: str, tools: Tools) -> Read:
    """{"name": "add", "parameters": {"a": 3}}, several separated by ;. Such JSON is a call after <|python_tag|>, or if
    it is the whole reply and names a declared tool. Llama 4: behind or between <|python_start|> and <|python_end|>."""
    before, tag, rest = text.partition("<|python_tag|>")
    if four := LLAMA4.fullmatch(text):
        before, tag, rest = (four[1], "4", four[2]) if four[2].strip() else ("", "4", four[1])
    calls = list(_objects(rest if tag else text))
    if not calls or None in calls:
        return text, ()
    known = {c.name for c in calls if c} <= set(schemas(tools))
    return (before.rstrip() if tag else "", tuple(c for c in calls if c)) if tag or known else (text, ())


def _objects(text: str) -> Iterator[ToolCall | None]:
    """Each call of a text that has only calls; None for an invalid one."""
    place = past(text, 0)
    while place < len(text):
        data, end = value(text, place)
        key = next((k for k in ("parameters", "arguments") if isinstance(data, dict) and set(data) == {"name", k}), "")
        call = named(data, key) if key else None
        yield call
        place = past(text, end)
        if call is None or (place < len(text) and text[place] not in ";{"):
            yield None
            return
        place = past(text, place + text.startswith(";", place))


def mistral(text: str, tools: Tools) -> Read:
    """[TOOL_CALLS][{"name": "add", "arguments": {"a": 3}, "id": "abcdefghi"}], or [TOOL_CALLS]add[ARGS]{"a": 3}"""

    def at(text: str, place: int) -> tuple[list[ToolCall], int] | None:
        if newer := MISTRAL_NAME.match(text, place):
            data, end = value(text, newer.end())
            call = made(newer[1], data, newer[2] or "")
            return ([call], end) if call else None
        data, end = value(text, place + len("[TOOL_CALLS]"))
        calls = [named(one) for one in data] if isinstance(data, list) else []
        return ([c for c in calls if c], end) if calls and None not in calls else None

    return beside(text, "[TOOL_CALLS]", at)


def deepseek(text: str, tools: Tools) -> Read:
    """DeepSeek V3 and R1 (function, separator, name, JSON in a fence) and V3.1 (name, separator, JSON)."""

    def at(text: str, place: int) -> tuple[list[ToolCall], int] | None:
        end, calls = place + len("<｜tool▁calls▁begin｜>"), []
        while opened := DEEPSEEK_CALL.match(text, end):
            data, end = value(text, opened.end())
            call, closed = made(opened[1] or opened[2], data), DEEPSEEK_END.match(text, end)
            if not call or not closed:
                return None
            calls.append(call)
            end = closed.end()
        last = DEEPSEEK_LAST.match(text, end)
        return (calls, last.end()) if calls and last else None

    return beside(text, "<｜tool▁calls▁begin｜>", at)


def function_gemma(text: str, tools: Tools) -> Read:
    """<start_function_call>call:add{a:3,unit:<escape>m<escape>}<end_function_call>"""
    return _gemma(text, "<start_function_call>", "<end_function_call>", "<escape>")


def gemma4(text: str, tools: Tools) -> Read:
    """<|tool_call>call:add{a:3,unit:<|"|>m<|"|>}<tool_call|>"""
    return _gemma(text, "<|tool_call>", "<tool_call|>", '<|"|>')


def _gemma(text: str, opening: str, closing: str, quote: str) -> Read:
    def at(text: str, place: int) -> tuple[list[ToolCall], int] | None:
        if not (opened := GEMMA_CALL.match(text, place + len(opening))):
            return None
        try:
            result, end = _fields(text, opened.end(), quote)
            call = made(opened[1], result)
        except (ValueError, RecursionError):
            return None
        return ([call], end + len(closing)) if call and text.startswith(closing, end) else None

    return beside(text, opening, at)


def _fields(text: str, place: int, quote: str) -> tuple[dict[str, Any], int]:
    """Parse the fields after an opening brace. Raises `ValueError`."""
    result: dict[str, Any] = {}
    while not text.startswith("}", place):
        if not (key := GEMMA_KEY.match(text, place)):
            raise ValueError("no key")
        result[key[1]], place = _gemma_value(text, key.end(), quote)
        place = _comma(text, place, "}")
    return result, place + 1


def _gemma_value(text: str, place: int, quote: str) -> tuple[Any, int]:
    if text.startswith(quote, place):
        end = text.index(quote, place + len(quote))
        return text[place + len(quote) : end], end + len(quote)
    if text.startswith("{", place):
        return _fields(text, place + 1, quote)
    if text.startswith("[", place):
        result, place = [], place + 1
        while not text.startswith("]", place):
            one, place = _gemma_value(text, place, quote)
            result.append(one)
            place = _comma(text, place, "]")
        return result, place + 1
    if not (atom := GEMMA_ATOM.match(text, place)):
        raise ValueError("no value")
    return json.loads(WRITTEN.get(atom[0], atom[0]), parse_constant=_refuse), atom.end()


def _comma(text: str, place: int, last: str) -> int:
    """Position after the comma, or at the closing bracket."""
    if text.startswith(",", place):
        return place + 1
    if text.startswith(last, place):
        return place
    raise ValueError("no comma")


def beside(text: str, opening: str, at: At) -> Read:
    """Parse calls with `at` at every occurrence of `opening`; returns the other text and the calls."""
    calls: list[ToolCall] = []
    rest, done, place = "", 0, text.find(opening)
    while place >= 0:
        if result := at(text, place):
            calls += result[0]
            rest += text[done:place]
            done = result[1]
        place = text.find(opening, max(done, place + 1))
    rest += text[done:]
    return (rest.rstrip() if calls else rest), tuple(calls)


def value(text: str, place: int) -> tuple[Any, int]:
    """The JSON value at a position, after blanks, and its end; None if there is none."""
    try:
        return JSON.raw_decode(text, past(text, place))
    except (ValueError, RecursionError):
        return None, place


def named(data: Any, arguments: str = "arguments") -> ToolCall | None:
    """Make a call from an object with a name and arguments."""
    if not isinstance(data, dict):
        return None
    given = data.get("id", "")
    return made(data.get("name"), data.get(arguments, {}), given if isinstance(given, str) else "")


def made(name: Any, arguments: Any, id: str = "") -> ToolCall | None:
    """Make a call; None if it is invalid or could not be rendered again: half a surrogate pair is no text."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text + id).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(name=name, arguments=text, id=id)


def typed(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Parse the parameter `name` of a tool with this schema: JSON of a type that the schema allows; else text."""
    properties = schema.get("properties")
    known = kinds(properties.get(name), schema) if isinstance(properties, Mapping) else set[str]()
    if known <= {"string"}:
        return text
    try:
        result = json.loads(WRITTEN.get(text, text), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return text if "string" in known and not known & KINDS[type(result)] else result


def kinds(schema: Any, whole: Mapping[str, Any]) -> set[str]:
    """Types that a schema allows, with those of its references into `whole`; empty if it names none."""
    todo, seen, result = [schema], set[int](), set[str]()
    while todo:
        one = todo.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        named = one.get("type")
        result |= {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
        place, *path = str(one.get("$ref", "")).split("/")
        target: Any = whole if place == "#" else None
        for part in path:
            target = target.get(part) if isinstance(target, Mapping) else None
        groups = (one.get(key) for key in ("anyOf", "oneOf", "allOf"))
        todo += [target, *(inner for group in groups if isinstance(group, list) for inner in group)]
    return result


def schemas(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Parameter schemas of the tools, by name."""
    result = [tool.get("function", tool) for tool in tools]
    return {f["name"]: f.get("parameters") or {} for f in result if isinstance(f, Mapping) and "name" in f}


def past(text: str, place: int) -> int:
    """Position after blanks."""
    match = SPACE.match(text, place)
    return match.end() if match else place


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


JSON = json.JSONDecoder(parse_constant=_refuse)


HARMONY = re.compile(
    r"\s*(?:<\|start\|>assistant)?(?:\s*to=([^\s<]+))?\s*<\|channel\|>(analysis|commentary|final)(?:\s+to=([^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?\s*(json|code)?\s*<\|message\|>(.*?)(<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


def harmony(text: str, tools: Tools) -> ParsedReply:
    """Parse GPT-OSS's channels: analysis is thinking, final is the answer, commentary to functions.NAME a call, other
    commentary is text for the user before a call. Text without a channel, and invalid calls, are content."""
    thinking: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    place, closed = 0, True
    while place < len(text) and (result := HARMONY.match(text, place)):
        to, channel, body = result[1] or result[3], result[2], result[5]
        place = result.end()
        if to:
            call = _addressed(to, body) if tools and channel != "final" else None
            calls += [call] if call else []
            content += [] if call else [result[0]]
        elif channel == "analysis":
            thinking.append(body)
            closed = bool(result[6])
        else:
            content.append(body)
    content += [text[place:]] if text[place:] else []
    return ParsedReply(
        thinking="\n\n".join(thinking) if thinking else None,
        content="".join(content),
        calls=tuple(calls),
        closed=closed,
    )


def _addressed(to: str, body: str) -> ToolCall | None:
    if not to.startswith("functions."):
        return None
    data, end = value(body, 0)
    return made(to.removeprefix("functions."), data) if past(body, end) == len(body) else None
