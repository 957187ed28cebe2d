"""Tokens are the truth: what the model saw and said is never made again from text."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from birl.errors import BirlError
from birl.rollout.assemble import samples
from birl.rollout.session import Limits, TooLong, checked, following
from birl.text import chat, tools
from birl.text.chat import Chat
from birl.types import Message, Outcome, ToolCall, Trajectory, Turn
from tests.rollout.scripted import CHAT, Scripted, session
from tests.text.families import TOOLS, reply
from tests.text.families import chat as family
from tests.text.test_chat import with_template
from tests.text.test_tools import QWEN
from tests.tiny import tiny_tokenizer

# Earlier questions are repeated in capitals.
LOUD = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ (m['content'] if loop.last else m['content'] | upper) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def trajectory(turns: Sequence[Turn]) -> Trajectory:
    return Trajectory(turns=tuple(turns), reward=1.0, score=1.0, outcome=Outcome.OK)


async def test_a_conversation_is_one_sample_with_the_tokens_that_were_sampled() -> None:
    engine = Scripted(["seven", "no, eight", "done"])
    talk = session(engine)
    said: tuple[Message, ...] = (user("What is 3 + 4?"),)
    for question in ("Sure?", "Why?", ""):
        reply = await talk.ask(said)
        said = (*said, reply, user(question))
    (sample,) = samples(trajectory(talk.turns), 1.0, 0, 0)
    assert sum(sample.mask) == sum(len(t.completion.tokens) for t in talk.turns)
    assert CHAT.decode(sample.tokens[sample.mask].tolist()) == ("seven<|im_end|>no, eight<|im_end|>done<|im_end|>")
    assert tuple(sample.tokens[: len(engine.prompts[0])]) == CHAT.render((user("What is 3 + 4?"),))
    assert [p.seed for p in engine.params] == [100, 101, 102]


async def test_tokens_that_no_encoder_would_make_survive() -> None:
    """encode(decode(ids)) may differ from ids: what was sampled letter by letter stays so."""
    spelled = tuple(CHAT.encode("a")[0] if c == "a" else CHAT.encode(c)[0] for c in "answer")
    assert CHAT.encode("answer") != spelled

    class Speller(Scripted):
        async def generate(self, prompt_ids, params, session=""):  # type: ignore[no-untyped-def]
            found = await super().generate(prompt_ids, params, session)
            n = len(spelled) + 1
            return type(found)(tokens=(*spelled, 2), logprobs=(-1.0,) * n, versions=(0,) * n, stop=found.stop)

    engine = Speller(["answer", "answer"])
    talk = session(engine)
    first = (user("Hi"),)
    reply = await talk.ask(first)
    await talk.ask((*first, reply, user("Again")))
    assert engine.prompts[1][: len(engine.prompts[0]) + 7] == (*engine.prompts[0], *spelled, 2)


async def test_a_branch_and_a_second_speaker_are_samples_of_their_own() -> None:
    engine = Scripted(["one", "two", "three", "four", "five"])
    talk = session(engine)
    first = (user("Hi"),)
    reply = await talk.ask(first)
    await talk.ask((*first, reply, user("left")))
    await talk.ask((*first, reply, user("right")))  # from the same beginning
    await talk.ask((Message(role="system", content="You are a critic."), user("Hi")))
    await talk.ask(first, agent="other")
    found = samples(trajectory(talk.turns), 1.0, 0, 0)
    trained = [CHAT.decode(s.tokens[s.mask].tolist()) for s in found]
    assert trained == [
        "one<|im_end|>two<|im_end|>",
        "three<|im_end|>",
        "four<|im_end|>",
        "five<|im_end|>",
    ]  # each answer is trained once
    assert tuple(found[1].tokens[: len(engine.prompts[1])]) != engine.prompts[1]
    assert engine.prompts[2][: len(engine.prompts[0])] == engine.prompts[0]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def rewrites(way: str, talk: list[Message]) -> tuple[list[Message], list[dict]]:  # type: ignore[type-arg]
    """What an agent sends of its system text, and of questions and answers in turn."""
    if way == "window":
        return [talk[0], *talk[1:][-3:]], []
    if way == "shortened":
        return [replace(m, content="...") if m.role == "user" and m is not talk[-1] else m for m in talk], []
    if way == "thinking":
        return [replace(m, thinking="other") if m.role == "assistant" else m for m in talk], []
    return talk, [TOOL] * (len(talk) % 4 // 2) if way == "tools" else []


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("window", "in turn 2 message 1 (user) differs"),
        ("shortened", "in turn 1 message 1 (user) differs"),
        ("thinking", "in turn 1 the thinking of its messages differs"),
        ("tools", "in turn 1 its tools differ"),
        ("nothing", ""),
    ],
)
def test_a_history_that_an_agent_rewrites_is_told_once(way: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Only messages that differed, over HTTP, and half of a history at most, were told."""

    async def play() -> list[str]:
        lines = []
        for notes in (set[str](), set[str]()):
            for _ in range(2):  # episodes of a run
                talk = [Message(role="system", content="Be brief."), user("Question 0")]
                asked = session(Scripted([f"<think>hm</think>answer {n}" for n in range(4)]), tokens=60)
                asked.notes = notes
                for n in range(1, 5):
                    sent, tools = rewrites(way, talk)
                    talk += [await asked.ask(sent, tools=tools), user(f"Question {n}")]
            lines.append(capsys.readouterr().out)
        return lines

    for printed in asyncio.run(play()):
        lines = [line.partition(" from before")[0] for line in printed.splitlines() if "history" in line]
        assert lines == ([f"An agent changed its history: {told}"] if told else [])


