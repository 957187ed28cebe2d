"""Agents reach the model by the real clients of OpenAI and Anthropic; what they asked are the episode's turns, token by
token."""

import asyncio
import json
import threading
from typing import Any

import pytest

from birl.text.bounds import LONG, characters
from birl.text.chat import Chat
from birl.types import Completion, Message, Stop
from tests.rollout.scripted import CHAT, Scripted
from tests.server.places import CALL, HI, TOOL, TOOLED, Place, played
from tests.text.test_tools import QWEN
from tests.tiny import tiny_tokenizer

HELLO = (Message(role="user", content="Hi"),)
SHOWN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


def test_openai_continues_token_by_token() -> None:
    async def body(here: Place) -> None:
        said = list(HI)
        for question in ("Sure?", "Why?"):
            reply = await here.chat(said)
            said += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": question}]
        last = (await here.chat(said)).choices[0]
        assert (last.message.content, last.finish_reason) == ("c", "stop")
        assert here.spoken() == ["a<|im_end|>b<|im_end|>c<|im_end|>"]

    played(Scripted(["a", "b", "c"]), body)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_calls_tools(stream: bool) -> None:
    async def body(here: Place) -> None:
        tools = [{"type": "function", "function": TOOL}]
        if stream:
            async with here.openai.chat.completions.stream(model="any", messages=HI, tools=tools) as events:  # type: ignore
                reply = (await events.get_final_completion()).choices[0]
        else:
            reply = (await here.chat(tools=tools)).choices[0]
        (call,) = reply.message.tool_calls
        assert (reply.finish_reason, reply.message.content) == ("tool_calls", "I add.")
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3}) and len(call.id) == 9
        own = {"role": "assistant", "content": "I add.", "tool_calls": [call.model_dump(exclude={"index"})]}
        own["tool_calls"][0]["function"].pop("parsed_arguments", None)  # type: ignore
        said = [*HI, own, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        assert (await here.chat(said, tools=tools)).choices[0].message.content == "seven"
        assert here.spoken() == [CALL + "<|im_end|>seven<|im_end|>"]

    played(Scripted([CALL, "seven"], TOOLED), body)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_calls_tools(stream: bool) -> None:
    async def body(here: Place) -> None:
        tools = [{"name": "add", "description": "Adds.", "input_schema": TOOL["parameters"]}]
        keys: Any = {"model": "any", "max_tokens": 90, "system": "Be brief.", "messages": HI, "tools": tools}
        if stream:
            async with here.anthropic.messages.stream(**keys) as events:
                reply = await events.get_final_message()
        else:
            reply = await here.anthropic.messages.create(**keys)
        words, call = reply.content
        assert (words.text, call.name, call.input, reply.stop_reason) == ("I add.", "add", {"a": 3}, "tool_use")  # pyright: ignore
        assert reply.usage.output_tokens == len(here.session.turns[0].completion.tokens)
        counted = await here.anthropic.messages.count_tokens(**{k: v for k, v in keys.items() if k != "max_tokens"})
        assert counted.input_tokens == len(here.session.turns[0].prompt) == reply.usage.input_tokens
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "7"}]}  # pyright: ignore
        keys["messages"] = [
            *HI,
            {"role": "assistant", "content": [b.model_dump() for b in reply.content]},
            {"role": "user", "content": [result]},
        ]
        reply = await here.anthropic.messages.create(**keys)
        assert (reply.content[0].text, reply.stop_reason) == ("seven", "end_turn")
        assert here.spoken() == [CALL + "<|im_end|>seven<|im_end|>"]

    played(Scripted([CALL, "seven"], TOOLED), body)


