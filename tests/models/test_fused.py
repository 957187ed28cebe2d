"""The fused decoder is transformers' module, and the Triton kernels are their plain definitions: on a GPU, or without
one in Triton's interpreter (pip install triton; TRITON_INTERPRET=1 python -m pytest tests/models/test_fused.py)."""

import gc
import os
import weakref

import pytest
import torch

from birl.data.pack import pack
from birl.data.trees import Tree
from birl.engine.runner import places
from birl.learner.learner import Learner
from birl.models import attention, fused, fused_decoder, logprobs
from birl.models.attention import Packed
from birl.models.fused_decoder import FusedDecoder
from birl.types import Sample
from tests.tiny import tiny_model

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
runs = fused.has_triton() and (CUDA or bool(os.environ.get("TRITON_INTERPRET")))
triton = pytest.mark.skipif(not runs, reason="no Triton with a GPU or TRITON_INTERPRET=1")
TREES = [Tree.of(5, (4, 3)), Tree.of(5)]


def model(**options: int) -> torch.nn.Module:
    made = tiny_model(layers=3, **options)
    made.set_attn_implementation(attention.NAME)
    return made.eval()


def whole(module: torch.nn.Module, decoder: FusedDecoder | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states of a packed row, and all parameters' gradients of some function of them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 320, (17,), generator=generator).to(DEVICE)
    positions = torch.tensor([p for t in TREES for p in t.positions()], device=DEVICE)
    layout = Packed(TREES, DEVICE)
    module.zero_grad()
    if decoder is not None:
        found = decoder.hidden_states(ids, positions, layout)
    else:
        body = module.base_model
        found = body(input_ids=ids[None], position_ids=positions[None], layout=layout, use_cache=False)[0][0]  # type: ignore
    found.backward(torch.randn(found.shape, generator=generator).to(found))
    return found.detach(), [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=triton)])
def test_the_fused_decoder_is_the_module(monkeypatch: pytest.MonkeyPatch, kernels: bool, checkpointing: bool) -> None:
    module = model().to(DEVICE)
    expected = whole(module, None)
    monkeypatch.setattr(fused, "on_gpu", lambda x: kernels)
    found = whole(module, FusedDecoder(module, checkpointing=checkpointing))
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-4)
    assert len(found[1]) == len(expected[1])
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def test_weights_are_joined_once_and_stay_the_parameters() -> None:
    module = model()
    decoder = FusedDecoder(module)
    names = [name for name, _ in module.named_parameters()]
    ids, positions, layout = torch.arange(9), torch.arange(9), Packed([Tree.of(9)])
    with torch.no_grad():
        first, at = decoder.hidden_states(ids, positions, layout), places(module)
        assert (first == decoder.hidden_states(ids, positions, layout)).all()
        for parameter in module.parameters():
            parameter.mul_(1.1)
        assert (decoder.hidden_states(ids, positions, layout) != first).any()
        assert places(module) == at
    assert [name for name, _ in module.named_parameters()] == names
    sizes = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in module.parameters()}
    assert sum(sizes.values()) == sum(p.nbytes for p in module.parameters())  # and nothing is there twice


def test_a_decoder_does_not_keep_its_model_alive() -> None:
    module = model()
    fused_decoder.MADE[module] = FusedDecoder(module)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


@triton
def test_norm_rotary_and_swiglu_kernels() -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()

    x, delta, weight = randn(7, 96), randn(7, 96), randn(96)
    by_total, by_y = randn(7, 96).detach(), randn(7, 96).detach()
    expected = fused.plain_add_norm(x, delta, weight, 1e-6)
    total, y, rstd = fused.launch_add_norm(x.detach(), delta.detach(), weight.detach(), 1e-6)
    torch.testing.assert_close((total, y), tuple(expected), atol=1e-5, rtol=1e-5)
    torch.autograd.backward(expected, [by_total, by_y])
    by_x, by_weight = fused.launch_norm_backward(total, weight.detach(), rstd, by_y, by_total)
    torch.testing.assert_close((by_x, by_weight), (x.grad, weight.grad), atol=1e-5, rtol=1e-4)

    qkv, cosine, sine = randn(7, 5, 16), randn(7, 8).detach(), randn(7, 8).detach()
    turned = fused.plain_rotary(qkv, cosine, sine, 4)
    torch.testing.assert_close(fused.launch_rotary(qkv.detach(), cosine, sine, 4, 1.0), turned)
    grad = randn(7, 5, 16).detach()
    turned.backward(grad)
    torch.testing.assert_close(fused.launch_rotary(grad, cosine, sine, 4, -1.0), qkv.grad)

    gate_up, grad = randn(7, 2 * 1100), randn(7, 1100).detach()
    result = fused.plain_swiglu(gate_up)
    torch.testing.assert_close(fused.launch_swiglu(gate_up.detach()), result)
    result.backward(grad)
    torch.testing.assert_close(fused.launch_swiglu_backward(gate_up.detach(), grad), gate_up.grad, atol=1e-5, rtol=1e-4)


@triton
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprob_kernels(monkeypatch: pytest.MonkeyPatch, temperature: float, kind: torch.dtype) -> None:
    def found() -> list[torch.Tensor]:
        torch.manual_seed(0)
        hidden = torch.randn(6, 8).to(DEVICE, kind).requires_grad_()
        head = torch.nn.Linear(8, 9000).to(DEVICE, kind)
        targets = torch.randint(0, 9000, (6,)).to(DEVICE)
        logp, entropy = logprobs.token_logprobs(hidden, head, targets, temperature, chunk=20_000)
        (logp * torch.arange(6, device=DEVICE) + entropy).sum().backward()
        return [logp.detach(), entropy.detach(), hidden.grad, head.weight.grad, head.bias.grad]  # type: ignore

    monkeypatch.setattr(logprobs, "on_gpu", lambda x: False)
    expected = found()
    monkeypatch.setattr(logprobs, "on_gpu", lambda x: True)
    for a, b in zip(found(), expected, strict=True):
        close = a.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=2e-5 if close else 1e-3, rtol=1e-4 if close else 0.02)


@pytest.mark.skipif(not CUDA, reason="no GPU")
def test_on_the_card_the_learner_gives_the_gradients_of_the_cpu() -> None:
    samples = [
        Sample(
            tokens=tuple(range(5, 25 + i)), mask=(False,) * 10 + (True,) * (10 + i), logprobs=(-1.0,) * (20 + i),
            versions=(0,) * (20 + i), advantage=1.0, group=0, episode=i,
        )
        for i in range(3)
    ]  # fmt: skip
    (batch,) = pack(samples, [1.0] * 3, 200)
    found = []
    for device in ("cpu", "cuda"):
        learner = Learner(model().to(device), dtype=torch.bfloat16)
        from birl.learner.learner import Stats

        learner.forward_backward(batch, lambda logp, entropy, b: ((logp * b.weights).sum(), {"logp": logp}), Stats())
        found.append({n: t.grad.cpu() for n, t in learner.masters.tensors.items() if t.grad is not None})
    for name in found[0]:
        gap = (found[0][name] - found[1][name]).norm() / found[0][name].norm()
        assert gap < 0.05, name
