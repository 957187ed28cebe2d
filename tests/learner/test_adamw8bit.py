"""AdamW with moments in 8 bits: its numbers beside float32's and torchao's, its bytes, and its checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from birl.config import schema
from birl.config.load import load
from birl.data.pack import pack
from birl.errors import BirlError
from birl.learner import adamw8bit, checkpoint
from birl.learner.adamw8bit import AdamW8bit, decode, encode, first_state, levels, limits, quantized, stored
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Lora
from birl.learner.open import make_learner
from birl.models import attention
from birl.plan import run_memory as memory
from birl.plan import sizes
from tests.data.test_pack import groups
from tests.learner.test_learner import reinforce
from tests.tiny import tiny_model

OPTIONS: Any = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}


def learner(kind: str = "adamw8bit", **options: Any) -> Learner:
    model = tiny_model()
    model.set_attn_implementation(attention.NAME)
    return Learner(model, optimizer=kind, **{"dtype": torch.bfloat16, "max_grad_norm": 0, **options})


def step(it: Learner, lr: float = 1e-3) -> float:
    stats, samples = Stats(), groups(4)
    for batch in pack(samples, [0.1] * len(samples), 60):
        it.forward_backward(batch, reinforce, stats)
    it.optim_step(lr)
    return stats.loss


def optimizers(weight: Tensor) -> list[tuple[Tensor, torch.optim.Optimizer]]:
    ours, plain = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    eight = AdamW8bit([{"params": [ours], "weight_decay": 0.1}], **OPTIONS)
    eight.state[ours] = first_state(ours, ours.shape)
    return [(ours, eight), (plain, torch.optim.AdamW([plain], weight_decay=0.1, **OPTIONS))]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [256, 700])
def test_a_number_gets_the_nearest_level_of_its_block(signed: bool, width: int) -> None:
    of = levels(signed)
    assert len(of) == 256 and of.max() == 1 and (of[1:] > of[:-1]).all() and of[127 if signed else 0] == 0
    values = torch.randn(5, width) * 10 ** torch.linspace(-6, 2, 5)[:, None]
    values = values if signed else values.square()
    values[0, 0] = values[1] = 0
    codes, scales = encode(values, limits(of))
    largest = torch.stack([block.abs().amax(1) for block in values.split(256, 1)], 1)
    assert codes.shape == values.shape and torch.equal(scales, largest)
    result, wide = decode(codes, scales, of), scales.repeat_interleave(256, 1)[:, :width]
    nearest = (wide[..., None] * of - values[..., None]).abs().amin(-1)
    small = values.abs() <= (0 if signed else of[1] * wide)  # without a sign these get the lowest level above 0
    assert ((result - values).abs() <= 1.001 * nearest)[~small].all()
    assert signed or torch.equal(result[small], (of[1] * wide * (values > 0))[small])


@pytest.mark.parametrize("shape", [(8, 512), (8, 700), (3, 4, 512)])
def test_it_goes_where_float32_goes(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps of noise with a drift: the way that is missing is 1.3 % of the way; bits do not depend on pieces."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    gradients = [torch.randn(shape) + 0.3 for _ in range(20)]
    ways = []
    for piece in (2**22, 512):
        monkeypatch.setattr(adamw8bit, "PIECE", piece)
        for tensor, optimizer in optimizers(weight):
            for gradient in gradients:
                tensor.grad = gradient.clone()
                optimizer.step()
            ways.append(tensor.detach() - weight)
    assert torch.equal(ways[0], ways[2]) and torch.equal(ways[1], ways[3])
    assert 0 < (ways[0] - ways[1]).square().mean().sqrt() < 0.03 * ways[1].square().mean().sqrt()


def test_a_second_moment_is_never_rounded_to_nothing() -> None:
    """Beside gradients thousands of times larger the nearest level of its square is 0, and of its mean it is not."""
    weight, sizes = torch.zeros(16, 256), torch.full((16, 256), 1e-3)
    sizes[:, 7] = 3e-7
    tensor, optimizer = optimizers(weight)[0]
    for scale in (1.0, 0.0):  # then nothing but the old mean moves it
        tensor.grad = sizes * scale
        optimizer.step()
    assert tensor.abs().max() < 2.5e-2


def test_levels_and_steps_are_torchaos() -> None:
    theirs = pytest.importorskip("torchao.optim")
    quant = pytest.importorskip("torchao.optim.quant_utils")
    for signed in (True, False):
        assert levels(signed).tolist() == torch.tensor(quant.create_dynamic_map(signed)).tolist()
    torch.manual_seed(0)
    weight = torch.randn(32, 512)
    (ours, optimizer), _ = optimizers(weight)
    other = torch.nn.Parameter(weight.clone())
    one = theirs.AdamW8bit([other], weight_decay=0.1, **OPTIONS)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(5):
            ours.grad = torch.randn(32, 512).sign() * torch.rand(32, 512).add(0.5)  # none so small that they round to 0
            other.grad = ours.grad.clone()
            optimizer.step()
            one.step()
    for moment, state in optimizer.state[ours].items():
        if moment in ("exp_avg", "exp_avg_sq"):  # a last bit may put a number on the other side of a limit
            assert (state != one.state[other][moment].codes.view_as(state)).float().mean() < 1e-3
    torch.testing.assert_close(ours, other, rtol=0, atol=1e-3)


def test_a_policy_computes_with_its_stepped_masters() -> None:
    """A step sets gradients of 8-bit tensors to None: of rank 64 that is all of them, and no policy moved."""
    it = learner(lora=Lora(rank=64, targets=("q_proj", "o_proj"), policies=("one", "two")))
    samples = [replace(s, policy="one") for s in groups(4)]
    for _ in range(2):
        for batch in pack(samples, [0.1] * len(samples), 60):
            it.forward_backward(batch, reinforce, Stats())
        assert it.optim_step(1e-2) > 0
    for name, moved in (("one", True), ("two", False)):
        for layer, factors in it.policies.adapter(name).factors.items():  # pyright: ignore
            b = it.masters.tensors[f"{name}/{layer}.lora_B"].detach()
            assert bool(b.any()) == moved and torch.equal(factors.b[:, :64], (b / 2).bfloat16()), (name, layer)


@pytest.mark.parametrize("lora", [None, Lora(rank=64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_its_bytes_are_those_that_are_planned(lora: Lora | None, dtype: torch.dtype) -> None:
    words = ["optimizer.kind=adamw8bit", f"model.dtype={str(dtype)[6:]}", f"lora.rank={lora.rank if lora else 0}"]
    config = load(schema.RL, ["data.train=x.jsonl", *words])
    it = make_learner(config, tiny_model())
    state = {n: t for n, t in it.tensors().items() if n.startswith("optimizer.") and t.ndim}
    assert any(t.dtype == torch.uint8 for t in state.values())
    load_ = sizes.Load(microbatch=100, several=False, sequences=4, group=4, prompt=10, longest=20)
    predicted = memory.predict(tiny_model(), config, load_)["training"]
    assert predicted["optimizer state, 8 bits"] == sum(t.nbytes for t in state.values())
    eight = sum(stored(t.shape) for t in it.masters.tensors.values() if quantized(t.shape))
    count = sum(t.numel() for t in it.masters.tensors.values() if quantized(t.shape))
    assert 2 * count < eight <= 2.125 * count  # rows of 64 to 128 elements have a scale each


@pytest.mark.parametrize("options", [{}, {"lora": Lora(rank=64)}, {"offload": True}], ids=["all", "lora", "offload"])
def test_a_run_that_goes_on_has_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    one = learner(**options)
    for _ in range(2):
        step(one)
    path = checkpoint.save(tmp_path, 2, one.tensors(), {"version": 2})
    other = learner(**options)
    checkpoint.fill(path, other.tensors())
    other.loaded(2)
    for it in (one, other):
        step(it)
    assert all(torch.equal(t, other.tensors()[n]) for n, t in one.tensors().items())
    with pytest.raises(BirlError, match=r"optimizer\.kind"):
        checkpoint.fill(path, learner("adamw").tensors())


def test_a_loss_curve_is_that_of_float32() -> None:
    """Six steps on one batch."""
    curves = []
    for kind in ("adamw", "adamw8bit"):
        it = learner(kind, dtype=torch.float32)
        curves.append([step(it, 3e-4) for _ in range(6)])
    moved = max(curves[0]) - min(curves[0])
    assert curves[0][0] == curves[1][0] and curves[0] != curves[1]
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 0.05 * moved
