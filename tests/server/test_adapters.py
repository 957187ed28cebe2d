"""What every engine in another process does the same way: vLLM and SGLang."""

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from birl.engine.engine import EmbeddedEngine
from birl.engines.peer import Peer
from birl.engines.sglang import SGLang
from birl.engines.vllm.adapter import VLLM
from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.models.digests import digests
from birl.types import SamplingParams, Stop, Update
from tests.engine.test_update import PROMPT, after, engine, needs_kernels, params, step_by_step, weights
from tests.server.doubles import Double, SGLangDouble, VLLMDouble

KINDS = ("vllm", "sglang")
GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


def stepping(own: EmbeddedEngine) -> EmbeddedEngine:
    """It looks up after every token, so that something can happen between two."""
    generate = own.generate

    async def watched(prompt: tuple[int, ...], asked: SamplingParams, session: str = "") -> Any:
        return await generate(prompt, asked, session, watch=step_by_step)

    own.generate = watched  # type: ignore[method-assign]
    return own


def pair(kind: str, folders: list[Path], compute: ThreadPoolExecutor, **keys: Any) -> tuple[Any, Double]:
    own = stepping(engine(folders[0], compute))
    double: Any = SGLangDouble(own, folders[0]) if kind == "sglang" else VLLMDouble(own, folders[0])
    if kind == "sglang":
        found: Any = SGLang("http://engine", end_ids=frozenset({2}), **keys)
    else:
        found = VLLM("http://engine", end_ids=frozenset({2}), **keys)
    found.peer.client = double.client(double.app())
    return found, double


def update(folder: Path, version: int) -> Update:
    return Update(version=version, digests=digests(weights(folder)), folder=str(folder))


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_is_the_engines_own(folders, compute, kind) -> None:
    adapter, double = pair(kind, folders, compute)
    for asked in (params(40), params(40, temperature=0.7), params(400, stop=("e",)), params(40, stop_ids=(45,))):
        expected = await double.engine.generate(PROMPT, asked)
        assert await adapter.generate(PROMPT, asked) == expected
    full = await adapter.generate((5,) * 508, params(40))
    assert len(full.ids) == 4 and full.stop is Stop.LENGTH
    assert (await adapter.generate((5,) * 512, params(40))).ids == ()
    info = await adapter.info()
    assert (info.version, info.context, info.dtype) == (0, 512, "bfloat16") and info.vocabulary == 320
    await adapter.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_end_tokens_of_the_request_and_of_the_model_are_sent(folders, compute, kind) -> None:
    adapter, double = pair(kind, folders, compute)
    whole = await adapter.generate(PROMPT, params(40))
    token = next(t for t in whole.ids if t != 2)
    cut = await adapter.generate(PROMPT, params(40, stop_ids=(token,)))
    assert cut.ids == whole.ids[: whole.ids.index(token) + 1] and cut.stop is Stop.STOP
    await adapter.generate(PROMPT, SamplingParams(max_tokens=4, stop_ids=(token,)))
    sent = [body["sampling_params"]["stop_token_ids"] for body in double.bodies]
    assert sent == [[], [token], sorted({2, token})]
    await adapter.close()


@needs_kernels  # without them PyTorch rounds a token by the batch that it comes in
@pytest.mark.parametrize("kind", KINDS)
async def test_given_tokens_are_scored(folders, compute, kind) -> None:
    adapter, double = pair(kind, folders, compute)
    answer = await double.engine.generate(PROMPT, params(50))
    assert await adapter.generate(PROMPT, params(50, forced=answer.ids)) == answer
    begun = await adapter.generate(PROMPT, params(50, forced=answer.ids[:20]))
    assert begun.ids[:20] == answer.ids[:20] and begun.logprobs.tolist()[:20] == answer.logprobs.tolist()[:20]
    assert len(begun.ids) == len(begun.versions.tolist()) == 50 and begun.stop is Stop.LENGTH
    ended = SamplingParams(max_tokens=50, forced=(*answer.ids[:5], 2, 7, 7))
    assert await adapter.generate(PROMPT, ended) == await double.engine.generate(PROMPT, ended)
    for wrong in ({"temperature": 0.7}, {"top_k": 5}):
        with pytest.raises(BirlError, match="without"):
            await adapter.generate(PROMPT, params(50, forced=answer.ids, **wrong))
    with pytest.raises(BirlError, match="at most 511"):
        await adapter.generate((5,) * 500, params(50, forced=(7,) * 12))
    await adapter.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_change_in_the_middle_of_an_answer(folders, compute, kind) -> None:
    adapter, double = pair(kind, folders, compute)
    asked = asyncio.create_task(adapter.generate(PROMPT, params(400)))
    await after(double.engine, 50)
    held = await adapter.load(update(folders[1], 7))
    assert held.version == adapter.version == 7 and held.bytes > 0 and held.seconds > 0 and held.digest == ""
    answer = await asked
    cut = answer.versions.tolist().index(7)
    assert 0 < cut < 400 and set(answer.versions.tolist()) == {0, 7} and not double.engine.paused
    assert (
        set((await adapter.generate(PROMPT, params(4))).versions.tolist()) == {7}
        and (await adapter.info()).version == 7
    )
    salts = {body.get("cache_salt") or body.get("extra_key") for body in double.bodies}
    assert salts == {"weights-0", "weights-7"}
    await adapter.close()


