"""A learner beside a teacher: what its losses find in their batch, however it is packed, and where that leads."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from birl.algorithms.divergence import DIVERGENCES, divergence
from birl.data.pack import Batch, pack
from birl.errors import BirlError
from birl.learner.distillation import Distillation
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.models.vision import give
from birl.parallel.ranks import Grid, Ranks
from birl.text.pictures import FIRST
from tests.data.test_pack import groups
from tests.parallel.processes import on_ranks
from tests.tiny import tiny_model

BETA = 0.4


def far(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    assert batch.divergence is not None
    return (batch.divergence * batch.weights).sum(), {"divergence": batch.divergence}


def taught(
    name: str = "jsd", top_k: int = 0, ranks: Ranks | None = None, dtype: torch.dtype = torch.float32
) -> Learner:
    """The teacher is wider than the learner, and no weight of theirs is the same."""
    model, other = tiny_model(), tiny_model(seed=3, hidden=128, heads=4, kv_heads=2)
    for each in (model, other):
        each.set_attn_implementation(attention.NAME)
    teacher = Learner(other, dtype=dtype, trainable=False, ranks=ranks)
    by: Any = {"function": divergence(name, BETA), "top_k": top_k, "temperature": 1.0}
    return Learner(model, dtype=dtype, ranks=ranks, teacher=Distillation(teachers={"": teacher}, student=model, **by))


@pytest.mark.parametrize("top_k", [0, 7])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_packing_changes_neither_divergence_nor_gradient(name: str, top_k: int) -> None:
    """And both are those of the models' own logits."""
    samples, results = groups(3), []
    weights = [1 / (i + 2) for i in range(len(samples))]
    alone = [b for s, w in zip(samples, weights, strict=True) for b in pack([s], [w], 100)]
    for batches in (pack(samples, weights, 10_000), pack(samples[::-1], weights[::-1], 40), alone):
        learner, stats = taught(name, top_k), Stats()
        for batch in batches:
            learner.forward_backward(batch, far, stats)
        gradients = {n: t.grad for n, t in learner.masters.tensors.items() if t.grad is not None}
        results.append((stats.loss, gradients))
    for loss, found in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-5)
        torch.testing.assert_close(found, results[0][1], atol=1e-5, rtol=1e-4)
    if top_k == 0:
        assert results[0][0] == pytest.approx(whole(name, samples, weights), rel=1e-4)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("top_k", [320, 1000])
def test_as_many_tokens_as_the_vocabulary_has_are_all(name: str, top_k: int) -> None:
    """It was NaN for as many, as no token is left for the bucket of the others, and an IndexError for more."""
    samples, stats = groups(2), [Stats(), Stats()]
    (batch,) = pack(samples, [1.0] * len(samples), 10_000)
    for k, each in zip((0, top_k), stats, strict=True):
        taught(name, k).forward_backward(batch, far, each)
    assert stats[0].loss == stats[1].loss > 0


def test_a_picture_is_refused() -> None:
    learner = taught()
    give(learner.model, cast(Any, object()))
    (batch,) = pack(groups(1), [1.0] * len(groups(1)), 10_000)
    batch.tokens[0] = FIRST
    with pytest.raises(BirlError, match="reads text alone"):
        learner.forward_backward(batch, far, Stats())


def whole(name: str, samples: list[Any], weights: list[float]) -> float:
    models = tiny_model(), tiny_model(seed=3, hidden=128, heads=4, kv_heads=2)
    total = 0.0
    for sample, weight in zip(samples, weights, strict=True):
        ids, places = torch.tensor([sample.tokens.tolist()]), sample.mask.nonzero()[0] - 1
        with torch.no_grad():
            logq, logp = (m.eval()(ids).logits[0, places].double().log_softmax(-1) for m in models)
        total += weight * divergence(name, BETA)(logq, logp).terms.sum().item()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_learner_goes_to_its_teacher(name: str, dtype: torch.dtype) -> None:
    learner, samples = taught(name, dtype=dtype), groups(2)
    before = {n: p.clone() for n, p in learner.teacher.teachers[""].model.named_parameters()}  # pyright: ignore
    (batch,) = pack(samples, [1 / len(samples)] * len(samples), 10_000)
    losses = []
    for _ in range(60):
        stats = Stats()
        learner.learn([(batch, far)], stats)
        learner.optim_step(1e-2)
        losses.append(stats.loss)
    assert losses[-1] < 0.2 * losses[0]
    torch.testing.assert_close(dict(learner.teacher.teachers[""].model.named_parameters()), before, atol=0, rtol=0)  # pyright: ignore


def on_grid(ranks: Ranks, name: str, top_k: int) -> tuple[list[float], list[float]]:
    learner, losses, norms = taught(name, top_k, ranks), [], []
    for step in range(3):
        samples = groups(step + 3)
        work = pack(samples, [1 / len(samples)] * len(samples), 80, parts=ranks.shares)
        stats = Stats()
        learner.learn([(batch, far) for batch in work], stats)
        losses.append(stats.loss)
        norms.append(learner.optim_step(1e-3))
        learner.survey([(batch, far) for batch in work], stats)
    return losses, norms


@pytest.mark.parametrize("top_k", [0, 7])
@pytest.mark.parametrize("grid", [Grid(fsdp=2), Grid(cp=2), Grid(ddp=2)], ids=str)
def test_more_ranks_change_no_number(grid: Grid, top_k: int) -> None:
    wanted = on_grid(Ranks(), "jsd", top_k)
    for found in on_ranks(grid, on_grid, "jsd", top_k):
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)
        assert found[1] == pytest.approx(wanted[1], rel=1e-4)
