"""OpenAI's dialect, spoken by the real client."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from birl.engine import scheduler
from birl.server.ask import Ask
from birl.server.openai_format import Pieces
from birl.server.service import Service
from birl.types import SamplingParams
from tests.server.running import Running, running, slowed, until

HI: Any = [{"role": "user", "content": "What is 3 + 4?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SAID = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
Answers = Any


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder, token="k") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0, timeout=60) as found:
        yield found


def says(monkeypatch: pytest.MonkeyPatch, server: Running, text: str, end: bool = True) -> None:
    """The model is made to say that, by tokens that are given instead of drawn."""
    ids = (*server.service.chat.encode(text), *([2] if end else []))
    generate = Service.generate

    async def forced(self: Service, prompt: Any, params: Any, session: str = "", watch: Any = None, **keys: Any) -> Any:
        return await generate(self, prompt, replace(params, forced=ids), session, watch, **keys)

    monkeypatch.setattr(Service, "generate", forced)
    monkeypatch.setattr(scheduler, "FORCED", 1)  # token by token, as if they were drawn


def chat(client: openai.OpenAI, **keys: Any) -> Answers:
    return client.chat.completions.create(**{"model": "tiny", "messages": HI, "max_tokens": 30, **keys})


def told(stream: Any) -> dict[int, dict[str, Any]]:
    """What a stream came to, by choice."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for c in chunk.choices:
            own = found.setdefault(c.index, {"text": "", "calls": [], "reason": None, "ids": [], "logprobs": []})
            delta = getattr(c, "delta", None)
            own["text"] += (delta.content or "") if delta else c.text
            own["calls"] += (delta.tool_calls or []) if delta else []
            own["ids"] += getattr(c, "token_ids", None) or []
            if c.logprobs:
                rows = c.logprobs.content if delta else c.logprobs.token_logprobs
                own["logprobs"] += [row.logprob for row in rows] if delta else rows
            assert own["reason"] is None, "something came behind the end"
            own["reason"] = c.finish_reason
        if chunk.usage:
            found[-1] = {"usage": chunk.usage}
    return found


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").owned_by == "birl"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_a_chat_is_what_the_engine_says(client: openai.OpenAI, server: Running) -> None:
    answer = chat(client, seed=7, temperature=0.8, top_p=0.9, logprobs=True, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    native = server.generate(answer.prompt_token_ids, max_tokens=30, seed=7, temperature=0.8, top_p=0.9)
    assert choice.token_ids == native["tokens"] and choice.weight_versions == native["versions"]
    assert [row.logprob for row in choice.logprobs.content] == native["logprobs"]
    assert choice.message.content == server.service.chat.parse(native["tokens"]).content
    assert server.service.chat.decode(answer.prompt_token_ids).endswith("3 + 4?<|im_end|>\n<|im_start|>assistant\n")
    usage = answer.usage
    assert usage.prompt_tokens == len(answer.prompt_token_ids) and usage.completion_tokens == len(native["tokens"])
    assert choice.finish_reason == native["stop"] and usage.total_tokens == usage.prompt_tokens + len(native["tokens"])


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_comes_to_the_same(client: openai.OpenAI, kind: str) -> None:
    keys: Any = {"model": "tiny", "max_tokens": 40, "n": 3, "seed": 2, "extra_body": {"return_token_ids": True}}
    keys |= {"messages": HI, "logprobs": True} if kind == "chat" else {"prompt": ["ab", "c"], "logprobs": 0}
    create = client.chat.completions.create if kind == "chat" else client.completions.create
    whole = create(**keys)
    parts = told(create(**keys, stream=True, stream_options={"include_usage": True}))
    assert parts.pop(-1)["usage"] == whole.usage
    assert sorted(parts) == [c.index for c in whole.choices]
    for c in whole.choices:
        text = c.message.content if kind == "chat" else c.text
        logprobs = [row.logprob for row in c.logprobs.content] if kind == "chat" else c.logprobs.token_logprobs
        expected = {"text": text, "calls": [], "reason": c.finish_reason, "ids": c.token_ids, "logprobs": logprobs}
        assert parts[c.index] == expected
    assert len({tuple(c.token_ids) for c in whole.choices}) == len(whole.choices)


def test_the_first_of_several_is_the_one_alone(client: openai.OpenAI) -> None:
    one, three = (chat(client, seed=3, n=n).choices for n in (1, 3))
    assert one[0].message.content == three[0].message.content
    free = {chat(client).choices[0].message.content for _ in range(3)}
    assert len(free) == 3
    cold = chat(client, n=2, temperature=0).choices
    assert cold[0].message.content == cold[1].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_text_is_not_part_of_it(client, server, monkeypatch, stream: bool) -> None:
    says(monkeypatch, server, "né 🎲 <answer>7</answer> and more")
    for stop, text in (("</answer>", "né 🎲 <answer>7"), (["zz", "<ans"], "né 🎲 "), (["é"], "n"), (["/x"], None)):
        answer = chat(client, stop=stop, stream=stream, max_tokens=60)
        choice = told(answer)[0] if stream else None
        found = choice["text"] if choice else answer.choices[0].message.content
        assert found == (text if text is not None else "né 🎲 <answer>7</answer> and more")
        assert (choice["reason"] if choice else answer.choices[0].finish_reason) == "stop"
    keys: Any = {"max_tokens": 5, "stop": ["</answer>"], "stream": stream}
    cut = chat(client, **keys)
    assert (told(cut)[0]["reason"] if stream else cut.choices[0].finish_reason) == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_likely_tokens_of_each_place(client: openai.OpenAI, stream: bool) -> None:
    """In all dialects the same, and those of the same text when it is scored."""

    def made(create: Any, **keys: Any) -> list[Any]:
        keys = {"model": "tiny", "extra_body": {"return_token_ids": True, "seed": 3}, **keys}
        return list(create(**keys, stream=True)) if stream else [create(**keys)]

    chunks = made(client.chat.completions.create, messages=HI, max_tokens=6, logprobs=True, top_logprobs=3)
    rows = [row for c in chunks for choice in c.choices if choice.logprobs for row in choice.logprobs.content]
    tops = [[(top.token, top.logprob) for top in row.top_logprobs] for row in rows]
    prompt = next(c.prompt_token_ids for c in chunks if hasattr(c, "prompt_token_ids"))
    ids = [t for c in chunks for choice in c.choices for t in choice.token_ids]
    assert len(tops) == len(ids) and {len(top) for top in tops} == {3}

    texts = made(client.completions.create, prompt=prompt, max_tokens=6, logprobs=3)
    told = [place for c in texts for choice in c.choices if choice.logprobs for place in choice.logprobs.top_logprobs]
    assert [sorted(place.values())[-3:] for place in told] == [sorted(p for _, p in top) for top in tops]
    end = made(
        client.responses.create, input=HI, max_output_tokens=6, include=["message.output_text.logprobs"], top_logprobs=3
    )[-1]
    own = (end.response if stream else end).output[0].content[0].logprobs
    assert [[(top.token, top.logprob) for top in row.top_logprobs] for row in own] == tops

    keys: Any = {"model": "tiny", "prompt": [*prompt, *ids], "echo": True, "max_tokens": 0, "logprobs": 3}
    scored = client.completions.create(**keys).choices[0].logprobs.top_logprobs[len(prompt) :]
    for top, place in zip(tops, scored, strict=True):
        assert max(place.values()) == pytest.approx(max(p for _, p in top), abs=0.05)


def test_chunks_are_whole_characters(client, server, monkeypatch) -> None:
    says(monkeypatch, server, "🎲🦫é")
    chunks = [c.choices[0].delta.content for c in chat(client, stream=True) if c.choices]
    assert [c for c in chunks if c] == ["🎲", "🦫", "é"]


def test_prompts_of_every_kind(client: openai.OpenAI, server: Running) -> None:
    ids = list(server.service.chat.render("Anna has"))
    create = client.completions.create
    keys: Any = {"model": "tiny", "max_tokens": 12, "seed": 1}
    alone = create(prompt="Anna has", **keys).choices[0].text
    for prompt in (["Anna has"], ids, [ids], [ids, "x"], ["x", "Anna has"]):
        choices = create(prompt=prompt, **keys).choices  # type: ignore[arg-type]
        assert alone in {c.text for c in choices}
        assert len(choices) == (2 if "x" in prompt else 1)
    assert create(prompt="x", model="tiny", seed=1).usage.completion_tokens <= 16
    answer = create(prompt="Anna has", **keys, logprobs=0, stop="e")
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == answer.usage.completion_tokens
    assert all(
        alone[at:].startswith(t) for at, t in zip(logprobs.text_offset, logprobs.tokens, strict=True) if t.isascii()
    )


def test_log_probs_of_a_long_text_take_no_longer_for_each_token() -> None:
    """What is computed for one answer keeps all others waiting."""
    speaker: Any = SimpleNamespace(chat=SimpleNamespace(decode=lambda tokens: "ab"))
    pieces = Pieces(speaker, Ask(chat=False, prompts=((1,),), params=SamplingParams(max_tokens=1), n=1, stream=False,
                                 usage=False, logprobs=True, token_ids=False))  # fmt: skip
    assert pieces.logprobs([5, 6, 7], [-1.0] * 3, 10)["text_offset"] == [10, 12, 14]
    assert pieces.logprobs([], [], 10)["text_offset"] == []
    began = time.perf_counter()
    assert pieces.logprobs([5] * 50_000, [-1.0] * 50_000, 0)["text_offset"][-1] == 99_998
    assert time.perf_counter() - began < 50


def test_ids_that_stop(client: openai.OpenAI, server: Running, monkeypatch) -> None:
    says(monkeypatch, server, "abc")
    b = server.service.chat.encode("b")[0]
    answer = chat(client, extra_body={"stop_token_ids": [b], "return_token_ids": True}).choices[0]
    assert answer.message.content == "a" and answer.token_ids[-1] == b and answer.finish_reason == "stop"
    answer = chat(client, extra_body={"ignore_eos": True, "top_k": -1, "min_p": 0.1}, max_tokens=9)
    assert answer.usage.completion_tokens == 9 and answer.choices[0].message.content.startswith("abc<|im_end|>")


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(client, server, monkeypatch, stream: bool) -> None:
    says(monkeypatch, server, SAID)
    answer = chat(client, tools=TOOLS, stream=stream, max_tokens=90)
    if stream:
        found = told(answer)[0]
        content, calls, reason = found["text"], found["calls"], found["reason"]
        assert calls[0].index == 0
    else:
        message = answer.choices[0].message
        content, calls, reason = message.content, message.tool_calls, answer.choices[0].finish_reason
    assert content == "I add." and reason == "tool_calls"
    (call,) = calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 3})
    plain = chat(client, max_tokens=90)  # without tools it is text
    assert plain.choices[0].message.content == SAID and plain.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_stays_text(client, server, monkeypatch, stream: bool) -> None:
    text = "Well <tool_call>{no} "
    says(monkeypatch, server, text)
    answer = chat(client, tools=TOOLS, stream=stream)
    assert (told(answer)[0]["text"] if stream else answer.choices[0].message.content) == text


