"""Rows that are split over ranks: losses, gradient norms, parameters after three steps and log-probs are those of one
rank, for both forms of attention."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from benchmarks.traffic import Traffic, context_bytes, figures_bytes
from birl.algorithms.segments import segment_mean, totals
from birl.data.pack import Batch, pack
from birl.errors import BirlError
from birl.learner.learner import Learner, Stats
from birl.learner.outputs import Outputs, padded
from birl.models import attention
from birl.models.heads import add_score_head
from birl.parallel import context
from birl.parallel.ranks import Grid, Ranks
from birl.types import Sample
from tests.data.test_pack import groups, make
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import Outcome, reinforce, same
from tests.tiny import tiny_model
from tests.zoo import build

Loss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]
#: float32 gradients differ by 1e-6 when they are added up otherwise, and AdamW divides by their size: with an epsilon
#: far below that, a gradient that is 0 but for rounding would move its weight by the whole rate
EPS = 1e-4


def llama() -> nn.Module:
    return tiny_model(heads=4, kv_heads=2)


def small(config: type, model: type, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(
            config(
                vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, initializer_range=0.2, pad_token_id=2, **options,
            )
        )  # fmt: skip


def mistral() -> nn.Module:
    return small(MistralConfig, MistralForCausalLM, sliding_window=4)


def gemma() -> nn.Module:
    """One layer with a window and one without."""
    kinds = ["sliding_attention", "full_attention"]
    return small(Gemma3TextConfig, Gemma3ForCausalLM, sliding_window=5, layer_types=kinds, query_pre_attn_scalar=16)


def hybrid() -> nn.Module:
    """Gated DeltaNet, whose queries and keys go through a convolution, and attention."""
    return build("qwen3_5_text", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


def critic() -> nn.Module:
    model = llama()
    add_score_head(model, 0, "value")
    return model


def reward_model() -> nn.Module:
    model = llama()
    add_score_head(model, 0)
    return model


def alone_each(step: int) -> list[Sample]:
    """No two samples share a prompt."""
    return [replace(s, group=i) for i, s in enumerate(groups(step))]


def one_long(step: int) -> list[Sample]:
    """One sequence of 150 tokens, more than what a rank may have, beside short ones."""
    tokens = [(7 * i + step) % 290 + 3 for i in range(150)]
    return [make(tuple(tokens[:20]), tuple(tokens[20:]), 99, 0, 0.5), *groups(step)]


def few_trained(step: int) -> list[Sample]:
    """A single trained token, at the end of a long prompt: one rank has it, the others have none."""
    return [make(tuple((11 * i + step) % 290 + 3 for i in range(61)), (5,), 0, 0, 1.0)]


def geometric(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Each token's loss looks at all tokens of its sample."""
    loss = -(segment_mean(logp, batch.sample).exp() * batch.advantages * batch.weights).sum()
    return loss, {"entropy": entropy.detach()}


