"""Replies as the models' makers document them, and what is none of that."""

import json

import pytest

from birl.text.formats import FORMATS, parts
from birl.types import ToolCall

WEATHER = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "location": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": ["boolean", "null"]},
                },
            },
        },
    },
)
THINK = ("<think>", "</think>")


def read(form: str, text: str, tags: tuple[str, str] | None = None, opened: bool = False):
    found = parts(text, FORMATS[form], tags, WEATHER, opened)
    return found.thinking, found.content, [(c.name, json.loads(c.arguments)) for c in found.calls]


PARIS = ("get_weather", {"location": "Paris"})
ROME = ("get_weather", {"location": "Rome"})


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>',
            "",
            [PARIS],
        ),
        (
            "hermes",
            'I look.\n<tool_call>{"arguments": {"location": "Paris"}, "name": "get_weather"}</tool_call>\n'
            '<tool_call>{"name": "get_weather", "arguments": {"location": "</tool_call>"}}</tool_call>',
            "I look.",
            [PARIS, ("get_weather", {"location": "</tool_call>"})],
        ),
        (
            "qwen_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=location>\n12\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=new>\n5\n</parameter>\n</function>\n</tool_call>",
            "",
            [("get_weather", {"location": "12", "days": 3, "exact": True, "new": "5"})],
        ),
        (
            "qwen_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
            "",
            [("get_weather", {"days": "many"})],
        ),
        ("llama", '{"name": "get_weather", "parameters": {"location": "Paris"}}', "", [PARIS]),
        ("llama", ' {"parameters": {"location": "Paris"}, "name": "get_weather"}\n', "", [PARIS]),
        (
            "llama",
            '{"name": "get_weather", "parameters": {"location": "Paris"}}; '
            '{"name": "get_weather", "parameters": {"location": "Rome"}}',
            "",
            [PARIS, ROME],
        ),
        (
            "qwen_coder",  # as the template of Qwen 3.5 writes what its schema calls a boolean
            "<tool_call>\n<function=get_weather>\n<parameter=location>\nTrue\n</parameter>\n<parameter=exact>\nFalse\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            [("get_weather", {"location": "True", "exact": False})],
        ),
        (
            "llama",  # 4
            '<|python_start|>I look.<|python_end|>{"name": "get_weather", "parameters": {"location": "Paris"}}'
            '{"name": "get_weather", "parameters": {"location": "Rome"}}',
            "I look.",
            [PARIS, ROME],
        ),
        (
            "llama",
            '<|python_start|>{"name": "get_weather", "parameters": {"location": "Paris"}}<|python_end|>',
            "",
            [PARIS],
        ),
        ("llama", 'So: <|python_tag|>{"name": "other", "parameters": {}}', "So:", [("other", {})]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"location": "Paris"}, "id": "VvvODy9mT"}, '
            '{"name": "get_weather", "arguments": {"location": "Rome"}}]',
            "",
            [PARIS, ROME],
        ),
        (
            "mistral",
            'I look.[TOOL_CALLS]get_weather[ARGS]{"location": "Paris"}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]'
            '{"location": "Rome"}',
            "I look.",
            [PARIS, ROME],
        ),
        (
            "deepseek",
            "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"location": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n'
            "```json\n"
            '{"location": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "I look.",
            [PARIS, ROME],
        ),
        (
            "deepseek",  # V3.1
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"location": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            [PARIS],
        ),
        (
            "harmony",
            '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"location": "Paris"}<|call|>',
            "",
            [PARIS],
        ),
        ("harmony", ' to=functions.get_weather<|channel|>commentary json<|message|>{"location": "Paris"}', "", [PARIS]),
        (
            "harmony",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_weather<|message|>{"location": "Paris"}',
            "I look.",
            [PARIS],
        ),
        (
            "function_gemma",
            "<start_function_call>call:get_weather{location:<escape>Paris<escape>}<end_function_call>",
            "",
            [PARIS],
        ),
        (
            "function_gemma",
            "<start_function_call>call:get_weather{days:3,exact:false,location:<escape>a,{b}<escape>,"
            "more:{x:[1,<escape>y<escape>],z:{}}}<end_function_call>",
            "",
            [("get_weather", {"days": 3, "exact": False, "location": "a,{b}", "more": {"x": [1, "y"], "z": {}}})],
        ),
        (
            "gemma4",
            'I look.<|tool_call>call:get_weather{days:3,exact:None,location:<|"|>a,{b}<|"|>,more:{x:[1,<|"|>y<|"|>]}}'
            "<tool_call|><|tool_call>call:get_weather{}<tool_call|>",
            "I look.",
            [
                ("get_weather", {"days": 3, "exact": None, "location": "a,{b}", "more": {"x": [1, "y"]}}),
                ("get_weather", {}),
            ],
        ),
    ],
)
def test_documented_calls_are_read(form: str, text: str, content: str, calls: list) -> None:
    assert read(form, text) == (None, content, calls)


