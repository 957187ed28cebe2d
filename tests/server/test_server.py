"""birl's own dialect over a real connection: the engine's bits, its weights, its limits, and how it ends."""

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from birl.engines import names, wire
from birl.hosts import bind
from birl.models.digests import digests, whole
from birl.types import Completion, SamplingParams, Stop
from tests.engine.test_update import PROMPT, needs_kernels, weights
from tests.server.app import tiny_engine
from tests.server.running import Running, process, running, slowed, until


@pytest.fixture
def server(folders: list[Path]) -> Iterator[Running]:
    with running(folders[0]) as found:
        yield found


def embedded(folder: Path, prompt: tuple[int, ...], params: SamplingParams) -> Completion:
    async def main() -> Completion:
        own = tiny_engine(folder)
        found = await own.generate(prompt, params)
        await own.close()
        return found

    return asyncio.run(main())


def test_it_says_what_the_embedded_engine_says(server: Running, folders: list[Path]) -> None:
    free = SamplingParams(max_tokens=60, temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=11)
    for params in (
        free,
        replace(free, support=True),
        SamplingParams(max_tokens=30, temperature=0),
        SamplingParams(max_tokens=60, stop=("e",), seed=5),
    ):
        data = {"prompt_ids": PROMPT, "params": wire.params_to(params), "session": "s"}
        reply = server.http.post("/generate", json=data)
        answer = wire.completion_from(reply.json())
        binary = server.http.post("/generate", json=data, headers={"Accept": wire.BINARY})
        assert binary.headers["content-type"] == wire.BINARY
        assert answer == wire.completion_from(wire.unpacked(binary.content)) == embedded(folders[0], PROMPT, params)


@pytest.mark.parametrize("damage", [lambda b: b[:40], lambda b: b[8:], lambda b: b.replace(b"versions", b"versionz")])
def test_a_damaged_binary_answer_is_none(damage: Callable[[bytes], bytes]) -> None:
    whole_ = wire.packed(Completion.of((5, 2), (-1.0, -0.5), (0, 0), Stop.STOP, bytes(6)))
    assert wire.completion_from(wire.unpacked(whole_)).routes == bytes(6)
    with pytest.raises((ValueError, KeyError)):
        wire.completion_from(wire.unpacked(damage(whole_)))


@needs_kernels  # without them PyTorch rounds a token by the batch that it comes in
def test_given_tokens_have_the_logprobs_that_they_were_sampled_with(server: Running) -> None:
    params = SamplingParams(max_tokens=60, stop=("e",), seed=5)
    data = {"prompt_ids": PROMPT, "params": wire.params_to(params)}
    answer = wire.completion_from(server.http.post("/generate", json=data).json())
    forced = SamplingParams(max_tokens=len(answer.ids), forced=answer.ids, ignore_eos=True)
    data = {"prompt_ids": PROMPT, "params": wire.params_to(forced)}
    assert (
        wire.completion_from(server.http.post("/generate", json=data).json()).logprobs.tolist()
        == answer.logprobs.tolist()
    )


def test_what_it_is(server: Running, folders: list[Path]) -> None:
    info = wire.Info(**server.http.get("/info").json())
    assert (info.engine, info.model, info.version, info.dtype) == ("birl", folders[0].name, 0, "bfloat16")
    assert (info.context, info.vocabulary, info.paused, info.asleep) == (512, 320, False, False)
    assert info.digest == whole(digests(weights(folders[0])))
    assert server.http.get("/digests").json() == {"version": 0, "digests": digests(weights(folders[0]))}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "prompt_ids is missing"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1, "a"]}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": [True]}, "prompt_ids must be a list"),
        ({"prompt_ids": [320]}, "320 is not a token id"),
        ({"prompt_ids": [1, -1]}, "-1 is not a token id"),
        ({"prompt_ids": [1]}, "params must be an object"),
        ({"prompt_ids": [1], "params": {}}, "params.max_tokens is missing"),
        ({"prompt_ids": [1], "params": {"max_tokens": 0}}, "params.max_tokens must be at least 1"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "best": 1}}, "params.best: there is no such key"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "temperature": -1}}, "params.temperature must be"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "temperature": float("nan")}}, "params.temperature must be"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "temperature": 1e-30}}, "must be 0 or at least 0.001"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "temperature": float("inf")}}, "params.temperature must be"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "temperature": 10**400}}, "params.temperature must be"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "top_p": 0}}, "params.top_p must be"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "seed": -1}}, "params.seed must be"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "stop": [""]}}, "params.stop must not"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "forced": [999]}}, "params.forced must be token ids"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1}, "session": 3}, "session must be text"),
        ({"prompt": "x"}, "prompt: there is no such key"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "top_k": 10**30}}, "params.top_k must be"),
        ({"prompt_ids": [1], "params": {"max_tokens": 1, "stop": ["\ud800"]}}, "half of a surrogate pair"),
    ],
)
def test_mistakes_are_named_and_harm_nobody(folders, shared: Running, data: dict, said: str) -> None:
    reply = shared.http.post("/generate", content=json.dumps(data))
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text
    assert shared.service.gate.open == 0


