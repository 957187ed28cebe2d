"""OpenAI's Responses, spoken by the real clients: for an episode, and to a server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from birl.rollout.session import Known
from birl.server.agent_session import Kept, bytes_of
from birl.server.gateway_responses import conversation
from birl.server.limits import Refused
from birl.types import Completion, Message, Stop, Turn
from tests.rollout.scripted import Scripted
from tests.server.places import CALL, THINKING, TOOL, TOOLED, Place, place, played
from tests.server.running import Running, running
from tests.server.test_dialects import SCHEMA, Answer
from tests.server.test_openai import says

ADD: Any = {"type": "function", **TOOL, "strict": False}
RESULT: Any = {"type": "function_call_output", "output": "7"}
IDS = {"return_token_ids": True}
THOUGHT = f"<think>\nhm\n</think>\n\n{CALL}"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, input: Any = "Hi", **keys: Any) -> Any:
    """`create`, or the end of its stream, after a look at the events."""
    keys = {"model": "any", "max_output_tokens": 90, "input": input, **keys}
    keys["extra_body"] = {"seed": 3, "return_token_ids": True, **keys.get("extra_body", {})}
    if not keys.pop("stream", False):
        return client.responses.create(**keys)
    events = list(client.responses.create(**keys, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))  # type: ignore[union-attr]
    whole = events[-1].response  # type: ignore[union-attr]
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in whole.output]
    for kind in ("response.output_text", "response.reasoning_text"):
        told = "".join(e.delta for e in events if e.type == f"{kind}.delta")  # pyright: ignore
        assert [told] * bool(told) == [e.text for e in events if e.type == f"{kind}.done" and e.text]  # pyright: ignore
    return whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cited", [False, True])
def test_an_episode_calls_tools_token_by_token(stream: bool, cited: bool) -> None:
    async def body(here: Place) -> None:
        keys: Any = {"model": "any", "instructions": "Be brief.", "tools": [ADD], "max_output_tokens": 90}
        if stream:
            async with here.openai.responses.stream(input="Hi", **keys) as events:
                kinds = [event.type async for event in events]
                reply: Any = await events.get_final_response()
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            assert "response.output_text.delta" in kinds and "response.function_call_arguments.done" in kinds
        else:
            reply = await here.openai.responses.create(input="Hi", **keys)
        words, call = reply.output
        assert (words.content[0].text, call.name, json.loads(call.arguments)) == ("I add.", "add", {"a": 3})
        assert reply.status == "completed" and reply.usage.input_tokens == len(here.session.turns[0].prompt)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        if cited:
            keys |= {"previous_response_id": reply.id, "input": [result]}
        else:
            keys["input"] = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in reply.output), result]
        reply = await here.openai.responses.create(**keys)
        assert reply.output_text == "seven"
        assert here.spoken() == [CALL + "<|im_end|>seven<|im_end|>"]  # one sample

    played(Scripted([CALL, "seven"], TOOLED), body)


@pytest.mark.parametrize("back", ["items", "references", "without thoughts"])
def test_thoughts_are_items(back: str) -> None:
    async def body(here: Place) -> None:
        keys: Any = {"model": "any", "tools": [ADD]}
        first = await here.openai.responses.create(**keys, input="Hi")
        thought, words, call = first.output
        assert (thought.content[0].text.strip(), words.content[0].text.strip()) == ("hm", "I add.")
        assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
        said: Any = [item.to_dict() for item in first.output]
        if back == "references":
            said = [{"type": "item_reference", "id": item.id} for item in first.output]
        said = said[1:] if back == "without thoughts" else said
        items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, *said]
        async with here.openai.responses.stream(**keys, input=[*items, {**RESULT, "call_id": call.call_id}]) as events:
            last = await events.get_final_response()
        assert [item.type for item in last.output] == ["reasoning", "message"] and last.output_text.strip() == "seven"
        assert here.spoken() == [f"{THOUGHT}<|im_end|><think>\nso\n</think>\n\nseven<|im_end|>"]

    played(Scripted([THOUGHT, "<think>\nso\n</think>\n\nseven"], THINKING), body)


def test_an_episode_keeps_its_own() -> None:
    """Another episode's are unknown, and other instructions begin a new sample."""

    async def body(here: Place) -> None:
        first = await here.openai.responses.create(model="any", input="Hi", instructions="Be brief.")
        more: Any = {"model": "any", "input": "Sure?", "previous_response_id": first.id}
        await here.openai.responses.create(**more, instructions="Be brief.")
        await here.openai.responses.create(**more, instructions="Be long.")
        assert here.spoken() == ["a<|im_end|>b<|im_end|>", "c<|im_end|>"]
        prompts = [here.session.chat.decode(turn.prompt.tolist()) for turn in here.session.turns]  # type: ignore[attr-defined]
        assert "Be brief." not in prompts[2] and "a<|im_end|>" in prompts[2]

        async with place(Scripted([])) as there:
            with pytest.raises(openai.BadRequestError, match="an episode keeps all of its own"):
                await there.openai.responses.create(**more)
            with pytest.raises(openai.BadRequestError, match="Compaction is not supported: send fewer items"):
                await there.openai.responses.compact(model="any", input="Hi")

    played(Scripted(["a", "b", "c"], TOOLED), body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_continues_token_by_token(server: Running, client: openai.OpenAI, stream: bool) -> None:
    """What random weights say is not what its text encodes to."""
    first = ask(client, instructions="Be brief.", stream=stream, max_output_tokens=40)
    assert first.status == ("completed" if first.token_ids[-1] == 2 else "incomplete")
    keys: Any = {"instructions": "Be brief.", "previous_response_id": first.id, "stream": stream}
    second = ask(client, "Sure?", **keys)
    begun = [*first.prompt_token_ids, *first.token_ids]
    assert second.prompt_token_ids[: len(begun)] == begun
    assert "Sure?" in server.service.chat.decode(second.prompt_token_ids[len(begun) :])
    again = ask(client, "Sure?", **{**keys, "stream": not stream})
    assert again.token_ids == second.token_ids and again.output_text == second.output_text
    plain = ask(client, "Sure?", previous_response_id=first.id)  # without instructions: another conversation
    assert "Be brief." not in server.service.chat.decode(plain.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_servers_calls_and_log_probs(server: Running, client: openai.OpenAI, monkeypatch, stream: bool) -> None:
    says(monkeypatch, server, CALL)
    reply = ask(client, tools=[ADD], stream=stream, include=["message.output_text.logprobs"])
    words, call = reply.output
    assert (words.content[0].text, call.name, call.arguments) == ("I add.", "add", '{"a": 3}')
    assert [row.token for row in words.content[0].logprobs] == [
        server.service.chat.decode([t]) for t in reply.token_ids
    ]
    assert all(row.logprob <= 0 for row in words.content[0].logprobs)
    said = server.http.post("/v1/responses", json={"input": "Hi", "tools": [ADD], "max_output_tokens": 3}).json()
    assert (said["status"], said["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_answers_of_a_form(client: openai.OpenAI) -> None:
    strict = {**ADD, "strict": True, "parameters": SCHEMA}
    keys: Any = {"tools": [strict], "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": False}
    told = ask(client, **keys)
    (call,) = told.output
    assert json.loads(call.arguments)["a"] in (3, 4)
    assert told.parallel_tool_calls is False  # it was told as true
    answer = client.responses.parse(model="any", input="Hi", text_format=Answer, max_output_tokens=60)
    assert isinstance(answer.output_parsed, Answer)


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,xx"}]}]
WRONG: list[tuple[dict[str, Any], str, str]] = [  # what is asked, what is named, and a word of the fix
    ({"previous_response_id": "resp_1"}, "previous_response_id", "as input"),
    ({"tools": [{"type": "web_search"}]}, "tools.0", "your own function"),
    ({"background": True}, "background", "stream=true"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "input"),
    ({"input": IMAGE}, "input.0.content", "no base64"),
    ({"input": []}, "input", "must be text or a list of items"),
    ({"input": [{"type": "computer_call", "call_id": "1"}]}, "input.0", "function_call"),
    ({"input": [{**RESULT, "call_id": "call_9"}]}, "input", "no earlier function_call has the call_id 'call_9'"),
    ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input.0.id", "as input"),
    ({"input": [{"id": "rs_1"}]}, "input.0.id", "as input"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "x", "arguments": "x"}]}, "input.0", "JSON text"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "JSON schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"store": "no"}, "store", "true or false"),
]


def test_both_refuse_the_same(server: Running) -> None:
    async def body(here: Place) -> None:
        for keys, param, fix in WRONG:
            sent = {"model": "any", "input": "Hi", **keys}
            for reply in (server.http.post("/v1/responses", json=sent), await here.http.post("/responses", json=sent)):
                error = reply.json()["error"]
                assert reply.status_code == 400 and error["type"] == "invalid_request_error", (keys, reply.text)
                assert error["param"].startswith(param) and fix in error["message"], (keys, error)
                assert error["message"].startswith(error["param"]) and "\n" not in error["message"]
        assert not here.session.turns

    played(Scripted([], TOOLED), body)


def test_a_prompt_is_counted_before_it_is_asked(server: Running, client: openai.OpenAI) -> None:
    keys: Any = {"model": "any", "input": "Hi", "instructions": "Be brief.", "tools": [ADD]}
    count = client.responses.input_tokens.count(**keys)
    assert count.input_tokens == ask(client, **keys, max_output_tokens=2).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="not supported: send fewer items"):
        client.responses.compact(model="any", input="Hi")

    async def body(here: Place) -> None:
        assert await here.openai.responses.input_tokens.count(**keys) == count and not here.session.turns

    played(Scripted([], TOOLED), body)


def test_a_refusal_of_another_model_is_text_of_the_history(client: openai.OpenAI) -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    answer: Any = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "Hi"}, said],
        max_tokens=1,
        extra_body=IDS,  # type: ignore
    )
    items = [{"role": "user", "content": "Hi"}, {"type": "message", "id": "msg_1", "status": "completed", **said}]
    assert ask(client, items, max_output_tokens=1).prompt_token_ids == answer.prompt_token_ids
    said["content"] = "No."  # type: ignore
    assert ask(client, [*items[:1], said], max_output_tokens=1).prompt_token_ids == answer.prompt_token_ids


