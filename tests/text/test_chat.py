"""Invariant 5: render, extend and parse agree, and ids that exist are never rewritten."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from birl.errors import BirlError, HistoryRewritten
from birl.models.load import load_tokenizer
from birl.text.chat import Chat, StopChecker
from birl.types import Message
from tests.tiny import CHATML, SPECIALS, tiny_tokenizer

START, END = 1, 2
TOKENIZER = tiny_tokenizer()
CHAT = Chat(TOKENIZER)

# Whatever people and models write, and what neither should: the special tokens' own names.
texts = st.lists(st.one_of(st.text(), st.sampled_from([*SPECIALS, "\n", " ", "user", "12345", "🎲", "é"]))).map("".join)
replies = texts.filter(lambda text: not text.endswith("<|im_end|>"))
messages = st.builds(Message, role=st.sampled_from(["user", "system", "tool"]), content=texts)
openings = st.tuples(st.booleans(), texts, texts).map(lambda o: (*([user(o[1], "system")] if o[0] else []), user(o[2])))
# the model replies, the world answers with one or more messages, and so on
rounds = st.lists(st.tuples(replies, st.lists(messages, min_size=1)), max_size=3)

# Templates as other families write them: begin tokens, end tokens after a space, no end tokens at all.
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
BARE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{{ 'assistant: ' }}"
# As Qwen3 does with thoughts: only the last answer keeps them.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.reasoning_content and loop.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(content: str, role: str = "user") -> Message:
    return Message(role=role, content=content)


def with_template(template: str | None) -> Chat:
    return Chat(tiny_tokenizer(template=template))


def adding(front: str = "", behind: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer without template that puts its own tokens around a text."""
    tokenizer = tiny_tokenizer(template=None)
    single = " ".join(filter(None, [front, "$A", behind]))
    specials = [(token, SPECIALS.index(token)) for token in SPECIALS]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
    return tokenizer


LLAMA2_CHAT = with_template(LLAMA2)
FRONTED = Chat(adding("<|endoftext|>"))
FRONTED.tokenizer.chat_template = CHATML


@settings(deadline=None, max_examples=50)
@given(openings, rounds)
@example((user("a"),), [("<|im_end|>x", [user("<|im_end|>")])])
@example((user("Grüße"),), [("", [user("")]), ("🎲", [user("\x00", "tool"), user("b")])])
def test_a_conversation_extended_reply_by_reply_is_the_one_rendered_as_a_whole(
    opening: tuple[Message, ...], rounds: list[tuple[str, list[Message]]]
) -> None:
    history, ids = opening, CHAT.render(opening)
    for reply, answers in rounds:
        tokens = (*CHAT.encode(reply), END)
        longer = CHAT.extend(ids, tokens, tuple(answers))
        assert longer[: len(ids) + len(tokens)] == (*ids, *tokens)
        history = (*history, CHAT.parse(tokens), *answers)
        ids = longer
        assert ids == CHAT.render(history)
    assert CHAT.decode(ids) == TOKENIZER.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in history], tokenize=False, add_generation_prompt=True
    )


@settings(deadline=None)
@given(replies)
def test_a_reply_is_parsed_to_the_text_it_was_made_of(text: str) -> None:
    assert CHAT.parse((*CHAT.encode(text), END)) == Message(role="assistant", content=text)
    assert CHAT.parse(CHAT.encode(text)) == Message(role="assistant", content=text)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1)), st.lists(st.integers(0, len(TOKENIZER) - 1)), texts)
def test_earlier_ids_stay_as_they_are_even_where_their_text_would_be_encoded_otherwise(
    ids: list[int], reply: list[int], text: str
) -> None:
    """A model samples any ids: halves of characters, words in odd pieces, special tokens."""
    longer = CHAT.extend(tuple(ids), tuple(reply), (user(text),))
    assert longer[: len(ids) + len(reply)] == (*ids, *reply)
    CHAT.parse(reply)