def test_examples_and_branches_are_no_changed_history(capsys: pytest.CaptureFixture[str]) -> None:
    """Many questions with the same examples, whose labels the model says, too; several threads with equal answers."""
    example = [
        user("Sea?"),
        Message(role="assistant", content="yes"),
        user("Air?"),
        Message(role="assistant", content="no"),
    ]

    async def play() -> None:
        asked = session(Scripted(["yes"] * 8))
        for n in range(3):
            talk = [*example, user(f"Thing {n}?")]
            talk += [await asked.ask(tuple(talk)), user("Sure?")]
            await asked.ask(tuple(talk))
        for n in range(2):
            await asked.ask((*example[::-1][1:], user(f"Thing {n}?")))

    asyncio.run(play())
    assert capsys.readouterr().out == ""


async def test_what_clients_lose_of_a_message_does_not_break_the_thread() -> None:
    engine = Scripted(["  seven ", "eight"])
    talk = session(engine)
    await talk.ask((user("Hi"),))
    stripped = Message(role="assistant", content="seven")
    await talk.ask((user("Hi"), stripped, user("Go on")))
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
    assert len(samples(trajectory(talk.turns), 1.0, 0, 0)) == 1


async def test_a_template_that_rewrites_history_starts_a_new_sample() -> None:
    chat = with_template(LOUD)
    engine = Scripted(["one", "two"], chat)
    talk = session(engine)
    first = (user("Hi"),)
    reply = await talk.ask(first)
    await talk.ask((*first, reply, user("Go on")))
    assert engine.prompts[1] == chat.render((*first, reply, user("Go on")))
    assert len(samples(trajectory(talk.turns), 1.0, 0, 0)) == 2


async def test_thoughts_that_clients_drop_are_known_until_the_template_drops_them() -> None:
    """Qwen 3 keeps thoughts while tools answer, and drops all of them with the next question."""
    chat = family("qwen3")
    call = ToolCall(name="add", arguments='{"a": 3}')
    said = Message(role="assistant", content="", thinking="3 + 4", tool_calls=(call,))
    engine = Scripted([reply("qwen3", said).removesuffix("<|im_end|>"), "It is 7.", "Yes."], chat)
    talk = session(engine, tokens=200)
    asked: tuple[Message, ...] = (user("What is 3 + 4?"),)
    answer = await talk.ask(asked, tools=TOOLS)
    assert answer == said
    client = replace(answer, thinking="")  # as OpenAI's client gives it back
    asked = (*asked, client, Message(role="tool", content="7"))
    answer = await talk.ask(asked, tools=TOOLS)
    assert "3 + 4\n</think>" in chat.decode(engine.prompts[1])
    asked = (*asked, answer, user("Sure?"))
    await talk.ask(asked, tools=TOOLS)
    assert engine.prompts[2] == chat.render(asked, TOOLS) and "</think>" not in chat.decode(engine.prompts[2])
    assert len(samples(trajectory(talk.turns), 1.0, 0, 0)) == 2


async def test_a_text_goes_on_with_the_thoughts_in_it() -> None:
    engine = Scripted(["<think>\n3 + 4\n</think>\n\n7", "yes"], family("qwen3"))
    talk = session(engine, tokens=100)
    answer = await talk.ask("What is 3 + 4? ")
    assert answer == Message(role="assistant", content="<think>\n3 + 4\n</think>\n\n7")
    await talk.ask(following("What is 3 + 4? ", answer) + "<|im_end|> Sure?")  # type: ignore[operator]
    assert len(samples(trajectory(talk.turns), 1.0, 0, 0)) == 1


