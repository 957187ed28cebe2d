"""Invariant 5 for the templates of many families: what was said stays as it is token by token, or a new prompt is
rendered, and a reply is read as what it was made of."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from birl.errors import BirlError, HistoryRewritten
from birl.text import tools as templates
from birl.text.formats import FORMATS
from birl.types import Message, ToolCall
from tests.text.families import FAMILIES, TOOLS, chat, reply

NAMES = sorted(FAMILIES)
WITH_TOOLS = [name for name in NAMES if FAMILIES[name].form]
THINKING = [name for name in NAMES if FAMILIES[name].thinks]
# what a reply looks like is what the template makes of it, to the letter
EXACT = [name for name in NAMES if name not in ("gpt_oss", "mistral")]

LOOKALIKES = (
    *(
        "<|im_end",
        "im_end|>",
        "<tool_call",
        "</tool_cal",
        "<function",
        "<|python_tag",
        "[TOOL_CALLS",
        "[ARGS",
        "<think",
    ),
    *("</think", "[/THIN", "<｜tool▁calls", "<|channel", "<|call", "<start_function", "to=functions.add", "<escape"),
    *('{"name": "add"', '{"name": "add", "arguments": {}}', "{", "}", "[", "]", '"', "\\", "```json", ",", ":"),
    *("\n", " ", "é", "🎲", "12", "-3", "word", "assistant"),
)
REAL = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "<function=add>", "<|python_tag|>")
pieces = st.lists(st.one_of(st.text(max_size=5), st.sampled_from(LOOKALIKES)), max_size=6).map("".join)
hostile = st.lists(
    st.one_of(
        st.sampled_from([*LOOKALIKES, *REAL, *{s for family in FAMILIES.values() for s in family.specials}]),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)
words = pieces.map(str.strip)
keys = st.sampled_from(["x", "y_1", "name"])
data = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), pieces),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(keys, inner, max_size=2)),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {},
    optional={"a": st.integers(), "unit": pieces, "more": st.dictionaries(keys, data, max_size=2)}
    | {"exact": st.booleans(), "last": st.one_of(st.none(), st.integers())},
)
calls = arguments.map(lambda a: ToolCall(name="add", arguments=json.dumps(a, ensure_ascii=False)))
replies = st.builds(
    Message,
    role=st.just("assistant"),
    content=words,
    thinking=st.one_of(st.just(""), words),
    tool_calls=st.lists(calls, max_size=2).map(tuple),
)
SLOW = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.filter_too_much])


def user(content: str, role: str = "user") -> Message:
    return Message(role=role, content=content)


def fitted(name: str, message: Message) -> Message:
    """What a model of this family can say of it."""
    family = FAMILIES[name]
    made = replace(message, tool_calls=message.tool_calls[: family.calls])
    if not family.thinks:
        made = replace(made, thinking="")
    if name == "llama3":
        made = replace(made, content="" if made.tool_calls else made.content)
    elif made.tool_calls and not family.beside:
        made = replace(made, content="")
    return made


def ambiguous(name: str, message: Message) -> bool:
    """Is there something in the reply's words that means something else in this family?"""
    everything = [message.content, message.thinking, *(c.arguments for c in message.tool_calls)]
    own = chat(name)
    words = (*FAMILIES[name].specials, "</tool_call>", "</think>", "[/THINK]", "<escape>")
    return any(w in text for w in words for text in everything) or bool(own.parts(message.content, TOOLS).calls)


def same(one: Message, other: Message) -> bool:
    return (one.content.strip(), one.thinking.strip(), [called(c) for c in one.tool_calls]) == (
        *(other.content.strip(), other.thinking.strip()),
        [called(c) for c in other.tool_calls],
    )


def called(call: ToolCall) -> tuple[str, Any]:
    return call.name, json.loads(call.arguments)


def tools_of(name: str) -> tuple[Any, ...]:
    return TOOLS if FAMILIES[name].form else ()