def test_what_is_kept_is_bounded(server: Running, client: openai.OpenAI, monkeypatch) -> None:
    turn = Turn(prompt=(1,) * 50, completion=Completion(tokens=(), logprobs=(), versions=(), stop=Stop.STOP))
    known = Known(key=(), talk=(Message(role="user", content="Hi"),), owner=("", ""), turn=turn)
    for kept in (Kept(most=3), Kept(most_bytes=3 * bytes_of(known))):
        for id in "abc":
            kept.keep(id, known)
        assert kept.known("a") == (known,)  # and so it stays
        kept.keep("d", known)
        assert [kept.cited(id) is not None for id in "abcd"] == [True, False, True, True]
        assert kept.size == 3 * bytes_of(known)
    monkeypatch.setattr(server.service, "kept", Kept(most=1, most_bytes=1 << 20))
    one, unkept = ask(client, max_output_tokens=2), ask(client, max_output_tokens=2, store=False)
    two = ask(client, max_output_tokens=2, previous_response_id=one.id)
    for id in (one.id, unkept.id):
        with pytest.raises(openai.BadRequestError, match="the last 1 are kept, at most 1 MiB") as caught:
            ask(client, previous_response_id=id)
        assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"
    assert ask(client, max_output_tokens=2, previous_response_id=two.id).status