@pytest.fixture(scope="module")
def shared(folders: list[Path]) -> Iterator[Running]:
    with running(folders[0], max_request_mb=0.05) as found:
        yield found


@pytest.mark.parametrize("temperature", [0.001, 1e30, 1e300])
def test_extreme_temperatures(shared: Running, temperature: float) -> None:
    found = shared.generate(PROMPT, max_tokens=5, temperature=temperature, seed=1, ignore_eos=True)
    assert len(found["tokens"]) == 5 and all(-1e6 < lp < 1e-3 for lp in found["logprobs"])


async def test_answers_do_not_wait_for_acknowledgements() -> None:
    """asyncio switches Nagle's algorithm off only for sockets that name their protocol; each answer took 40 ms."""
    met = asyncio.get_running_loop().create_future()
    with bind("127.0.0.1", 0) as sock:
        server = await asyncio.start_server(lambda _, writer: met.set_result(writer), sock=sock)
        async with server:
            _, mine = await asyncio.open_connection(*sock.getsockname()[:2])
            writer = await asyncio.wait_for(met, 10)
            taken = writer.get_extra_info("socket")
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            mine.close()


def test_bodies_that_are_none(shared: Running) -> None:
    half, words = b'{"prompt": "\xed\xa0\x80"}', '{"prompt": "x"}'  # bytes that mean half a character
    for body in (b"{", b"[1]", b"\xff", b"[" * 20_000, half, words.encode("utf-16")):
        for path in ("/generate", "/v1/completions"):
            assert shared.http.post(path, content=body).status_code == 400
    assert shared.http.get("/generate").status_code == 405
    assert "/generate" in shared.http.get("/nothing").json()["error"]["message"]
    assert shared.http.post("/generate", content=b" " * 60_000).status_code == 413

    def parts() -> Iterator[bytes]:  # without a Content-Length
        for _ in range(60):
            yield b" " * 1000

    assert shared.http.post("/generate", content=parts()).status_code == 413
    assert len(shared.generate(PROMPT, max_tokens=3, ignore_eos=True)["tokens"]) == 3


def test_a_prompt_that_fills_the_context(shared: Running) -> None:
    assert shared.generate([1] * 512, max_tokens=3) == {"tokens": [], "logprobs": [], "versions": [], "stop": "length"}
    assert len(shared.generate([1] * 510, max_tokens=9, ignore_eos=True)["tokens"]) == 2