def text_of(name: str, talk: tuple[Message, ...]) -> str:
    return templates.text(chat(name), [templates.as_dict(m) for m in talk], tools_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_format_is_told_from_the_template(name: str) -> None:
    assert chat(name).format is FORMATS[FAMILIES[name].form or "hermes"]  # written into messages where it has no tools


@pytest.mark.parametrize("name", NAMES)
@SLOW
@given(message=replies)
def test_a_reply_is_read_as_what_it_was_made_of(name: str, message: Message) -> None:
    own, message = chat(name), fitted(name, message)
    assume(not ambiguous(name, message))
    prompt = own.render((user("Hi"),), tools_of(name))
    assert same(own.parse(own.encode(reply(name, message)), tools_of(name), prompt), message)


@pytest.mark.parametrize("name", NAMES)
@SLOW
@given(
    question=pieces,
    turns=st.lists(st.tuples(replies, st.lists(st.tuples(st.integers(0, 9), pieces), max_size=2)), max_size=3),
)
def test_a_conversation_goes_on_token_by_token_or_begins_anew(
    name: str, question: str, turns: list[tuple[Message, list[tuple[int, str]]]]
) -> None:
    own, tools, talk = chat(name), tools_of(name), (user(question),)
    assume(not any(s in question for s in FAMILIES[name].specials))
    ids = own.render(talk, tools)
    for said, more in turns:
        said = fitted(name, said)
        assume(not ambiguous(name, said) and not any(s in t for _, t in more for s in FAMILIES[name].specials))
        tokens = own.encode(reply(name, said))
        new = tuple(Message(role="tool", content=f"result {i}", name=c.name) for i, c in enumerate(said.tool_calls))
        new += tuple(user(text, FAMILIES[name].roles[k % len(FAMILIES[name].roles)]) for k, text in more)
        new = (new or (user("Go on"),)) if name not in ("gemma",) else (user("Go on"),)
        before, talk = talk, (*talk, own.parse(tokens, tools, ids), *new)
        whole = text_of(name, talk)
        opened = own.decode(ids) + own.decode(tokens).removesuffix(FAMILIES[name].ends[bool(said.tool_calls)])
        try:
            longer = own.extend(ids, tokens, new, tools, before)
        except HistoryRewritten:
            if name in EXACT:
                assert not whole.startswith(opened.rstrip())
            ids = own.render(talk, tools)
            continue
        assert longer[: len(ids) + len(tokens)] == (*ids, *tokens)
        assert whole.endswith(own.decode(longer[len(ids) + len(tokens) :]))
        if name in EXACT and own.decode(ids) + own.decode(tokens) in whole:
            assert own.decode(longer) == whole
        ids = longer


@pytest.mark.parametrize("name", NAMES)
@SLOW
@given(said=hostile, content=hostile, cut=st.integers(0, 40))
def test_hostile_words_never_change_what_was_there(name: str, said: str, content: str, cut: int) -> None:
    """Real special tokens, half calls, replies that were cut: read without an error, and nothing of it lost."""
    own, tools = chat(name), tools_of(name)
    prompt = own.render((user("Hi"),), tools)
    tokens = own.encode(said)[:cut]
    message = own.parse(tokens, tools, prompt)
    if not message.thinking and not message.tool_calls and not own.thinks(prompt) and name != "gpt_oss":
        assert message.content == own.reply_text(tokens) or own.parts(own.reply_text(tokens), tools).thinking == ""
    try:
        longer = own.extend(prompt, tokens, (user(content),), tools, (user("Hi"),))
    except BirlError:
        return
    assert longer[: len(prompt) + len(tokens)] == (*prompt, *tokens)


@pytest.mark.parametrize("name", WITH_TOOLS)
@SLOW
@given(message=replies.filter(lambda m: m.tool_calls), share=st.floats(0, 0.999))
def test_a_call_that_was_cut_is_no_call(name: str, message: Message, share: float) -> None:
    own, message = (
        chat(name),
        fitted(name, replace(message, content="", thinking="", tool_calls=message.tool_calls[:1])),
    )
    assume(not ambiguous(name, message))
    text = own.reply_text(own.encode(reply(name, message)))
    cut = text[: int(share * len(text))]
    prompt = own.render((user("Hi"),), TOOLS)
    assert own.parse(own.encode(cut), TOOLS, prompt).tool_calls == ()


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_tool_loop_is_one_sample(name: str) -> None:
    """A question, three calls with their results: what agents live on."""
    own = chat(name)
    talk: tuple[Message, ...] = (user("What is 3 + 4?"),)
    ids = own.render(talk, TOOLS)
    for i in range(3):
        call = ToolCall(name="add", arguments=json.dumps({"a": i, "unit": "m"}))
        thought = f"step {i}" if FAMILIES[name].thinks else ""
        tokens = own.encode(reply(name, Message(role="assistant", content="", thinking=thought, tool_calls=(call,))))
        said = own.parse(tokens, TOOLS, ids)
        assert (said.thinking, [called(c) for c in said.tool_calls]) == (thought, [("add", {"a": i, "unit": "m"})])
        result = Message(role="tool", content=f'"result" {i}\n', tool_call_id="call_0123456789", name="add")
        longer = own.extend(ids, tokens, (result,), TOOLS, talk)
        assert longer[: len(ids) + len(tokens)] == (*ids, *tokens)
        talk, ids = (*talk, said, result), longer
    if name in EXACT:
        assert own.decode(ids) == text_of(name, talk)


@pytest.mark.parametrize("name", [n for n in THINKING if n not in ("hermes", "mistral_args", "qwen3_coder")])
def test_thoughts_that_the_template_drops_begin_a_new_sample(name: str) -> None:
    own, talk = chat(name), (user("Hi"),)
    prompt = own.render(talk)
    tokens = own.encode(reply(name, Message(role="assistant", content="7", thinking="3 + 4")))
    assert own.parse(tokens, (), prompt) == Message(role="assistant", content="7", thinking="3 + 4")
    with pytest.raises(HistoryRewritten):
        own.extend(prompt, tokens, (user("Why?"),), (), talk)


@pytest.mark.parametrize("name", ["hermes", "mistral_args", "qwen3_coder"])
def test_thoughts_that_the_template_keeps_stay(name: str) -> None:
    own, talk = chat(name), (user("Hi"),)
    prompt = own.render(talk)
    tokens = own.encode(reply(name, Message(role="assistant", content="7", thinking="3 + 4")))
    longer = own.extend(prompt, tokens, (user("Why?"),), (), talk)
    assert longer == own.render((*talk, own.parse(tokens, (), prompt), user("Why?")))


def test_an_earlier_thought_is_dropped_when_a_question_follows_the_tools() -> None:
    """Qwen 3: nothing changes while tools answer; the next question changes all of it."""
    own, first = chat("qwen3"), user("Hi")
    prompt = own.render((first,), TOOLS)
    call = Message(role="assistant", content="", thinking="3 + 4", tool_calls=(ToolCall(name="add", arguments="{}"),))
    result = user("7", "tool")
    one = own.encode(reply("qwen3", call))
    ids = own.extend(prompt, one, (result,), TOOLS, (first,))
    two = own.encode("It is 7.<|im_end|>")
    talk = (first, own.parse(one, TOOLS, prompt), result)
    with pytest.raises(HistoryRewritten):
        own.extend(ids, two, (user("Sure?"),), TOOLS, talk)
    bare = (first, replace(talk[1], thinking=""), result)  # without a thought there is nothing to drop
    assert own.extend(ids, two, (user("Sure?"),), TOOLS, bare)[: len(ids)] == ids


@pytest.mark.parametrize(
    ("name", "tools", "talk", "said"),
    [
        ("gemma", TOOLS, (user("Hi"), user("Hi")), "must alternate.*chat_template=hermes"),
        ("gemma", (), (user("Hi"), user("7", "assistant"), user("7", "tool")), "must alternate.*chat_template=hermes"),
        ("deepseek_r1", (), (user("Hi"), user("7", "assistant"), user("7", "tool")), r"of role tool \(messages\.2\)"),
        ("deepseek_r1", (), (user("Be brief", "system"), user("!", "system"), user("Hi")), "of role system"),
        ("gpt_oss", (), (user("Hi"), user("7", "tool")), "no previous assistant message with a tool call"),
    ],
)
def test_what_a_template_cannot_say_is_refused(name: str, tools: Any, talk: Any, said: str) -> None:
    with pytest.raises(BirlError, match=said):
        chat(name).render(talk, tools)


@pytest.mark.parametrize("name", ["smollm2", "gemma", "deepseek_r1"])
def test_a_template_without_tools_gets_the_format_of_hermes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    own, first = chat(name), user("What is 3 + 4?")
    own.noted = False
    prompt = own.render((first,), TOOLS)
    text = own.decode(prompt)
    assert all(f'"name": "{tool["function"]["name"]}"' in text for tool in TOOLS) and first.content in text
    end = own.decode([next(iter(own.end_ids))])
    opened = "</think>" if name == "deepseek_r1" else ""
    one = own.encode(f'{opened}Well.\n<tool_call>{{"name": "add", "arguments": {{"a": 3}}}}</tool_call>{end}')
    said = own.parse(one, TOOLS, prompt)
    assert said.content == "Well." and said.tool_calls == (ToolCall(name="add", arguments='{"a": 3}'),)
    results = (user("7", "tool"), user("8", "tool"), user("Sure?"))
    anew = own.render((first, said, *results), TOOLS)
    assert all(word in own.decode(anew) for word in ("Well.", '"a": 3', "<tool_response>\n8", "Sure?"))
    if name != "deepseek_r1":  # it forgets what was thought, so it begins anew
        assert own.extend(prompt, one, results, TOOLS, (first,))[: len(prompt) + len(one)] == (*prompt, *one)
        own.render((user("Be brief", "system"), first), TOOLS)
    assert capsys.readouterr().out.count("leaves out tools, so they are written into the") == 1


CALLED = (ToolCall(name="add", arguments="{}"),)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deepseek_v3_1", Message(role="assistant", content="<think>3 + 4</think>7")),
        ("gemma4", Message(role="assistant", content="<|channel>thought\n3 + 4<channel|>7")),
        ("llama3", Message(role="assistant", content="I add.", tool_calls=CALLED)),
        ("mistral", Message(role="assistant", content="I add.", tool_calls=CALLED)),
    ],
)
def test_what_a_template_leaves_out_of_an_answer_is_not_trained_in_silence(name: str, said: Message) -> None:
    with pytest.raises(BirlError, match=r"leaves out a part of the assistant's content \(messages\.1\)"):
        chat(name).conversation((user("Hi"), said))
    with pytest.raises(BirlError, match=r"leaves out a part of the assistant's content \(messages\.1\)"):
        chat(name).conversation((user("Hi"), said, user("Why?")), ("all",))
    whole = Message(role="assistant", content="<think>3 + 4</think>\n7")
    ids, mask = chat("qwen3").conversation((user("Hi"), whole))
    trained = [token for token, own in zip(ids, mask, strict=True) if own]
    assert chat("qwen3").decode(trained) == "<think>\n3 + 4\n</think>\n\n7<|im_end|>"