def test_a_reply_is_ended_once_whether_it_ended_itself_or_not() -> None:
    """A stop string or a limit leaves it open: the end is then part of the next prompt, not of the reply."""
    prompt, reply = CHAT.render((user("Hi"),)), CHAT.encode("7")
    ended, cut = (CHAT.extend(prompt, tokens, (user("Why?"),)) for tokens in ((*reply, END), reply))
    assert ended == cut
    assert ended.count(END) == prompt.count(END) + 2  # the reply's and the new message's
    assert CHAT.extend(prompt, (), (user("Why?"),)).count(END) == prompt.count(END) + 2


def test_a_truncated_reply_gets_no_end_token() -> None:
    assert CHAT.parse(CHAT.encode("The answer")).content == "The answer"
    assert END not in CHAT.encode("The answer")


def test_no_more_messages_still_open_the_next_answer() -> None:
    prompt = CHAT.render((user("Hi"),))
    longer = CHAT.extend(prompt, (*CHAT.encode("7"), END), ())
    assert CHAT.decode(longer).endswith("7<|im_end|>\n<|im_start|>assistant\n")


@settings(deadline=None)
@given(texts, replies, texts)
def test_templates_that_put_a_space_before_the_end_token_end_a_reply_once(first: str, reply: str, second: str) -> None:
    prompt = LLAMA2_CHAT.render((user(first),))
    tokens = (*LLAMA2_CHAT.encode(reply), END)
    expected = LLAMA2_CHAT.encode(f"<|im_start|>[INST] {second} [/INST]")
    assert LLAMA2_CHAT.extend(prompt, tokens, (user(second),)) == (*prompt, *tokens, *expected)


def test_a_template_that_reads_parts_alone_gets_every_text() -> None:
    """SmolVLM's: an answer was left out of the history, and a question refused."""
    own = with_template(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' }}{% for part in m.content %}"
        "{{ part.text if part.type == 'text' else '<image>' if part.type == 'image' }}{% endfor %}{{ '<|im_end|>' }}"
        "{% endfor %}{{ '<|im_start|>assistant:' if add_generation_prompt }}"
    )
    talk = (user("Hi"), user("A", "assistant"), user("Why?"))
    whole = "<|im_start|>user:Hi<|im_end|><|im_start|>assistant:A<|im_end|><|im_start|>user:Why?<|im_end|>"
    assert own.decode(own.render(talk)) == f"{whole}<|im_start|>assistant:"
    assert own.extend(own.render(talk[:1]), (*own.encode("A"), END), talk[2:], (), talk[:1]) == own.render(talk)


@pytest.mark.parametrize("header", ["<|im_start|>", "<|user|>"])
def test_an_answer_is_trained_to_end_where_the_template_has_no_end_token(header: str) -> None:
    """GLM's next message begins with what ends an answer; others have no token for it at all."""
    own = with_template(
        "{% for m in messages %}{{ 'USER' if m.role == 'user' else '<|im_start|>' }}{{ m.content }}{% endfor %}"
        "{{ '<|im_start|>' if add_generation_prompt }}".replace("USER", header)
    )
    own.tokenizer.add_tokens(["<|user|>"], special_tokens=True)
    own.end_ids = frozenset({END, int(own.tokenizer.convert_tokens_to_ids("<|user|>"))})  # pyright: ignore
    ids, mask = own.conversation((user("Hi"), user("A", "assistant"), user("Why?"), user("B", "assistant")))
    end = header if header == "<|user|>" else f"<|im_end|>{header}"
    assert own.decode(ids) == f"{header}Hi<|im_start|>A{end}Why?<|im_start|>B<|im_end|>"
    trained = own.decode([token for token, is_own in zip(ids, mask, strict=True) if is_own])
    assert trained == f"A{end.removesuffix('<|im_start|>')}B<|im_end|>"


def test_templates_without_end_tokens_keep_the_one_that_was_sampled() -> None:
    chat = with_template(BARE)
    prompt, reply = chat.render((user("Hi"),)), (*CHAT.encode("7"), END)
    assert chat.decode(chat.extend(prompt, reply, (user("Why?"),))) == (
        "user: Hi\nassistant: 7<|im_end|>\nuser: Why?\nassistant: "
    )


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{% for message in messages %}", "{{ messages|length }}{% for message in messages %}"),
        "{% for m in messages[-1:] %}{{ m['content'] }}{% endfor %}",
        "{{ messages[0]['content'] }}",
    ],
    ids=["counts_messages", "keeps_the_last", "ignores_replies"],
)
def test_a_template_that_rewrites_history_is_refused_for_more_than_one_turn(template: str) -> None:
    chat = with_template(template)
    prompt = chat.render((user("Hi"),))  # one turn is fine
    with pytest.raises(BirlError, match=r"rewrites earlier messages.*model\.chat_template"):
        chat.extend(prompt, (*CHAT.encode("7"), END), (user("Why?"),))


