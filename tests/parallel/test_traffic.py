"""What ranks send each other is what the form needs, and hardly more."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.traffic import Traffic, least
from birl.data.pack import pack
from birl.engine.open import Sampled
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Lora
from birl.models import attention
from birl.models.load import cast
from birl.models.shape import Shape
from birl.parallel.ranks import Grid, Ranks
from tests.data.test_pack import groups
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import reinforce
from tests.tiny import tiny_model


def traffic(ranks: Ranks) -> tuple[int, dict[str, int], float]:
    """Bytes of a step, by kind, and the least, in which norms are not counted."""
    model = tiny_model()
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, ranks=ranks)
    samples = groups(3, count=6)
    work = pack(samples, [1 / len(samples)] * len(samples), 40, parts=ranks.shares)
    with Traffic() as counted:
        learner.learn([(batch, reinforce) for batch in work], Stats())
        learner.optim_step(1e-3)
    shape = Shape.of(model.config.to_dict())
    form = next(axis for axis in ("ddp", "fsdp", "tp", "cp") if getattr(ranks.grid, axis) > 1)
    micro, tokens = len(work) // ranks.shares, sum(len(b.tokens) for b in work) / len(work)
    return counted.total, dict(counted.bytes), least(form, ranks.grid.size, shape, micro, round(tokens))


@pytest.mark.parametrize(
    ("grid", "kind"), [(Grid(ddp=2), "reduce"), (Grid(fsdp=2), "gather"), (Grid(fsdp=3), "receive")]
)
def test_a_step_sends_little_more_than_it_must(grid: Grid, kind: str) -> None:
    found = on_ranks(grid, traffic)
    for total, by_kind, bound in found:
        assert bound <= total < 1.06 * bound
        assert by_kind[kind] > 0.3 * total
    assert len({total for total, _, _ in found}) == 1


def between_replicas(ranks: Ranks, lora: Lora | None = None) -> list[tuple[int, int, int]]:
    """Micro-batches of two steps, the bytes that replicas send each other in it, and those of this rank's parts; then
    the same with LoRA."""
    model = tiny_model()
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, ranks=ranks, lora=lora)
    result, samples, own = [], groups(3, count=16), sum(t.nbytes for t in learner.masters.tensors.values())
    assert ranks.mesh is not None
    for capacity in (1000, 40):
        work = pack(samples, [1 / len(samples)] * len(samples), capacity, parts=ranks.shares)
        with Traffic() as counted:
            learner.learn([(batch, reinforce) for batch in work], Stats())
            learner.optim_step(1e-3)
        result.append((len(work) // ranks.shares, counted.groups[ranks.mesh.get_group("ddp").group_name], own))
    return result if lora else [*result, *between_replicas(ranks, Lora(rank=4))]


def test_gradients_of_replicas_are_summed_once_a_step() -> None:
    """FSDP, given the axis of the replicas, did it in every micro-batch, and with LoRA for whole weights."""
    for steps in on_ranks(Grid(ddp=2, fsdp=2), between_replicas):
        assert all(sent == own for _, sent, own in steps)  # 2 (n - 1) / n of what a rank has
        assert [count > 1 for count, *_ in steps] == [False, True, False, True]


def refreshed(ranks: Ranks) -> tuple[int, int, bool]:
    """Bytes that the engine's own weights take, their number, and whether they are those that were there."""
    model, copy = tiny_model(), cast(tiny_model(), torch.bfloat16)
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, ranks=ranks, dtype=torch.bfloat16)
    for parameter in copy.parameters():
        parameter.data.fill_(float("nan"))
    policy: Any = None
    with Traffic() as counted:
        Sampled(policy=policy, learner=learner, dtype="bfloat16", copy=copy).refresh()
    wanted = dict(cast(tiny_model(), torch.bfloat16).named_parameters())
    same = all(torch.equal(p, wanted[name]) for name, p in copy.named_parameters())
    return counted.total, sum(p.numel() for p in copy.parameters()), same


def test_the_engines_own_weights_are_rounded_before_they_are_gathered() -> None:
    for total, count, same in on_ranks(Grid(fsdp=2), refreshed):
        assert same and total == pytest.approx(count * 2 / 2, rel=0.01)  # two bytes each, half of them from the other


def test_the_least_grows_with_what_it_must() -> None:
    shape = Shape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, inner=16, vocabulary=32, tied=True)
    assert least("ddp", 2, shape, 1, 64) == least("ddp", 2, shape, 5, 64) == 4 * shape.parameters
    assert least("fsdp", 2, shape, 2, 64) == 2 * least("fsdp", 2, shape, 1, 64)
    assert least("tp", 2, shape, 1, 128) == 2 * least("tp", 2, shape, 1, 64)
    wide = replace(shape, kv_heads=2)
    keys = [least("cp", 4, its, 1, 64) - least("fsdp", 4, its, 1, 64) for its in (shape, wide)]
    assert keys == [0.75 * 2 * 64 * 2 * 2 * 2 * 4, 2 * keys[0]]