def test_gemma_4_names_the_function_of_each_result() -> None:
    """Its template looks them up by id, and without ids every result was of the last call."""
    own, calls = chat("gemma4"), tuple(ToolCall(name=name, arguments="{}") for name in ("add", "halve"))
    said = Message(role="assistant", content="", tool_calls=calls)
    text = own.decode(own.render((user("Hi"), said, user("7", "tool"), user("8", "tool")), TOOLS))
    assert 'response:add{value:<|"|>7<|"|>}' in text and 'response:halve{value:<|"|>8<|"|>}' in text


def test_thinking_has_its_name_in_each_template() -> None:
    """GPT-OSS and LFM 2.5 read `thinking`: theirs was lost where no tool was called."""
    own = chat("gpt_oss")
    ids, mask = own.conversation((user("Hi"), Message(role="assistant", content="7", thinking="3 + 4")))
    trained = own.decode([token for token, is_own in zip(ids, mask, strict=True) if is_own])
    assert (
        trained == "<|channel|>analysis<|message|>3 + 4<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>"
    )


def test_a_left_out_tool_message_is_refused_when_the_conversation_goes_on() -> None:
    own = chat("deepseek_r1")
    tokens = own.encode("</think>7<｜end▁of▁sentence｜>")
    with pytest.raises(BirlError):
        own.extend(own.render((user("Hi"),)), tokens, (user("8", "tool"),), (), (user("Hi"),))


