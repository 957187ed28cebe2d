from typing import Any

import pytest
import torch
from torch import nn

from birl.data.pack import pack
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Lora
from birl.learner.optimizer import learning_rate, on_grid
from birl.models import attention
from tests.data.test_pack import groups
from tests.learner.test_learner import reinforce
from tests.tiny import tiny_model


def test_weights_move_at_the_learning_rates_of_rl() -> None:
    """EasyRL's defect: AdamW on bfloat16 weights of size 0.02 at lr 1e-6 leaves every one where it was."""
    naive = torch.nn.Parameter(torch.full((64,), 0.02, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([naive], lr=1e-6, weight_decay=0.0)
    for _ in range(50):
        naive.grad = torch.ones_like(naive)
        optimizer.step()
    assert torch.equal(naive, torch.full((64,), 0.02, dtype=torch.bfloat16))

    model = tiny_model()
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, dtype=torch.bfloat16, max_grad_norm=0)
    before = {n: t.clone() for n, t in learner.weights().items()}
    for _ in range(50):
        for tensor in learner.masters.tensors.values():
            tensor.grad = torch.ones_like(tensor)
        learner.optim_step(1e-6)
    for name, tensor in learner.weights().items():
        torch.testing.assert_close(before[name] - tensor, torch.full_like(tensor, 50e-6), rtol=2e-2, atol=1e-7)
    assert all(torch.equal(p, learner.masters.tensors[n].bfloat16()) for n, p in learner.masters.parameters.items())  # pyright: ignore


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloading_changes_no_bit(dtype: torch.dtype, checkpointing: bool) -> None:
    """On the CPU there is nothing to gain, but copies of weights and gradients go the same ways as from a GPU: several
    micro-batches, two steps. Without kernels, which are the CPU's own."""
    learners: list[Learner] = []
    for offload in (False, True):
        model = tiny_model(heads=4, kv_heads=2)
        model.set_attn_implementation(attention.NAME)
        learner = Learner(model, dtype=dtype, gradient_checkpointing=checkpointing, offload=offload)
        if dtype != torch.float32 and not offload:  # the head's gradient is offloaded in the type that is computed in
            del model.get_output_embeddings().weight.master
        samples = groups(4)
        for _ in range(2):
            for batch in pack(samples, [0.1] * len(samples), 60):
                learner.forward_backward(batch, reinforce, Stats())
            learner.optim_step(1e-3)
        learners.append(learner)
    one, other = (learner.tensors() for learner in learners)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    offloaded = learners[1]
    for name, parameter in offloaded.masters.parameters.items():  # pyright: ignore
        master = offloaded.masters.tensors[name]
        assert master.data_ptr() != parameter.data_ptr() and master.dtype == torch.float32
        assert torch.equal(parameter, master.to(dtype)) and parameter.grad is None


def test_decay_is_for_matrices_only() -> None:
    model = tiny_model()
    learner = Learner(model, dtype=torch.float32, weight_decay=0.1)
    learner.optim_step(1e-2)
    norm, matrix = model.model.norm.weight, model.model.layers[0].mlp.up_proj.weight  # pyright: ignore
    assert torch.equal(norm, torch.ones_like(norm))
    torch.testing.assert_close(matrix, tiny_model().model.layers[0].mlp.up_proj.weight * (1 - 1e-3))  # pyright: ignore


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.775, 0.325, 0.1]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    options = {"peak": 1.0, "schedule": schedule, "warmup": 2, "total": 6, "min_ratio": 0.1}
    assert [learning_rate(s, **options) for s in range(6)] == pytest.approx(expected)  # type: ignore[arg-type]
    assert learning_rate(99, **options) == pytest.approx(expected[-1])  # type: ignore[arg-type]


@torch.no_grad()
def on_ties(model: nn.Module, share: int = 8) -> nn.Module:
    """One weight in `share` lies halfway between two bfloat16 numbers, as after float16 or 4 bits."""
    for parameter in model.parameters():
        bits = parameter.data.bfloat16().float().view(torch.int32).view(-1)
        bits[::share] |= 0x8000
        parameter.data = bits.view(torch.float32).view(parameter.shape)
    return model


@pytest.mark.parametrize("lr", [1e-8, 1e-6])
@pytest.mark.parametrize("lora", [None, Lora(rank=16), Lora(rank=16, dora=True)])
@pytest.mark.parametrize("offload", [False, True])
def test_a_tiny_step_from_weights_on_ties_moves_the_policy_little(lr: float, lora: Lora | None, offload: bool) -> None:
    model: Any = on_ties(tiny_model())
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, dtype=torch.bfloat16, lora=lora, offload=offload)
    total = sum(p.numel() for p in model.parameters())
    if lora is None:
        assert learner.rounded == pytest.approx(total / 8, rel=0.01)
        assert learner.rounded_share == pytest.approx(1 / 8, rel=0.01)
    (batch,) = pack(groups(4), [1.0] * len(groups(4)), 10_000)
    before = learner.forward(batch)
    learner.forward_backward(batch, reinforce, Stats())
    learner.optim_step(lr)
    assert (learner.forward(batch) - before).abs().mean() < 5e-3  # 0.05 from the ties themselves


def test_what_is_trained_begins_on_the_grid_and_nothing_else_is_rounded() -> None:
    weights = torch.tensor([1.0, 1.00390625, -3e-9, 0.1])
    rounded = weights.clone()
    assert on_grid([rounded]) == 3 and torch.equal(rounded, weights.bfloat16().float())
    assert on_grid([rounded]) == 0
    for options in ({"dtype": torch.float32}, {"lora": Lora(rank=2, targets=("q_proj",))}, {"trainable": False}):
        model: Any = on_ties(tiny_model())
        model.set_attn_implementation(attention.NAME)
        assert Learner(model, **options).rounded == 0  # type: ignore[arg-type]


def test_the_weights_of_a_checkpoint_are_not_rounded() -> None:
    def made() -> Learner:
        model: Any = on_ties(tiny_model())
        model.set_attn_implementation(attention.NAME)
        return Learner(model)

    one, other = made(), made()
    for tensor in one.masters.tensors.values():
        tensor.grad = torch.ones_like(tensor)
    one.optim_step(1e-6)
    kept = {name: tensor.clone() for name, tensor in one.tensors().items()}
    for name, tensor in other.tensors().items():
        tensor.copy_(kept[name])
    other.loaded(1)
    assert all(torch.equal(kept[name], tensor) for name, tensor in other.tensors().items())
    assert not torch.equal(kept["model.model.norm.weight"], kept["model.model.norm.weight"].bfloat16().float())
