"""An engine with weights of its own: what it samples while they change, and what it refuses."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from birl import kernels
from birl.engine.engine import EmbeddedEngine
from birl.engine.request import Request
from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.models.digests import digests, whole
from birl.models.load import cast, load_model, load_tokenizer
from birl.types import Completion, SamplingParams, Stop, Update

PROMPT = (1, 9, 4, 45, 7)

needs_kernels = pytest.mark.skipif(bool(kernels.problem()), reason=f"no kernels: {kernels.problem()}")


def engine(folder: Path, compute: ThreadPoolExecutor, dtype: torch.dtype = torch.bfloat16, **keys) -> EmbeddedEngine:
    model = cast(load_model(folder), dtype).requires_grad_(False)
    return EmbeddedEngine(
        model,
        load_tokenizer(folder),
        end_ids=frozenset({2}),
        context=512,
        compute=compute,
        **({"draft_rows": 0, "kv_cache_gb": 0.01} | keys),
    )


def step_by_step(request: Request) -> None:
    """Whoever watches makes the engine look up after every token, so that something can happen between two."""


def weights(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: p.data for name, p in cast(load_model(folder), dtype).named_parameters()}


def update(folder: Path, version: int, dtype: torch.dtype = torch.bfloat16) -> Update:
    tensors = weights(folder, dtype)
    return Update(version=version, digests=digests(tensors), tensors=tensors)


def params(n: int, **keys) -> SamplingParams:
    return SamplingParams(max_tokens=n, seed=3, ignore_eos=True, **keys)


async def after(engine: EmbeddedEngine, tokens: int) -> None:
    """Wait until so many were sampled."""
    while engine.counters.tokens < tokens:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@needs_kernels
async def test_given_tokens_get_the_log_probs_they_were_sampled_with(folders, compute, dtype) -> None:
    own = engine(folders[0], compute, dtype)
    answers = await asyncio.gather(*(own.generate(PROMPT[:n], params(200)) for n in (1, 3, 5)))
    scored = await asyncio.gather(
        *(own.generate(PROMPT[:n], params(200, forced=a.ids)) for n, a in zip((1, 3, 5), answers, strict=True))
    )
    for said, found in zip(answers, scored, strict=True):
        assert found.ids == said.ids
        gap = max(abs(a - b) for a, b in zip(found.logprobs.tolist(), said.logprobs.tolist(), strict=True))
        assert gap == 0
    assert own.counters.tokens == own.counters.scored == 600
    await own.close()


@needs_kernels
async def test_given_tokens_can_begin_an_answer(folders, compute) -> None:
    """The rest is drawn with the random numbers of its own places: an answer that was cut goes on as it would have."""
    own = engine(folders[0], compute)
    whole = await own.generate(PROMPT, params(60))
    begun = await own.generate(PROMPT, params(60, forced=whole.ids[:23]))
    assert begun == whole
    await own.close()


@pytest.mark.parametrize("draft_rows", [0, 16])
@needs_kernels
async def test_given_beginnings_beside_requests_that_share_their_prompt(folders, compute, draft_rows) -> None:
    """A batch of both: some go on where they were cut, others begin with the same prompt."""
    own = engine(folders[0], compute, draft_rows=draft_rows)
    wanted = [params(40) if i % 2 else SamplingParams(max_tokens=40, seed=i, ignore_eos=True) for i in range(9)]
    answers = await asyncio.gather(*(own.generate(PROMPT, p) for p in wanted))
    begun = [replace(p, forced=a.ids[: 5 * (i % 3)]) for i, (p, a) in enumerate(zip(wanted, answers, strict=True))]
    assert await asyncio.gather(*(own.generate(PROMPT, p) for p in begun)) == answers
    await own.close()


@pytest.mark.parametrize("recompute", [True, False])
@needs_kernels
async def test_weights_that_change_in_the_middle_of_an_answer(folders, compute, recompute) -> None:
    """Each token says which weights sampled it, and has exactly the log-prob that these give it after all tokens before
    it: where keys and values are computed anew. Where the old ones stay, it is neither the one nor the other policy."""
    own = engine(folders[0], compute, recompute_kv=recompute)
    asked = [asyncio.create_task(own.generate(PROMPT[:n], params(400), watch=step_by_step)) for n in (2, 5)]
    await after(own, 100)
    held = await own.load(update(folders[1], 7))
    assert held.version == own.version == 7
    assert held.digest == whole(digests(weights(folders[1]))) == whole(await own.digests())
    answers = [await a for a in asked]
    for answer, n in zip(answers, (2, 5), strict=True):
        cut = answer.versions.tolist().index(7)
        assert (
            0 < cut < 400
            and set(answer.versions.tolist()) == {0, 7}
            and answer.versions.tolist() == sorted(answer.versions.tolist())
        )
        for folder, part in ((folders[0], slice(0, cut)), (folders[1], slice(cut, 400))):
            judge = engine(folder, compute)
            scored = await judge.generate(PROMPT[:n], params(400, forced=answer.ids))
            same = scored.logprobs.tolist()[part] == answer.logprobs.tolist()[part]
            assert same == (recompute or folder == folders[0])
            await judge.close()
    await own.close()


async def test_who_comes_after_an_update_shares_no_older_keys(folders, compute) -> None:
    """Where running answers keep theirs. They have the same prompt, of more than a page."""
    prompt = tuple(range(3, 73))
    own, judge = engine(folders[0], compute, recompute_kv=False), engine(folders[1], compute)
    first = asyncio.create_task(own.generate(prompt, params(400), watch=step_by_step))
    await after(own, 50)
    await own.load(update(folders[1], 7))
    found = await own.generate(prompt, params(20))
    assert not first.done() and found.logprobs.tolist() == (await judge.generate(prompt, params(20))).logprobs.tolist()
    await own.abort()
    await first
    await own.close()
    await judge.close()


@needs_kernels
async def test_a_pause_changes_nothing(folders, compute) -> None:
    own = engine(folders[0], compute)
    expected = await own.generate(PROMPT, params(300))
    task = asyncio.create_task(own.generate(PROMPT, params(300), watch=step_by_step))
    await after(own, 350)
    await own.pause()
    counted = own.counters.tokens
    late = asyncio.create_task(own.generate(PROMPT, params(10)))  # waits
    await asyncio.sleep(0.05)
    assert own.counters.tokens == counted and not task.done() and not late.done()
    await own.resume()
    assert await task == expected and (await late).ids == expected.ids[:10]
    await own.close()


async def test_aborted_answers_come_back_with_what_they_have(folders, compute) -> None:
    own = engine(folders[0], compute, max_batch=2)
    sessions = ("a", "b", "b")
    asked = [asyncio.create_task(own.generate(PROMPT, params(400), session=s, watch=step_by_step)) for s in sessions]
    await after(own, 20)
    assert await own.abort({"b"}) == 2
    kept, cut, waited = [await a for a in asked[1:]] and asked
    assert cut.result().stop is waited.result().stop is Stop.ABORT and not waited.result().ids  # pyright: ignore
    assert 0 < len(cut.result().ids) < 400  # pyright: ignore
    await own.pause(abort=True)
    partial = await kept
    assert partial.stop is Stop.ABORT
    task = asyncio.create_task(own.generate(PROMPT, params(5)))
    await asyncio.sleep(0)
    assert await own.abort() == 1 and (await task).ids == ()  # while paused
    await own.resume()
    assert len((await own.generate(PROMPT, params(5))).ids) == 5
    assert own.counters.tokens == len(cut.result().ids) + len(partial.ids) + 5  # pyright: ignore
    await own.close()


async def test_tokens_of_a_cancelled_caller_are_counted(folders, compute) -> None:
    own = engine(folders[0], compute)
    task = asyncio.create_task(own.generate(PROMPT, params(400), watch=step_by_step))
    await after(own, 20)
    task.cancel()
    await asyncio.wait([task])
    while not own.counters.dropped:  # the engine looks up after a step; in a pause it would not
        await asyncio.sleep(0.001)
    await own.pause()
    assert own.counters.dropped == own.counters.tokens > 0
    await own.close()


def broken(kind: str, folder: Path, tmp_path: Path) -> Update:
    good = update(folder, 3)
    tensors = {name: t.clone() for name, t in good.tensors.items()}
    first = next(iter(tensors))
    if kind == "missing":
        del tensors[first]
    elif kind == "extra":
        tensors["adapter.lora_A"] = torch.zeros(2, 2)
    elif kind == "shape":
        tensors[first] = tensors[first][:-1]
    elif kind == "dtype":
        tensors[first] = tensors[first].float()
    elif kind == "bytes":
        tensors[first][0, 0] += 1
    elif kind in ("nan", "inf"):  # sent like that
        tensors[first][0, 0] = float(kind)
        return Update(version=3, digests=digests(tensors), tensors=tensors)
    elif kind == "old":
        return Update(version=-1, digests={}, tensors=tensors)
    elif kind == "no folder":
        return Update(version=3, digests={}, folder=str(tmp_path / "none"))
    elif kind == "truncated":
        save_file(tensors, tmp_path / "model.safetensors")
        data = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
        return Update(version=3, digests=good.digests, folder=str(tmp_path))
    return Update(version=3, digests=good.digests, tensors=tensors)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        *(("missing", "missing"), ("extra", "missing"), ("shape", "mismatch"), ("dtype", "mismatch")),
        *(("bytes", "mismatch"), ("old", "stale"), ("no folder", "missing"), ("truncated", "truncated")),
        *(("nan", "numbers"), ("inf", "numbers")),
    ],
)
async def test_a_bad_update_changes_nothing_and_says_why(folders, compute, tmp_path, kind, cause) -> None:
    own = engine(folders[0], compute)
    before = await own.digests()
    with pytest.raises(WeightsFailed) as caught:
        await own.load(broken(kind, folders[1], tmp_path))
    assert caught.value.cause == cause and own.version == 0 and await own.digests() == before
    held = await own.load(update(folders[1], 3))
    assert held.version == 3
    await own.close()


@needs_kernels
async def test_sleep_gives_the_memory_back_and_the_answer_goes_on(folders, compute) -> None:
    own = engine(folders[0], compute)
    expected = await own.generate(PROMPT, params(300))
    task = asyncio.create_task(own.generate(PROMPT, params(300), watch=step_by_step))
    await after(own, 350)
    await own.sleep()
    assert own.runner.cache is None and sum(p.nbytes for p in own.runner.model.parameters()) == 0
    with pytest.raises(BirlError, match="sleeps"):
        await own.resume()
    await own.wake()
    await own.load(update(folders[0], 0))
    await own.resume()
    assert await task == expected
    await own.close()


async def test_who_watches_hears_every_token_once(folders, compute) -> None:
    own = engine(folders[0], compute)
    heard: list[int] = []

    def watch(request: Request) -> None:
        heard.extend(request.tokens[request.told :])

    answer: Completion = await own.generate(PROMPT, params(50), watch=watch)
    assert tuple(heard) == answer.ids
    await own.close()


@pytest.mark.parametrize("paused", [True, False])
async def test_closing_tells_whoever_waits(folders, compute, paused) -> None:
    """Half an answer is none: a router asks another engine, and a canary is not said to have failed."""
    own = engine(folders[0], compute)
    if paused:
        await own.pause()
    task = asyncio.create_task(own.generate(PROMPT, params(400), watch=step_by_step))
    await (asyncio.sleep(0) if paused else after(own, 5))
    await own.close()
    with pytest.raises(EngineDown, match="closed"):
        await task
    assert own.counters.dropped == own.counters.tokens and not own.scheduler.busy
    with pytest.raises(EngineDown, match="closed"):
        await own.generate(PROMPT, params(1))