def test_a_conversation_with_tools_goes_on(client: openai.OpenAI, server: Running, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        says(patch, server, SAID)
        call = chat(client, tools=TOOLS, max_tokens=90).choices[0].message
    messages = [*HI, call.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "x", "content": "seven"}]
    answer = chat(client, messages=messages, tools=TOOLS, extra_body={"return_token_ids": True})
    text = server.service.chat.decode(answer.prompt_token_ids)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 3}}' in text and "tool\nseven" in text
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 + 4?"}]
    same = [chat(client, messages=m, seed=1).choices[0] for m in ([{"role": "user", "content": parts}], HI)]
    assert same[0].message.content == same[1].message.content
    silent = chat(client, tools=TOOLS, tool_choice="none", seed=1).choices[0]  # as if there were none
    assert silent.message.content == same[1].message.content


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "odd"}}}},
            "response_format",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "odd"}}, "tools": TOOLS}, "tool_choice"),
        ({"extra_body": {"tempreature": 1}}, "tempreature"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1, "max_tokens": None}, "max_completion_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
        ({"extra_body": {"stop_token_ids": [999]}}, "stop_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(client: openai.OpenAI, keys: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **keys)
    assert caught.value.param == param, caught.value
    assert len(caught.value.message) < 700 and "?." not in caught.value.message


@pytest.mark.parametrize("keys", [{"top_logprobs": 3}, {"top_logprobs": 21, "logprobs": True}])
def test_likely_tokens_go_with_log_probs_and_are_few(client: openai.OpenAI, keys: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=r"requires log-probs|at most 20, got 21"):
        chat(client, **keys)


@pytest.mark.parametrize("keys", [{"suffix": "x"}, {"prompt": []}, {"echo": True, "stream": True}, {"logprobs": 21}])
def test_completions_refuse_too(client: openai.OpenAI, keys: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "x", **keys})
    assert caught.value.param == next(iter(keys))