def test_stop_strings_of_a_client_end_the_answer_and_not_the_sample() -> None:
    """APIs leave the stop string out; the model has sampled it, and its tokens stay."""

    class Stops(Scripted):
        async def generate(self, prompt_ids: Any, params: Any, session: str = "") -> Completion:
            found = await super().generate(prompt_ids, params, session)
            assert params.stop == ("STOP",)
            return Completion(
                tokens=found.ids[:-1],
                logprobs=found.logprobs.tolist()[:-1],
                versions=found.versions.tolist()[:-1],
                stop=Stop.STOP,
            )

    async def body(here: Place) -> None:
        first = (await here.chat(stop="STOP")).choices[0].message
        assert first.content == "one"
        said = [*HI, {"role": "assistant", "content": "one"}, *HI]
        second = await here.message(said, stop_sequences=["STOP"])
        assert (second.content[0].text, second.stop_reason, second.stop_sequence) == ("two", "stop_sequence", "STOP")
        assert here.spoken() == ["oneSTOPtwoSTOP"]

    played(Stops(["oneSTOP", "twoSTOP"]), body)


def test_an_answer_is_cut_at_a_stop_string_before_it_is_parsed() -> None:
    """As on a server: a call without its end is text; and a stop string within the end token's text ended nothing."""

    async def body(here: Place) -> None:
        tools: Any = [{"name": "add", "input_schema": TOOL["parameters"]}]
        cut = await here.message(tools=tools, stop_sequences=["</tool_call>"])
        assert [block.type for block in cut.content] == ["text"] and cut.content[0].text == CALL.partition("</tool_")[0]
        ended = await here.message(stop_sequences=["e", "<|"])
        assert (ended.content[0].text, ended.stop_reason, ended.stop_sequence) == ("ok", "end_turn", None)
        assert here.spoken() == [CALL + "<|im_end|>", "ok<|im_end|>"]

    played(Scripted([CALL, "ok"], TOOLED), body)


def test_a_stop_token_of_a_client_is_no_text() -> None:
    """As on a server: the answer ends before it, and its sample contains it."""
    (dot,) = CHAT.encode(".")

    class Stops(Scripted):
        async def generate(self, prompt_ids: Any, params: Any, session: str = "") -> Completion:
            assert params.stop_ids == (dot,)
            whole = await super().generate(prompt_ids, params, session)
            return Completion.of(whole.ids[:-1], whole.logprobs[:-1], whole.versions[:-1], Stop.STOP)

    async def body(here: Place) -> None:
        asked = {"extra_body": {"stop_token_ids": [dot]}}
        first = (await here.chat(**asked)).choices[0].message
        said = [*HI, {"role": "assistant", "content": "one"}, *HI]
        second = (await here.chat(said, **asked)).choices[0].message
        assert (first.content, second.content, here.spoken()) == ("one", "two", ["one.two."])

    played(Stops(["one.", "two."]), body)


@pytest.mark.parametrize("told", [True, False], ids=["the text has the stop string", "the text leaves it out"])
def test_a_text_that_goes_on_behind_a_stop_string_has_it_once(told: bool) -> None:
    """As agents of the ReAct kind ask: the answer comes without the stop string, and their next text begins with it."""

    class Stops(Scripted):
        async def generate(self, prompt_ids: Any, params: Any, session: str = "") -> Completion:
            whole = await super().generate(prompt_ids, params, session)
            return Completion.of(whole.ids[:-1], whole.logprobs[:-1], whole.versions[:-1], Stop.STOP)

    engine = Stops(["look\nObs:", "done"])

    async def body(here: Place) -> None:
        ask = here.openai.completions.create
        said = (await ask(model="any", prompt="Q", stop=["\nObs:"])).choices[0].text
        assert said == "look"
        text = f"Q{said}\n{'Obs:' if told else 'I see'} 7\n"
        await ask(model="any", prompt=text, stop=["\nObs:"])
        assert CHAT.decode(engine.prompts[1]) == text
        assert here.spoken() == (["look\nObs:done"] if told else ["look\nObs:", "done"])

    played(engine, body)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/chat/completions", {"messages": HI}),
        ("/completions", {"prompt": "Hi"}),
        ("/responses", {"input": "Hi"}),
        ("/messages", {"messages": HI, "max_tokens": 20}),
    ],
)
def test_events_are_lines_for_every_client(path: str, asked: dict[str, Any]) -> None:
    """LiteLLM and others cut a stream with httpx's `iter_lines`, which ends lines where `str.splitlines` does."""

    async def body(here: Place) -> None:
        async with here.http.stream("POST", path, json={"model": "any", "stream": True, **asked}) as answer:
            lines = [line async for line in answer.aiter_lines()]
        told = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        assert len(told) == sum(not line.startswith(("event: ", "data: [DONE]")) for line in lines if line)
        assert any(repr("a\u2028b\x85c") in str(json.loads(line)) for line in told)

    played(Scripted(["a\u2028b\x85c"]), body)


