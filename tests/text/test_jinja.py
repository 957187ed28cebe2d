"""A chat template from anywhere takes neither all memory nor all time."""

from datetime import datetime

import pytest

from birl.errors import BirlError
from birl.text import jinja, tools
from birl.types import Message
from tests.server.test_bounds import CHATML, chat_of

TEXT = "{% set ns = namespace(x='xxxxxxxxxx') %}"
LIST = "{% set ns = namespace(x=['x']) %}"
MANY, END = "{% for _ in range(24) %}{% set ns.x = ", " %}{% endfor %}"
OVER = {
    "~": TEXT + MANY + "ns.x ~ ns.x" + END,
    "+": TEXT + MANY + "ns.x + ns.x" + END,
    "*": "{{ 'x' * 9999999 }}",
    "* of a list": "{{ [0] * 9999999 }}",
    "**": "{{ 10 ** 1000000 }}",
    "squares": "{% set ns = namespace(x=7) %}" + MANY + "ns.x * ns.x" + END,
    "%": "{{ '%9999999d' % 1 }}",
    "% with a width": "{{ '%*d' % (9999999, 1) }}",
    "% of a dict": "{{ '%(a)9999999d' % {'a': 1} }}",
    "% of much": "{% set x = 'x' * 60000 %}{{ ('%(a)s' * 999) % {'a': x} }}",
    "|format": "{{ '%9999999d'|format(1) }}",
    ".format": "{{ '{:9999999}'.format(1) }}",
    ".format with a width": "{{ '{:{}}'.format(1, 9999999) }}",
    ".format of much": "{% set x = 'x' * 60000 %}{{ ('{0}' * 999).format(x) }}",
    ".format_map": "{{ '{x:9999999}'.format_map({'x': 1}) }}",
    "|center": "{{ 'x'|center(9999999) }}",
    "|indent": "{{ 'a\nb'|indent(9999999) }}",
    "|tojson": "{{ [1]|tojson(indent=9999999) }}",
    "|batch": "{{ [1]|batch(9999999, 'x')|list }}",
    "|round": "{{ 5|round(9999999, 'floor') }}",
    ".ljust": "{{ 'x'.ljust(9999999) }}",
    ".zfill": "{{ 'x'.zfill(9999999) }}",
    ".expandtabs": "{{ '\t'.expandtabs(9999999) }}",
    ".to_bytes": "{{ (1).to_bytes(9999999, 'big') }}",
    ".replace": "{% set x = 'x' * 9999 %}{{ x.replace('x', x) }}",
    "|replace": "{% set x = 'x' * 9999 %}{{ x|replace(new=x, old='x') }}",
    ".translate": "{% set x = 'x' * 9999 %}{{ x.translate({120: x}) }}",
    ".join": "{% set x = 'x' * 9999 %}{{ x.join(x) }}",
    "|join": "{% set x = 'x' * 9999 %}{{ x|join(x) }}",
    "|join, a generator": "{% set x = 'x' * 9999 %}{{ x|map('upper')|join(d=x) }}",
    "|map": "{{ range(9999)|map('string')|map('center', 9999)|list }}",
    "|wordwrap": TEXT + MANY + "ns.x|wordwrap(1, wrapstring=ns.x)" + END,
    "|sum": LIST + MANY + "[ns.x, ns.x]|sum(start=[])" + END,
    "{% set %}": TEXT + "{% set x = ns.x %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 24,
    "{% macro %}": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + TEXT + MANY + "f(ns.x)" + END,
    "{% filter %}": "{% set x = 'x' * 9999 %}{% filter replace('x', x) %}{{ x }}{% endfilter %}",
    "output": "{% set x = 'x' * 60000 %}{% for _ in range(999) %}{{ x }}{% endfor %}",
    "lists": LIST + MANY + "[ns.x, ns.x]" + END,
    "tuples": LIST + MANY + "(ns.x, ns.x)" + END,
    "dicts": LIST + MANY + "{'a': ns.x, 'b': ns.x}" + END,
    "views": "{% set ns = namespace(x={'a': 1}) %}" + MANY + "{'a': ns.x.items(), 'b': ns.x.items()}" + END,
    "dict()": LIST + MANY + "dict(a=ns.x, b=ns.x)" + END,
    "dict.fromkeys": LIST + MANY + "dict.fromkeys(['a', 'b'], ns.x)" + END,
    "cycler": LIST + MANY + "cycler(ns.x, ns.x).items" + END,
    "many values": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set x = 'x' * 60000 %}{% endfor %}",
}


