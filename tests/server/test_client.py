"""The client against a real engine behind HTTP, and against servers that answer nonsense or nothing."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from birl.engine.engine import EmbeddedEngine
from birl.engines.client import Client, buckets, packed
from birl.errors import BirlError, EngineDown, Malformed, WeightsFailed
from birl.models.digests import digests, whole
from birl.models.load import cast, load_model
from birl.process import free_port
from birl.types import Stop, Update
from tests.engine.test_update import PROMPT, params, weights
from tests.server.app import tiny_engine
from tests.server.running import running


@contextmanager
def served(folder: Path, token: str = "", slow: float = 0.0) -> Iterator[tuple[str, EmbeddedEngine]]:
    """Each step of its engine takes `slow` seconds longer."""
    with running(folder, token) as server:
        engine = server.service.engine
        step = engine.steps.step
        engine.steps.step = lambda: (time.sleep(slow), step())[1]  # type: ignore[method-assign]
        yield server.url, engine


async def test_answers_cross_the_wire_bit_for_bit(folders) -> None:
    own = tiny_engine(folders[0])
    with served(folders[0]) as (address, _):
        client = Client(address)
        cases = [params(40), params(30, temperature=0.7, top_k=5, stop_ids=(7,)), params(10, forced=(5, 6))]
        for case in [*cases, replace(params(20), seed=2**62 + 1)]:
            assert await client.generate(PROMPT, case, "s") == await own.generate(PROMPT, case)
        told = await client.info()
        assert told.engine == "birl" and told.counters["tokens"] > 90 and client.version == 0
        assert told.digest == whole(await own.digests())
        await client.close()
    await own.close()


@pytest.mark.parametrize("bucket_mb", [0.001, 64.0])
async def test_weights_arrive_as_tensors_and_as_a_folder(folders, tmp_path, bucket_mb) -> None:
    with served(folders[0]) as (address, engine):
        client = Client(address, bucket_mb=bucket_mb)
        tensors = weights(folders[1])
        tensors = {name: t.mT.contiguous().mT if t.ndim == 2 else t for name, t in tensors.items()}  # other strides
        held = await client.load(Update(version=4, digests=digests(tensors), tensors=tensors))
        assert held.version == client.version == engine.version == 4 and held.digest == whole(digests(tensors))
        model = cast(load_model(folders[0]), torch.bfloat16)
        model.save_pretrained(tmp_path)  # pyright: ignore
        held = await client.load(Update(version=5, digests=digests(weights(folders[0])), folder=str(tmp_path)))
        assert held.digest == whole(digests(weights(folders[0])))
        for broken, cause in [
            (Update(version=6, digests={}, folder=str(tmp_path / "none")), "missing"),
            (Update(version=2, digests={}, folder=str(tmp_path)), "stale"),
            (Update(version=6, digests={}, tensors={"x": torch.zeros(2)}), "missing"),
        ]:
            with pytest.raises(WeightsFailed) as caught:
                await client.load(broken)
            assert caught.value.cause == cause and address in str(caught.value)
        assert (await client.info()).version == 5
        await client.close()


def test_buckets_are_full_and_lose_nothing() -> None:
    tensors = {str(i): torch.zeros(n) for i, n in enumerate((100, 100, 70_000, 100, 200_000, 300_000, 1))}
    found = list(buckets(tensors, 1.0))
    assert [list(b) for b in found] == [["0", "1", "2", "3"], ["4"], ["5"], ["6"]]
    assert list(buckets({}, 1.0)) == []


def test_what_is_packed_is_what_safetensors_reads() -> None:
    from safetensors.torch import load

    whole = torch.randn(6, 5)
    tensors = {"a": whole[:2], "b": whole.t(), "c": whole.bfloat16(), "é": torch.tensor(7), "empty": torch.zeros(0, 3)}
    found = load(packed(tensors))
    assert found.keys() == tensors.keys()
    assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in tensors.items())


async def test_commands_do_what_they_say(folders) -> None:
    with served(folders[0], slow=0.002) as (address, engine):
        client = Client(address)
        asked = [asyncio.create_task(client.generate(PROMPT, params(400), s)) for s in ("a", "b")]
        while engine.counters.tokens < 20:
            await asyncio.sleep(0.005)
        assert await client.abort({"a"}) == 1 and (await asked[0]).stop is Stop.ABORT
        await client.pause()
        assert (await client.info()).paused
        counted = engine.counters.tokens
        await asyncio.sleep(0.1)
        assert engine.counters.tokens == counted and not asked[1].done()
        await client.resume()
        await client.pause(abort=True)
        assert (await asked[1]).stop is Stop.ABORT
        await client.sleep()
        assert (await client.info()).asleep
        with pytest.raises(BirlError, match="sleeps"):
            await client.resume()
        await client.wake()
        tensors = weights(folders[1])
        await client.load(Update(version=1, digests=digests(tensors), tensors=tensors))
        await client.resume()
        assert (await client.generate(PROMPT, params(3))).versions.tolist() == [1, 1, 1]
        await client.close()


async def test_cancelling_ends_the_request_in_the_engine(folders) -> None:
    with served(folders[0], slow=0.005) as (address, engine):
        client = Client(address)
        task = asyncio.create_task(client.generate(PROMPT, params(450)))
        while engine.counters.tokens < 10:
            await asyncio.sleep(0.005)
        task.cancel()
        deadline = time.monotonic() + 100
        while not engine.counters.dropped and time.monotonic() < deadline:  # counted after it is off the schedule
            await asyncio.sleep(0.01)
        assert engine.counters.dropped == engine.counters.tokens < 450
        late = Client(address, timeout=0.3)
        with pytest.raises(EngineDown, match=rf"session 'ep 7' on {address} got no answer within 0.3 s"):
            await late.generate(PROMPT, params(450), "ep 7")
        while engine.scheduler.busy and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert not engine.scheduler.busy
        await client.close()
        await late.close()


async def test_a_wrong_request_and_a_wrong_token(folders) -> None:
    with served(folders[0], token="secret") as (address, _):
        client = Client(address, "secret")
        with pytest.raises(BirlError, match="prompt_ids is empty"):
            await client.generate((), params(4))
        assert (await client.info()).version == 0
        for wrong in (Client(address), Client(address, "other")):
            with pytest.raises(EngineDown, match="BIRL_TOKEN"):
                await wrong.info()
            await wrong.close()
        await client.close()
        with pytest.raises(EngineDown, match="closed"):
            await client.info()


@pytest.mark.parametrize("address", ["localhost:8000", "http://", "ftp://x:1", "http://x:1/v1", "", "http://x:y"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(BirlError, match="not an engine's address"):
        Client(address)


def http(body: str, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n{body}".encode()


GOOD = '{"tokens": [5, 6], "logprobs": [-1.0, -0.5], "versions": [0, 0], "stop": "length"}'


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"", "RemoteProtocolError"),
        (b"\x00\xff garbage\r\n\r\n", "RemoteProtocolError"),
        (http("<html>" + "x" * 5000), "<html>x"),
        (http("[1, 2]"), "200"),
        (http("{}"), "no completion"),
        (http(GOOD.replace("[0, 0]", "[0]")), "2 tokens, 2 logprobs, 1 versions"),
        (http(GOOD.replace("-1.0", "NaN")), "not a number"),
        (http(GOOD.replace("-1.0", "-1" + "0" * 400)), "no completion"),
        (http(GOOD.replace("length", "tired")), "tired"),
        (http(GOOD.replace("[5, 6]", "null")), "no completion"),
        (http(GOOD.replace("[5, 6]", "[5, 6, 7]").replace("-1.0", "-1.0, -1.0").replace("0, 0", "0, 0, 0")), "2 were"),
        (http("oops", "500 Internal Server Error"), "500 oops"),
        (http("", "302 Found", "Location: http://10.0.0.1/\r\n"), "302"),
        (http(GOOD)[:-9], "RemoteProtocolError"),
    ],
    ids=range(14),
)
async def test_what_is_no_answer_is_told(answer: bytes, told: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=5.0)
    with pytest.raises(EngineDown, match=told) as caught:
        await client.generate(PROMPT, params(2), "s")
    whole = b"200 OK" in answer and told != "RemoteProtocolError"
    assert isinstance(caught.value, Malformed) == whole
    assert len(str(caught.value)) < 500 and client.address in str(caught.value)
    with pytest.raises(EngineDown):
        await client.info()
    with pytest.raises(WeightsFailed) as failed:
        await client.load(Update(version=1, digests={}, folder="x"))
    assert failed.value.cause == ("mismatch" if whole else "unreachable")
    server.close()
    await client.close()


async def test_a_full_server_says_when_to_come_back() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(http('{"error": {"message": "full"}}', "429 Too Many Requests", "Retry-After: 3\r\n"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(EngineDown, match="429 full") as caught:
        await client.generate(PROMPT, params(2))
    assert caught.value.retry_after == 3.0
    server.close()
    await client.close()


async def test_nobody_there_and_nobody_answering() -> None:
    client = Client(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineDown, match="ConnectError"):
        await client.info()
    await client.close()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", control_timeout=0.2, load_timeout=0.3)
    with pytest.raises(EngineDown, match=r"GET /info .*got no answer within 0.2 s"):
        await client.info()
    with pytest.raises(WeightsFailed, match=r"got no answer within 0.3 s"):
        await client.load(Update(version=1, digests={}, folder="x"))
    await client.close()
    server.close()


async def test_hundreds_of_requests_wait_at_once_and_the_engine_can_still_be_asked_how_it_is() -> None:
    waiting, most, go = 0, 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting, most
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
            waiting += 1
            most = max(most, waiting)
            await go.wait()
            waiting -= 1
            writer.write(http(GOOD))
        else:
            writer.write(http("{}"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1000)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections=300)
    asked = [asyncio.create_task(client.generate(PROMPT, params(2))) for _ in range(350)]
    while waiting < 300:
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDown, match="not a birl engine"):  # it answered at once
        await client.info()
    go.set()
    assert len(await asyncio.gather(*asked)) == 350 and most == 300
    server.close()
    await client.close()


async def test_the_proxy_of_the_environment_is_not_asked(folders, monkeypatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with served(folders[0]) as (address, _):
        client = Client(address)
        assert (await client.info()).version == 0
        await client.close()
