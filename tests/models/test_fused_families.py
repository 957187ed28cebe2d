"""Each family's fused layers are transformers' own, in values and gradients, training and over pages. On the CPU by the
plain forms of the fused operations; with Triton (a GPU, or TRITON_INTERPRET=1) by the kernels, too."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from birl.data.trees import Tree
from birl.kernels.tensors import PAGE
from birl.models import fused
from birl.models import fused_layers as fused_layers_file
from birl.models.attention import Packed
from birl.models.forward import hidden_states
from birl.models.fused_decoder import FusedDecoder
from birl.models.fused_layers import Layer, fused_layers, normed, placed
from birl.models.paged import Cache, Paged
from birl.models.slots import slots_of, watched
from tests.families import FAMILIES, family
from tests.models.test_fused import DEVICE, triton

FUSED = sorted(FAMILIES.keys() - {"ernie4_5", "exaone4"})
TREES = [Tree.of(9, (5, 8)), Tree.of(4), Tree.of(12, (3, 20))]


def results(model: torch.nn.Module, decoder: FusedDecoder | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states of a packed row, and the gradients of some function of them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 320, (sum(map(len, TREES)),), generator=generator).to(DEVICE)
    positions = torch.tensor([p for t in TREES for p in t.positions()], device=DEVICE)
    model.zero_grad()
    layout = Packed(TREES, DEVICE)
    compute = hidden_states if decoder is None else lambda model, *inputs: decoder.hidden_states(*inputs)
    hidden = compute(model, ids, positions, layout)
    (hidden * torch.randn(hidden.shape, generator=generator).to(DEVICE)).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=triton)])
@pytest.mark.parametrize("kind", FUSED)
def test_fused_layers_are_the_module(kind: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family(kind, device=DEVICE.type)
    assert fused_layers(model)
    expected, wanted = results(model, None)
    monkeypatch.setattr(fused, "on_gpu", lambda x: kernels)
    result, gradients = results(model, FusedDecoder(model, checkpointing=kernels))
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm() + 1e-6, name


@pytest.mark.parametrize("kind", FUSED)
@torch.no_grad()
def test_over_pages_too(kind: str) -> None:
    model = family(kind, device=DEVICE.type)
    decoder, tokens = FusedDecoder(model), torch.arange(3, 48, device=DEVICE)
    expected = hidden_states(model, tokens, tokens - 3, Packed([Tree.of(45)], DEVICE))
    cache, rows = Cache.make(-(-45 // PAGE), slots_of(model), torch.float32, DEVICE), []
    for i in range(45):
        layout = Paged.of(cache, [[1, 0]], [i + 1], [1], [0])
        rows.append(decoder.hidden_states(tokens[i : i + 1], tokens[i : i + 1] - 3, layout))
    torch.testing.assert_close(torch.cat(rows), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - set(FUSED)))
def test_other_layers_are_left_to_transformers(kind: str) -> None:
    assert not fused_layers(family(kind))


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Gemma3RMSNorm, Olmo2RMSNorm])
def test_norms_round_where_transformers_does(kind: type[torch.nn.Module]) -> None:
    norm = kind(96, 1e-6).to(torch.bfloat16)
    norm.weight.data += torch.randn(96).to(torch.bfloat16)  # pyright: ignore
    x = torch.randn(50, 96).to(torch.bfloat16)
    assert torch.equal(normed(norm, x)[1], norm(x))


@triton
@pytest.mark.parametrize("form", [fused.LLAMA, fused.GEMMA, fused.OLMO])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_each_form_of_norm(form: fused.Form, dtype: torch.dtype) -> None:
    x, weight, by_y = (torch.randn(7, 96).to(DEVICE, dtype) for _ in range(3))
    weight = weight[0].requires_grad_()
    x.requires_grad_()
    expected = fused.plain_add_norm(x, None, weight, 1e-6, form)[1]
    _, y, rstd = fused.launch_add_norm(x.detach(), None, weight.detach(), 1e-6, form)
    atol, rtol = (1e-5, 1e-4) if dtype == torch.float32 else (0.05, 0.02)
    torch.testing.assert_close(y, expected, atol=atol, rtol=rtol)
    expected.backward(by_y)
    by_x, by_weight = fused.launch_norm_backward(x.detach(), weight.detach(), rstd, by_y, None, form)
    torch.testing.assert_close((by_x, by_weight), (x.grad, weight.grad), atol=atol, rtol=rtol)


@triton
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("turning", [16, 12, 8])
def test_the_rotary_kernel_turns_a_part_of_a_head(turning: int, pairs: bool) -> None:
    qkv = torch.randn(7, 5, 16).to(DEVICE).requires_grad_()
    cosine, sine, grad = (torch.randn(*s).to(DEVICE) for s in ((7, turning // 2), (7, turning // 2), (7, 5, 16)))
    expected = fused.plain_rotary(qkv, cosine, sine, 4, pairs)
    torch.testing.assert_close(fused.launch_rotary(qkv.detach(), cosine, sine, 4, 1.0, pairs), expected)
    expected.backward(grad)
    torch.testing.assert_close(fused.launch_rotary(grad, cosine, sine, 4, -1.0, pairs), qkv.grad)


@triton
@pytest.mark.parametrize(
    ("kind", "dtype", "turning"),
    [
        *((Qwen3RMSNorm, torch.float32, 12), (Qwen3RMSNorm, torch.bfloat16, 16)),
        *((Gemma3RMSNorm, torch.float32, 16), (Gemma3RMSNorm, torch.bfloat16, 12)),
    ],
)
def test_the_heads_kernels_norm_and_turn(
    kind: type[torch.nn.Module], dtype: torch.dtype, turning: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As norms of all heads and the rotary kernel's plain forms do, one after the other; more rows than programs."""
    monkeypatch.setattr(fused, "PARTS", 3)
    layer = Layer.of(0, family("qwen3").base_model.layers[0], Qwen3Config(), watched(family("qwen3")))  # pyright: ignore
    layer.head_norms = kind(16, 1e-6).to(DEVICE, dtype), kind(16, 1e-6).to(DEVICE, dtype)
    for norm in layer.head_norms:
        norm.weight.data.add_(torch.randn(16).to(norm.weight))
    layer.heads, layer.kv_heads = 7, 2  # 11 in all: two groups, of which one is not full
    qkv, cosine, sine = (torch.randn(*s).to(DEVICE, dtype) for s in ((7, 11, 16), (7, turning // 2), (7, turning // 2)))
    given = qkv.requires_grad_(), *(norm.weight for norm in layer.head_norms)
    grad = torch.randn(7, 11, 16).to(DEVICE, dtype)

    def results(kernels: bool) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(fused_layers_file, "on_gpu", lambda x: kernels)
        monkeypatch.setattr(fused, "on_gpu", lambda x: False)
        result = placed(layer, qkv, cosine, sine)
        return result, *torch.autograd.grad(result, given, grad)

    atol, rtol = (2e-5, 1e-4) if dtype == torch.float32 else (0.15, 0.02)  # bfloat16: 0.06 from one number to the next
    for ours, plain in zip(results(True), results(False), strict=True):
        torch.testing.assert_close(ours, plain, atol=atol, rtol=rtol)


@triton
def test_the_gated_kernel_takes_gelu() -> None:
    gate_up, grad = torch.randn(7, 2200).to(DEVICE).requires_grad_(), torch.randn(7, 1100).to(DEVICE)
    expected = fused.plain_swiglu(gate_up, gelu=True)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(expected, F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(fused.launch_swiglu(gate_up.detach(), gelu=True), expected, atol=1e-5, rtol=1e-4)
    expected.backward(grad)
    found = fused.launch_swiglu_backward(gate_up.detach(), grad, gelu=True)
    torch.testing.assert_close(found, gate_up.grad, atol=1e-5, rtol=1e-4)