def test_the_end_token_of_gpt_oss_is_no_input() -> None:
    """Its template writes another one in the place of <|return|>."""
    own, talk = chat("gpt_oss"), (user("Hi"),)
    tokens = own.encode("<|channel|>final<|message|>7<|return|>")
    with pytest.raises(HistoryRewritten):
        own.extend(own.render(talk), tokens, (user("Why?"),), (), talk)


def test_mistral_gets_ids_that_it_can_take() -> None:
    own = chat("mistral")
    calls = (ToolCall(name="add", arguments="{}", id="call_abc"), ToolCall(name="add", arguments="{}"))
    results = tuple(Message(role="tool", content=c, tool_call_id=i) for c, i in (("7", "call_abc"), ("8", "")))
    said = Message(role="assistant", content="", tool_calls=calls)
    text = own.decode(own.render((user("Hi"), said, *results), TOOLS))
    ids = [part.split('"')[0] for part in text.split('"id": "')[1:]]
    assert [part.split('"')[0] for part in text.split('"call_id": "')[1:]] == ids
    assert len(set(ids)) == 2 and all(len(i) == 9 for i in ids)
    tokens = own.encode('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "VvvODy9mT"}]</s>')
    assert own.parse(tokens, TOOLS).tool_calls == (ToolCall(name="add", arguments='{"a": 1}', id="VvvODy9mT"),)


def test_a_format_can_be_named_and_an_unknown_one_is_refused() -> None:
    from birl.text.chat import Chat
    from tests.tiny import CHATML, tiny_tokenizer

    odd = CHATML.replace("message['content']", "message['content'] + (message.tool_calls | string)") + "{{ tools }}"
    said = Message(role="assistant", content="", tool_calls=(ToolCall(name="add", arguments='{"a": 1}'),))
    with pytest.raises(BirlError, match=r"not known how.*model\.tool_format=.*hermes.*model\.chat_template=hermes"):
        Chat(tiny_tokenizer(template=odd)).render((user("Hi"), said), TOOLS)
    named = Chat(tiny_tokenizer(template=odd), "llama")
    assert named.parse(named.encode('{"name": "add", "parameters": {}}'), TOOLS).tool_calls[0].name == "add"
    assert named.render((user("Hi"),), TOOLS)