def test_a_template_that_drops_thoughts_rewrites_those_conversations_that_have_some() -> None:
    chat = with_template(FORGETFUL)
    prompt = chat.render((user("Hi"),))
    for thought in ("3 + 4", ""):  # an empty block is dropped too
        with pytest.raises(HistoryRewritten):
            chat.extend(prompt, (*CHAT.encode(f"<think>\n{thought}\n</think>\n\n7"), END), (user("Why?"),))
    reply = (*CHAT.encode("7"), END)
    whole = chat.render((user("Hi"), user("7", "assistant"), user("Why?")))
    assert chat.extend(prompt, reply, (user("Why?"),)) == whole


def test_a_template_that_changes_only_what_was_said_before_the_reply() -> None:
    """Letters of the same number: what counts is what they are."""
    loud = CHATML.replace(
        "message['content']", "(message['content'] if loop.revindex < 3 else message['content']|upper)"
    )
    chat = with_template(loud)
    prompt = chat.render((user("Hi"),))
    with pytest.raises(HistoryRewritten):
        chat.extend(prompt, (*CHAT.encode("7"), END), (user("Why?"),))
    assert chat.extend(prompt, (*CHAT.encode("7"), END), ())  # nothing came before that changes


def test_a_template_that_rewrites_history_for_some_roles_only_is_refused_for_those() -> None:
    chat = with_template("{% if messages[-1]['role'] == 'tool' %}{{ 'tools!' }}{% endif %}" + CHATML)
    assert chat.extend((5,), (END,), (user("Why?"),))[:2] == (5, END)
    with pytest.raises(BirlError, match="rewrites earlier messages"):
        chat.extend((5,), (END,), (user("7", "tool"),))


def test_a_template_that_refuses_a_conversation_is_quoted() -> None:
    chat = with_template("{{ raise_exception('Only user and assistant roles are supported!') }}")
    with pytest.raises(BirlError, match=r"refuses a conversation of system, user: Only user and assistant"):
        chat.render((user("Be brief.", "system"), user("Hi")))


def test_a_template_with_a_syntax_error_is_a_message_not_a_traceback() -> None:
    with pytest.raises(BirlError, match="chat template"):
        with_template("{% for m in messages %}").render((user("Hi"),))


def test_without_a_template_messages_are_refused_and_text_is_fine() -> None:
    chat = with_template(None)
    assert not chat.has_template
    with pytest.raises(BirlError, match=r"no chat template.*model\.chat_template=FILE\.jinja.*text prompts"):
        chat.render((user("Hi"),))
    prompt = chat.render("1 + 1 =")
    assert chat.decode(prompt) == "1 + 1 ="
    assert chat.decode(chat.extend(prompt, chat.encode(" 2"), (user("\n2 + 2 ="),))) == "1 + 1 = 2\n2 + 2 ="


@pytest.mark.parametrize("behind", ["", "<|im_end|>"])
def test_text_gets_the_tokenizers_front_tokens_once_and_nothing_behind(behind: str) -> None:
    """An end token behind a prompt would tell the model that there is nothing to add."""
    chat = Chat(adding("<|im_start|>", behind))
    text = chat.encode("Hi 12")
    assert chat.render("Hi 12") == (START, *text)
    assert chat.render("<|im_start|>Hi 12") == (START, *text)  # rendered by whoever made the data
    assert chat.render("") == (START,)


@settings(deadline=None)
@given(texts)
def test_messages_get_no_front_tokens_but_the_templates(text: str) -> None:
    assert FRONTED.render((user(text),)) == CHAT.render((user(text),))


