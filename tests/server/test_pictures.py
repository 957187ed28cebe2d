"""Pictures in requests, in each dialect: the model gets the same tokens, and nothing of this machine or its network."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from birl.text.pictures import FIRST, Bounds, decoded
from tests import sights
from tests.server.running import Running, running

CODED = base64.b64encode(sights.drawn("7")).decode()
URL = f"data:image/png;base64,{CODED}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": CODED}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = sights.folder(tmp_path_factory.mktemp("sees") / "m")
    with running(folder, model={"dtype": "float32", "max_pixels": 4000}) as found:
        yield found


def asked(server: Running, part: dict[str, Any], more: dict[str, Any] | None = None) -> Any:
    talk = [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}]
    body = {"messages": talk, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **(more or {})}
    return server.http.post("/v1/chat/completions", json=body)


def test_every_dialect_shows_the_model_the_same(server: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": URL}}
    first = asked(server, image).json()
    assert sum(token >= FIRST for token in first["prompt_token_ids"]) == 6
    said = first["choices"][0]["message"]["content"]
    shown = [{"type": "image", "source": SOURCE}, {"type": "text", "text": "Which?"}]
    body = {"model": "birl", "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": shown}]}
    reply = server.http.post("/v1/messages", json=body).json()
    assert "".join(b["text"] for b in reply["content"]) == said
    assert reply["usage"]["input_tokens"] == first["usage"]["prompt_tokens"]
    items = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "Which?"}]
    asking = {"model": "birl", "max_output_tokens": 4, "temperature": 0, "input": [{"role": "user", "content": items}]}
    answer = server.http.post("/v1/responses", json=asking).json()
    assert "".join(p["text"] for m in answer["output"] for p in m["content"]) == said


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_vl", "gemma3"])
def test_greedy_replies_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """By its own processor, from the text of the template, with a picture in OpenAI's and in Anthropic's words."""
    folder = sights.folder(tmp_path / "m", kind)
    with running(folder, model={"dtype": "float32", "pictures": True}) as found:
        image = {"type": "image_url", "image_url": {"url": URL}}
        reply = asked(found, image, {"max_tokens": 24}).json()
        shown = [{"type": "image", "source": SOURCE}, {"type": "text", "text": "Which?"}]
        body = {"model": "birl", "max_tokens": 24, "temperature": 0, "messages": [{"role": "user", "content": shown}]}
        said = found.http.post("/v1/messages", json=body).json()
        pictures = found.service.chat.pictures
    assert pictures is not None
    mark = sights.MARKS[kind][0]
    talk = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]
    text = pictures.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert mark in text
    given = pictures.processor(text=[text], images=[[decoded(base64.b64decode(CODED), Bounds())]], return_tensors="pt")
    assert given["input_ids"].tolist()[0] == [pictures.id if t >= FIRST else t for t in reply["prompt_token_ids"]]
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    answer = model.generate(**given, do_sample=False, max_new_tokens=24)[0, given["input_ids"].shape[1] :].tolist()
    assert reply["choices"][0]["token_ids"] == answer
    assert "".join(block["text"] for block in said["content"]) == reply["choices"][0]["message"]["content"]


def test_later_turns_and_tools_show_pictures(server: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": URL}}
    talk = [
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": "7"},
        {"role": "tool", "content": [image, {"type": "text", "text": "as asked"}], "tool_call_id": "1"},
    ]
    reply = asked(server, image, {"messages": talk}).json()
    assert sum(token >= FIRST for token in reply["prompt_token_ids"]) == 12


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/a.png"}}, "are not downloaded"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "which is not read here"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}, "cannot be read"),
        ({"type": "image", "source": {"type": "file", "file_id": "x"}}, "without any of"),
        ({"type": "input_audio", "input_audio": {}}, "of type 'input_audio'; the model reads text and pictures"),
    ],
)
def test_what_is_refused(server: Running, part: dict[str, Any], error: str) -> None:
    reply = asked(server, part)
    assert reply.status_code == 400 and error in reply.json()["error"]["message"], reply.text


def test_a_picture_beyond_a_bound_is_refused(server: Running, tmp_path: Path) -> None:
    large = base64.b64encode(sights.drawn("7", (100, 100))).decode()
    reply = asked(server, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{large}"}})
    assert reply.status_code == 400
    assert "100 x 100 pixels is not decoded: at most 4000" in reply.json()["error"]["message"]