def test_a_stream_ends_with_the_error(server: Running, client: openai.OpenAI, monkeypatch) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(server.service.engine, "generate", fails)
    with pytest.raises(openai.APIError, match="broken"):
        list(client.responses.create(model="any", input="Hi", stream=True))


def test_a_kept_response_is_read_and_deleted(client: openai.OpenAI) -> None:
    said: Any = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well?"},
        {"role": "user", "content": "Go"},
    ]
    for stream in (False, True):
        made = ask(client, said, max_output_tokens=3, stream=stream, metadata={"run": "7"})
        assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
        items = list(client.responses.input_items.list(made.id, order="asc", limit=2))  # of two pages
        assert [(item.role, item.content) for item in items] == [(m["role"], m["content"]) for m in said]  # type: ignore[union-attr]
        assert [item.id for item in client.responses.input_items.list(made.id)] == [item.id for item in items][::-1]
        for limit in ("0", "101", "9" * 5000, "few"):
            with pytest.raises(openai.BadRequestError, match=r"limit must be from 1 to 100\."):
                client.responses.input_items.list(made.id, extra_query={"limit": limit})
        with pytest.raises(openai.BadRequestError, match="The response is incomplete: only one that is being streamed"):
            client.responses.cancel(made.id)
        client.responses.delete(made.id)
        for method in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match=f"There is no response '{made.id}'"):
                method(made.id)
        with pytest.raises(openai.BadRequestError, match=r"there is no response .* episode, deleted, requested with"):
            ask(client, previous_response_id=made.id)