@pytest.mark.parametrize(
    ("more", "keep_end", "seen"),
    [
        ("<|im_end|> and then", False, "<|im_end|> and then"),
        (" and then", True, "<|im_end|> and then"),
        (" and then", False, " and then"),
    ],
    ids=["the text holds the end token", "an environment leaves it out", "a client leaves it out"],
)
async def test_text_goes_on_token_by_token(more: str, keep_end: bool, seen: str) -> None:
    """RL2's prefix rule, on tokens: for environments the end token stays where it was sampled; a client's text is
    what it asks."""
    chat = Chat(CHAT.tokenizer)
    engine = Scripted(["seven", "eight"], chat)
    talk = session(engine)
    reply = await talk.ask("What is 3 + 4? ")
    after = following("What is 3 + 4? ", reply)
    assert after == "What is 3 + 4? seven"
    await talk.answer(after + more, talk.params, keep_end=keep_end)
    assert chat.decode(engine.prompts[1]) == after + seen
    assert len(samples(trajectory(talk.turns), 1.0, 0, 0)) == (1 if "<|im_end|>" in seen else 2)


async def test_a_text_of_empty_answers_goes_on_behind_the_newest() -> None:
    """The text is the same after each of them, and so is what is known of it."""
    engine = Scripted(["", "", "seven"])
    talk = session(engine)
    for _ in range(3):
        await talk.answer("What is 3 + 4? ", talk.params, keep_end=True)
    assert CHAT.decode(engine.prompts[2]) == "What is 3 + 4? <|im_end|><|im_end|>"
    assert len(samples(trajectory(talk.turns), 1.0, 0, 0)) == 1


def test_an_empty_answer_is_a_message_in_any_form() -> None:
    """An agent that sent it back as OpenAI's clients have it failed."""
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}, {"role": "tool", "content": ""}]
    assert checked(said) == (user("Hi"), *(Message(role=role, content="") for role in ("assistant", "tool")))


async def test_what_cannot_fit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*_: object) -> None:
        raise AssertionError("it was rendered")

    talk = session(Scripted(["a"]), Limits(tokens=10))
    monkeypatch.setattr(Chat, "render", render)
    for said in ("x" * 1000, (user("x" * 1000),), (user("x"),) * 11):
        with pytest.raises(TooLong, match="more characters than 10 tokens hold"):
            await talk.ask(said)


async def test_no_room_is_told_and_the_last_answer_gets_what_is_left() -> None:
    engine = Scripted(["a" * 50, "b"])
    room = len(CHAT.render((user("Hi"),))) + 5
    talk = session(engine, Limits(tokens=room))
    reply = await talk.ask((user("Hi"),))
    assert engine.params[0].max_tokens == 5 and len(talk.turns[0].completion.tokens) == 5
    with pytest.raises(TooLong, match="leaves no room"):
        await talk.ask((user("Hi"), reply, user("more")))
    assert isinstance(talk.failure, TooLong) and len(talk.turns) == 1


async def test_parallel_questions_keep_their_order() -> None:
    engine = Scripted(lambda prompt: "ab"[prompt.count("second")], delay=0.01)
    talk = session(engine)
    await asyncio.gather(talk.ask((user("first"),)), talk.ask((user("second"),)))
    assert [CHAT.decode(t.completion.ids) for t in talk.turns] == ["a<|im_end|>", "b<|im_end|>"]


async def test_a_turn_renders_its_history_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the turn before is kept, and long new messages that it contains need no probe. The prompts are those
    that are rendered without either."""
    renderings = []
    apply = tools._apply
    monkeypatch.setattr(tools, "_apply", lambda *given: renderings.append(1) or apply(*given))

    async def prompts() -> list[tuple[int, ...]]:
        engine = Scripted([f"Reply {i}." for i in range(9)], Chat(tiny_tokenizer(template=QWEN)))
        own, talk = session(engine, Limits(turns=9)), (user("Hi"),)
        for i in range(9):
            reply = await own.ask(talk, tools=[tools.TOOL])
            talk = (*talk, reply, user(f"{i}: a new message of more than thirty-two characters"))
        return engine.prompts

    kept, first = await prompts(), len(renderings)
    monkeypatch.setattr(chat, "LONG_TEXT", 1 << 20)
    monkeypatch.setattr(chat, "MOST_KEPT", 0)
    assert await prompts() == kept and first <= 30 < 40 < len(renderings) - first


async def test_a_long_message_that_the_template_leaves_out_is_refused() -> None:
    template = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    own = session(Scripted(["One.", "Two."], Chat(tiny_tokenizer(template=template))))
    told = await own.ask((user("Hi"),))
    with pytest.raises(BirlError, match="leaves out messages of role tool"):
        await own.ask((user("Hi"), told, Message(role="tool", content="It is forty-two degrees in Oslo at noon.")))
