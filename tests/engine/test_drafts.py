"""Guessed tokens change how fast something is sampled, and nothing else."""

import asyncio
import contextlib
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from birl import kernels
from birl.engine.drafts import Drafts
from birl.engine.pages import Pages, pages_for
from birl.engine.request import TopLogprobs
from birl.engine.scheduler import Scheduler
from birl.kernels.tensors import PAGE
from birl.types import SamplingParams, Stop
from tests.engine.test_engine import PAGE_BYTES, Bench
from tests.engine.test_scheduler import compute as computed
from tests.engine.test_scheduler import request

PROMPTS = [tuple(range(5, 15)) * 3, tuple(range(5, 15)) * 3, tuple(range(40, 47)) * 2]


def repetitive(bench: Bench) -> Bench:
    """A random model hardly repeats itself; sharper logits make it."""
    with torch.no_grad():
        bench.learner.model.lm_head.weight *= 8  # type: ignore[union-attr]
    return bench


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"max_batch": 2}, {"kv_cache_gb": 6 * PAGE_BYTES / 2**30}, {"draft_rows": 12}, {"draft_rows": 40}]
)
def test_the_same_tokens_with_guesses_and_without(
    tiny: Path, compute: ThreadPoolExecutor, dtype: torch.dtype, options: dict[str, float]
) -> None:
    params = [SamplingParams(max_tokens=100, seed=i, temperature=t) for i, t in enumerate((0.0, 0.3, 0.3))]
    plain = repetitive(Bench(tiny, compute, dtype, draft_rows=0))
    expected = plain.generate(PROMPTS, params)
    bench = repetitive(Bench(tiny, compute, dtype, **options))
    found = bench.generate(PROMPTS, params)
    counters = bench.engine.counters
    assert counters.accepted > 20 and counters.drafted > counters.accepted
    assert counters.tokens == sum(len(c.ids) for c in found) == plain.engine.counters.tokens
    assert [(c.ids, c.stop, c.versions.tolist()) for c in found] == [
        (c.ids, c.stop, c.versions.tolist()) for c in expected
    ]
    for a, b in zip(found, expected, strict=True):
        if not kernels.problem():
            assert a.logprobs.tolist() == b.logprobs.tolist()
        else:
            assert a.logprobs.tolist() == pytest.approx(
                b.logprobs.tolist(), abs=5e-5 if dtype == torch.float32 else 0.5
            )  # logits of 60


@pytest.mark.parametrize("ending", [{"stop_ids": True}, {"stop": True}])
def test_an_end_among_the_guesses_ends_it(tiny: Path, compute: ThreadPoolExecutor, ending: dict[str, bool]) -> None:
    bench = repetitive(Bench(tiny, compute))
    (free,) = bench.generate(PROMPTS[:1], [SamplingParams(max_tokens=60, seed=1, temperature=0.0, ignore_eos=True)])
    last = free.ids[40]
    end = {"stop_ids": (last,)} if "stop_ids" in ending else {"stop": (bench.tokenizer.decode([last]),)}
    plain = repetitive(Bench(tiny, compute, draft_rows=0))
    params = [SamplingParams(max_tokens=60, seed=1, temperature=0.0, ignore_eos=True, **end)]  # type: ignore[arg-type]
    (found,), (expected,) = bench.generate(PROMPTS[:1], params), plain.generate(PROMPTS[:1], params)
    assert found.ids == expected.ids and found.stop == expected.stop


