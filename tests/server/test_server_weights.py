"""Weights of `birl serve`: staged, loaded, refused, given back and brought again."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save

from birl.engines import wire
from birl.models.digests import digests, whole
from birl.server import staging
from birl.types import SamplingParams, Update
from birl.weights import folder
from tests.engine.test_update import PROMPT, weights
from tests.server.running import Running, process, running, slowed, until
from tests.server.test_server import embedded


@pytest.fixture
def server(folders: list[Path]) -> Iterator[Running]:
    with running(folders[0]) as found:
        yield found


def stage(server: Running, version: int, tensors: dict[str, torch.Tensor], pieces: int = 3) -> None:
    names = list(tensors)
    for i in range(pieces):
        piece = {name: tensors[name] for name in names[i::pieces]}
        assert server.http.put(f"/stage/{version}", content=save(piece)).status_code == 200


def test_weights_change_in_the_middle_of_an_answer(server: Running, folders: list[Path], monkeypatch) -> None:
    slowed(monkeypatch, server.service, 0.005)
    new = weights(folders[1])
    with ThreadPoolExecutor(4) as pool:
        keys = {"max_tokens": 300, "ignore_eos": True}
        asked = [pool.submit(server.generate, PROMPT[: i + 1], seed=i, **keys) for i in range(4)]
        until(lambda: server.service.engine.counters.tokens > 40)
        stage(server, 7, new)
        reply = server.http.post("/load", json={"version": 7, "digests": digests(new)})
        held = wire.held_from(reply.json())
        assert (held.version, held.digest) == (7, whole(digests(new)))
        answers = [a.result(60) for a in asked]
    for answer in answers:
        assert set(answer["versions"]) == {0, 7} and answer["versions"] == sorted(answer["versions"])
    assert server.http.get("/info").json()["digest"] == held.digest
    fresh = server.generate(PROMPT, max_tokens=20, seed=1)
    assert fresh["tokens"] == list(embedded(folders[1], PROMPT, SamplingParams(max_tokens=20, seed=1)).tokens)


def test_weights_from_a_volume(folders: list[Path], tmp_path: Path) -> None:
    """The server looks there by itself; what is damaged is told, and the next version is taken."""
    new = weights(folders[1])
    place = str(folder.write(tmp_path, 1, new, folders[1]))
    with process(folders[0], f"volume={tmp_path}") as (child, url):
        wrong = digests(weights(folders[0]))
        folder.announce(tmp_path, Update(version=1, digests=wrong, folder=place))  # not what is in it
        assert "other bytes than were sent" in child.stdout.readline()
        place = str(folder.write(tmp_path, 2, new, folders[1]))
        folder.announce(tmp_path, Update(version=2, digests=digests(new), folder=place))
        until(lambda: httpx.get(f"{url}/info").json()["version"] == 2)
        assert httpx.get(f"{url}/info").json()["digest"] == whole(digests(new))
        for path in ("/sleep", "/wake"):
            assert httpx.post(url + path).status_code == 200
        until(lambda: httpx.get(f"{url}/info").json()["digest"] == whole(digests(new)))  # it has them again


def test_refused_weights_change_nothing(server: Running, folders: list[Path], tmp_path: Path) -> None:
    new, old = weights(folders[1]), server.http.get("/digests").json()["digests"]
    first = next(iter(new))

    def refused(cause: str, version: int = 3, **more: object) -> None:
        reply = server.http.post("/load", json={"version": version, "digests": digests(new), **more})
        assert reply.status_code == 409 and reply.json()["error"]["type"] == "weights"
        assert reply.json()["error"]["cause"] == cause, reply.text
        assert server.http.get("/digests").json() == {"version": 0, "digests": old}

    refused("missing")  # nothing was staged
    stage(server, 3, {name: t for name, t in new.items() if name != first})
    refused("missing")
    stage(server, 3, new | {first: new[first] * 2})
    refused("mismatch")
    stage(server, 3, new)
    stage(server, 4, {first: new[first]}, pieces=1)  # takes the place of 3
    refused("missing")
    assert server.http.put("/stage/5", content=save(new)[:-9]).json()["error"]["cause"] == "truncated"
    huge = {str(i): t.repeat(2, *[1] * (t.dim() - 1)) for i, t in enumerate(new.values())}
    assert server.http.put("/stage/5", content=save(huge)).status_code == 413
    refused("missing", folder=str(tmp_path))
    counted = server.service.metrics.registry.get_sample_value
    assert counted("birl_load_failures_total", {"cause": "missing"}) == 4
    for bad in ({"version": "x"}, {"version": True}, {"version": 1, "digests": [1]}, {"version": 1, "folder": 3}):
        assert server.http.post("/load", json=bad).status_code == 400


def test_what_nobody_goes_on_staging_is_dropped(server: Running, folders: list[Path], monkeypatch) -> None:
    stage(server, 2, weights(folders[1]))
    monkeypatch.setattr(staging, "ABANDONED", 0.0)
    until(lambda: server.service.staging.version is None)
    assert not server.service.staging.tensors


def test_sleep_needs_weights_afterwards(server: Running, folders: list[Path]) -> None:
    post, own = server.http.post, weights(folders[0])
    expected = server.generate(PROMPT, max_tokens=20, seed=3)

    def why() -> str:
        reply = server.http.get("/ready")
        assert reply.status_code == 503
        return reply.json()["error"]["message"]

    assert post("/sleep").json()["asleep"]
    assert "sleeps" in why() and server.http.get("/info").json()["digest"] == ""
    stage(server, 0, own)
    for path in ("/resume", "/load"):
        assert post(path, json={"version": 0} if path == "/load" else {}).status_code == 409
    assert server.http.get("/digests").status_code == 409
    assert not post("/wake").json()["asleep"]
    assert "no weights" in why() and post("/resume").status_code == 409
    stage(server, 0, own)
    assert post("/load", json={"version": 0, "digests": digests(own)}).status_code == 200
    assert "paused" in why() and post("/resume").status_code == 200
    assert server.http.get("/ready").status_code == 200
    assert server.generate(PROMPT, max_tokens=20, seed=3) == expected
