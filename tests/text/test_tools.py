"""Tool calls: what is read from a model's answer, and what a template must not leave out."""

import json

import pytest

from birl.errors import BirlError
from birl.text.chat import Chat
from birl.text.tools import render
from birl.types import Message
from tests.tiny import CHATML, tiny_tokenizer

# As Qwen2.5's, shorter.
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
ASK = {"role": "user", "content": "What is 3 + 4?"}
SAID = {"role": "tool", "content": "seven"}


def chat(template: str) -> Chat:
    return Chat(tiny_tokenizer(template=template))


def test_plain_messages_are_rendered_as_everywhere() -> None:
    own = chat(CHATML)
    assert render(own, [ASK]) == own.render((Message(role="user", content="What is 3 + 4?"),))


def test_tools_and_calls_are_in_the_prompt() -> None:
    own = chat(QWEN)
    text = own.decode(render(own, [ASK, CALLED, SAID], [TOOL]))
    assert json.dumps(TOOL) in text and '"arguments": {"a": 1}' in text and "tool\nseven" in text


@pytest.mark.parametrize(
    ("template", "messages", "tools", "said"),
    [
        ("{{ 'Hello' }}", [ASK], [TOOL], "leaves out tools"),
        (QWEN.replace("tool_calls", "no_calls"), [ASK, CALLED], [], r"leaves out tool_calls \(messages\.1\)"),
        (QWEN.replace("in messages", "in messages if m.role != 'tool'"), [ASK, SAID], [], "of role tool"),
        ("{{ raise_exception('no!') }}", [ASK], [], "refuses a conversation of user: no!"),
        ("{{ '\\ud800' }}", [ASK], [], "refuses a conversation of user: 'utf-8' codec"),
        ("{{ 'a' * 10**15 }}", [ASK], [], "makes a value of more than 8,388,608 characters"),
        ("", [ASK], [], "no chat template"),
    ],
)
def test_what_a_template_leaves_out_is_refused(template, messages, tools, said) -> None:
    with pytest.raises(BirlError, match=said):
        render(chat(template), messages, tools)