CALL = '{"name": "get_weather", "arguments": {"location": "Paris"}}'
MALFORMED = {
    "hermes": [
        *(f"I <tool_call>{inside}</tool_call> " for inside in ("{", '{"name": 3}', '{"name": ""}', "[]", "eval(1)")),
        *(f"<tool_call>{CALL}", CALL, f"<tool_call>{CALL} and</tool_call>", f"```json\n{CALL}\n```"),
        *(f'<tool_call>{{"name": "a", "arguments": {a}}}</tool_call>' for a in ('"x"', "[1]", "NaN", '{"x": 1e999}')),
        '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>',  # half a character cannot be said again
        f"<tool_call>{'[' * 100_000}</tool_call>",
        f'<tool_call>{{"name": "a", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>',
    ],
    "qwen_coder": [
        "<tool_call>\n<function=get_weather>\n<parameter=location>\nParis\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=location>\nParis\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        f"<tool_call>{CALL}</tool_call>",
        "<function=get_weather>\n</function>",
    ],
    "llama": [
        '{"name": "get_weather", "parameters": {"location": "Paris"}',
        'I look: {"name": "get_weather", "parameters": {}}',
        '{"name": "get_weather", "parameters": {}} done',
        '{"name": "Bob", "parameters": {}}',  # JSON that names no tool is an answer
        '{"name": "get_weather"}',
        '{"name": "get_weather", "parameters": {}, "more": 1}',
        "<|python_tag|>print(1)",
        "<|python_start|>print(1)<|python_end|>",
        "<|python_start|>print(1)",
    ],
    "gemma4": [
        '<|tool_call>call:a{b:<|"|>c<|"|>}',
        "<|tool_call>call:a{b:<escape>c<escape>}<tool_call|>",
        '<|tool_call>call:a{b:<|"|>c}<tool_call|>',
    ],
    "mistral": [
        "[TOOL_CALLS] []",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {}}',
        "[TOOL_CALLS]get_weather{}",
        "[TOOL_CALLS]get_weather[ARGS]{",
        f"[{CALL}]",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "function_gemma": [
        "<start_function_call>call:a{b:<escape>c<escape>}",
        "<start_function_call>call:a{b:c}<end_function_call>",
        "<start_function_call>call:a{b:1,,}<end_function_call>",
        "<start_function_call>call:a{:1}<end_function_call>",
        f"<start_function_call>call:a{{b:{'[' * 100_000}<end_function_call>",
        "<start_function_call>call:a{b:NaN}<end_function_call>",
    ],
    "harmony": [
        "just text",
        "<|channel|>secret<|message|>7",
        '<|channel|>commentary to=functions.get_weather json<|message|>{"location": ',
        "<|channel|>commentary to=python code<|message|>print(1)",
        "<|channel|>commentary to=functions.get_weather<|message|>[1]",
    ],
}


@pytest.mark.parametrize(("form", "text"), [(f, t) for f, texts in MALFORMED.items() for t in texts])
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    assert read(form, text) == (None, text, [])


