"""Links to an export's files: who has one needs no key, for that file and until its hour is over, and no longer."""

import asyncio
import base64
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from birl.server.tinker.listing import LINK
from birl.server.tinker.routes import app
from birl.server.tinker.service import TinkerService
from birl.server.tinker.store import Checkpoint
from tests.server.tinker_server import KEYS, without_model

RUN = f"{'a' * 32}:train:0"
KEY = KEYS["alice"]
EXPORT = f"/api/v1/training_runs/{RUN}/checkpoints/external_weights/out/external_weights_urls"


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def service(tmp_path: Path) -> TinkerService:
    result = without_model(tmp_path, clock=Clock())
    for name in ("out", "other"):
        made = Checkpoint(run=RUN, kind="external_weights", name=name, owner="alice", made=1.0)
        result.store.save(made, {"adapter_config.json": name.encode(), "adapter_model.safetensors": b"weights"}, False)
    return result


def get(service: TinkerService, url: str, **headers: str) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(url, headers=headers)

    return asyncio.run(asked())


def link(service: TinkerService) -> str:
    return get(service, EXPORT, **{"x-api-key": KEY}).json()["urls"]["adapter_config.json"]


def audit(service: TinkerService) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (service.store.root / "audit.jsonl").read_text().splitlines()]


def test_a_link_is_good_for_an_hour(service: TinkerService) -> None:
    assert isinstance(service.clock, Clock)
    said = get(service, EXPORT, **{"x-api-key": KEY}).json()
    url = said["urls"]["adapter_config.json"]
    left = datetime.fromisoformat(said["expires"]) - datetime.now(UTC)
    assert abs(left.total_seconds() - LINK) < 600
    service.clock.now += LINK
    assert get(service, url).text == "out"
    service.clock.now += 1
    late = get(service, url)
    assert late.status_code == 410 and "expired" in late.json()["error"]
    assert get(service, link(service)).text == "out"  # a new one


def changed(url: str, **new: Any) -> str:
    """The same signature over other words."""
    base, _, own = url.rpartition("/")
    raw = base64.urlsafe_b64decode(own)
    words = dict(zip(("path", "name", "until"), json.loads(raw[32:]), strict=True)) | new
    return f"{base}/{base64.urlsafe_b64encode(raw[:32] + json.dumps(list(words.values())).encode()).decode()}"


@pytest.mark.parametrize(
    "new",
    [
        {"path": f"tinker://{RUN}/external_weights/other"},
        {"name": "adapter_model.safetensors"},
        {"name": "../../../../audit.jsonl"},
        {"until": 10.0**12},
        {"until": float("nan")},  # is less than nothing
    ],
)
def test_a_link_leads_nowhere_else_and_no_further_than_it_was_made_for(service: TinkerService, new: dict) -> None:
    url = link(service)
    assert changed(url) == url and get(service, url).status_code == 200
    wrong = get(service, changed(url, **new))
    assert wrong.status_code == 403 and "This link is invalid" in wrong.json()["error"]
    other = TinkerService(**{k: getattr(service, k) for k in service.__slots__ if k != "secret"})
    assert get(other, url).status_code == 403  # of a server that was started before


@pytest.mark.parametrize("words", ["A", "AAAA", "%C3%BC", "A" * 5000, "=" * 8])
def test_words_that_are_no_link_are_refused(service: TinkerService, words: str) -> None:
    assert get(service, f"/api/v1/download/{words}").status_code == 403


def test_making_and_using_a_link_are_in_the_audit(service: TinkerService) -> None:
    url, path = link(service), f"tinker://{RUN}/external_weights/out"
    get(service, url)
    get(service, changed(url, until=10.0**12))
    made, fetched = audit(service)
    assert (made["tenant"], made["event"], made["path"]) == ("alice", "external_weights_urls", path)
    assert (fetched["event"], fetched["path"], fetched["file"]) == ("download", path, "adapter_config.json")
    assert url.rpartition("/")[2] not in json.dumps([made, fetched])  # who reads it gets no link
