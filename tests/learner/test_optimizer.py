import pytest
import torch
from transformers import get_scheduler

from birl.data.pack import pack
from birl.learner.learner import Learner, Stats
from birl.learner.optimizer import learning_rate
from birl.models import attention
from tests.data.test_pack import groups
from tests.learner.test_learner import reinforce
from tests.tiny import tiny_model
from tests.zoo import build


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
        torch.testing.assert_close(before[name] - tensor, torch.full_like(tensor, 50e-6), rtol=0.1, atol=1e-7)
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
    experts = Learner(build("gpt_oss"), dtype=torch.float32, weight_decay=0.1)
    biases = {n: t.fill_(1).clone() for n, t in experts.weights().items() if n.endswith("bias")}
    experts.optim_step(1e-2)
    assert any(b.ndim == 2 for b in biases.values())
    assert all(torch.equal(experts.weights()[n], b) for n, b in biases.items())


@pytest.mark.parametrize(("total", "warmup"), [(8, 0), (8, 3), (1, 0), (2, 1), (5, 5), (3, 7)])
@pytest.mark.parametrize(
    ("theirs", "ours", "ratio"),
    [
        ("constant_with_warmup", "constant", 0.0),
        ("linear", "linear", 0.0),
        ("cosine", "cosine", 0.0),
        ("cosine_with_min_lr", "cosine", 0.1),
    ],
)
def test_schedules_are_those_of_transformers(theirs: str, ours: str, ratio: float, total: int, warmup: int) -> None:
    """But for the warm-up, whose first step has a rate; the last step of a decay had none."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    own = {"min_lr_rate": ratio} if ratio else {}
    scheduler = get_scheduler(theirs, optimizer, warmup, total, own)
    expected = []
    for step in range(total):
        expected.append(0.5 * (step + 1) / warmup if step < warmup else optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    given = {"peak": 0.5, "schedule": ours, "warmup": warmup, "total": total, "min_ratio": ratio}
    found = [learning_rate(s, **given) for s in range(total)]  # type: ignore[arg-type]
    assert found == pytest.approx(expected) and all(found)
    if ours != "constant" and total > warmup:
        assert learning_rate(total + 99, **given) == pytest.approx(0.5 * ratio)  # type: ignore[arg-type]
