"""The float32 numbers that master weights begin with."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from birl import kernels
from birl.data.pack import pack
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Adapters, Lora
from birl.learner.rounding import Dither, noise, on_grid
from birl.models import attention
from birl.parallel.ranks import Grid, Ranks
from tests.data.test_pack import groups
from tests.learner.test_learner import reinforce
from tests.parallel.processes import on_ranks
from tests.tiny import tiny_model, tiny_moe


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
    assert (learner.forward(batch) - before).abs().mean() < 0.02  # 0.05 from the ties themselves, 0.008 from here


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


def test_a_number_belongs_to_a_place_however_the_tensor_lies_in_memory() -> None:
    whole = torch.randn(40, 24).bfloat16().float()
    wanted = Dither.of("w", whole.shape, noise(whole.device))(whole.clone())
    turned = whole.T.contiguous().T
    assert not turned.is_contiguous()
    assert torch.equal(Dither.of("w", whole.shape, noise(whole.device))(turned), wanted)
    assert not torch.equal(Dither.of("v", whole.shape, noise(whole.device))(whole.clone()), wanted)


def learner_of(model: Any, **options: Any) -> Learner:
    model.set_attn_implementation(attention.NAME)
    return Learner(model, **options)


@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("offload", [False, True])
def test_a_step_moves_published_weights_by_what_it_says(lr: float, offload: bool) -> None:
    """From masters that are bfloat16 numbers, a step at 1e-5 moves those around 0.02 by nothing at all."""
    model: Any = tiny_model()
    for parameter in model.parameters():
        parameter.data.uniform_(0.01, 0.03).copy_(parameter.data.bfloat16().float())
    learner = learner_of(model, offload=offload)
    before = torch.cat([p.double().flatten() for p in model.parameters()])
    for tensor in learner.masters.tensors.values():
        tensor.grad = torch.ones_like(tensor)
    learner.optim_step(lr)  # AdamW's first step: all weights by -lr
    moved = torch.cat([p.double().flatten() for p in model.parameters()]) - before
    assert -moved.mean().item() == pytest.approx(lr, rel=3 * (1e-4 / lr / len(moved)) ** 0.5)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_small_matrices_of_lora_arrive_in_the_merged_weights(dora: bool, offload: bool) -> None:
    """W + s B A rounded to the nearest bfloat16 number is W, where s B A is less than half the distance between two."""
    model: Any = tiny_model()
    learner = learner_of(model, lora=Lora(rank=4, dora=dora), offload=offload)
    before = {n: p.double().clone() for n, p in model.named_parameters()}
    assert all(torch.equal(before[n], w.bfloat16().double()) for n, w in tiny_model().named_parameters())
    assert isinstance(learner.masters, Adapters)
    arrived = wanted = 0.0
    for adapter in learner.masters.adapters.values():
        adapter.b.fill_(1e-4)
    learner.masters.publish()
    for name, adapter in learner.masters.adapters.items():
        change = (adapter.scale * adapter.b @ adapter.a).double()
        if not dora:
            assert change.abs().mean() < before[f"{name}.weight"].abs().mean() / 2**9
        arrived += (change * (model.get_parameter(f"{name}.weight").double() - before[f"{name}.weight"])).sum().item()
        wanted += change.square().sum().item()
    assert arrived == pytest.approx(wanted, rel=0.1)


@pytest.mark.skipif(bool(kernels.problem()), reason="no bfloat16 kernels on this processor")
def test_small_matrices_of_a_policy_arrive_in_its_log_probs() -> None:
    """They are added to products that would be rounded before: 0.4 of the first steps arrived."""

    def moved(dtype: torch.dtype, seed: int) -> Tensor:
        model: Any = tiny_model(seed=seed)
        on_grid(p.data for p in model.parameters())
        model.set_attn_implementation(attention.NAME)
        learner = Learner(model, dtype=dtype, lora=Lora(rank=8, policies=("a", "b")))
        (batch,) = pack([replace(s, policy="a") for s in groups(4)], [1.0] * len(groups(4)), 10_000)
        before = learner.forward(batch)
        learner.forward_backward(batch, reinforce, Stats())
        learner.optim_step(1e-4)
        return learner.forward(batch) - before

    exact, rounded = (torch.cat([moved(dtype, seed) for seed in range(4)]) for dtype in (torch.float32, torch.bfloat16))
    assert float((exact * rounded).sum() / exact.square().sum()) > 0.7


def test_weights_begin_as_they_are_and_masters_fill_what_rounds_to_them() -> None:
    model: Any = tiny_model()
    weights = {name: p.data.bfloat16() for name, p in model.named_parameters()}
    with torch.no_grad():
        weights["model.embed_tokens.weight"][0, :4] = torch.tensor([0.0, -0.0, 1.0, -2.0]).bfloat16()
        model.get_input_embeddings().weight.copy_(weights["model.embed_tokens.weight"])
    learner = learner_of(model)
    places = []
    for name, parameter in model.named_parameters():
        master = learner.masters.tensors[name].data
        assert torch.equal(parameter, weights[name]) and torch.equal(master.bfloat16(), weights[name])
        places.append((master.view(torch.int32) - weights[name].float().view(torch.int32)).flatten() / 2**16)
    first = learner.masters.tensors["model.embed_tokens.weight"].data[0]
    assert first[:2].tolist() == [0.0, 0.0]
    place = torch.cat(places)
    assert place.abs().max() < 0.5 and abs(place.mean()) < 0.01
    assert place.std().item() == pytest.approx(12**-0.5, rel=0.02)
    assert abs(torch.corrcoef(torch.stack([place[1:], place[:-1]]))[0, 1]) < 0.02


def masters_on(ranks: Ranks, moe: str, lora: Lora | None = None) -> dict[str, Tensor]:
    """Masters, or merged weights of LoRA."""
    learner = learner_of(tiny_moe(moe) if moe else tiny_model(heads=4, kv_heads=2), ranks=ranks, lora=lora)
    for name, tensor in learner.masters.tensors.items():
        if "lora_B" in name:
            tensor.fill_(1e-4)
    return {n: (w.full_tensor() if isinstance(w, DTensor) else w).clone() for n, w in learner.weights().items()}


@pytest.mark.parametrize(
    ("grid", "moe", "lora"),
    [
        (Grid(fsdp=3), "", None),
        (Grid(tp=2), "", None),
        (Grid(fsdp=2, tp=2), "", None),
        (Grid(fsdp=4, ep=2), "qwen3_moe", None),
        (Grid(fsdp=2, tp=2), "", Lora(rank=4)),
    ],
    ids=str,
)
def test_any_number_of_ranks_begins_with_the_same_masters(grid: Grid, moe: str, lora: Lora | None) -> None:
    wanted = masters_on(Ranks(), moe, lora)
    for masters in on_ranks(grid, masters_on, moe, lora):
        assert masters.keys() == wanted.keys()
        assert all(torch.equal(masters[name], master) for name, master in wanted.items())