def test_a_good_call_beside_a_bad_one() -> None:
    text = f"<tool_call>{{bad}}</tool_call> and <tool_call>{CALL}</tool_call> <tool_call>{CALL[:20]}"
    bad, cut = "<tool_call>{bad}</tool_call> and ", f" <tool_call>{CALL[:20]}"
    assert read("hermes", text) == (None, bad + cut, [PARIS])


def test_a_schema_says_what_is_text() -> None:
    """A schema of `true` or `null` was an AttributeError; a referenced object stayed text, and 5 for an optional text
    was a number."""
    schema = {
        "$defs": {
            "Point": {"type": "object"},
            "Color": {"type": "string"},
            "Node": {"anyOf": [{"$ref": "#/$defs/Node"}]},
        },
        "properties": {
            **{"any": True, "none": None, "point": {"$ref": "#/$defs/Point"}, "color": {"$ref": "#/$defs/Color"}},
            **{"maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "several": {"type": ["string", "integer"]}},
            **{"node": {"$ref": "#/$defs/Node"}, "gone": {"$ref": "#/$defs/Gone"}, "far": {"$ref": "http://a/b"}},
        },
    }
    given = {"any": "5", "none": "5", "point": '{"x": 1}', "color": "5", "maybe": "5", "several": "5", "node": "5"}
    given |= {"gone": "5", "far": "5", "new": "5"}
    result = {**given, "point": {"x": 1}, "several": 5}
    for own, expected in ((schema, result), ({"properties": None}, given), ({}, given)):
        written = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in given.items())
        text = f"<tool_call>\n<function=draw>\n{written}</function>\n</tool_call>"
        (call,) = parts(text, FORMATS["qwen_coder"], None, [{"function": {"name": "draw", "parameters": own}}]).calls
        assert json.loads(call.arguments) == expected
    text = "<tool_call>\n<function=draw>\n<parameter=maybe>\nnull\n</parameter>\n</function>\n</tool_call>"
    (call,) = parts(text, FORMATS["qwen_coder"], None, [{"function": {"name": "draw", "parameters": schema}}]).calls
    assert json.loads(call.arguments) == {"maybe": None}


def test_without_tools_nothing_is_a_call() -> None:
    found = parts(f"<tool_call>{CALL}</tool_call>", FORMATS["hermes"], None, ())
    assert (found.content, found.calls) == (f"<tool_call>{CALL}</tool_call>", ())
    text = "<|channel|>commentary to=functions.a json<|message|>{}"
    assert parts(text, FORMATS["harmony"], None, ()).content == text


@pytest.mark.parametrize(
    ("text", "opened", "thinking", "content", "closed"),
    [
        ("<think>\n3 + 4\n</think>\n\n7", False, "3 + 4", "7", True),
        ("3 + 4\n</think>\n\n7", True, "3 + 4", "7", True),
        ("3 + 4", True, "3 + 4", "", False),  # cut
        ("<think>\n\n</think>\n\n7", False, "", "7", True),
        ("7 <think>3</think>", False, None, "7 <think>3</think>", True),
        ("3</think>7", False, None, "3</think>7", True),
        (f"<think><tool_call>{CALL}</tool_call></think>7", False, f"<tool_call>{CALL}</tool_call>", "7", True),
    ],
)
def test_thinking_is_set_apart(text: str, opened: bool, thinking: str | None, content: str, closed: bool) -> None:
    found = parts(text, FORMATS["hermes"], THINK, WEATHER, opened)
    assert (found.thinking, found.content, found.calls, found.closed) == (thinking, content, (), closed)


def test_channels() -> None:
    text = "<|channel|>analysis<|message|>3 + 4<|end|><|start|>assistant<|channel|>final<|message|>7"
    assert read("harmony", text) == ("3 + 4", "7", [])
    cut = parts("<|channel|>analysis<|message|>3 +", FORMATS["harmony"], None, WEATHER)
    assert (cut.thinking, cut.content, cut.closed) == ("3 +", "", False)


def test_ids_are_kept() -> None:
    found = parts('[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS]{"é": "\\u00e9"}', FORMATS["mistral"], None, WEATHER)
    assert found.calls == (ToolCall(name="a", arguments='{"é": "é"}', id="abcdefghi"),)
