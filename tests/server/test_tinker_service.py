"""The Tinker service, by what it answers: order, once, whose, how much, and what a killed one keeps."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from birl.server.tinker import futures, wire
from birl.server.tinker.futures import Answer, Promises
from tests.server.tinker_server import KEYS, Client, Server, serving, text
from tests.tiny import tiny_model_folder

DATA = [text(list(range(5, 30))), text([9, 8, 7, 6, 9, 8, 7, 6])]
SAMPLING = {"max_tokens": 6, "seed": 3, "temperature": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("tinker") / "model")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("state")
    with serving(model, state, "quota_tokens=2000", "quota_runs=20") as result:
        yield result
    said = "".join(result.said) + "".join(f.read_text() for f in state.rglob("*.json*"))
    assert not any(key in said for key in KEYS.values())  # keys are neither printed nor kept


def prompt(*ids: int) -> dict:
    return {"chunks": [{"type": "encoded_text", "tokens": list(ids)}]}


def test_requests_are_done_in_order_and_once(server: Server) -> None:
    alice = server.client()
    run = alice.run(alice.session())
    late = alice.step(run, 2)  # before the first has come
    first = alice.learn(run, 1, DATA)
    assert alice.learn(run, 1, DATA) == first and alice.step(run, 2) == late  # sent again
    total, logp = alice.loss(first)
    assert total == pytest.approx(-float(logp.sum()))
    assert alice.wait(late)["metrics"]["optimizer_steps"] == 1
    again, _ = alice.loss(alice.learn(run, 3, DATA, forward_only=True))
    assert again < total
    assert alice.wait(alice.step(run, 4))["metrics"]["grad_norm"] == 0  # a forward pass leaves no gradient


def test_what_is_sampled_has_the_trainers_log_probs(server: Server) -> None:
    alice = server.client()
    session = alice.session()
    run = alice.run(session)
    alice.learn(run, 1, DATA)
    alice.step(run, 2)
    saved = alice.wait(alice.post("save_weights_for_sampler", model_id=run, seq_id=3, sampling_session_seq_id=0))
    asked = {"sampling_session_id": saved["sampling_session_id"], "prompt": prompt(5, 6, 7), "num_samples": 2}
    body = alice.answer(alice.post("asample", seq_id=0, sampling_params=SAMPLING, prompt_logprobs=True, **asked))
    sequences = [dict(wire.fields(wire.raw(v))) for n, v in wire.fields(body) if n == 1]
    tokens = [wire.array(s[2], np.dtype("<i4"), "").tolist() for s in sequences]
    assert len(tokens) == 2 and tokens[0] != tokens[1]
    logprobs = wire.array(sequences[0][3], np.dtype("<f4"), "")
    _, learned = alice.loss(alice.learn(run, 4, [text([5, 6, 7, *tokens[0]])], forward_only=True))
    np.testing.assert_array_equal(learned[2:], logprobs)  # on birl's bfloat16 kernels, bit for bit
    (scored,) = [wire.array(v, np.dtype("<f4"), "") for n, v in wire.fields(body) if n == 2]
    assert np.isnan(scored[0])
    np.testing.assert_array_equal(scored[1:], learned[:2])
    repeated = alice.answer(alice.post("asample", seq_id=1, sampling_params=SAMPLING, prompt_logprobs=True, **asked))
    assert repeated == body  # the same seed


@pytest.mark.parametrize(
    ("datum", "said"),
    [
        ({**text([5, 6, 7]), "weights": [float("nan"), 1.0]}, "data[0].weights: 1 numbers are infinite or NaN"),
        ({**text([5, 6, 7]), "weights": [1.0] * 3}, "data[0].weights: has the shape [3]; the input has 2 tokens"),
        ({"tokens": [5, 6], "weights": [1.0, 1.0]}, "data[0]: target_tokens is missing"),
        (text([5, 6, 100_000]), "100000 is no token; the model has 320"),
        (text([-1, 6, 7]), "-1 is no token"),
        (text([5] * 600), "data[0].model_input: has 599 tokens or more; a sequence has 1 to 512"),
    ],
)
def test_data_that_cannot_be_is_answered_with_the_reason_and_stops_nothing(
    server: Server, datum: dict, said: str
) -> None:
    alice = server.client()
    run = alice.run(alice.session())
    failed = alice.wait(alice.learn(run, 1, [datum]))
    assert failed["category"] == "user" and said in failed["error"]
    total, _ = alice.loss(alice.learn(run, 2, DATA))
    assert np.isfinite(total)
    alice.wait(alice.post("unload_model", model_id=run))


def test_bodies_that_are_none_are_refused(server: Server) -> None:
    alice = server.client()
    for body in (b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", b"", b"\x1a\x03abc"):
        assert alice.http.post("forward_backward", content=body).status_code in (400, 404)
    assert alice.http.post("optim_step", content=b"[1").status_code == 400
    assert alice.http.post("forward_backward", content=b"0" * (65 * 2**20)).status_code == 413
    assert alice.http.post("no_such_thing", json={}).status_code == 404


def test_a_tenant_sees_nothing_of_anothers(server: Server) -> None:
    alice, bob = server.client("alice"), server.client("bob")
    session = alice.session()
    run = alice.run(session)
    done = alice.learn(run, 1, DATA)
    path = alice.wait(alice.post("save_weights", model_id=run, seq_id=2, path="mine"))["path"]
    sampler = alice.post(
        "create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path
    )["sampling_session_id"]  # fmt: skip
    own = bob.session()
    bob.learn(run, 3, DATA, status=404)
    bob.post("optim_step", 404, model_id=run, seq_id=3, adam_params={})
    bob.post("get_info", 404, model_id=run)
    bob.post("retrieve_future", 410, request_id=done["request_id"])
    bob.post("create_model", 404, session_id=session, model_seq_id=5, base_model="model", lora_config={"rank": 4})
    bob.post("create_sampling_session", 400, session_id=own, sampling_session_seq_id=0, model_path=path)
    bob.post("asample", 404, sampling_session_id=sampler, seq_id=0, prompt=prompt(5), sampling_params=SAMPLING)
    bob.post("weights_info", 400, tinker_path=path)
    bob.get(f"samplers/{sampler}", 404)
    bob.get(f"sessions/{session}", 404)
    bob.get(f"training_runs/{run}", 404)
    bob.get(f"training_runs/{run}/checkpoints", 404)
    bob.get(f"training_runs/{run}/checkpoints/weights/mine/external_weights_urls", 404)
    assert bob.http.delete(f"training_runs/{run}/checkpoints/weights/mine").status_code == 404
    assert bob.get("training_runs")["training_runs"] == [] and bob.get("checkpoints")["checkpoints"] == []
    failed = bob.wait(bob.post("load_weights", session_id=own, model_seq_id=0, path=path, optimizer=True))
    assert "There is no checkpoint" in failed["error"]
    nobody = Client(server.client().http)
    nobody.http.headers["X-API-Key"] = "tml-nobody-000000000"
    nobody.post("create_session", 401)
    alice.http.post(f"training_runs/{run}/checkpoints/weights/mine/publish")
    loaded = bob.wait(bob.post("load_weights", session_id=own, model_seq_id=1, path=path, optimizer=True))
    assert loaded["model_id"] == f"{own}:train:1"  # published: others may read it, and not delete it
    assert bob.http.delete(f"training_runs/{run}/checkpoints/weights/mine").status_code == 404
    for client, each in ((alice, run), (bob, loaded["model_id"])):
        client.wait(client.post("unload_model", model_id=each))


@pytest.mark.parametrize("path", ["tinker://../../weights/x", "tinker://a/b", "/etc/passwd", "tinker://x/weights/.."])
def test_a_path_leads_nowhere_else(server: Server, path: str) -> None:
    alice = server.client()
    session = alice.session()
    alice.post("create_sampling_session", 400, session_id=session, sampling_session_seq_id=0, model_path=path)
    run = alice.run(session)
    for name in ("../x", "", ".", "a/b", "x" * 200):
        assert "error" in alice.wait(alice.post("save_weights", model_id=run, path=name))
    alice.wait(alice.post("unload_model", model_id=run))


def test_what_is_more_than_a_tenant_may_have_is_refused(server: Server) -> None:
    alice, bob = server.client("alice"), server.client("bob")
    run, other = alice.run(alice.session()), bob.run(bob.session())
    assert "may have 2000 at once" in alice.wait(alice.learn(run, 1, [text([7] * 500)] * 5))["error"]
    assert np.isfinite(alice.loss(alice.learn(run, 2, DATA))[0])  # the run goes on
    heavy = {**text([5, 6, 7]), "weights": [1.0] * 40_000}
    assert "counting its 160" in alice.wait(alice.learn(run, 3, [heavy]))["error"]  # it would wait in memory
    session = alice.session()
    runs = [
        alice.wait(alice.post("create_model", session_id=session, model_seq_id=i, base_model="model",
                              lora_config={"rank": 4}))
        for i in range(21)
    ]  # fmt: skip
    assert "your quota" in runs[-1]["error"]
    for made in runs:
        if "model_id" in made:
            alice.wait(alice.post("unload_model", model_id=made["model_id"]))
    huge = {"session_id": session, "model_seq_id": 99, "base_model": "model", "lora_config": {"rank": 100_000}}
    assert "rank: must be" in alice.wait(alice.post("create_model", **huge))["error"]
    assert (
        "LoRA" in alice.wait(alice.post("create_model", **{**huge, "model_seq_id": 100, "lora_config": None}))["error"]
    )
    assert np.isfinite(bob.loss(bob.learn(other, 1, DATA))[0])  # and another is not concerned
    for client, each in ((alice, run), (bob, other)):
        client.wait(client.post("unload_model", model_id=each))


def test_links_to_an_export_need_no_key_and_cannot_be_made_up(server: Server) -> None:
    alice = server.client()
    run = alice.run(alice.session())
    path = alice.wait(alice.post("save_weights_external", model_id=run, seq_id=1, path="out"))["path"]
    name = path.rpartition("/")[2]
    links = alice.get(f"training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls")["urls"]
    config = httpx.get(links["adapter_config.json"]).json()
    assert config["r"] == 4 and config["lora_alpha"] == 32
    assert httpx.get(links["adapter_model.safetensors"]).status_code == 200
    link = links["adapter_config.json"]
    for wrong in (link[:-6] + "AAAAAA", link.rpartition("/")[0] + "/AAAA"):
        assert httpx.get(wrong).status_code == 403
    alice.http.delete(f"training_runs/{run}/checkpoints/external_weights/{name}")
    assert httpx.get(link).status_code == 410
    alice.wait(alice.post("unload_model", model_id=run))


def trained(client: Client, run: str, first: int, last: int) -> list[float]:
    """Steps of three requests each; all sent before any is waited for."""
    asked = []
    for i in range(first, last):
        asked.append(client.learn(run, 3 * i + 1, DATA[:1]))
        client.learn(run, 3 * i + 2, DATA[1:])
        client.step(run, 3 * i + 3)
    return [client.loss(one)[0] for one in asked]


def saved(client: Client, run: str, seq: int, state: Path) -> dict[str, np.ndarray]:
    client.wait(client.post("save_weights", model_id=run, seq_id=seq, path="end"))
    (file,) = state.glob("runs/*/weights/end/adapter.safetensors")
    return load_file(file)


def test_killed_with_requests_under_way_it_ends_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "whole") as server:
        client = server.client()
        run = client.run(client.session())
        losses = trained(client, run, 0, 6)
        expected = saved(client, run, 19, tmp_path / "whole")
        server.child.send_signal(signal.SIGTERM)
        assert server.child.wait(60) == 128 + signal.SIGTERM
    state = tmp_path / "killed"
    with serving(model, state) as server:
        client = server.client()
        run = client.run(client.session())
        seen = trained(client, run, 0, 2)
        asked = [client.learn(run, 7, DATA[:1]), client.learn(run, 8, DATA[1:]), client.step(run, 9)]
        os.kill(server.child.pid, signal.SIGKILL)  # accepted, and perhaps being computed
    with (state / "runs" / run.replace(":", "-") / "journal").open("ab") as file:
        file.write(b'{"seq": 10, "kind": "optim_step", "size": 500, "crc": 0}\nhalf')  # not accepted
    with serving(model, state) as server:
        client = server.client()
        seen.append(client.loss(asked[0])[0])  # the answer to what was asked before
        assert client.wait(asked[2])["metrics"]["optimizer_steps"] == 3
        seen += trained(client, run, 3, 5)
        server.child.send_signal(signal.SIGTERM)
        server.child.wait(60)
    with serving(model, state) as server:
        client = server.client()
        seen += trained(client, run, 5, 6)
        result = saved(client, run, 19, state)
        audit = [json.loads(line) for line in (state / "audit.jsonl").read_text().splitlines()]
    assert seen == losses
    assert result.keys() == expected.keys()
    assert all(np.array_equal(result[name], expected[name]) for name in expected)
    assert {"create_session", "create_model", "save_weights"} <= {line["event"] for line in audit}


def test_a_small_body_of_very_many_fields_is_refused(server: Server) -> None:
    """It held all tenants up for more than a minute."""
    alice = server.client()
    run = alice.run(alice.session())
    chunks = wire.bytes_field(3, wire.bytes_field(1, b"\x0a\x00" * 1_000_000))
    body = wire.bytes_field(1, run.encode()) + wire.number_field(2, 1) + chunks * 25
    reply = alice.http.post("forward_backward", content=body)
    assert reply.status_code == 400 and "more than 2,000,000 fields" in reply.json()["error"]
    alice.wait(alice.post("unload_model", model_id=run, seq_id=1))


HUGE = 10**400
BAD_SAMPLES: dict[str, tuple[dict, str]] = {
    "temperature": ({"sampling_params": {"temperature": HUGE}}, "temperature: must be"),
    "targets": ({"target_prompt_logprobs": {"data": [HUGE, 6], "shape": [2, 1]}}, "must be an int64 tensor"),
    "cells": (
        {"num_samples": 1024, "topk_sample_logprobs": 300, "sampling_params": {"max_tokens": 400}},
        "at most 50,000,000",
    ),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_numbers_without_a_bound_are_answered_with_the_reason(server: Server, name: str) -> None:
    alice = server.client()
    session = alice.session()
    sampler = alice.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="model")
    asked = {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 0, "prompt": prompt(5, 6, 7)}
    more, said = BAD_SAMPLES[name]
    failed = alice.wait(alice.post("asample", **(asked | {"sampling_params": SAMPLING} | more)))
    assert failed["category"] == "user" and said in failed["error"]


def test_what_is_no_list_or_number_is_refused_with_its_name(server: Server) -> None:
    alice = server.client()
    assert "tags" in alice.post("create_session", 400, tags=3)["error"]
    for limit in ("²", "9" * 5000, "-1"):
        assert "limit" in alice.get(f"sessions?limit={limit}", 400)["error"]
    made = {"session_id": alice.session(), "model_seq_id": 0, "base_model": "model", "lora_config": {"rank": 4}}
    assert "optimizer" in alice.wait(alice.post("create_model", **made, optimizer_config=[1]))["error"]
    run = alice.run(alice.session())
    failed = alice.wait(alice.post("optim_step", model_id=run, seq_id=1, adam_params={"learning_rate": HUGE}))
    assert "learning_rate: must be" in failed["error"]
    failed = alice.wait(alice.post("optim_step", model_id=run, seq_id=2, adam_params={"learning_rate": None}))
    assert "learning_rate: is null" in failed["error"]  # NaN of the client; the default was taken in its place
    number = wire.bytes_field(3, wire.bytes_field(1, wire.bytes_field(1, wire.number_field(1, 7))))
    body = wire.bytes_field(1, run.encode()) + wire.number_field(2, 3) + number
    assert alice.http.post("forward_backward", content=body).status_code == 400
    alice.wait(alice.post("unload_model", model_id=run, seq_id=3))


def test_a_finished_session_takes_nothing_new(server: Server) -> None:
    alice = server.client()
    session = alice.session()
    run = alice.run(session)
    alice.post(f"sessions/{session}/finish", reason={"type": "errored"}, detail=None)
    alice.post(f"sessions/{session}/finish", reason={"type": "success"})  # the first reason counts
    made = {"session_id": session, "base_model": "model"}
    for route, more in {
        "create_model": {"model_seq_id": 1, "lora_config": {"rank": 4}},
        "load_weights": {"model_seq_id": 2, "path": f"tinker://{run}/weights/x", "optimizer": False},
        "create_sampling_session": {"sampling_session_seq_id": 1},
    }.items():
        assert "is finished: begin a new one" in alice.post(route, 400, **made, **more)["error"]
    alice.post("session_heartbeat", 410, session_id=session)
    (found,) = alice.post("sessions/search", session_id=session)["sessions"]
    assert found["status"] == {"type": "client_finished", "reason": {"type": "errored"}}
    alice.wait(alice.post("unload_model", model_id=run))


BAD_SEARCHES: dict[str, tuple[dict, str]] = {
    "limit": ({"limit": 0}, "limit: must be"),
    "project": ({"project_ids": ["x"]}, "no projects"),
    "cursor": ({"cursor": {"last_created_at": "x", "last_session_id": "y"}}, "cursor.last_created_at"),
    "early": ({"cursor": {"last_created_at": "0001-01-01T00:00:00+14:00"}}, "cursor.last_created_at"),
    "statuses": ({"statuses": [1]}, "statuses"),
    "owner": ({"owner": [1]}, "owner"),
    "names": ({"owner": {"type": "user", "owner_urns": 3}}, "owner_urns"),
}


@pytest.mark.parametrize("name", BAD_SEARCHES)
def test_a_search_that_cannot_be_is_refused_with_its_key(server: Server, name: str) -> None:
    asked, said = BAD_SEARCHES[name]
    alice = server.client()
    alice.session()
    assert said in alice.post("sessions/search", 400, **asked)["error"]


def test_answers_that_nobody_fetches_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    promises = Promises()
    for brief in (True, False):
        promises.make(f"{brief}", "alice", brief).settle(Answer(b"x" * 100))
    promises.make("waits", "alice", brief=True)
    monkeypatch.setattr(futures, "LEFT", -1.0)
    promises.sweep()
    assert set(promises.by_id) == {"False", "waits"}  # a run's answer waits for its client
    monkeypatch.setattr(futures, "LEFT", 100.0)
    monkeypatch.setattr(futures, "MOST_KEPT", 250)
    for i in range(4):
        promises.make(f"{i}", "alice", brief=True).settle(Answer(b"x" * 100))
    promises.sweep()
    assert {"3", "False", "waits"} == set(promises.by_id)
    promises.make("bob's", "bob", brief=True).settle(Answer(b"x" * 90))
    for i in range(4):
        promises.make(f"run {i}", "alice").settle(Answer(b"x" * 100))
    promises.sweep()  # whoever keeps most loses, and what a run's client never fetched goes last
    assert {"bob's", "run 3", "waits"} == set(promises.by_id)