def test_several_choices_are_branches() -> None:
    async def body(here: Place) -> None:
        found = await here.chat(n=3, logprobs=True)
        assert sorted(c.message.content for c in found.choices) == ["a", "b", "c"]
        assert found.usage.completion_tokens == 6 and found.choices[0].logprobs.content[0].logprob == -0.5
        assert sorted(here.spoken()) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]

    played(Scripted(["a", "b", "c"]), body)


def test_text_completions_and_models() -> None:
    async def body(here: Place) -> None:
        found = await here.openai.completions.create(model="any", prompt="one and", max_tokens=50)
        assert found.choices[0].text == " two"
        found = await here.openai.completions.create(model="any", prompt="one and two and")
        assert here.spoken() == [" two<|im_end|>", " three<|im_end|>"]
        first, second = (turn.prompt.tolist() for turn in here.session.turns)
        assert second[: len(first)] == first and CHAT.decode(second[len(first) :]) == " two and"
        assert [m.id async for m in here.openai.models.list()] == ["birl"]
        assert (await here.openai.models.retrieve("some/model")).id == "some/model"

    played(Scripted([" two", " three"]), body)


@pytest.mark.parametrize("kind", ["text", "picture"])
def test_a_long_prompt_holds_up_no_other_request(kind: str) -> None:
    """It is rendered and counted beside the event loop: 6 MB take 40 s on a slow machine, a picture of 60 kB 4 s."""
    chat, go = Chat(tiny_tokenizer(template=QWEN)), threading.Event()
    render, rendering = chat.render, []

    def slow(prompt: Any, tools: Any = ()) -> tuple[int, ...]:
        if characters(prompt) > LONG or prompt[0].pictures:
            rendering.append(prompt)
            assert go.wait(20)
            return render(HELLO, tools) if prompt[0].pictures else render(prompt, tools)
        return render(prompt, tools)

    chat.render = slow  # type: ignore[method-assign]
    url = f"data:image/png;base64,{SHOWN['source']['data']}"

    async def body(here: Place) -> None:
        long = "x" * (LONG + 1)
        asked: Any = long if kind == "text" else [{"type": "image_url", "image_url": {"url": url}}]
        asking = asyncio.create_task(here.chat([{"role": "user", "content": asked}]))
        counted: Any = [{"role": "user", "content": long if kind == "text" else [SHOWN]}]
        counting = asyncio.create_task(here.anthropic.messages.count_tokens(model="any", messages=counted))
        while len(rendering) < 2:
            await asyncio.sleep(0.01)
        assert (await here.chat()).choices[0].message.content == "a"
        go.set()
        assert (await asking).choices[0].message.content == "a"
        assert (await counting).input_tokens > (LONG if kind == "text" else 0)

    played(Scripted(lambda prompt: "a", chat), body)


def test_agents_have_names() -> None:
    async def body(here: Place) -> None:
        await here.chat(model="birl/critic")
        await here.chat(model="openai/gpt-9")
        await here.chat(extra_headers={"X-Birl-Agent": "judge"})
        await here.message(model="birl/critic")
        assert [t.agent for t in here.session.turns] == ["critic", "", "judge", "critic"]

    played(Scripted(["a", "b", "c", "d"]), body)


