"""A learner that is its own teacher: what it says behind a prompt with a hint, however samples are packed, and an
average of its weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from birl.algorithms.divergence import divergence
from birl.data.pack import Batch, pack
from birl.learner import checkpoint
from birl.learner.distillation import Average, Distillation
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Lora
from birl.models import attention
from birl.parallel.ranks import Grid, Ranks
from birl.types import Sample
from tests.data.test_pack import groups
from tests.parallel.processes import on_ranks
from tests.tiny import tiny_model

RATE = 0.25
LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",), dora=False, seed=0)


def far(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    assert batch.divergence is not None and batch.hinted is not None
    return (batch.divergence * batch.hinted.weights).sum(), {"divergence": batch.divergence}


def with_hints(samples: list[Sample]) -> list[Sample]:
    """Prompts of other lengths; of some samples of a group the same, of every third none."""
    random = np.random.default_rng(0)
    prompts = [random.integers(1, 60, n) for n in (9, 3, 17)]
    return [replace(s, hinted=None if i % 3 == 2 else prompts[i % 2 + s.group % 2]) for i, s in enumerate(samples)]


def own(top_k: int = 0, ranks: Ranks | None = None, rate: float = 1.0, **more: Any) -> Learner:
    """Its own teacher: now, or as an average."""
    model, other = tiny_model(), tiny_model()
    for each in (model, other):
        each.set_attn_implementation(attention.NAME)
    how: Any = {"dtype": torch.float32, "ranks": ranks, **more}
    learner = Learner(model, **how)
    if rate < 1:
        learner.average = Average(Learner(other, **how), rate)
        learner.average.teacher.optimizer.state.clear()
    teacher = learner.average.teacher if learner.average else learner
    by: Any = {"function": divergence("jsd", 0.5), "top_k": top_k, "temperature": 1.0}
    learner.teacher = Distillation(teachers={"": teacher}, student=model, **by)
    return learner


def whole(samples: list[Sample], weights: list[float]) -> tuple[float, dict[str, Tensor]]:
    """Both distributions of each sample from the model's own logits, and the gradient by autograd."""
    model, total = tiny_model().eval(), torch.zeros((), dtype=torch.float64)
    for sample, weight in zip(samples, weights, strict=True):
        if sample.hinted is None:
            continue
        first, places = int(sample.mask.argmax()), torch.from_numpy(sample.mask.nonzero()[0]) - 1
        told = np.concatenate([sample.hinted, sample.tokens[first:]])
        logq = model(torch.from_numpy(sample.tokens)[None].long()).logits[0, places].double().log_softmax(-1)
        with torch.no_grad():
            there = places + len(sample.hinted) - first
            logp = model(torch.from_numpy(told)[None].long()).logits[0, there].double().log_softmax(-1)
        mean = torch.logaddexp(logq, logp) - np.log(2)
        each = 0.5 * (logp.exp() * (logp - mean)).sum(-1) + 0.5 * (logq.exp() * (logq - mean)).sum(-1)
        total = total + weight * each.sum()
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_packing_changes_neither_divergence_nor_gradient() -> None:
    """Both are those of the two conversations, each computed alone."""
    samples = with_hints(groups(3))
    samples += [replace(s, hinted=prompt) for s in samples[:2] for prompt in (samples[0].hinted, None)]  # same answers
    weights = [1 / (i + 2) for i in range(len(samples))]
    wanted, by_weights = whole(samples, weights)
    alone = [b for s, w in zip(samples, weights, strict=True) if s.hinted is not None for b in pack([s], [w], 100)]
    for batches in (pack(samples, weights, 10_000), pack(samples[::-1], weights[::-1], 40), alone):
        learner, stats = own(), Stats()
        for batch in batches:
            if batch.hinted is not None:
                learner.forward_backward(batch, far, stats)
        assert stats.loss == pytest.approx(wanted, rel=1e-5)
        gradients = {n: t.grad for n, t in learner.masters.tensors.items() if t.grad is not None}
        torch.testing.assert_close(gradients, by_weights, atol=1e-5, rtol=1e-4)


