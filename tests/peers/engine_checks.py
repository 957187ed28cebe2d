"""What is checked of a server of vLLM or SGLang beside transformers, each with one line about its result."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from birl.engine.sampler import given
from birl.engine.truncation import limits_of, restrict
from birl.engines.vllm import adapter as vllm
from birl.errors import BirlError, WeightsFailed
from birl.models.slots import computed_by
from birl.types import Completion, SamplingParams, Stop, Update

CLOSE = 2e-5  # mean of abs(difference of log-probs), float32, for each answer [nats]


@dataclass(frozen=True, kw_only=True)
class Bench:
    engine: Any
    models: list[Any]  # of transformers: SmolLM2, and the same with noise; with --sees two of `test_vision.Bench`
    updates: list[Update]
    prompts: list[tuple[int, ...]]
    tmp: Path

    def logprobs(self, prompt: tuple[int, ...], answer: Completion, params: SamplingParams, which: int) -> list[float]:
        """What transformers gives the tokens of an answer."""
        ids = torch.tensor([[*prompt, *answer.ids]])
        with torch.no_grad():
            logits = self.models[which](ids).logits[0, len(prompt) - 1 : -1].float()
        return given(logits, answer.ids, params).tolist()

    def gap(self, prompt: tuple[int, ...], answer: Completion, params: SamplingParams, version: int) -> float:
        return mean(
            abs(a - b) for a, b in zip(answer.logprobs, self.logprobs(prompt, answer, params, version), strict=True)
        )

    async def fresh(self, version: int) -> Update:
        """These weights under the next number, loaded."""
        update = self.next(version)
        await self.engine.load(update)
        return update

    def next(self, version: int) -> Update:
        old = self.updates[version]
        return Update(version=self.engine.version + 1, digests=old.digests, folder=old.folder)


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def sampled(count: int, **keys: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **keys)


async def greedy_tokens(bench: Bench) -> str:
    params = SamplingParams(max_tokens=48, temperature=0.0)
    answers = await asyncio.gather(*(bench.engine.generate(p, params) for p in bench.prompts))
    for prompt, answer in zip(bench.prompts, answers, strict=True):
        found = bench.models[0].generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)[0, len(prompt) :]
        assert answer.ids == tuple(found.tolist()), (answer.ids, found.tolist())
    return f"{sum(len(a.ids) for a in answers)} tokens equal transformers'"


async def sampled_logprobs(bench: Bench) -> str:
    kinds = [sampled(64, seed=1), sampled(64, seed=2, temperature=0.7)]
    if isinstance(bench.engine, vllm.VLLM):
        kinds += [sampled(64, seed=3, top_p=0.9), sampled(64, seed=4, temperature=1.3, top_k=20)]
    gaps = []
    for params in kinds:
        answers = await asyncio.gather(*(bench.engine.generate(p, params) for p in bench.prompts))
        gaps.append(mean(bench.gap(p, a, params, 0) for p, a in zip(bench.prompts, answers, strict=True)))
        assert all(len(a.ids) == 64 and set(a.versions) == {bench.engine.version} for a in answers)
    assert max(gaps) < CLOSE, gaps
    return f"mean gap {max(gaps):.1e} nats over {len(kinds)} ways to sample"


async def kept_words(bench: Bench) -> str:
    """Log-probs are over the words that it says it kept, and these are the definition's but for some at the edge, where
    it keeps all that tie, or float32 sums decide."""
    if not isinstance(bench.engine, vllm.VLLM):
        return "it does not say them"
    gaps, edges, words = [], 0, 0
    for keys in ({"top_k": 20}, {"top_k": 128, "top_p": 0.9}, {"top_k": 50, "min_p": 0.05, "temperature": 1.3}):
        params = sampled(48, seed=7, support=True, **keys)
        answers = await asyncio.gather(*(bench.engine.generate(p, params) for p in bench.prompts))
        limits = limits_of([params])
        assert limits is not None
        for prompt, answer in zip(bench.prompts, answers, strict=True):
            assert answer.possible().support is not None
            with torch.no_grad():
                logits = bench.models[0](torch.tensor([[*prompt, *answer.ids]])).logits[0, len(prompt) - 1 : -1].float()
            logits = logits / params.temperature
            own = np.split(answer.support.ids, answer.support.counts.cumsum()[:-1])
            wanted = restrict(logits, limits) > -torch.inf
            for row, ids, token, logprob, left in zip(logits, own, answer.ids, answer.logprobs, wanted, strict=True):
                gaps.append(abs(float(row[token] - row[torch.from_numpy(ids).long()].logsumexp(0)) - float(logprob)))
                edges += len(set(ids.tolist()) ^ set(left.nonzero()[:, 0].tolist()))
                words += len(ids)
    assert mean(gaps) < CLOSE and edges < 0.01 * words, (mean(gaps), edges, words)
    return f"{words} words, {edges} at the edge; mean gap {mean(gaps):.1e} nats over what was kept"


async def scored_tokens(bench: Bench) -> str:
    params, prompt = sampled(64, seed=5), bench.prompts[1]
    answer = await bench.engine.generate(prompt, params)
    scored = await bench.engine.generate(prompt, sampled(64, forced=answer.ids))
    begun = await bench.engine.generate(prompt, sampled(64, forced=answer.ids[:20]))
    assert scored.ids == answer.ids and scored.stop is Stop.LENGTH
    assert begun.ids[:20] == answer.ids[:20] and len(begun.ids) == 64
    gaps = [bench.gap(prompt, scored, params, 0), bench.gap(prompt, begun, params, 0)]
    assert max(gaps) < CLOSE, gaps
    try:
        await bench.engine.generate(prompt, sampled(64, forced=answer.ids, temperature=0.5))
    except BirlError:
        return f"mean gap {max(gaps):.1e} nats; another temperature is refused"
    raise AssertionError("scored under a temperature that it can not score under")


async def stops(bench: Bench) -> str:
    prompt = bench.prompts[0]
    free = await bench.engine.generate(prompt, SamplingParams(max_tokens=16, temperature=0.0))
    by_id = await bench.engine.generate(prompt, SamplingParams(max_tokens=16, temperature=0.0, stop_ids=free.ids[4:5]))
    assert by_id.stop is Stop.STOP and by_id.ids == free.ids[:5]
    by_text = await bench.engine.generate(prompt, SamplingParams(max_tokens=16, temperature=0.0, stop=("Paris",)))
    assert by_text.stop is Stop.STOP and by_text.ids == free.ids[: len(by_text.ids)], by_text
    assert len(by_text.logprobs) == len(by_text.ids) < len(free.ids)
    return "stop ids and strings stay in the answer"


async def loaded(bench: Bench) -> str:
    """All weights are the new ones, tied ones too."""
    gaps = []
    for source in (1, 0):
        update = await bench.fresh(source)
        for prompt in bench.prompts:
            answer = await bench.engine.generate(prompt, sampled(32, seed=6))
            assert set(answer.versions) == {update.version}
            gaps.append(bench.gap(prompt, answer, sampled(32), source))
    assert max(gaps) < CLOSE, gaps
    return f"mean gap {max(gaps):.1e} nats"


async def switch(bench: Bench) -> str:
    """Every token has the log-prob that its version gives it after all tokens before it."""
    engine = bench.engine
    if not engine.recompute_kv:
        return "left out: this engine keeps old keys and values"
    first = engine.version
    asked = [asyncio.create_task(engine.generate(p, sampled(160, seed=7))) for p in bench.prompts]
    await asyncio.sleep(1.0)
    held = await engine.load(bench.next(1))
    second = engine.version
    gaps = []
    for prompt, answer in zip(bench.prompts, [await a for a in asked], strict=True):
        cut = answer.versions.index(second)
        assert 0 < cut < 160 and set(answer.versions) == {first, second}, answer.versions
        for version, part in ((0, slice(0, cut)), (1, slice(cut, 160))):
            right = bench.logprobs(prompt, answer, sampled(160), version)
            gaps.append(mean(abs(a - b) for a, b in zip(answer.logprobs[part], right[part], strict=True)))
    assert max(gaps) < CLOSE, gaps
    await bench.fresh(0)
    return f"answers change at tokens they name; mean gap {max(gaps):.1e} nats; stood still {held.seconds:.2f} s"


async def old_keys(bench: Bench) -> str:
    """Without new keys and values the log-probs after the switch are of neither policy."""
    engine, prompt = bench.engine, bench.prompts[1]
    engine.recompute_kv = False
    try:
        asked = asyncio.create_task(engine.generate(prompt, sampled(160, seed=8)))
        await asyncio.sleep(1.0)
        await engine.load(bench.next(1))
        answer = await asked
        cut = answer.versions.index(engine.version)
        right = bench.logprobs(prompt, answer, sampled(160), 1)
        gap = mean(abs(a - b) for a, b in zip(answer.logprobs[cut:], right[cut:], strict=True))
        assert gap > CLOSE, "it computed keys and values anew"
        new = await engine.generate(prompt, sampled(32, seed=9))
        assert bench.gap(prompt, new, sampled(32), 1) < CLOSE, "a new answer was sampled with old keys and values"
    finally:
        engine.recompute_kv = True
        await bench.fresh(0)
    return f"mean gap {gap:.1e} nats after the switch, new answers are exact"


async def pauses(bench: Bench) -> str:
    engine, prompt = bench.engine, bench.prompts[1]
    asked = asyncio.create_task(engine.generate(prompt, sampled(120, seed=3)))
    await asyncio.sleep(0.7)
    await engine.pause()
    late = asyncio.create_task(engine.generate(prompt, sampled(8)))
    await asyncio.sleep(1.5)
    assert not asked.done() and not late.done() and (await engine.info()).paused is not False
    await engine.resume()
    kept = await asked
    assert len(kept.ids) == 120 and bench.gap(prompt, kept, sampled(120), 0) < CLOSE and len((await late).ids) == 8
    asked = asyncio.create_task(engine.generate(prompt, sampled(800)))
    await asyncio.sleep(0.7)
    await engine.pause(abort=True)
    partial = await asyncio.wait_for(asked, 10)
    await engine.resume()
    assert partial.stop is Stop.ABORT and 0 < len(partial.ids) < 800, partial.stop
    return f"kept: all 120 tokens exact; aborted: {len(partial.ids)} of 800 tokens"


async def aborts(bench: Bench) -> str:
    engine, prompt = bench.engine, bench.prompts[1]
    asked = [asyncio.create_task(engine.generate(prompt, sampled(800 if s == "b" else 60), s)) for s in "abb"]
    await asyncio.sleep(0.7)
    assert await engine.abort({"b"}) == 2
    a, b, c = [await t for t in asked]
    assert b.stop is c.stop is Stop.ABORT and 0 < len(b.ids) < 800 and a.stop is Stop.LENGTH and len(a.ids) == 60
    asked = [asyncio.create_task(engine.generate(prompt, sampled(800)))]
    await asyncio.sleep(0.5)
    await engine.pause()
    assert await engine.abort() == 1 and (await asked[0]).stop is Stop.ABORT  # while it is paused
    await engine.resume()
    gone = asyncio.create_task(engine.generate(prompt, sampled(900)))
    await asyncio.sleep(0.5)
    gone.cancel()
    for _ in range(50):
        if (await engine.info()).running == 0:
            return "by session, while paused, and by leaving"
        await asyncio.sleep(0.2)
    raise AssertionError("the request of a cancelled caller goes on")


async def bad_loads(bench: Bench) -> str:
    engine, tmp = bench.engine, bench.tmp / "bad"
    good = bench.updates[1]
    params = SamplingParams(max_tokens=16, temperature=0.0)
    before, version = await engine.generate(bench.prompts[1], params), engine.version

    def update(folder: Path | str = good.folder, number: int = version + 1, sums: Any = good.digests) -> Update:
        return Update(version=number, digests=sums, folder=str(folder))

    shutil.copytree(good.folder, tmp)
    weights = tmp / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    fewer = dict(good.digests)
    fewer.popitem()
    cases = {
        "stale": update(number=version - 1),
        "missing": update(bench.tmp / "none"),
        "truncated": update(tmp),
        "mismatch": update(bench.updates[0].folder),
    }
    for cause, wrong in [*cases.items(), ("missing", update(sums=fewer))]:
        try:
            await engine.load(wrong)
        except WeightsFailed as error:
            assert error.cause == cause, (cause, error.cause, str(error))
        else:
            raise AssertionError(f"took weights that are {cause}")
        assert engine.version == version == (await engine.info()).version, (cause, engine.version)
        answer = await engine.generate(bench.prompts[1], params)
        assert answer.ids == before.ids and bench.gap(bench.prompts[1], answer, params, 0) < CLOSE, (cause, answer)
    await engine.load(update())
    assert (await engine.generate(bench.prompts[1], params)).ids != before.ids, "the new ones answer as the old"
    await bench.fresh(0)
    return "stale, missing, truncated, mismatch: refused, and the old weights answer"


async def speed(bench: Bench) -> str:
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(bench.engine.generate((*bench.prompts[0], 100 + i), sampled(128)) for i in range(16))
    )
    seconds = time.perf_counter() - began
    held = [await bench.engine.load(bench.next(i % 2)) for i in (1, 2)]
    stood = ", ".join(f"{h.seconds:.2f}" for h in held)
    rate = sum(len(a.ids) for a in answers) / seconds
    return f"16 x 128 tokens: {rate:.0f} tokens/s; idle loads stood still {stood} s"


async def many(bench: Bench) -> str:
    """More requests at once than the server runs at once."""
    answers = await asyncio.gather(
        *(bench.engine.generate((*bench.prompts[0], 100 + i), sampled(4)) for i in range(300))
    )
    assert all(len(a.ids) == 4 for a in answers)
    return "300 requests at once"


CHECKS: dict[str, Callable[[Bench], Awaitable[str]]] = {
    f.__name__: f
    for f in (
        *(greedy_tokens, sampled_logprobs, kept_words, scored_tokens, stops, loaded, switch, old_keys, pauses, aborts),
        *(bad_loads, many, speed),
    )
}


async def pictures(bench: Bench) -> str:
    """Greedy answers are those of transformers' `generate` on the same files, and sampled ones have the log-probs of
    its forward, also with other weights of the tower."""
    gaps, count = [], 0
    greedy = {"do_sample": False, "max_new_tokens": 32}
    for version, seen in enumerate(bench.models):
        await bench.fresh(version)
        for prompt in bench.prompts:
            answer = await bench.engine.generate(prompt, SamplingParams(max_tokens=32, temperature=0.0))
            with computed_by(seen.model, "eager"):
                expected = seen.model.generate(**seen.inputs(prompt), **greedy)[0, len(prompt) :].tolist()
            assert list(answer.ids) == expected, (answer.ids, expected)
            count += len(answer.ids)
            answer = await bench.engine.generate(prompt, sampled(32, seed=version))
            mark = seen.pictures.id  # a sampled placeholder, which transformers' forward would take for a picture
            ids = answer.ids[: (*answer.ids, mark).index(mark)]
            with torch.no_grad():
                logp = seen.logprobs((*prompt, *ids), len(prompt)).numpy()
            assert set(answer.versions) == {bench.engine.version}
            gaps.append(mean(np.abs(answer.logprobs[: len(ids)] - logp)))
    assert max(gaps) < CLOSE, gaps
    return f"{count} tokens equal transformers'; mean gap {max(gaps):.1e} nats over {len(gaps)} answers"