def rendered(template: str) -> tuple[int, ...]:
    return chat_of(template + CHATML).render((Message(role="user", content="Hi"),))


@pytest.mark.parametrize("template", OVER.values(), ids=OVER)
def test_what_a_template_makes_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja, "LARGEST", 2**16)
    monkeypatch.setattr(jinja, "TOGETHER", 2**26)
    with pytest.raises(BirlError, match="The chat template makes a value of more than 65,536 characters"):
        rendered(template)


def test_within_the_bounds_a_template_says_what_it_says() -> None:
    made = (
        "{{ ['a', 2]|join('-') }} {{ '%s %5.1f'|format('b', 1.25) }} {{ '{:>4}|{x}'.format(7, x='y') }} {{ 'ab' * 3 }} "
        "{{ 2 ** 70 }} {{ 'aXb'.replace('X', '12') }} {{ {'k': (1, [2])}|tojson }} {{ ', '.join(['p', 'q']) }} "
        "{{ messages|map(attribute='role')|list }} {{ 'z'|default(99999999999) }} "
        "{% for a, b in {'u': 1}.items() %}{{ a ~ b }}{% endfor %} {{ namespace(t=1770000000000).t }}"
    )
    chat = chat_of(made + CHATML)
    expected = (
        "a-2 b   1.2    7|y ababab 1180591620717411303424 a12b {\"k\": [1, [2]]} p, q ['user'] z u1 1770000000000"
    )
    assert chat.text((Message(role="user", content="Hi"),)).startswith(expected)


def test_templates_that_transformers_compiled_before_are_bounded_too() -> None:
    chat = chat_of("{{ 'x' * 9999999 }}" + CHATML)
    from transformers.utils import chat_template_utils as foreign

    foreign._compile_jinja_template.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign, "ImmutableSandboxedEnvironment", jinja.ImmutableSandboxedEnvironment)
        foreign._compile_jinja_template(str(chat.tokenizer.chat_template))
        with pytest.raises(BirlError, match="The chat template makes a value of more than"):
            tools.text(chat, [{"role": "user", "content": "Hi"}])


DATED = (
    "{{ strftime_now('%Y-%m-%d %H:%M') }} {% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
)


def test_the_time_of_a_run_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over midnight a conversation began anew, and a resumed run had other prompts."""
    chat, asked = chat_of(DATED + "{{ 'assistant: ' if add_generation_prompt }}"), (Message(role="user", content="Hi"),)
    monkeypatch.setattr(tools, "now", datetime(2030, 12, 31, 23, 59))
    prompt, reply = chat.render(asked), (*chat.encode("7"), 2)
    assert chat.decode(prompt).startswith("2030-12-31 23:59 ")
    assert chat.extend(prompt, reply, (Message(role="user", content="Why?"),), (), asked)[: len(prompt)] == prompt


def test_an_endless_template_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took ten seconds, several times over."""
    monkeypatch.setattr(tools, "SECONDS", 0.1)
    chat, starts = chat_of("{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}"), []
    bounded = jinja.bounded
    monkeypatch.setattr(jinja, "bounded", lambda: (starts.append(1), bounded()))
    with pytest.raises(BirlError, match=r"took longer than 0\.1 s"):
        chat.ends_written()
    with pytest.raises(BirlError, match=r"took longer than 0\.1 s"):
        chat.render((Message(role="user", content="Hi"),))
    assert len(starts) == 2
