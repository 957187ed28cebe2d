"""Invariants 2 and 8 on several ranks: loss, gradient norm and parameters are those of one rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from birl.data.pack import Batch, pack
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.models.load import load_model
from birl.models.slices import sketched
from birl.parallel import shard
from birl.parallel.ranks import Grid, Ranks
from birl.types import Sample
from tests.data.test_pack import drawn, groups
from tests.parallel.processes import on_ranks
from tests.tiny import tiny_model, tiny_moe

STEPS = 3


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    counts: list[int]
    norms: list[float]
    entropies: list[float]
    logprobs: list[torch.Tensor]
    weights: dict[str, torch.Tensor]


#: with AdamW's own epsilon a gradient that is 0 but for rounding, another one on every processor, would move its weight
EPS = 1e-4


def reinforce(logp: torch.Tensor, entropy: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(logp * batch.advantages * batch.weights).sum() - 0.01 * (entropy * batch.weights).sum()
    return loss, {"entropy": entropy}


def trained(ranks: Ranks, options: dict[str, Any]) -> Outcome:
    """Three optimizer steps on generated groups, and the log-probs afterwards."""
    options = dict(options)
    kind, given = options.pop("moe", ""), options.pop("model", None)
    model = tiny_moe(kind) if kind else given or tiny_model()
    samples_of = options.pop("samples", groups)
    model.set_attn_implementation(attention.NAME)
    options = {"dtype": torch.float32, "max_grad_norm": 0.5, "eps": EPS, **options}
    learner = Learner(model, ranks=ranks, **options)
    losses, counts, norms, entropies = [], [], [], []
    for step in range(STEPS):
        samples = samples_of(step + 3)
        work = pack(samples, [1 / len(samples)] * len(samples), 80, parts=ranks.shares)
        stats = Stats()
        learner.learn([(batch, reinforce) for batch in work], stats)
        norms.append(learner.optim_step(1e-3))
        losses.append(stats.loss)
        counts.append(stats.count)
        entropies.append(stats.mean("entropy"))
    samples = samples_of(9)
    batches = pack(samples, [0.0] * len(samples), 80, parts=ranks.shares)
    found = learner.ranks.each(batches, learner.forward)
    order = torch.cat([b.sample for b in batches]).argsort(stable=True)
    weights = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in learner.weights().items()
    }
    return Outcome(losses, counts, norms, entropies, [torch.cat(found)[order]], weights)


@pytest.fixture(scope="module")
def alone() -> Outcome:
    return trained(Ranks(), {})


@pytest.mark.parametrize("grid", [Grid(ddp=2), Grid(fsdp=2), Grid(ddp=2, fsdp=2), Grid(fsdp=3)], ids=str)
def test_more_ranks_change_no_number(grid: Grid, alone: Outcome) -> None:
    for found in on_ranks(grid, trained, {}):
        same(found, alone, 1e-5)


def read_and_trained(ranks: Ranks, folder: Path, pinned: bool = False) -> Outcome:
    """Of a model whose ranks read their own parts; `pinned`: into CPU memory, as optimizer.offload=cpu on a GPU."""
    if not ranks.sharded:
        return trained(ranks, {"model": load_model(folder)})
    if pinned:  # in a process of its own
        plain: Any = shard.CPUOffloadPolicy
        shard.CPUOffloadPolicy = lambda pin_memory: plain(pin_memory=True)  # pyright: ignore
        torch.Tensor.pin_memory = lambda tensor, *args: tensor.clone()  # pyright: ignore
    return trained(ranks, {"model": sketched(folder, torch.device("cpu")), "offload": pinned})


@pytest.mark.parametrize(
    ("grid", "tied", "pinned"), [(Grid(fsdp=3), True, False), (Grid(fsdp=3), False, False), (Grid(fsdp=2), True, True)]
)
def test_parts_that_fsdp_moves_are_trained(grid: Grid, tied: bool, pinned: bool, tmp_path: Path) -> None:
    """Uneven ones and those to be pinned, at their first use: the optimizer would step what no rank computes with."""
    model = tiny_model(vocab=320)
    model.config.tie_word_embeddings = tied
    type(model)(model.config).save_pretrained(tmp_path)
    wanted = read_and_trained(Ranks(), tmp_path)
    for found in on_ranks(grid, read_and_trained, tmp_path, pinned):
        same(found, wanted, 1e-5)


def patience(ranks: Ranks) -> set[float]:
    """Timeouts of the process groups of this rank [s]."""
    assert ranks.mesh is not None and ranks.experts is not None
    meshes = [mesh.get_group(name) for mesh, name in ((ranks.mesh, "shard"), (ranks.experts, "ep"))]
    groups = cast(Any, [dist.group.WORLD, *ranks.groups.values(), *meshes])
    return {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups}


def test_the_timeout_bounds_the_collectives_of_every_group() -> None:
    """Only the default group had it, so that FSDP's waited half an hour, and no longer if it was raised."""
    assert on_ranks(Grid(fsdp=2, ep=2), patience) == [{30.0}] * 2


def drawn_groups(seed: int) -> list[Sample]:
    return drawn(groups(seed), seed)


def trained_on_drawn(ranks: Ranks) -> Outcome:
    return trained(ranks, {"samples": drawn_groups, "model": tiny_model(heads=4, kv_heads=2)})


@pytest.mark.parametrize(
    "grid", [Grid(ddp=2), Grid(fsdp=2), Grid(cp=2), Grid(cp=2, context="ulysses"), Grid(tp=2), Grid(cp=2, tp=2)],
    ids=lambda g: f"{g} {g.context}",
)  # fmt: skip
def test_supports_are_those_of_one_rank(grid: Grid) -> None:
    """Also where a rank has a part of a row's tokens, or of the vocabulary."""
    wanted = trained_on_drawn(Ranks())
    for found in on_ranks(grid, trained_on_drawn):
        same(found, wanted, 2e-5)


def same(found: Outcome, wanted: Outcome, near: float) -> None:
    assert found.counts == wanted.counts
    assert found.losses == pytest.approx(wanted.losses, abs=near)
    assert found.norms == pytest.approx(wanted.norms, rel=near)
    assert found.entropies == pytest.approx(wanted.entropies, rel=near)
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], weight, atol=near, rtol=near, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(found.logprobs[0], wanted.logprobs[0], atol=10 * near, rtol=near)


def seen_after_a_change(ranks: Ranks) -> torch.Tensor:
    """Log-probs under weights that were written after a forward pass without a backward pass."""
    model = tiny_model()
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, ranks=ranks, dtype=torch.float32)
    samples = groups(5)
    batches = pack(samples, [0.0] * len(samples), 80, parts=ranks.shares)
    learner.ranks.each(batches, learner.forward)
    for name, tensor in learner.masters.tensors.items():
        tensor.data.mul_(0.5 if "norm" in name else 1.0)
    learner.loaded(1)
    return torch.cat(learner.ranks.each(batches, learner.forward))


def test_new_weights_are_used_whatever_was_computed_before() -> None:
    for found in on_ranks(Grid(fsdp=2), seen_after_a_change):
        torch.testing.assert_close(found.sort()[0], seen_after_a_change(Ranks()).sort()[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offloading_on_ranks_changes_no_bit(dtype: torch.dtype) -> None:
    plain, offloaded = (on_ranks(Grid(fsdp=2), trained, {"dtype": dtype, "offload": o})[1] for o in (False, True))
    same(offloaded, plain, 0.0)