def test_whoever_hangs_up_is_not_computed_for(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch, server.service, 0.02)
    long = {"prompt_ids": PROMPT, "params": {"max_tokens": 400, "ignore_eos": True}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/generate", json=long, timeout=httpx.Timeout(10, read=0.3))
    engine = server.service.engine
    until(lambda: engine.counters.dropped > 0 and not engine.scheduler.busy)
    assert server.service.gate.open == 0 and engine.counters.tokens < 100
    assert server.service.metrics.registry.get_sample_value(
        "birl_requests_total", {"route": "/generate", "status": "499"}
    )


def test_pause_resume_abort(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch, server.service, 0.01)
    post, counters = server.http.post, server.service.engine.counters
    keys = {"max_tokens": 200, "ignore_eos": True, "seed": 3}
    expected = server.generate(PROMPT, **keys)
    with ThreadPoolExecutor(2) as pool:
        before = counters.tokens
        asked = pool.submit(server.generate, PROMPT, **keys)
        until(lambda: counters.tokens > before + 5)
        assert post("/pause", json={"mode": "keep"}).json()["paused"]
        reply = server.http.get("/ready")
        assert reply.status_code == 503 and "paused" in reply.json()["error"]["message"]
        assert server.http.get("/health").status_code == 200
        at = counters.tokens
        time.sleep(0.05)
        assert counters.tokens == at and not asked.done()
        assert post("/resume").json() == {"version": 0, "paused": False, "asleep": False}
        assert asked.result(30) == expected
        mine = {"prompt_ids": PROMPT, "params": keys, "session": "mine"}
        asked = pool.submit(post, "/generate", json=mine)
        before = counters.tokens
        until(lambda: counters.tokens > before + 5)
        assert post("/abort", json={"sessions": ["another"]}).json() == {"aborted": 0}
        assert post("/abort", json={"sessions": ["mine"]}).json() == {"aborted": 1}
        cut = asked.result(30).json()
        assert cut["stop"] == "abort" and cut["tokens"] == expected["tokens"][: len(cut["tokens"])] != []
    assert post("/pause", json={"mode": "stop"}).status_code == 400
    assert post("/abort", json={"sessions": "mine"}).status_code == 400


def test_nobody_comes_in_without_the_token(folders: list[Path]) -> None:
    with running(folders[0], token="s3cret") as server:
        assert len(server.generate(PROMPT, max_tokens=2, ignore_eos=True)["tokens"]) == 2
        for said in ("", "Bearer", "Bearer s3cre", "Bearer s3crett", "Basic s3cret", "Bearer \u00e9"):
            for path in ("/generate", "/load", "/sleep", "/v1/chat/completions"):
                headers = {b"authorization": said.encode("utf-8")}
                reply = httpx.post(server.url + path, json={}, headers=headers)
                assert reply.status_code == 401 and "BIRL_TOKEN" in reply.json()["error"]["message"]
            assert httpx.get(f"{server.url}/info").status_code == httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{server.url}/ready").status_code == 200


def test_pages_in_a_browser_need_a_token(shared: Running) -> None:
    reply = shared.http.post("/sleep", headers={"origin": "https://example.org"})
    assert reply.status_code == 403 and not shared.service.engine.asleep


def test_too_many_and_too_slow(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from birl.config.schema import Engine

    with running(
        folders[0], engine=Engine(kv_cache_gb=0.01, max_batch=1), max_waiting=1, request_timeout=0.5
    ) as server:
        slowed(monkeypatch, server.service, 0.02)
        long = {"prompt_ids": PROMPT, "params": {"max_tokens": 400, "ignore_eos": True}}
        with ThreadPoolExecutor(3) as pool:
            replies = list(pool.map(lambda _: httpx.post(f"{server.url}/generate", json=long, timeout=20), range(3)))
        assert sorted(r.status_code for r in replies) == [429, 504, 504]
        (busy,) = [r for r in replies if r.status_code == 429]
        assert busy.headers["retry-after"] == "1" and busy.json()["error"]["type"] == "overloaded"
        until(lambda: not server.service.engine.scheduler.busy)
        assert server.service.gate.open == 0
        wide = {"prompt": "x", "n": 3, "max_tokens": 1}
        assert server.http.post("/v1/completions", json=wide).status_code == 400


def test_a_stuck_engine_is_not_healthy(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go, step = threading.Event(), server.service.engine.steps.step
    monkeypatch.setattr(server.service.engine.steps, "step", lambda: go.wait(30) and step())
    server.service.stuck_after = 0.3
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.generate, PROMPT, max_tokens=3, ignore_eos=True)
        until(lambda: server.http.get("/health").status_code == 503)
        assert "nothing was computed" in server.http.get("/ready").json()["error"]["message"]
        go.set()
        assert len(asked.result(30)["tokens"]) == 3
    assert server.http.get("/health").status_code == 200


def test_a_failing_engine_says_so(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(server.service.engine.steps, "step", broken)
        reply = server.http.post("/generate", json={"prompt_ids": PROMPT, "params": {"max_tokens": 3}})
    assert reply.status_code == 500 and "RuntimeError: out of memory" in reply.json()["error"]["message"]
    assert server.generate(PROMPT, max_tokens=3, ignore_eos=True)["stop"] == "length"


def test_figures_for_prometheus(server: Running) -> None:
    server.generate(PROMPT, max_tokens=9, ignore_eos=True)
    server.http.post("/generate", json={})
    lines = dict(line.rsplit(" ", 1) for line in server.http.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(lines["birl_tokens_sampled_total"]) == 9 and float(lines["birl_sequences_finished_total"]) == 1
    assert float(lines['birl_requests_total{route="/generate",status="200"}']) == 1
    assert float(lines['birl_requests_total{route="/generate",status="400"}']) == 1
    assert float(lines['birl_request_seconds_count{route="/generate"}']) == 2
    assert float(lines["birl_weight_version"]) == 0 and float(lines["birl_kv_pages_total"]) > 0


def test_seeds_of_the_server(folders: list[Path]) -> None:
    said = []
    for seed in (5, 5, 6, 0):
        with running(folders[0], seed=seed) as server:
            said.append([server.generate(PROMPT, max_tokens=20)["tokens"] for _ in range(2)])
    assert said[0] == said[1] != said[2] and said[0][0] != said[0][1] and said[3] != said[0]


def test_a_signal_lets_it_finish(folders: list[Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path))
    with process(folders[0], "name=exp/0", BIRL_TOKEN="t") as (child, url):
        assert names.find("exp/0") == [url] and "t" not in [*names.entries("exp/0")[0].file.read_text().split('"')]
        headers = {"authorization": "Bearer t"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as http, ThreadPoolExecutor(1) as pool:
            many = {"prompt": [5, 6], "n": 64, "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
            asked = pool.submit(http.post, "/v1/completions", json=many)
            until(lambda: http.get("/info").json()["running"] > 0)
            child.send_signal(signal.SIGTERM)
            until(lambda: http.get("/ready").status_code == 503)
            late = http.post("/generate", json={"prompt_ids": PROMPT, "params": {"max_tokens": 1}})
            assert late.status_code == 503 and not asked.done()
            assert names.find("exp/0") == []
            assert all(len(c["token_ids"]) == 200 for c in asked.result(60).json()["choices"])
        assert child.wait(20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("how", ["patience ends", "a second signal"])
def test_what_does_not_finish_is_told(folders: list[Path], how: str) -> None:
    drain = "drain_timeout=0.3" if how == "patience ends" else "drain_timeout=60"
    with process(folders[0], drain) as (child, url), ThreadPoolExecutor(1) as pool:
        httpx.post(f"{url}/pause")
        asked = pool.submit(
            httpx.post, f"{url}/generate", json={"prompt_ids": PROMPT, "params": {"max_tokens": 3}}, timeout=60
        )
        until(lambda: httpx.get(f"{url}/info").json()["waiting"] == 1)
        child.send_signal(signal.SIGINT)
        if how == "a second signal":
            until(lambda: httpx.get(f"{url}/ready").json()["error"]["message"].count("shutting down"))
            child.send_signal(signal.SIGINT)
            with pytest.raises(httpx.HTTPError):
                asked.result(20)
            assert child.wait(20) == 130
        else:
            reply = asked.result(20)
            assert reply.status_code == 503 and "closed" in reply.json()["error"]["message"]
            assert child.wait(20) == 130


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["host=0.0.0.0"], "BIRL_TOKEN"),
        (["host=10.255.255.1"], "BIRL_TOKEN"),
        (["name=../x"], "must be experiment/trial"),
        (["port=99999"], "at most 65535"),
        (["model.path=/nowhere/at/all"], "there is no such folder"),
        (["max_waiting=-1"], "must be at least 0"),
        (["volume=/dev/null"], "volume=/dev/null: is a file; name a folder"),
        (["--multirun"], "a server does not end"),
    ],
)
def test_mistakes_end_it_before_the_model_is_loaded(words: list[str], said: str, capsys, monkeypatch) -> None:
    from birl.cli import main

    monkeypatch.delenv("BIRL_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["serve", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken(shared: Running, capsys: pytest.CaptureFixture[str]) -> None:
    from birl.cli import main

    port = shared.url.rpartition(":")[2]
    assert main(["serve", f"port={port}"]) == 2
    assert f"port={port}: cannot be taken" in capsys.readouterr().err
