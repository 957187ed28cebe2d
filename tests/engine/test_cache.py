"""Pages that are found by their tokens: what they save, and that no bit of an answer tells whether they did."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from birl.engine.engine import EmbeddedEngine
from birl.engine.pages import FIRST, Pages
from birl.types import Completion, SamplingParams
from tests.engine.test_engine import PAGE_BYTES, Bench
from tests.engine.test_update import after, engine, needs_kernels, step_by_step, update
from tests.families import family
from tests.scenario import scenario
from tests.tiny import tiny_tokenizer

SYSTEM = tuple(range(5, 80))


def asked(seed: int, answer: int = 40) -> SamplingParams:
    return SamplingParams(max_tokens=answer, seed=seed, ignore_eos=True)


async def after_idle(own: EmbeddedEngine) -> None:
    assert own._pump is not None
    await own._pump


async def talk(own: EmbeddedEngine, folders: list[Path], seed: int) -> list[Completion]:
    """Six conversations with one system text, two of them branches of a third, in rounds. They stand still within the
    first round; between the second and the third the weights change."""
    rng = random.Random(seed)
    texts = [(*SYSTEM[: rng.choice([75, 75, 64, 33])], 100 + i % 4) for i in range(6)]
    result: list[Completion] = []
    for turn in range(4):
        if turn == 2:
            await own.load(update(folders[1], 7))
        lengths = [rng.randint(1, 45) for _ in texts]
        begun = own.counters.tokens
        asking = [
            asyncio.create_task(own.generate(t, asked(10 * turn + i, n), watch=None if turn else step_by_step))
            for i, (t, n) in enumerate(zip(texts, lengths, strict=True))
        ]
        if turn == 0:
            await after(own, begun + 10)  # which looks up after every token
            await own.pause()
            await own.resume()
        answers = [await a for a in asking]
        result += answers
        for i, answer in enumerate(answers):
            texts[i] += (*answer.ids, *(rng.randint(3, 200) for _ in range(rng.randint(1, 40))))  # pyright: ignore
        if turn == 1:
            texts[4:] = [(*texts[0][:-1], 201), (*texts[0], 202)]
    return result


@needs_kernels
@pytest.mark.parametrize(
    ("seed", "pages", "options"),
    [(0, 400, {}), (1, 16, {}), (1, 16, {"draft_rows": 16, "recompute_kv": False}), (2, 400, {"draft_rows": 16})],
)
async def test_off_cold_or_warm_the_bits_are_the_same(
    folders: list[Path], compute: ThreadPoolExecutor, seed: int, pages: int, options: dict[str, int]
) -> None:
    """With 16 pages requests are preempted, and known pages are lost again and again."""
    answers: list[list[Completion]] = []
    for kind in ("off", "cold", "warm"):
        own = engine(folders[0], compute, kv_cache_gb=pages * PAGE_BYTES / 2 / 2**30, **options)  # bfloat16
        assert own.scheduler.pages.total == pages
        own.scheduler.cache, own.scheduler.prefill = kind != "off", 50
        if kind == "warm":
            await own.generate((*SYSTEM, 100, 3), asked(1000))
            await own.generate(SYSTEM[:50], asked(0))
        answers.append(await talk(own, folders, seed))
        assert (own.counters.reused > 0) == (kind != "off")
        assert own.scheduler.preempted > 0 or pages > 16
        assert own.scheduler.pages.room == pages
        await own.close()
    assert answers[0] == answers[1] == answers[2]
    assert {v for a in answers[0] for v in a.versions.tolist()} == {0, 7}


@needs_kernels
@pytest.mark.parametrize("recompute", [True, False])
async def test_weights_that_change_within_an_answer_leave_no_page_known(
    folders: list[Path], compute: ThreadPoolExecutor, recompute: bool
) -> None:
    """What comes later equals the answers of an engine that never had other weights."""
    own, judge = engine(folders[0], compute, recompute_kv=recompute), engine(folders[1], compute)
    await own.generate(SYSTEM, asked(1))
    first = asyncio.create_task(own.generate(SYSTEM, asked(2, 300), watch=step_by_step))
    await after(own, 60)
    await own.load(update(folders[1], 7))
    for _ in range(2):  # beside the first, and with what the one before left
        same = [await e.generate((*SYSTEM, 9), asked(3)) for e in (own, judge)]
        assert same[0].logprobs.tolist() == same[1].logprobs.tolist() and same[0].ids == same[1].ids
    whole = await first
    again = [await e.generate((*SYSTEM, *whole.ids, 9), asked(4)) for e in (own, judge)]
    assert again[0].logprobs.tolist() == again[1].logprobs.tolist()
    await own.close()
    await judge.close()


def test_a_turn_computes_what_is_new(tiny: Path, compute: ThreadPoolExecutor) -> None:
    bench = Bench(tiny, compute, torch.bfloat16)
    counters, text, known = bench.engine.counters, SYSTEM, 0
    for turn in range(4):
        before = counters.prefilled, counters.reused
        (answer,) = bench.generate([text], [asked(turn, 30)])
        assert (counters.prefilled - before[0], counters.reused - before[1]) == (len(text) - known, known)
        known = (len(text) + 29) // 32 * 32  # the last token was only drawn
        text = (*text, *answer.ids, 8, 9)


def test_prompts_with_one_beginning_compute_it_once_in_one_step(tiny: Path, compute: ThreadPoolExecutor) -> None:
    bench = Bench(tiny, compute)
    prompts = [(*SYSTEM, 100 + i) for i in range(4)]
    together = bench.generate(prompts, [asked(i) for i in range(4)])
    assert bench.engine.counters.prefilled == 76 + 3 * 12 and bench.engine.counters.reused == 3 * 64
    assert bench.gap(prompts, together).abs().max() <= 1e-5


def test_where_bits_depend_on_a_steps_rows_nothing_is_known_when_idle(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """A resumed run does not have what an earlier process knew."""
    for dtype in (torch.float32, torch.bfloat16):
        bench = Bench(tiny, compute, dtype)

        async def main(own: EmbeddedEngine = bench.engine) -> None:
            await own.generate(SYSTEM, asked(0))
            await after_idle(own)

        scenario(main)
        assert bool(bench.engine.scheduler.pages.known) == bench.engine.runner.same_bits
        bench.engine.rest()
        assert bench.engine.runner.cache is None and not bench.engine.scheduler.pages.known


def test_routes_come_with_their_pages(compute: ThreadPoolExecutor) -> None:
    model, found = family("qwen3_moe"), []
    for cache in (True, False):
        own = EmbeddedEngine(
            model, tiny_tokenizer(), end_ids=frozenset(), context=256, compute=compute, version=lambda: 0, max_batch=2,
            routes=True, draft_rows=0,
        )  # fmt: skip
        own.scheduler.cache = cache

        async def main(own: EmbeddedEngine = own) -> list[Completion]:
            return await asyncio.gather(*(own.generate((*SYSTEM, i), asked(i, 9 + 9 * i)) for i in range(4)))

        found.append(asyncio.run(asyncio.wait_for(main(), 60)))
        assert (own.counters.reused > 0) == cache
    assert [(c.ids, c.routes) for c in found[0]] == [(c.ids, c.routes) for c in found[1]]


def test_the_least_recently_used_goes_first_and_of_a_sequence_the_last_page() -> None:
    pages = Pages(4)
    a, b, c, d = (tuple(range(i, i + 32)) for i in range(4))
    one, two, other = pages.take(), pages.take(), pages.take()
    assert (pages.keep((FIRST, a), one), pages.keep((one, b), two), pages.keep((FIRST, c), other)) == (0, 1, 2)
    assert pages.keep((FIRST, c), two) == other  # the first one stays
    for page in (two, one, other):
        pages.release(page)
    assert pages.find(a + b + d) == [one, two] and pages.find(b) == [] and pages.find(a[:31]) == []
    pages.release(pages.share(one))  # used once more
    assert pages.room == 4 and [pages.take() for _ in range(3)] == [3, two, other]
    assert pages.find(a + b) == [one] and pages.find(c) == []
    assert pages.take() == one and not pages.known and not pages.room