def test_the_distribution_is_the_models(
    tiny: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Second tokens of 2,000 answers, each guessed to be the likeliest, against the model's probabilities."""
    bench = Bench(tiny, compute, max_batch=8, draft_rows=32)
    with torch.no_grad():
        bench.learner.model.lm_head.weight *= 3  # type: ignore[union-attr]
    prompt = PROMPTS[0]

    def probabilities(context: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            return bench.learner.model(torch.tensor([context])).logits[0, -1].softmax(-1).tolist()

    first = probabilities(prompt)
    likeliest = max(range(len(first)), key=first.__getitem__)
    second = probabilities((*prompt, likeliest))
    next_one = max(range(len(second)), key=second.__getitem__)
    monkeypatch.setattr(Drafts, "guess", lambda self, r, most: [next_one] if len(r.tokens) == 1 else [])
    n = 2000
    params = [SamplingParams(max_tokens=3, seed=i, ignore_eos=True) for i in range(n)]
    answers = [c.ids for c in bench.generate([prompt] * n, params)]
    after = Counter(a[1] for a in answers if a[0] == likeliest)
    total = sum(after.values())
    assert total > 100 and bench.engine.counters.accepted > 50
    common = [t for t in after if total * second[t] >= 5]
    rest = total - sum(after[t] for t in common)
    expected_rest = total * (1 - sum(second[t] for t in common))
    chi2 = sum((after[t] - total * second[t]) ** 2 / (total * second[t]) for t in common)
    chi2 += (rest - expected_rest) ** 2 / max(expected_rest, 1e-9)
    freedom = max(len(common), 1)
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_likely_tokens_are_told_of_each_place(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """Of what was drawn, under the distribution that it was drawn from; a wrong guess leaves nothing."""
    bench, best = repetitive(Bench(tiny, compute)), TopLogprobs(3)
    params = SamplingParams(max_tokens=60, seed=1, temperature=8.0, top_k=4, ignore_eos=True)
    drawn = asyncio.run(bench.engine.generate(PROMPTS[0], params, best=best))
    assert bench.engine.counters.drafted > bench.engine.counters.accepted > 5
    with torch.no_grad():
        logits = bench.learner.model(torch.tensor([(*PROMPTS[0], *drawn.ids)])).logits[0, len(PROMPTS[0]) - 1 : -1]
    kept = (logits.float() / 8.0).topk(4).values.log_softmax(-1)
    assert len(best.places) == len(drawn.ids) == 60
    for (place, rank), expected, logprob in zip(best.places, kept.tolist(), drawn.logprobs, strict=True):
        assert [p for _, p in place] == pytest.approx(expected[:3], abs=1e-3)
        assert expected[rank - 1] == pytest.approx(logprob, abs=1e-3)


def test_guesses_come_from_the_prompt_and_other_answers() -> None:
    drafts = Drafts(16)
    one, other = request(0, 50), request(0, 50)
    one.prompt = other.prompt = (1, 2, 3, 4, 5, 1, 2)
    drafts.add(one)
    drafts.add(other)
    one.daring = other.daring = 16
    assert drafts.guess(one, 3) == [3, 4, 5]
    assert drafts.guess(one, 8) == [3, 4, 5, 1, 2, 3, 4, 5]  # and so on from there
    for token in (8, 9, 10, 11):
        other.append(token, -1.0, 0)
    one.append(8, -1.0, 0)
    assert drafts.guess(one, 4) == [9, 10, 11]  # nobody knows what comes after 11
    assert drafts.guess(other, 4) == []
    stranger = request(0, 50)
    stranger.prompt = (9, 9)
    drafts.add(stranger)
    stranger.append(8, -1.0, 0)
    assert drafts.guess(stranger, 4) == []


def test_never_more_than_may_still_be_sampled() -> None:
    drafts = Drafts(16)
    r = request(0, 3)
    r.prompt = (1, 2, 3, 1, 2, 3, 1, 2)
    drafts.add(r)
    assert drafts.guess(r, 9) == [3, 1]
    r.append(3, -1.0, 0)
    assert drafts.guess(r, 9) == [1]
    r.append(1, -1.0, 0)
    assert drafts.guess(r, 9) == []


def test_guesses_use_spare_rows_and_free_pages_only() -> None:
    scheduler = Scheduler(max_batch=8, pages=Pages(5), drafts=Drafts(8))
    for first in (1, 50):
        r = request(0, 200)
        r.max_tokens, r.prompt = 60, tuple(range(first, first + 15)) * 2
        scheduler.add(r)
    computed(scheduler.plan())
    for _ in range(20):
        plan = scheduler.plan()
        assert sum(1 + len(w.drafts) for w in plan) <= 8
        for work in plan:
            assert len(work.request) + len(work.drafts) <= len(work.request.pages) * PAGE
            assert len(work.request.pages) <= pages_for(len(work.request) + 8)
        assert scheduler.preempted == 0 or len(plan) == 1
        computed(plan)


def test_what_is_remembered_is_bounded() -> None:
    drafts = Drafts(16)
    for n in range(20):
        r = request(10, 5, first=n * 100)
        drafts.add(r)
        r.append(1, -1.0, 0)
        r.stop = Stop.STOP if n else None
    drafts.trim(61)
    assert sum(map(len, drafts.lookups.values())) <= 61
    assert [prompt[0] for prompt in drafts.lookups] == [0, 1600, 1700, 1800, 1900]  # the newest stay, and who goes on
    drafts.trim(0)
    assert [prompt[0] for prompt in drafts.lookups] == [0]


def test_what_is_remembered_is_bounded_while_somebody_always_asks(
    tiny: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous run, or a busy server: the engine is never idle."""
    monkeypatch.setattr("birl.engine.engine.REMEMBERED", 100)
    engine = Bench(tiny, compute).engine

    async def main() -> int:
        long = asyncio.create_task(engine.generate(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True)))
        for n in range(40):
            await engine.generate(tuple(range(n, n + 20)), SamplingParams(max_tokens=2, ignore_eos=True))
        assert not long.done() and engine.scheduler.busy
        known = len(engine.scheduler.drafts.lookups)
        await engine.close()
        with contextlib.suppress(Exception):
            await long
        return known

    assert asyncio.run(asyncio.wait_for(main(), 60)) <= 6
