"""A sample that its client gives up is computed no further, and its tokens are free for others."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from birl.server.tinker.inputs import Reader
from birl.server.tinker.routes import app
from birl.server.tinker.service import QUIET
from birl.server.tinker.tenants import Tenant
from tests.server.tinker_server import KEYS, without_model


class Endless:
    """A sampler that never comes to an end by itself."""

    ended = ""

    def __init__(self) -> None:
        self.began = asyncio.Event()

    async def answer(self, *_: Any) -> bytes:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = "cancelled"
        return b""


async def run(root: Path) -> None:
    sampling = Endless()
    service = without_model(root, sampling=sampling, work=SimpleNamespace(reader=Reader(320, 512)))
    alice, bob = (
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app(service)), base_url="http://localhost/api/v1",
            headers={"x-api-key": KEYS[name]},
        )
        for name in ("alice", "bob")
    )  # fmt: skip

    async def post(client: httpx.AsyncClient, route: str, **data: Any) -> dict[str, Any]:
        return (await client.post(route, json=data)).json()

    tenant: Tenant = service.tenants.named("alice")
    session = (await post(alice, "create_session"))["session_id"]
    made = await post(alice, "create_sampling_session", session_id=session, base_model="model")
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    asked = {
        "prompt": prompt,
        "sampling_params": {"max_tokens": 400},
        "sampling_session_id": made["sampling_session_id"],
    }
    id = (await post(alice, "asample", seq_id=0, **asked))["request_id"]
    await sampling.began.wait()
    assert tenant.tokens == 403
    await post(bob, "cancel_future", request_id=id)  # another's: as if it were not there
    await asyncio.sleep(0.01)
    assert not sampling.ended
    await post(alice, "cancel_future", request_id=id)
    assert "cancelled" in (await post(alice, "retrieve_future", request_id=id))["error"]
    assert sampling.ended and (tenant.tokens, tenant.requests) == (0, 0)
    assert await post(alice, "cancel_future", request_id="none") == {}

    for gone in ("silent", "closed"):  # its program
        sampling.began.clear()
        id = (await post(alice, "asample", seq_id=3, **asked))["request_id"]
        await asyncio.wait_for(sampling.began.wait(), 5)
        if gone == "silent":
            service.sessions.by_id[session].heard -= 2 * QUIET
            service.abandon()
            assert not service.promises.by_id[id].answer  # asked for after the last heartbeat: by a copy of the client
            service.promises.by_id[id].made -= 2 * QUIET
            service.abandon()
        else:
            await post(alice, f"sessions/{session}/finish")
        await asyncio.sleep(0.01)
        assert (tenant.tokens, tenant.requests) == (0, 0), gone
        assert (await alice.post("retrieve_future", json={"request_id": id})).status_code == 410  # it asks anew


def test_a_sample_that_is_cancelled_or_whose_program_is_gone_stops_and_frees_its_tokens(tmp_path: Path) -> None:
    asyncio.run(run(tmp_path))