def test_rewards_are_sent() -> None:
    async def body(here: Place) -> None:
        for wrong in ({}, {"reward": "1"}, {"reward": True}, {"reward": 1, "agnet": "x"}, {"reward": 1, "agent": 3}):
            assert (await here.http.post("/reward", json=wrong)).status_code == 400
        assert (await here.http.post("/reward", content=b'{"reward": NaN}')).status_code == 400
        assert here.session.reward is None
        await here.http.post("/reward", json={"reward": 0.5})
        assert here.session.reward == 0.5
        await here.http.post("/reward", json={"reward": 1, "agent": "a"})
        await here.http.post("/reward", json={"reward": -1, "agent": "b"})
        assert here.session.reward == {"a": 1.0, "b": -1.0}

    played(Scripted([]), body)


def test_the_run_decides_how_answers_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Scripted(["a"] * 4, TOOLED)

    async def body(here: Place) -> None:
        strict = [{"type": "function", "function": {**TOOL, "strict": True}}]
        for _ in range(2):
            await here.chat(temperature=0.2, top_p=0.5, seed=1, max_tokens=7)
        await here.chat(tools=strict, tool_choice="required", response_format={"type": "json_object"})

    played(engine, body)
    assert [(p.temperature, p.top_p, p.seed, p.max_tokens) for p in engine.params[:2]] == [
        (1.0, 1.0, 100, 7),
        (1.0, 1.0, 101, 7),
    ]
    printed = capsys.readouterr().out
    for key in ("temperature=0.2; the run's temperature is 1", "top_p=0.5", "seed", "tool_choice", "response_format"):
        assert printed.count(f"An agent requested {key}") == 1
    assert "strict=true" in printed


def test_an_agent_may_decide_where_nothing_is_trained() -> None:
    engine = Scripted(["a", "b"])

    async def body(here: Place) -> None:
        await here.chat(temperature=0.2, top_p=0.5, extra_body={"top_k": 3})
        await here.message(extra_body={"temperature": 0.3})

    played(engine, body, sampling="agent")
    assert [(p.temperature, p.top_p, p.top_k) for p in engine.params] == [(0.2, 0.5, 3), (0.3, 1.0, 0)]


REFUSED = {
    "an unknown parameter": ("/chat/completions", {"messages": HI, "tempreature": 1}, "tempreature"),
    "no messages": ("/chat/completions", {}, "messages"),
    "an image": (
        "/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "image_url",
    ),
    "an image for Anthropic": (
        "/messages",
        {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "image",
    ),
    "an answer that was begun": (
        "/messages",
        {"max_tokens": 5, "messages": [*HI, {"role": "assistant", "content": "I"}]},
        "prefilled answers",
    ),
    "a tool of the API": ("/messages", {"messages": HI, "tools": [{"type": "bash_1", "name": "bash"}]}, "tools.0"),
    "ids": ("/completions", {"prompt": [1, 2]}, "prompt must be text"),
    "no room": ("/chat/completions", {"messages": HI, "max_tokens": 0}, "max_tokens must be at least 1"),
    "too many": ("/chat/completions", {"messages": HI, "n": 1000}, "at most 128"),
    "no JSON": ("/chat/completions", "{", "not JSON"),
    "many empty messages": ("/chat/completions", {"messages": [{"role": "user"}] * 5000}, "5000 messages"),
    "a long role": ("/chat/completions", {"messages": [{"role": "u" * 400, "content": ""}]}, "400 characters"),
    "a deep schema": ("/messages", {"messages": HI, "tools": [json.loads("[" * 200 + "]" * 200)]}, "nested more than"),
    "a picture beside its place": (
        "/messages",
        {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "\ufffc"}, SHOWN]}]},
        "messages.0.content has the character U+FFFC beside pictures",
    ),
    "a reward of 400 digits": ("/reward", '{"reward": 1' + "0" * 400 + "}", "too large"),
}


@pytest.mark.parametrize(("path", "sent", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_had_is_refused_by_name(path: str, sent: Any, told: str) -> None:
    async def body(here: Place) -> None:
        found = await here.http.post(path, content=sent if isinstance(sent, str) else json.dumps(sent))
        assert found.status_code == 400 and told in found.json()["error"]["message"].replace(": ", " "), found.text
        assert (found.json().get("type") == "error") == (path == "/messages")
        assert not here.session.turns and here.session.failure is None

    played(Scripted([]), body, tokens=4096)
