"""Prompts whose tokens are scored, and prompts of tokens: as lm-eval and vLLM's clients want them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from birl.kernels.tensors import PAGE
from birl.models.load import load_model
from tests.server.places import HI
from tests.server.running import Running, running
from tests.text.test_tools import QWEN


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder) as found:
        yield found


def test_prompts_are_scored_as_lm_eval_wants(server: Running) -> None:
    own = server.service.chat
    prompts = ["What is 3 + 4? The answer is 7.", "Anna"]
    for given in (prompts, [list(own.render(p)) for p in prompts]):
        sent = {"model": "any", "prompt": given, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        reply = server.http.post("/v1/completions", json=sent | {"seed": 1234})
        assert reply.status_code == 200, reply.text
        for prompt, choice in zip(prompts, reply.json()["choices"], strict=True):
            ids, found = own.render(prompt), choice["logprobs"]
            assert choice["text"].startswith(prompt) and len(set(map(len, found.values()))) == 1
            assert len(found["tokens"]) == len(ids) + 1 and found["token_logprobs"][0] is None
            greedy = [
                lp == max(top.values())
                for lp, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True)
            ]
            assert greedy[-1]
            for place in range(1, len(ids)):
                params = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
                best = server.generate(ids[:place], **params)
                assert greedy[place - 1] == (best["tokens"][0] == ids[place])
                forced = server.generate(ids[:place], max_tokens=1, forced=[ids[place]], ignore_eos=True)
                assert abs(forced["logprobs"][0] - found["token_logprobs"][place]) < 2e-2
    silent = server.http.post("/v1/completions", json={"prompt": "Anna", "max_tokens": 0, "echo": True, "logprobs": 1})
    assert silent.json()["choices"][0]["text"] == "Anna"


def test_prompts_have_their_likeliest_tokens_as_vllm_tells_them(folder: Path) -> None:
    with running(folder, model={"dtype": "float32"}) as server:
        chat, post = server.service.chat, partial(server.http.post, "/v1/completions")
        model, ids = load_model(folder), chat.render("What is 3 + 4? The answer is 7.")
        with torch.no_grad():
            table = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        for k in (0, 1, 5):
            reply = post(json={"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": k, "n": 2})
            assert reply.status_code == 200, reply.text
            first, second = (choice["prompt_logprobs"] for choice in reply.json()["choices"])
            assert first == second and first[0] is None and len(first) == len(ids)
            for row, token, place in zip(table, ids[1:], first[1:], strict=False):
                assert {int(t) for t in place} == {token, *row.topk(k).indices.tolist()}
                for t, found in place.items():
                    assert found["logprob"] == pytest.approx(row[int(t)].item(), abs=1e-4)
                    assert found["rank"] == int((row > row[int(t)]).sum()) + 1
                    assert found["decoded_token"] == chat.decode([int(t)])
        for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True}):
            reply = post(json={"prompt": "x", **wrong})
            assert reply.status_code == 400 and "prompt_logprobs" in reply.json()["error"]["message"], reply.text


def test_a_prompt_whose_tokens_are_scored_is_computed_once(server: Running) -> None:
    ids = [5 + i % 40 for i in range(90)]
    counters = server.service.engine.counters
    before = counters.prefilled + counters.scored
    sent = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    reply = server.http.post("/v1/completions", json=sent)
    assert reply.status_code == 200 and len(reply.json()["choices"][0]["prompt_logprobs"]) == len(ids), reply.text
    assert len(ids) <= counters.prefilled + counters.scored - before <= len(ids) + PAGE  # a full page is found again


def test_text_and_tokens_as_vllm_has_them(server: Running) -> None:
    own = server.service.chat
    found = server.http.post("/tokenize", json={"prompt": "Anna has 7.", "return_token_strs": True}).json()
    assert tuple(found["tokens"]) == own.render("Anna has 7.") and found["count"] == len(found["token_strs"])
    assert found["max_model_len"] == server.service.engine.context
    assert server.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "Anna has 7."}
    talk = server.http.post("/tokenize", json={"messages": HI}).json()["tokens"]
    assert own.decode(talk).endswith("<|im_start|>assistant\n")
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] and info["chat_template"] == QWEN
    assert server.http.get("/version").json()["version"]
    for sent in ({}, {"prompt": 3}, {"prompt": "x", "odd": 1}, {"model": "gpt-4", "prompt": "x"}):
        assert server.http.post("/tokenize", json=sent).status_code in (400, 404)
    assert server.http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
