"""Answers in other formats than Hermes's, through the real client: calls and thinking, whole and streamed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.running import Running, running
from tests.server.test_openai import HI, TOOLS, chat, says
from tests.text.families import FOLDER
from tests.tiny import tiny_model_folder

LLAMA = FOLDER / "llama3.jinja"
R1 = FOLDER / "qwen3_coder.jinja"  # its prompt opens the thinking


def serving(folder: Path, template: Path) -> Iterator[tuple[Running, openai.OpenAI]]:
    short = re.sub("Given the following functions[^']*", "", template.read_text())  # the tiny model's context is short
    model = tiny_model_folder(folder / "tiny", template=short.replace("(indent=4)", ""))
    with running(model) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=60) as client:
        yield server, client


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, openai.OpenAI]]:
    yield from serving(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, openai.OpenAI]]:
    yield from serving(tmp_path_factory.mktemp("thinker"), R1)


def told(client: openai.OpenAI, stream: bool, **keys: Any) -> tuple[str, str, list[Any], list[str]]:
    """Thinking, content, calls, and the content of each chunk."""
    answer = chat(client, stream=stream, max_tokens=120, **keys)
    if not stream:
        message = answer.choices[0].message
        return getattr(message, "reasoning_content", ""), message.content or "", message.tool_calls or [], []
    deltas = [c.delta for chunk in answer for c in chunk.choices]
    contents = [d.content or "" for d in deltas]
    thinking = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    return thinking, "".join(contents), [c for d in deltas for c in d.tool_calls or []], contents


@pytest.mark.parametrize("stream", [False, True])
def test_a_bare_json_call_is_hidden_while_it_grows(llama, monkeypatch, stream: bool) -> None:
    server, client = llama
    with monkeypatch.context() as patch:
        says(patch, server, '{"name": "add", "parameters": {"a": 3}}')
        _, content, (call,), contents = told(client, stream, tools=TOOLS)
    assert (content, call.function.name, json.loads(call.function.arguments)) == ("", "add", {"a": 3})
    assert not any(contents)
    says(monkeypatch, server, 'So {"a": 1} it is.')  # no call: told in the end
    assert told(client, stream, tools=TOOLS)[1:3] == ('So {"a": 1} it is.', [])


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_the_prompt_opened_is_set_apart(thinker, monkeypatch, stream: bool) -> None:
    server, client = thinker
    call = "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    with monkeypatch.context() as patch:
        says(patch, server, f"I need\na sum.\n</think>\n\nI add.\n{call}")
        thinking, content, (found,), contents = told(client, stream, tools=TOOLS)
    assert (thinking, content, found.function.name) == ("I need\na sum.", "I add.", "add")
    assert not stream or len([c for c in contents if c]) > 1  # as it came
    says(monkeypatch, server, "I never")
    assert told(client, stream)[:2] == ("I never", "")


def test_thinking_is_taken_back_from_clients(thinker) -> None:
    server, client = thinker
    said = {"role": "assistant", "content": "7", "reasoning_content": "3 + 4"}
    messages = [*HI, said, {"role": "user", "content": "Why?"}]
    answer = chat(client, messages=messages, extra_body={"return_token_ids": True}, max_tokens=1)
    assert "<think>\n3 + 4\n</think>\n\n7" in server.service.chat.decode(answer.prompt_token_ids)
