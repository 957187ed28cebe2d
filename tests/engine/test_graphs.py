"""Bursts by captured graphs equal single steps. Capturing is replaced by running eagerly where there is no GPU: sizes,
padding, look-ahead and the state that moves on by itself are the same."""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from birl.engine import graphs, runner, scheduler
from birl.engine.graphs import AHEAD, Graphs
from birl.errors import BirlError
from birl.models import fused_decoder
from birl.models.fused_decoder import FusedDecoder
from birl.types import Completion, SamplingParams
from tests.engine.test_engine import PROMPTS, Bench, seeded


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The engine on CPU, made to think that it has graphs. Gives (rows, tokens in a row) of each burst."""
    made: dict[int, FusedDecoder] = {}
    monkeypatch.setattr(runner, "fused_for", lambda model: made.setdefault(id(model), FusedDecoder(model)))
    monkeypatch.setattr(graphs, "captured", lambda device: lambda work: work)
    monkeypatch.setattr(runner, "graphed", lambda device: True)
    monkeypatch.setattr(runner, "decoder_for", lambda model: None)
    seen: list[tuple[int, int]] = []
    original = Graphs.run

    def run(self: Graphs, **inputs: object) -> object:
        seen.append((len(inputs["tokens"]), inputs["count"]))  # type: ignore[arg-type]
        return original(self, **inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(Graphs, "run", run)
    return seen


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [c.ids for c in completions]


WHOLE: list[dict[str, float]] = [{"temperature": t} for t in (1.0, 0.0, 0.7, 1.0, 1.3, 1.0)]
LIMITED: list[dict[str, float]] = [
    {"top_p": 0.9}, {"temperature": 0.0, "top_k": 3}, {"temperature": 0.7, "top_k": 20}, {}, {"min_p": 0.1},
    {"top_k": 1},
]  # fmt: skip
TOLD: list[dict[str, float]] = [
    {"top_k": 9, "support": True}, {"support": True, "top_k": 12, "top_p": 0.9}, {"top_p": 0.7}, {},
    {"support": True, "temperature": 0.0, "top_k": 3}, {"support": True, "top_k": 320, "min_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("options", [WHOLE, LIMITED, TOLD])
def test_bursts_give_what_single_steps_give(
    plain: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[int, int]],
    options: list[dict[str, float]],
) -> None:  # fmt: skip
    params = [replace(p, **o) for p, o in zip(seeded(6), options, strict=True)]  # pyright: ignore[reportArgumentType]
    found = Bench(plain, compute).generate(PROMPTS, params)
    assert any(count > 1 for _, count in sizes)
    with monkeypatch.context() as without:
        without.setattr(runner, "graphed", lambda device: False)
        expected = Bench(plain, compute).generate(PROMPTS, params)
    assert tokens(found) == tokens(expected)
    assert [c.stop for c in found] == [c.stop for c in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs.tolist() == pytest.approx(b.logprobs.tolist(), abs=1e-5)
        assert a.versions.tolist() == b.versions.tolist() and a.support == b.support
    assert [c.support is not None for c in found] == [("support" in o and o.get("temperature") != 0) for o in options]


@pytest.mark.parametrize("options", [{"max_batch": 2}, {"kv_cache_gb": 3 * 2 * 2 * 2 * 32 * 16 * 4 / 2**30}])
def test_nor_do_slots_or_preemption_matter(
    plain: Path, compute: ThreadPoolExecutor, sizes: list[tuple[int, int]], options: dict[str, float]
) -> None:
    params = seeded(len(PROMPTS), ignore_eos=True)
    expected = Bench(plain, compute).generate(PROMPTS, params)
    bench = Bench(plain, compute, **options)  # pyright: ignore[reportArgumentType]
    assert tokens(bench.generate(PROMPTS, params)) == tokens(expected)
    assert bench.engine.scheduler.pages.room == bench.engine.scheduler.pages.total


def test_given_tokens_are_not_drawn(
    plain: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[int, int]]
) -> None:
    """More of them than one step scores, or behind a prompt of one token: the next step looks like one for a burst."""
    bench = Bench(plain, compute)
    free = bench.generate(PROMPTS, [SamplingParams(max_tokens=40, seed=i, ignore_eos=True) for i in range(6)])
    monkeypatch.setattr(scheduler, "FORCED", 8)
    for most in (40, 60):  # all of the answer, or its beginning
        params = [SamplingParams(max_tokens=most, seed=99, forced=c.ids, ignore_eos=True) for c in free]
        found = bench.generate(PROMPTS, params)
        assert [c.ids[:40] for c in found] == tokens(free) and {len(c.ids) for c in found} == {most}
        for a, b in zip(found, free, strict=True):
            assert a.logprobs.tolist()[:40] == pytest.approx(b.logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("graphed", [True, False])
def test_logits_that_are_no_numbers_are_told(
    plain: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[int, int]],
    graphed: bool,
) -> None:  # fmt: skip
    """On a GPU they were answers, with log-probs of NaN."""
    monkeypatch.setattr(runner, "graphed", lambda device: graphed)
    bench = Bench(plain, compute)
    (norm,) = (t for name, t in bench.learner.masters.tensors.items() if name == "model.norm.weight")
    bench.generate(PROMPTS, seeded(6))
    norm.data.fill_(torch.nan)
    with pytest.raises(BirlError, match="not numbers any more"):
        bench.generate(PROMPTS, seeded(6))


def test_graphs_are_made_for_powers_of_two_and_kept_while_nothing_moves(
    plain: Path, compute: ThreadPoolExecutor, sizes: list[tuple[int, int]]
) -> None:
    bench = Bench(plain, compute)
    bench.generate(PROMPTS, seeded(6, ignore_eos=True))
    first = bench.engine.runner.graphs
    assert first is not None and {*first.made} == {
        (n, graphs.NARROWEST, False, 0) for n in (1, 8)
    }  # a prompt of 1 token
    assert max(count for _, count in sizes) == AHEAD
    for tensor in bench.learner.masters.tensors.values():
        tensor.grad = torch.randn_like(tensor)
    bench.learner.optim_step(1e-3)  # in place
    after = bench.generate(PROMPTS, seeded(6, ignore_eos=True))
    assert bench.engine.runner.graphs is first and {v for c in after for v in c.versions.tolist()} == {1}
    parameter = next(bench.learner.model.parameters())
    parameter.data = parameter.data.clone()
    bench.generate(PROMPTS[:1], seeded(1))
    assert bench.engine.runner.graphs is not first


GREEDY, WARM = SamplingParams(max_tokens=6, temperature=0.0), SamplingParams(max_tokens=4)


def test_rows_that_fill_up_touch_the_scratch_page_alone() -> None:
    written: list[tuple[list[int], list[int]]] = []

    def step(tokens: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        place = (lengths.long() - 1) // 32
        written.append((table.gather(1, place[:, None])[:, 0].tolist(), lengths.tolist()))
        return torch.nn.functional.one_hot(tokens + 1, 50).float() * 100

    keep: Callable[[Callable[[], None]], Callable[[], None]] = lambda work: work  # noqa: E731
    made = Graphs(step, torch.device("cpu"), scratch=99, capture=keep)
    found, logps, _ = made.run(
        tokens=[3, 7, 9], lengths=[31, 1, 64], tables=[[5, 6], [7], [8, 4, 2]], params=[GREEDY] * 3,
        uniforms=[[0.5] * 4] * 3, count=4,
    )  # fmt: skip
    assert found == [[4, 5, 6, 7], [8, 9, 10, 11], [10, 11, 12, 13]] and logps[0] == pytest.approx([0.0] * 4)
    assert [pages for pages, _ in written] == [[5, 7, 4, 99], [5, 7, 2, 99], [6, 7, 2, 99], [6, 7, 2, 99]]
    written.clear()
    made.run(
        tokens=[3, 3], lengths=[254, 255], tables=[list(range(8)), list(range(10, 18))], params=[GREEDY] * 2,
        uniforms=[[0.5] * 2] * 2, count=6,
    )  # fmt: skip
    # both end at 256, where their pages end too; what the burst samples behind that is nobody's
    assert [pages for pages, _ in written] == [[7, 17], [7, 17], [7, 99], [99, 99], [99, 99], [99, 99]]


def test_lengths_move_on() -> None:
    lengths_seen: list[list[int]] = []

    def step(tokens: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        lengths_seen.append(lengths.tolist())
        return torch.zeros(len(tokens), 5)

    made = Graphs(step, torch.device("cpu"), scratch=9, capture=lambda work: work)
    made.run(tokens=[1] * 3, lengths=[31, 1, 64], tables=[[5, 6], [7], [8, 4, 2]], params=[WARM] * 3,
             uniforms=[[0.5] * 4] * 3, count=4)  # fmt: skip
    assert [lengths[:3] for lengths in lengths_seen] == [[31 + i, 1 + i, 64 + i] for i in range(4)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_the_card_graphs_are_the_eager_steps_bit_for_bit(
    plain: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bench() -> Bench:
        made = Bench(plain, compute, torch.bfloat16, device="cuda")  # type: ignore[arg-type]
        assert fused_decoder.fused_for(made.learner.model) is not None
        return made

    params = seeded(len(PROMPTS), ignore_eos=True)
    with_graphs = bench()
    captured = with_graphs.generate(PROMPTS, params)
    assert with_graphs.gap(PROMPTS, captured).abs().mean() < 0.05  # pages against FlashAttention
    monkeypatch.setattr(graphs, "captured", lambda device: lambda work: work)
    eager = bench().generate(PROMPTS, params)
    assert tokens(captured) == tokens(eager) and [c.logprobs.tolist() for c in captured] == [
        c.logprobs.tolist() for c in eager
    ]


def test_another_threads_waits_are_not_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's setting is the process's. A server that got weights during its first step decoded without graphs."""
    for name, value in (("is_available", True), ("get_sync_debug_mode", 0), ("set_sync_debug_mode", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    text = "called a synchronizing CUDA operation"
    with graphs.watched_syncs(torch.device("cuda", 0)) as syncs:
        other = threading.Thread(target=warnings.warn, args=(text,))
        other.start()
        other.join()
    assert not syncs
    with graphs.watched_syncs(torch.device("cuda", 0)) as syncs:
        warnings.warn(text, stacklevel=1)
    assert syncs == [text]