@pytest.mark.parametrize("store", [True, False])
def test_a_streamed_response_is_cancelled(client: openai.OpenAI, store: bool) -> None:
    keys: Any = {"model": "any", "input": "Hi", "store": store, "extra_body": {"ignore_eos": True}}
    with client.responses.create(**keys, stream=True) as events:
        made: Any = next(iter(events))
        assert client.responses.retrieve(made.response.id).status == "in_progress"
        ended = client.responses.cancel(made.response.id)
        *_, last = events
    assert ended.status == last.response.status == "cancelled" and last.type == "response.incomplete"  # pyright: ignore
    if store:
        assert client.responses.retrieve(ended.id).to_dict() == last.response.to_dict()


def test_cached_tokens_are_those_that_were_not_computed(server: Running, client: openai.OpenAI) -> None:
    """In all dialects, whole and streamed, beside the engine's own count."""
    prompt = "Name seven rivers, seven cities and seven hills of this country. " * 4
    counters = server.service.engine.counters
    told: list[tuple[int, int]] = []

    def chat(stream: bool, n: int = 1) -> int:
        keys: Any = {"model": "any", "messages": [{"role": "user", "content": prompt}], "max_tokens": 2, "n": n}
        if not stream:
            return client.chat.completions.create(**keys).usage.prompt_tokens_details.cached_tokens
        *_, last = client.chat.completions.create(**keys, stream=True, stream_options={"include_usage": True})
        return last.usage.prompt_tokens_details.cached_tokens

    def response(stream: bool) -> int:
        return ask(client, prompt, stream=stream, max_output_tokens=2).usage.input_tokens_details.cached_tokens

    for cached in (chat, chat, response):
        for stream in (False, True):
            before = counters.reused
            told.append((cached(stream), counters.reused - before))
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as other:
        keys: Any = {"model": "any", "max_tokens": 2, "messages": [{"role": "user", "content": prompt}]}
        usage = other.messages.create(**keys).usage
        with other.messages.stream(**keys) as events:
            assert events.get_final_message().usage == usage
        told.append((usage.cache_read_input_tokens, told[-1][1]))
        assert (
            usage.input_tokens + told[-1][0]
            == other.messages.count_tokens(model="any", messages=keys["messages"]).input_tokens
        )
    (first, reused), *others = told
    assert first == reused < 64
    assert {cached for cached, _ in others} == {count for _, count in others} and others[0][0] > 64
    assert chat(False, n=2) == others[0][0]  # the prompt of two answers is one


@pytest.mark.parametrize("key", ["content", "summary"])
def test_thoughts_that_are_no_parts_are_told(key: str) -> None:
    for value in (3, True, 1.5, "hm"):
        with pytest.raises(Refused, match=rf"{key}.* must be a list of parts"):
            conversation([{"type": "reasoning", key: value}], Kept())


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_a_number_that_json_cannot_repeat_is_refused(server: Running, number: str) -> None:
    for more in (f'"metadata": {{"a": {number}}}', f'"top_logprobs": 0, "reasoning": {{"a": [{number}]}}'):
        reply = server.http.post("/v1/responses", content=f'{{"input": "x", "max_output_tokens": 1, {more}}}')
        assert reply.status_code == 400 and "no JSON can repeat" in reply.json()["error"]["message"]