def test_errors_have_the_clients_classes(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt-4'"):
        chat(client, model="gpt-4")


def test_a_template_that_leaves_out_tools(tiny: Path) -> None:
    with running(tiny, served_name="own/name") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        bare, told = (chat(client, model="own/name", **keys).usage for keys in ({}, {"tools": TOOLS}))
        assert told.prompt_tokens > bare.prompt_tokens + 50
        assert client.models.retrieve("own/name").id == "own/name"


async def test_the_asynchronous_client(server: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        create = client.chat.completions.create
        keys: Any = {"model": "tiny", "messages": HI, "max_tokens": 20}
        answers = await asyncio.gather(*(create(**keys, seed=i) for i in range(8)))
        for i in (0, 5):
            text = ""
            async for chunk in await create(**keys, seed=i, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == answers[i].choices[0].message.content


def test_a_stream_that_is_closed_is_aborted(server: Running, client, monkeypatch) -> None:
    slowed(monkeypatch, server.service, 0.01)
    engine = server.service.engine
    before, sampled = engine.counters.dropped, engine.counters.tokens
    stream = chat(client, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))  # who speaks; it is sent before the first token is sampled
    until(lambda: engine.counters.tokens > sampled)
    stream.close()
    until(lambda: engine.counters.dropped > before and not engine.scheduler.busy)
    until(lambda: server.service.gate.open == 0)


def test_a_stream_that_fails_says_so(server: Running, client, monkeypatch) -> None:
    slowed(monkeypatch, server.service, 0.02)
    monkeypatch.setattr(server.service, "timeout", 0.4)
    with pytest.raises(openai.APIError, match=r"longer than 0\.4 s"):
        told(chat(client, stream=True, max_tokens=400, extra_body={"ignore_eos": True}))
    until(lambda: not server.service.engine.scheduler.busy)


def test_weights_that_change_while_it_streams(server: Running, client, monkeypatch) -> None:
    slowed(monkeypatch, server.service, 0.01)
    from safetensors.torch import save

    tensors = {name: p.data.clone() for name, p in server.service.engine.runner.model.named_parameters()}
    versions: list[int] = []
    body = {"ignore_eos": True, "return_token_ids": True}
    for n, chunk in enumerate(chat(client, stream=True, max_tokens=150, extra_body=body)):
        versions += chunk.choices[0].weight_versions
        if n == 5:
            server.http.put("/stage/4", content=save(tensors))
            assert server.http.post("/load", json={"version": 4}).status_code == 200
    assert versions == sorted(versions) and set(versions) == {0, 4} and len(versions) == 150


def test_curl_sees_events(server: Running) -> None:
    data = {"prompt": "x", "max_tokens": 3, "stream": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=data, headers={"authorization": "Bearer k"})
    lines = [line for line in reply.text.split("\n") if line]
    assert reply.headers["content-type"].startswith("text/event-stream") and lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])
