"""What an agent asks for while it is trained it may ask of `birl serve`: one parser, one tolerance, and on the server
answers of a form."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pydantic
import pytest

from birl.server.agent_session import Kept
from birl.text.chat import Chat
from birl.text.grammar import Guide, calls_of, whole
from tests.rollout.scripted import Scripted
from tests.server.places import HI, TOOLED, Place, played
from tests.server.running import Running, running
from tests.text.families import FAMILIES
from tests.text.test_families import chat as family
from tests.text.test_tools import QWEN
from tests.tiny import tiny_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"enum": [3, 4]}}, "required": ["a"], "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder, token="s3cret") as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, **keys: Any) -> Any:
    return client.chat.completions.create(**{"model": "any", "messages": HI, "max_tokens": 60, "seed": 1, **keys})


class Answer(pydantic.BaseModel):
    right: bool


STRICT = {**ADD, "function": {**ADD["function"], "strict": True}}
USUAL: dict[str, dict[str, Any]] = {
    **{key: {key: 0.5} for key in ("frequency_penalty", "presence_penalty", "repetition_penalty")},
    "a bias": {"logit_bias": {"5": 1}},
    "effort": {"reasoning_effort": "low", "verbosity": "low"},
    "thinking": {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}},
    "OpenRouter": {
        "reasoning": {"effort": "low"},
        "usage": {"include": True},
        "provider": {"order": ["x"]},
        "transforms": [],
        "trace": {"trace_id": "x"},
    },
    "SGLang": {"separate_reasoning": True, "rid": "x", "no_stop_trim": False, "min_new_tokens": 0},
    "llama.cpp": {"cache_prompt": True, "repeat_penalty": 1.1, "timings_per_token": False, "reasoning_format": "none"},
    "vLLM": {"skip_special_tokens": True, "stop_token_ids": [5], "min_tokens": 1, "ignore_eos": False, "top_k": 5},
    "top logprobs": {"logprobs": True, "top_logprobs": 3},
    "no parallel calls": {"parallel_tool_calls": False, "tools": [ADD]},
    "a strict tool": {"tools": [STRICT], "tool_choice": "auto"},
    "a forced tool": {"tools": [ADD], "tool_choice": "required"},
    "a named tool": {"tools": [ADD, SUB], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
    "a schema": {"response_format": FORM},
    "JSON": {"response_format": {"type": "json_object"}},
    "guided": {"guided_json": SCHEMA},
    "auto without tools": {"tool_choice": "auto"},
    "a developer": {"messages": [{"role": "developer", "content": "Be brief."}, *HI]},
    "an empty answer": {"messages": [*HI, {"role": "assistant", "content": None}, *HI]},
    "usage on the way": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "harmless": {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"},
    "without effect": {"logit_bias": {}, "response_format": {"type": "text"}, "top_logprobs": 0},
}


@pytest.mark.parametrize("keys", USUAL.values(), ids=USUAL)
def test_a_server_takes_what_agents_send(server: Running, keys: dict[str, Any]) -> None:
    sent = {"model": "any", "messages": HI, "max_tokens": 8, "seed": 1, **keys}
    reply = server.http.post("/v1/chat/completions", json=sent)
    assert reply.status_code == 200, reply.text


def test_the_gateway_takes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(here: Place) -> None:
        for name, keys in USUAL.items():
            for _ in range(2):
                reply = await here.http.post("/chat/completions", json={"model": "any", "messages": HI, **keys})
                assert reply.status_code == (400 if name == "top logprobs" else 200), (keys, reply.text)
        reply = await here.http.post("/responses", json={"input": HI, "top_logprobs": 3})
        assert reply.status_code == 400 and "report log-probs of sampled tokens only" in reply.text

    played(Scripted(["Hello."] * 2 * len(USUAL)), body, turns=100)
    told = capsys.readouterr().out
    for key in ("frequency_penalty", "reasoning", "guided_json", "response_format", "tool_choice"):
        assert told.count(f"An agent requested {key}=") == 1


NAMELESS = {"type": "function", "function": {"name": "x", "parameters": "x"}}
CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "\\ud800"}'}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": "x"}
WRONG: list[tuple[str, dict[str, Any], str]] = [  # of which dialect, what is asked, and what is named
    ("chat/completions", {"temperature": -1}, "temperature"),
    ("chat/completions", {"top_k": 10**400}, "top_k"),
    ("chat/completions", {"seed": "x"}, "seed"),
    ("chat/completions", {"ignore_eos": 1}, "ignore_eos"),
    ("chat/completions", {"model": 5}, "model"),
    ("chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("chat/completions", {"response_format": "json"}, "response_format"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("chat/completions", {"guided_json": {"$ref": "#/none"}}, "guided_json"),
    ("chat/completions", {"guided_regex": "("}, "guided_regex"),
    ("chat/completions", {"tools": [NAMELESS]}, "tools.0.function.parameters"),
    ("chat/completions", {"tools": [ADD], "tool_choice": ALLOWED}, "allowed_tools"),
    ("chat/completions", {"tools": [ADD], "tool_choice": "odd"}, "tool_choice"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    (
        "chat/completions",
        {"tools": [ADD], "parallel_tool_calls": "no", "tool_choice": "required"},
        "parallel_tool_calls",
    ),
    (
        "chat/completions",
        {"messages": [*HI, {"role": "assistant", "tool_calls": [CALLED]}]},
        "messages.1.tool_calls.0.function.arguments",
    ),
    ("completions", {"prompt": "x", "top_p": 0}, "top_p"),
    ("messages", {"temperature": -1}, "temperature"),
    ("messages", {"top_k": 10**400}, "top_k"),
    ("messages", {"output_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tool_choice": {"type": ["auto"]}}, "type"),
]


def test_both_refuse_the_same(server: Running) -> None:
    """By name and in the dialect's own words, also where the run's own values count: a server would refuse it later."""

    async def body(here: Place) -> None:
        for path, keys, param in WRONG:
            sent = ({} if path == "completions" else {"messages": HI}) | {"max_tokens": 4} | keys
            for reply in (server.http.post(f"/v1/{path}", json=sent), await here.http.post(f"/{path}", json=sent)):
                assert reply.status_code == 400, (keys, reply.text)
                error = reply.json()["error"]
                assert error["message"].startswith(f"{param}: "), (keys, error)
                assert error["type"] == "invalid_request_error" and len(error["message"]) < 600

    played(Scripted(["Hello."] * len(WRONG), TOOLED), body, turns=100)


def test_arguments_that_no_schema_names_are_not_made_up() -> None:
    own = Chat(tiny_tokenizer(template=QWEN))
    for more, good in (({}, False), ({"additionalProperties": True}, True)):
        schema = {"type": "object", "properties": {"a": {"enum": [3, 4]}}, "required": ["a"], **more}
        body = calls_of(own, [{"type": "function", "function": {"name": "add", "parameters": schema}}], many=False)
        matcher = Guide(own, whole(own, body or "", False)).matcher
        ids = own.encode('<tool_call>\n{"name": "add", "arguments": {"a": 3, "')
        assert (matcher.try_consume_tokens(list(ids)) == len(ids)) == good


def test_a_server_says_once_what_has_no_effect(client: openai.OpenAI, server: Running, capsys) -> None:
    server.service.terms.noted.clear()
    first, second = (ask(client, frequency_penalty=p, max_tokens=4) for p in (0.7, 0.8))
    assert first.choices[0].message.content == second.choices[0].message.content
    assert capsys.readouterr().out == "A client requested frequency_penalty=0.7; that has no effect.\n"
    for name in ("a", "\x1b]0;b"):  # names of a client's own are no keys of the note
        more = {"stream": True, "max_tokens": 1, "stream_options": {name: 1}}
        assert server.http.post("/v1/completions", json={"prompt": "x", **more}).status_code == 200
        assert server.http.post("/v1/responses", json={"input": "x", "text": {name: 1}}).status_code == 200
    told = capsys.readouterr().out
    assert told.count("stream_options=") == told.count("text=") == 1 and len(told.splitlines()) == 2


@pytest.mark.parametrize("form", [FORM, {"type": "json_object"}], ids=["schema", "object"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_of_a_form(client: openai.OpenAI, form: Any, temperature: float) -> None:
    schema = form["type"] == "json_schema"
    answer = ask(client, response_format=form, temperature=temperature, logprobs=True).choices[0]
    if schema:
        assert json.loads(answer.message.content)["a"] in (3, 4) and answer.finish_reason == "stop"
        sure = [row.logprob for row in answer.logprobs.content if row.token in ('{"', "{")]
        assert temperature == 0 or all(lp > -1e-3 for lp in sure[1:])
    else:
        assert answer.message.content.startswith("{")


def test_log_probs_are_those_of_what_is_allowed(client: openai.OpenAI, server: Running) -> None:
    """Of two texts that differ in one token, both log-probs make one."""
    found = {}
    for seed in range(40):
        extra = {"guided_choice": ["7", "8"]}
        choice = ask(client, extra_body=extra, seed=seed, logprobs=True, max_tokens=4).choices[0]
        found[choice.message.content] = choice.logprobs.content[0].logprob
        if len(found) == 2:
            break
    assert set(found) == {"7", "8"} and abs(sum(np.exp(list(found.values()))) - 1) < 1e-4


@pytest.mark.parametrize("stream", [False, True])
def test_calls_can_be_forced(client: openai.OpenAI, stream: bool) -> None:
    for choice, names in (("required", {"add", "sub"}), ({"type": "function", "function": {"name": "sub"}}, {"sub"})):
        answer = ask(
            client, tools=[ADD, SUB], tool_choice=choice, parallel_tool_calls=False, stream=stream, max_tokens=120
        )
        if stream:
            calls = [c for chunk in answer for c in (chunk.choices[0].delta.tool_calls or ())]
        else:
            calls = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls"
        assert len(calls) == 1 and calls[0].function.name in names
        assert json.loads(calls[0].function.arguments)["a"] in (3, 4)


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.form in ("hermes", "llama", "mistral", "")])
def test_a_forced_call_is_read_as_a_call(name: str) -> None:
    own = family(name)
    body = calls_of(own, [ADD, SUB], many=False)
    assert body
    opened = own.thinks()
    guide, tokens = Guide(own, whole(own, body, opened)), list[int]()
    numbers = np.random.default_rng(1)
    if opened:
        tokens = list(own.encode("Hm.</think>"))
        assert not any(map(guide.take, tokens))
    size = len(own.tokenizer)
    for _ in range(200):
        token = int(numbers.choice(np.flatnonzero(guide.allowed(size))))
        tokens.append(token)
        if guide.take(token) or token in own.end_ids:
            break
    said = own.parts(own.reply_text(tokens), [ADD, SUB], opened)
    if said.thinking is None or opened:  # else it still thinks, at random
        assert [c.name for c in said.calls] in (["add"], ["sub"]) and json.loads(said.calls[0].arguments)["a"] in (3, 4)


def test_strict_tools_leave_the_answer_free(server: Running) -> None:
    own: Chat = server.service.chat
    body = calls_of(own, [STRICT], many=True, text="any")
    assert body
    for text, good in (
        ("No tool.", True),
        ('Well. <tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "odd"', False),
    ):
        matcher = Guide(own, whole(own, body, False)).matcher
        ids = own.encode(text)
        assert (matcher.try_consume_tokens(list(ids)) == len(ids)) == good, text


@pytest.mark.parametrize("base", ["", "/v1"])
@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_on_a_server(server: Running, base: str, stream: bool) -> None:
    tool: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    with anthropic.Anthropic(base_url=server.url + base, api_key="s3cret", max_retries=0) as client:
        keys: Any = {"model": "any", "max_tokens": 60, "messages": HI, "system": "Be brief.", "tools": [tool]}
        keys |= {"tool_choice": {"type": "tool", "name": "add"}}
        if stream:
            with client.messages.stream(**keys) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**keys)
        (block,) = reply.content
        assert reply.stop_reason == "tool_use" and block.type == "tool_use" and block.input["a"] in (3, 4)
        results: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": "7"}]
        talk = [*HI, {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
        again = client.messages.create(**{**keys, "messages": talk, "tool_choice": {"type": "auto"}, "max_tokens": 5})
        assert again.usage.output_tokens <= 5
        counted = client.messages.count_tokens(model="any", messages=talk, system="Be brief.", tools=[tool])
        assert counted.input_tokens == again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.BadRequestError, match="no room for an answer"):
            client.messages.create(model="any", max_tokens=5, messages=[{"role": "user", "content": "a b " * 900}])
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="claude", max_tokens=5, messages=HI)


def test_an_agent_of_openai_agents_runs(server: Running) -> None:
    """A strict tool, a forced first call, then structured output."""
    agents = pytest.importorskip("agents")
    if not hasattr(agents, "OpenAIChatCompletionsModel"):
        pytest.skip("another package of that name")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: bool) -> str:
        """Adds."""
        return "7"

    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0) as client:
            model = agents.OpenAIChatCompletionsModel(model="any", openai_client=client)
            settings = agents.ModelSettings(max_tokens=90, tool_choice="required", parallel_tool_calls=False)
            agent = agents.Agent(name="x", model=model, tools=[add], output_type=Answer, model_settings=settings)
            return await agents.Runner.run(agent, "What is 3 + 4?", max_turns=20)

    result = asyncio.run(main())
    assert isinstance(result.final_output, Answer)
    assert any(type(item).__name__ == "ToolCallOutputItem" for item in result.new_items)


def test_guided_answers_do_not_change_others(server: Running) -> None:
    """In one batch with answers of a form."""
    from concurrent.futures import ThreadPoolExecutor

    prompt = list(server.service.chat.render("What is 3 + 4?"))
    alone = server.generate(prompt, max_tokens=30, seed=5, ignore_eos=True)
    sent = {"model": "any", "messages": HI, "max_tokens": 40, "response_format": FORM}
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(server.http.post, "/v1/chat/completions", json=sent) for _ in range(3)]
        assert pool.submit(server.generate, prompt, max_tokens=30, seed=5, ignore_eos=True).result() == alone
        assert all(json.loads(o.result().json()["choices"][0]["message"]["content"])["a"] in (3, 4) for o in others)


def test_what_ended_an_answer_is_text_in_no_dialect(server: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
    whole = server.http.post("/v1/chat/completions", json={**asked, "return_token_ids": True}).json()["choices"][0]
    asked["stop_token_ids"] = whole["token_ids"][3:4]
    chat, message = (server.http.post(f"/v1/{p}", json=asked).json() for p in ("chat/completions", "messages"))
    (said,) = (block["text"] for block in message["content"] if block["type"] == "text")
    assert message["usage"]["output_tokens"] <= 4 and said == chat["choices"][0]["message"]["content"]


def test_a_thread_of_anthropics_on_a_server(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="s3cret", max_retries=0) as client:
        tool: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
        thread = client.beta.messages.thread(model="any", max_tokens=4, system="Be brief.", tools=[tool])
        thread.send({"role": "user", "content": "Hi"})
        whole = [*thread.messages, {"role": "user", "content": "Go on."}]
        reply = thread.send({"role": "user", "content": "Go on."})
        counted = client.messages.count_tokens(model="any", messages=whole, system="Be brief.", tools=[tool])  # type: ignore[arg-type]
        assert counted.input_tokens == reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
        monkeypatch.setattr(server.service, "kept", Kept(most=3, most_bytes=1 << 20))
        assert thread.send({"role": "user", "content": "And?"}).id != reply.id  # the client sends all of it again


def test_bodies_as_they_come(server: Running) -> None:
    """Compressed ones are refused by name; a mark of the byte order is none of JSON, and is left out."""
    body = json.dumps({"messages": HI, "max_tokens": 2}).encode()
    for path, sent, encoding, status in (
        ("/v1/chat/completions", gzip.compress(body), "gzip", 415),
        ("/v1/messages", gzip.compress(body), "gzip", 415),
        ("/v1/chat/completions", b"\xef\xbb\xbf" + body, "identity", 200),
    ):
        reply = server.http.post(path, content=sent, headers={"content-encoding": encoding})
        assert reply.status_code == status, reply.text
        assert status == 200 or "Content-Encoding: gzip" in reply.json()["error"]["message"]
    other = server.http.post("/v1/messages/count_tokens", json={"model": "other", "messages": HI})
    assert other.status_code == 404 and "There is no model 'other'" in other.json()["error"]["message"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    sent = [{"role": "user", "content": [{"type": "text", "text": "Which?"}, image]}]
    for path, key in (("/v1/messages", "messages"), ("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        reply = server.http.post(path, json={key: sent, "max_output_tokens" if key == "input" else "max_tokens": 2})
        assert reply.status_code == 400 and "this model reads text alone" in reply.json()["error"]["message"]
        assert not reply.json()["error"].get("code"), "clients would shorten the conversation"
    sent = {"model": "any", "max_tokens": 2, "messages": [*HI, {"role": "system", "content": "Be brief."}]}
    assert server.http.post("/v1/messages", json=sent).status_code == 200