def broken(cause: str, folders: list[Path], tmp_path: Path) -> Update:
    good = update(folders[1], 9)
    if cause == "stale":
        return update(folders[1], 4)
    if cause == "missing":
        return Update(version=9, digests=good.digests, folder=str(tmp_path / "none"))
    if cause == "mismatch":
        return Update(version=9, digests=good.digests, folder=str(folders[0]))
    data = (folders[1] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    return Update(version=9, digests=good.digests, folder=str(tmp_path))


@pytest.mark.parametrize("cause", ["stale", "missing", "truncated", "mismatch"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_bad_update_changes_nothing(folders, compute, tmp_path, kind, cause) -> None:
    adapter, double = pair(kind, folders, compute)
    await adapter.load(update(folders[0], 5))
    before = await adapter.generate(PROMPT, params(20))
    with pytest.raises(WeightsFailed) as caught:
        await adapter.load(broken(cause, folders, tmp_path))
    assert caught.value.cause == cause and adapter.version == 5 and not double.engine.paused
    assert await adapter.generate(PROMPT, params(20)) == before
    await adapter.load(update(folders[1], 9))
    assert (await adapter.generate(PROMPT, params(20))).ids != before.ids
    await adapter.close()


@pytest.mark.parametrize(
    ("kind", "path"), [("vllm", "/update_weight_version"), ("sglang", "/update_weights_from_disk")]
)
async def test_a_load_that_fails_half_way_breaks_the_engine_until_one_succeeds(folders, compute, kind, path) -> None:
    adapter, double = pair(kind, folders, compute)
    asked = asyncio.create_task(adapter.generate(PROMPT, params(500)))
    await after(double.engine, 20)
    double.fail[path] = JSONResponse({"success": False, "message": "no such thing"}, 400)
    with pytest.raises(WeightsFailed, match=r"no such thing.*broken"):
        await adapter.load(update(folders[1], 1))
    assert (await asked).stop is Stop.ABORT  # nobody waits for what will not come
    with pytest.raises(EngineDown, match="half-way"):
        await adapter.generate(PROMPT, params(5))
    double.fail.clear()
    await adapter.load(update(folders[1], 1))
    assert len((await adapter.generate(PROMPT, params(5))).ids) == 5
    await adapter.close()


@needs_kernels
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_pause_and_abort(folders, compute, kind) -> None:
    adapter, double = pair(kind, folders, compute)
    expected = await double.engine.generate(PROMPT, params(300))
    asked = asyncio.create_task(adapter.generate(PROMPT, params(300)))
    await after(double.engine, 350)
    await adapter.pause()
    late = asyncio.create_task(adapter.generate(PROMPT, params(300), "late"))
    await asyncio.sleep(0.05)
    assert not asked.done() and not late.done() and (await adapter.info()).paused
    assert await adapter.abort({"late"}) == 1 and (await late).stop is Stop.ABORT
    await adapter.load(update(folders[0], 3))
    assert double.engine.paused  # a load does not end a pause
    await adapter.resume()
    assert (await asked).ids == expected.ids
    asked = [asyncio.create_task(adapter.generate(PROMPT, params(500), s)) for s in ("a", "b", "b")]
    await after(double.engine, double.engine.counters.tokens + 30)
    assert await adapter.abort({"b"}) == 2
    await adapter.pause(abort=True)
    for answer in [await a for a in asked]:
        assert answer.stop is Stop.ABORT and 0 < len(answer.ids) < 500
    await adapter.resume()
    assert await adapter.abort() == 0
    await adapter.close()


@needs_kernels
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_sleep_keeps_what_runs_and_needs_weights_afterwards(folders, compute, kind) -> None:
    adapter, double = pair(kind, folders, compute)
    expected = await double.engine.generate(PROMPT, params(300))
    asked = asyncio.create_task(adapter.generate(PROMPT, params(300)))
    await after(double.engine, 350)
    await adapter.sleep()
    with pytest.raises(BirlError, match="sleeps"):
        await adapter.resume()
    await adapter.wake()
    with pytest.raises(BirlError, match="sleeps"):
        await adapter.resume()  # there is room for weights, and none are in it
    await adapter.load(update(folders[0], 1))
    assert double.engine.paused
    await adapter.resume()
    assert (await asked).ids == expected.ids
    await adapter.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_errors_say_whose_fault_it_is(folders, compute, kind) -> None:
    adapter, double = pair(kind, folders, compute)
    with pytest.raises(BirlError, match="empty"):
        await adapter.generate((), params(5))
    for answer, error, said in (
        (JSONResponse({"error": {"message": "out of memory"}}, 500), EngineDown, "out of memory"),
        (JSONResponse({"error": "busy"}, 429), EngineDown, "busy"),
        (JSONResponse({"error": "unknown field `foo`"}, 400), BirlError, "foo"),
        (PlainTextResponse("<html>"), EngineDown, "html"),
        (JSONResponse({"choices": []}), EngineDown, "unknown answer"),
    ):
        double.fail[GENERATE[kind]] = answer
        with pytest.raises(error, match=said):
            await adapter.generate(PROMPT, params(5))
    await adapter.close()
    closed: Any = (SGLang if kind == "sglang" else VLLM)("http://127.0.0.1:9")  # nobody listens on "discard"
    for asked in (closed.info(), closed.generate(PROMPT, params(5)), closed.pause()):
        with pytest.raises(EngineDown, match=r"127\.0\.0\.1:9"):
            await asked
    with pytest.raises(WeightsFailed) as caught:
        await closed.load(update(folders[1], 1))
    assert caught.value.cause == "unreachable"
    await closed.close()


async def test_an_answer_that_trickles_in_is_late() -> None:
    """Each byte comes in time, and the last one never."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    peer = Peer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=0.3)
    began = time.monotonic()
    for keys in ({}, {"timeout": 0.2}):
        with pytest.raises(EngineDown, match="in time"):
            await peer.json("GET", "/x", **keys)
    assert time.monotonic() - began < 30
    await peer.close()
    server.close()