def test_equal_predictions_of_both_prompts_are_computed_once() -> None:
    (sample, *_) = groups(1)
    trained, hints = int(sample.mask.sum()), [np.array([5, 6]), np.array([5, 6]), np.array([7]), None, None]
    samples = [replace(sample, hinted=hint) for hint in hints]
    (batch,) = pack(samples, [1.0] * len(samples), 10_000)
    assert batch.hinted is not None and len(batch.entry) == 5 * trained
    assert len(batch.source) == len(batch.hinted.source) == 3 * trained
    assert torch.equal(batch.entry, batch.hinted.entry)


def test_without_a_hint_a_model_is_no_way_from_itself() -> None:
    samples, stats = groups(2), Stats()
    samples = [replace(s, hinted=s.tokens[: int(s.mask.argmax())]) for s in samples]
    (batch,) = pack(samples, [1.0] * len(samples), 10_000)
    own().forward_backward(batch, far, stats)
    assert stats.loss == pytest.approx(0.0, abs=1e-6)


def step(learner: Learner, number: int) -> float:
    samples = with_hints(groups(number + 3))
    stats = Stats()
    work = pack(samples, [1 / len(samples)] * len(samples), 80, parts=learner.ranks.shares)
    learner.learn([(batch, far) for batch in work if batch.hinted is not None], stats)
    learner.optim_step(1e-2)
    return stats.loss


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_follows_each_step(lora: Lora | None, dtype: torch.dtype) -> None:
    """phi <- phi + rate (theta - phi), in float32; what is computed with are these weights."""
    learner = own(rate=RATE, lora=lora, dtype=dtype)
    assert learner.average is not None
    teacher = learner.average.teacher
    average = {n: t.detach().clone() for n, t in teacher.masters.tensors.items()}
    for number in range(3):
        step(learner, number)
        for name, tensor in learner.masters.tensors.items():
            average[name] += RATE * (tensor.detach() - average[name])
    torch.testing.assert_close({n: t.detach() for n, t in teacher.masters.tensors.items()}, average)
    for name, weight in teacher.weights().items():
        torch.testing.assert_close(dict(teacher.model.named_parameters())[name], weight.to(dtype), atol=0, rtol=0)
    assert any(not torch.equal(average[n], t) for n, t in learner.masters.tensors.items())


def test_a_resumed_learner_has_the_average_too(tmp_path: Path) -> None:
    learner, losses = own(rate=RATE), []
    for number in range(4):
        losses.append(step(learner, number))
        if number == 1:
            checkpoint.save(tmp_path, 2, learner.tensors(), {"version": learner.version})
    again = own(rate=RATE)
    checkpoint.fill(tmp_path / "step-000002", again.tensors())
    again.loaded(2)
    assert [step(again, number) for number in (2, 3)] == losses[2:]
    now, resumed = learner.tensors(), again.tensors()
    assert any(name.startswith("average.") for name in now)
    assert all(torch.equal(now[name], resumed[name]) for name in now)


def on_grid(ranks: Ranks, rate: float, top_k: int, lora: Lora | None) -> list[float]:
    learner = own(top_k, ranks, rate, lora=lora)
    return [step(learner, number) for number in range(3)]


@pytest.mark.parametrize(("rate", "top_k", "lora"), [(1.0, 0, None), (RATE, 7, None), (RATE, 0, LORA)])
@pytest.mark.parametrize("grid", [Grid(fsdp=2), Grid(ddp=2)], ids=str)
def test_more_ranks_change_no_number(grid: Grid, rate: float, top_k: int, lora: Lora | None) -> None:
    wanted = on_grid(Ranks(), rate, top_k, lora)
    for found in on_ranks(grid, on_grid, rate, top_k, lora):
        assert found == pytest.approx(wanted, rel=1e-5)
