"""Layers that keep a state beside the pages: each sequence has its own, whatever else runs and happens to it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from birl.config.schema import Engine
from birl.engine import graphs, runner
from birl.engine.engine import EmbeddedEngine
from birl.engine.graphs import Graphs
from birl.engine.open import check_cache
from birl.engine.request import Request
from birl.errors import BirlError
from birl.models.slots import page_bytes, state_bytes
from birl.types import Completion, SamplingParams
from tests.data.test_pack import make
from tests.models.sweep import own_logprobs
from tests.zoo import build

#: a convolution; Gated DeltaNet; Mamba 2, beside attention and alone; Mamba 1, the same; lightning attention; RG-LRU
KINDS = ("lfm2", "qwen3_5_text", "bamba", "mamba2", "jamba", "falcon_mamba", "minimax", "recurrent_gemma")
PROMPTS = [tuple(range(5, 5 + n)) for n in (40, 40, 40, 1, 2, 75)]  # the first three are a group


def sampled(n: int, **options: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=20, seed=100 + i, ignore_eos=True, **options) for i in range(n)]


class Bench:
    def __init__(self, kind: str, compute: ThreadPoolExecutor, pages: int = 99, max_batch: int = 8) -> None:
        self.model, self.version = build(kind, initializer_range=0.05), 0  # 0.2 makes 1e-4 of rounding
        size = (pages * page_bytes(self.model) + max_batch * state_bytes(self.model)) / 2**30
        options: Any = {"end_ids": frozenset(), "context": 256, "kv_cache_gb": size, "max_batch": max_batch}
        self.engine = EmbeddedEngine(
            self.model, cast(Any, None), version=lambda: self.version, compute=compute, **options
        )

    def generate(
        self, params: list[SamplingParams], prompts: list[tuple[int, ...]] = PROMPTS,
        watch: Callable[[Request], None] | None = None,
    ) -> list[Completion]:  # fmt: skip
        async def main() -> list[Completion]:
            asked = zip(prompts, params, strict=True)
            return await asyncio.gather(*(self.engine.generate(p, q, watch=watch) for p, q in asked))

        return asyncio.run(asyncio.wait_for(main(), 60))

    def check(self, completions: list[Completion], prompts: list[tuple[int, ...]] = PROMPTS) -> None:
        """Each log-prob of the newest version is what transformers' own forward gives the sequence alone."""
        for prompt, c in zip(prompts, completions, strict=True):
            expected = own_logprobs(self.model, [make(prompt, c.ids, 0, 0)])
            new = torch.tensor([v == self.version for v in c.versions.tolist()])
            assert len(c.ids) == 20 and new.any()
            torch.testing.assert_close(torch.tensor(c.logprobs.tolist())[new], expected[new], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_change_no_token(kind: str, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing is replaced by running eagerly, as in test_graphs.py: each row has its sequence's state, rows that only
    fill up have one of nobody, and a prompt of one token begins without."""
    options: list[dict[str, Any]] = [{}, {"top_k": 5}]
    single = [Bench(kind, compute).generate(sampled(6, **each)) for each in options]
    monkeypatch.setattr(graphs, "captured", lambda device: lambda work: work)
    monkeypatch.setattr(runner, "graphed", lambda device: True)
    bench, bursts, run = Bench(kind, compute), list[int](), Graphs.run
    monkeypatch.setattr(Graphs, "run", lambda self, **inputs: bursts.append(inputs["count"]) or run(self, **inputs))
    for each, expected in zip(options, single, strict=True):
        made = bench.generate(sampled(6, **each))
        assert not bench.engine.runner.eager and max(bursts) > 1
        assert [c.ids for c in made] == [c.ids for c in expected]
        for a, b in zip(made, expected, strict=True):
            assert a.logprobs.tolist() == pytest.approx(b.logprobs.tolist(), abs=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_keep_their_states_apart(kind: str, compute: ThreadPoolExecutor) -> None:
    """A group shares its prompt; a prompt goes through in pieces; places are given back and taken again."""
    bench = Bench(kind, compute)
    bench.engine.scheduler.prefill = 33
    for _ in range(2):
        bench.check(bench.generate(sampled(6)))
    assert bench.engine.counters.prefilled == 2 * (40 + 1 + 2 + 75)
    assert sorted(bench.engine.scheduler.places) == list(range(8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_computed_again(kind: str, compute: ThreadPoolExecutor) -> None:
    """After preemption, and with new weights in the middle of an answer."""
    bench = Bench(kind, compute, pages=5, max_batch=4)
    prompts = [tuple(range(3, 3 + n)) for n in (20, 20, 25, 28)]  # each needs a second page, and one is left

    def step(request: Request) -> None:
        if len(request.tokens) >= 10 and not bench.version:
            bench.version = 1
            with torch.no_grad():
                for parameter in bench.model.parameters():
                    parameter *= 1.1

    completions = bench.generate(sampled(4), prompts, watch=step)
    assert bench.engine.scheduler.preempted and bench.engine.counters.restarts
    bench.check(completions, prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_given_tokens_move_the_state_on(kind: str, compute: ThreadPoolExecutor) -> None:
    bench = Bench(kind, compute)
    forced = [replace(p, forced=tuple(range(50, 50 + n))) for p, n in zip(sampled(6), (0, 1, 5, 20, 7, 0), strict=True)]
    bench.check(bench.generate(forced))


def test_nothing_finds_pages_without_their_state(compute: ThreadPoolExecutor) -> None:
    bench = Bench("lfm2", compute)
    scheduler = bench.engine.scheduler
    assert not (scheduler.cache or scheduler.early or scheduler.drafts.rows)
    turn = [(*PROMPTS[5], 7, 8)]
    bench.check(bench.generate(sampled(6)))
    bench.check(bench.generate(sampled(1), turn), turn)
    assert bench.engine.counters.reused == 2 * 40  # by the group alone


def test_a_cache_that_states_fill_is_refused_with_the_cause(compute: ThreadPoolExecutor) -> None:
    engine = Bench("lfm2", compute, pages=0).engine
    with pytest.raises(BirlError, match=r"of 0 tokens beside the states of engine\.max_batch=8 sequences"):
        check_cache(Engine(kv_cache_gb=0.001, max_batch=8), engine, 30, 30)
