"""Every decoder takes captured graphs, by transformers' own forward too; what cannot be captured decodes without, and
says so. Capturing is replaced by running eagerly, as in test_graphs.py."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from birl.engine import graphs, runner
from birl.engine.engine import EmbeddedEngine
from birl.engine.graphs import Graphs
from birl.models import attention, forward
from birl.models.forward import hidden_states
from birl.models.fused_decoder import FusedDecoder
from birl.models.fused_layers import fused_layers
from birl.models.heads import head
from birl.models.paged import Cache, Paged
from birl.models.slots import slots_of
from birl.types import Completion, SamplingParams
from tests.families import FAMILIES, family
from tests.tiny import tiny_tokenizer

PROMPTS = [tuple(range(5, 5 + n)) for n in (1, 4, 9, 17, 30)]


@pytest.fixture(autouse=True)
def bursts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The engine on CPU, made to think that it has graphs. Gives the number of tokens of each burst."""
    monkeypatch.setattr(graphs, "captured", lambda device: lambda work: work)
    monkeypatch.setattr(runner, "graphed", lambda device: True)
    seen: list[int] = []
    original = Graphs.run

    def run(self: Graphs, **inputs: object) -> object:
        seen.append(inputs["count"])  # type: ignore[arg-type]
        return original(self, **inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(Graphs, "run", run)
    return seen


def generated(model: torch.nn.Module, compute: ThreadPoolExecutor, routes: bool = False) -> list[Completion]:
    engine = EmbeddedEngine(
        model, tiny_tokenizer(), end_ids=frozenset({2}), context=128, compute=compute, version=lambda: 0, routes=routes,
        draft_rows=0,
    )  # fmt: skip
    params = [SamplingParams(max_tokens=12, seed=i, temperature=i % 3 / 2, ignore_eos=True) for i in range(5)]

    async def main() -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, PROMPTS, params))

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("kind", FAMILIES)
def test_graphs_change_no_token(
    kind: str, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, bursts: list[int]
) -> None:
    """Nor do fused layers: single steps are transformers'."""
    model = family(kind)
    ways = [None, *([FusedDecoder(model)] if fused_layers(model) else [])]
    runs = []
    for decoder in ways:
        for module in (forward, runner):
            monkeypatch.setattr(module, "fused_for", lambda model, decoder=decoder: decoder)
        runs.append(generated(model, compute))
        assert max(bursts, default=0) > 1
        bursts.clear()
    for module in (forward, runner):
        monkeypatch.setattr(module, "fused_for", lambda model: None)
    monkeypatch.setattr(runner, "graphed", lambda device: False)
    single = generated(model, compute)
    assert not bursts
    for captured in runs:
        assert [c.ids for c in captured] == [c.ids for c in single]
        for a, b in zip(captured, single, strict=True):
            assert a.logprobs.tolist() == pytest.approx(b.logprobs.tolist(), abs=2e-5)


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_nor_a_bit_of_a_step(kind: str) -> None:
    """Over what is in the cache, for as many rows."""
    model = family(kind)
    run = runner.Runner(model)
    tables, lengths = [[0, 1], [2], [3]], [40, 7, 1]
    tokens = torch.tensor([9, 8, 7])
    logits = []
    for captured in (True, False):
        run.cache = Cache.make(5, slots_of(model), torch.float32, torch.device("cpu"))
        for i, t in enumerate((*run.cache.keys, *run.cache.values)):
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(i)))
        layout = Paged.of(run.cache, tables, lengths, [1, 1, 1], [0, 0, 0])
        if captured:
            logits.append(run.step_of_graph(tokens, layout.lengths, layout.table))
        else:
            logits.append(head(model)(hidden_states(model, tokens, layout.lengths.long() - 1, layout)))
    assert torch.equal(*logits)


def test_experts_in_a_loop_decode_without_graphs_and_say_so(
    compute: ThreadPoolExecutor, bursts: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    model = family("mixtral")
    expected = [c.ids for c in generated(model, compute)]
    assert bursts and not capfd.readouterr().err
    bursts.clear()
    model.set_experts_implementation("eager")
    assert [c.ids for c in generated(model, compute)] == expected and not bursts
    told = capfd.readouterr().err
    assert told.startswith("birl: MixtralForCausalLM decodes without CUDA graphs, which is slower: aten.")
    assert told.endswith(" waits for the device.\n") and told.count("\n") == 1


def test_routes_are_recorded_by_single_steps(compute: ThreadPoolExecutor, bursts: list[int]) -> None:
    (first, *_) = generated(family("qwen3_moe"), compute, routes=True)
    assert not bursts and first.routes


async def test_no_row_of_a_burst_goes_beyond_the_context(compute: ThreadPoolExecutor, bursts: list[int]) -> None:
    """A sequence that ends there does so within a burst of others; a table of positions has no row behind it, and a GPU
    that reads one breaks its context."""
    config = GPT2Config(vocab_size=320, n_positions=40, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
    engine = EmbeddedEngine(
        model, tiny_tokenizer(), end_ids=frozenset({2}), context=40, compute=compute, version=lambda: 0, draft_rows=0
    )
    params = [SamplingParams(max_tokens=40, seed=i, ignore_eos=True) for i in range(5)]
    found = await asyncio.gather(*map(engine.generate, PROMPTS, params))
    assert [len(p) + len(c.ids) for p, c in zip(PROMPTS, found, strict=True)] == [40] * 5 and max(bursts) > 4