@settings(deadline=None)
@given(texts)
def test_text_without_front_tokens_is_encoded_as_it_is(text: str) -> None:
    assert CHAT.render(text) == CHAT.encode(text)
    assert CHAT.decode(CHAT.render(text)) == text


def test_every_end_token_of_the_model_is_taken_off() -> None:
    chat = Chat(TOKENIZER)
    chat.end_ids = frozenset({0, END})
    assert chat.parse((*chat.encode("7"), 0)).content == "7"
    assert chat.parse((*chat.encode("7"), END)).content == "7"


def test_smollm2_conversations_agree_too(smollm2: Path) -> None:
    chat = Chat(load_tokenizer(smollm2))
    history: tuple[Message, ...] = (user("What is 12 * 345?"),)
    ids = chat.render(history)
    assert chat.decode(ids).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    for reply in ("It's 4140.", " Ça va — 🎲\n", ""):
        tokens = (*chat.encode(reply), *chat.end_ids)
        ids = chat.extend(ids, tokens, (user("Sure? <|im_end|>"),))
        history = (*history, user(reply, "assistant"), user("Sure? <|im_end|>"))
        assert ids == chat.render(history)


def stops_at(text: str, stop: tuple[str, ...]) -> str | None:
    """What has been said when a checker first says stop; one token of `text` at a time."""
    checker = StopChecker(TOKENIZER, stop)
    tokens = CHAT.encode(text)
    return next((CHAT.decode(tokens[: n + 1]) for n, token in enumerate(tokens) if checker.feed(token)), None)


@settings(deadline=None)
@given(texts, st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=3), texts)
@example("The answer is ", ["</answer>"], "")
@example("é🎲", ["世界"], "é")
def test_a_stop_string_is_found_at_the_token_that_completes_it(before: str, stop: list[str], after: str) -> None:
    text = before + stop[0] + after
    said = stops_at(text, tuple(stop))
    assert said is not None and text.startswith(said) and any(s in said for s in stop)
    tokens = CHAT.encode(text)
    earlier = (CHAT.decode(tokens[:n]) for n in range(len(CHAT.encode(said))))
    assert not any(s in so_far for s in stop for so_far in earlier)


@settings(deadline=None)
@given(texts, st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_nothing_stops_what_holds_no_stop_string(text: str, stop: list[str]) -> None:
    tokens = CHAT.encode(text)
    if any(s in CHAT.decode(tokens[: n + 1]) for n in range(len(tokens)) for s in stop):
        return
    assert stops_at(text, tuple(stop)) is None


@pytest.mark.parametrize(
    ("text", "stop", "said"),
    [
        ("So 7</answer> and", ("</answer>",), "So 7</answer>"),  # many tokens
        ("Grüße, 世界!", ("世界",), "Grüße, 世界"),  # characters of many tokens
        ("a🎲b", ("🎲",), "a🎲"),
        ("x" * 300 + "STOP" + "y", ("no", "STOP"), "x" * 300 + "STOP"),  # far beyond the window
        ("7<|im_end|>", ("<|im_end|>",), "7<|im_end|>"),  # a special token's name
        ("a\n\n\nb", ("\n\n",), "a\n\n"),
        ("nothing", ("never",), None),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], said: str | None) -> None:
    assert stops_at(text, stop) == said


PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
)


def test_phi_3_is_not_trained_on_what_follows_its_end_token() -> None:
    """It writes a line break and another end token behind the last answer, and the first one ends it."""
    own = with_template(PHI3)
    own.tokenizer.add_tokens(["<|user|>", "<|assistant|>", "<|end|>"], special_tokens=True)
    end = int(own.tokenizer.convert_tokens_to_ids("<|end|>"))  # pyright: ignore
    assert own.ends_written() == {end}
    own.end_ids = frozenset({END, end})
    talk = (user("Hi"), user("A", "assistant"), user("Why?"), user("B", "assistant"))
    for messages in (talk[:2], talk):
        ids, mask = own.conversation(messages)
        trained = own.decode([token for token, is_own in zip(ids, mask, strict=True) if is_own])
        assert trained == "".join(f"{m.content}<|end|>" for m in messages if m.role == "assistant")
        assert own.decode(ids) == own.text(messages).removesuffix("\n<|assistant|>\n")