def with_values(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    loss, figures = reinforce(logp, entropy, batch)
    assert batch.predicted is not None
    return loss + ((batch.predicted - batch.advantages).square() * batch.weights).sum(), figures


def ranking(scores: Tensor, _: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores of whole samples; the figures are means over samples."""
    each = (totals(scores * batch.weights, batch.sample) - 1).square()
    return each.sum(), {"entropy": each.detach()}


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = llama
    samples: Callable[[int], list[Sample]] = groups
    loss: Loss = reinforce
    options: tuple[tuple[str, Any], ...] = ()


CAPACITY = 80  # tokens of each rank
CASES = {
    "trees": Case(),
    "plain": Case(samples=alone_each),
    "windows": Case(mistral),
    "two kinds of layers": Case(gemma),
    "states": Case(hybrid),
    "longer than a rank": Case(samples=one_long),
    "a rank without trained tokens": Case(samples=few_trained),
    "whole samples": Case(loss=geometric),
    "critic on the backbone": Case(critic, loss=with_values),
    "scores": Case(reward_model, loss=ranking),
    "checkpointing": Case(mistral, options=(("gradient_checkpointing", True),)),
}


def run(ranks: Ranks, case: Case, capacity: int) -> Outcome:
    """Three optimizer steps, and what a forward pass gives afterwards."""
    model = case.make()
    model.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    learner = Learner(model, ranks=ranks, dtype=torch.float32, max_grad_norm=0.5, eps=EPS, **dict(case.options))
    found = Outcome([], [], [], [], [], {})
    for step in range(3):
        samples = case.samples(step + 3)
        stats = Stats()
        work = pack(samples, [1 / len(samples)] * len(samples), capacity, parts=ranks.shares)
        learner.learn([(batch, case.loss) for batch in work], stats)
        found.norms.append(learner.optim_step(1e-3))
        found.losses.append(stats.loss)
        found.counts.append(stats.count)
        found.entropies.append(stats.mean("entropy"))
    samples = case.samples(9)
    batches = pack(samples, [0.0] * len(samples), capacity, parts=ranks.shares)
    order = torch.cat([b.sample for b in batches]).argsort(stable=True)
    found.logprobs.append(torch.cat(learner.ranks.each(batches, learner.forward))[order])
    for name, value in learner.weights().items():
        found.weights[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found


def all_cases(ranks: Ranks) -> dict[str, Outcome]:
    return {name: run(ranks, case, CAPACITY * ranks.grid.cp * ranks.grid.tp) for name, case in CASES.items()}


@functools.cache
def on_one(name: str) -> Outcome:
    return run(Ranks(), CASES[name], 10 * CAPACITY)


GRIDS = [
    *(Grid(cp=2), Grid(cp=2, context="ulysses"), Grid(cp=4), Grid(cp=4, context="ulysses")),
    *(Grid(fsdp=2, cp=2), Grid(fsdp=2, cp=2, context="ulysses"), Grid(ddp=2, cp=2)),
    *(Grid(cp=2, tp=2), Grid(cp=2, tp=2, context="ulysses")),
]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{g} {g.context}")
def test_splitting_rows_changes_no_number(grid: Grid) -> None:
    """All ranks go on with the same bits: else one could clip or drop what another keeps."""
    ranks = on_ranks(grid, all_cases, timeout=100)
    for name in CASES:
        print(name)  # which one, where it fails
        same(ranks[0][name], on_one(name), 1e-5)
        for found in ranks[1:]:
            assert (found[name].losses, found[name].norms) == (ranks[0][name].losses, ranks[0][name].norms)
            assert torch.equal(found[name].logprobs[0], ranks[0][name].logprobs[0])
            same(found[name], ranks[0][name], 0)


def halves(ranks: Ranks) -> Tensor:
    """Log-probs of a frozen model in bfloat16."""
    model = llama()
    model.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    learner = Learner(model, ranks=ranks, trainable=False)
    return learner.forward(pack(groups(5), [0.0] * 12, 400)[0])


@pytest.mark.parametrize("form", ["gather", "ulysses"])
def test_a_frozen_model_in_bfloat16(form: str) -> None:
    """One rank's products have other shapes, so they round otherwise: by less than bfloat16 differs from float32."""
    exact = llama()
    exact.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    wanted = Learner(exact, trainable=False, dtype=torch.float32).forward(pack(groups(5), [0.0] * 12, 400)[0])
    one = (halves(Ranks()) - wanted).abs().max()
    for found in on_ranks(Grid(cp=2, context=form), halves):
        assert (found - wanted).abs().max() < 2 * one


def sent(ranks: Ranks, samples: list[Sample], capacity: int) -> tuple[int, int, int, int]:
    """Bytes that this rank sends to those that it shares a row with: forward, backward; and what the row has."""
    model = llama()
    model.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    learner = Learner(model, ranks=ranks, dtype=torch.float32)
    (batch,) = pack(samples, [1.0] * len(samples), capacity)
    group = ranks.groups["cp"].group_name
    with Traffic() as forward:
        loss, _ = reinforce(*learner._passed(batch)[:3])
    with Traffic() as backward:
        loss.backward()
    part = context.split(padded(batch, ranks.grid.cp), ranks)
    return forward.groups[group], backward.groups[group], len(part.tokens) * ranks.grid.cp, max(part.counts)


@pytest.mark.parametrize("grid", [Grid(cp=2), Grid(cp=2, context="ulysses"), Grid(cp=4, context="ulysses")], ids=str)
def test_no_byte_more_is_sent_than_the_form_needs(grid: Grid) -> None:
    """With two key heads, four ranks of the Ulysses form are sent each twice."""
    for forward, backward, tokens, longest in on_ranks(grid, sent, groups(3), 400):
        least = context_bytes(
            grid.context, ranks=grid.cp, tokens=tokens, heads=4, kv_heads=2, size=16, layers=2, element=4
        )
        assert forward == least + figures_bytes(grid.cp, longest)
        assert backward == least


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "times"), [(8, 8, 4, 1), (8, 2, 4, 2), (8, 4, 2, 1), (6, 1, 3, 3)]
)
def test_key_heads_are_sent_to_those_that_query_them(heads: int, kv_heads: int, ranks: int, times: int) -> None:
    assert context.copies(heads, kv_heads, ranks) == times


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(9, 3, 2), (6, 3, 2), (4, 4, 8), (12, 4, 6)])
def test_heads_that_cannot_be_shared_out_are_refused_with_the_numbers(heads: int, kv_heads: int, ranks: int) -> None:
    with pytest.raises(BirlError, match=f"{heads} query heads and {kv_heads} key heads .* parallel.cp={ranks} "):
        context.copies(heads, kv_heads, ranks)


def test_a_model_is_refused_before_it_is_split() -> None:
    with pytest.raises(BirlError, match="4 query heads and 2 key heads"):
        Outputs(llama(), 1.0, False, Ranks(Grid(cp=8, context="ulysses")))


def kept(ranks: Ranks, tokens: int) -> int:
    """Bytes that the forward pass of one sequence keeps for the backward pass, weights left out."""
    model = llama()
    model.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    learner = Learner(model, ranks=ranks, dtype=torch.float32)
    (batch,) = pack([make((5,) * (tokens - 60), (7,) * 60, 0, 0)], [1.0], tokens)
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = learner._passed(batch)[:3]
    assert outputs[0].requires_grad
    return sum(found.values())


def kept_for_each_token(ranks: Ranks) -> float:
    return (kept(ranks, 480) - kept(ranks, 80)) / 400


@pytest.mark.parametrize(
    "grid", [Grid(cp=2), Grid(cp=4), Grid(cp=4, context="ulysses")], ids=lambda g: f"{g} {g.context}"
)
def test_a_rank_keeps_its_share_of_the_activations(grid: Grid) -> None:
    """But in the gather form the keys and values of all tokens: 2 layers, 2 heads of 16, float32."""
    seen = 2 * 2 * 2 * 16 * 4 if grid.context == "gather" else 0
    found = on_ranks(grid, kept_for_each_token)
    assert sum(found) / grid.cp == pytest.approx((kept_for_each_token(Ranks()) - seen) / grid.cp + seen, rel=0.1)
