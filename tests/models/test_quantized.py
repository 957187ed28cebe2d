"""Weights in 4 and 8 bits: levels, rounding, packing, and a layer's product and gradients."""

from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from birl.errors import BirlError
from birl.models.quantized import BLOCK, NF4, QuantizedLinear, decode, encode, quantized_layers, stored
from birl.models.slices import quantizable, quantize, sketched, values
from birl.models.verify import verify
from tests.models.test_decoder import MAKERS, made

KINDS = ["nf4", "int8"]
CPU = torch.device("cpu")


def layer_of(kind: str, rows: int = 24, width: int = 40, bias: bool = True) -> QuantizedLinear:
    random = torch.Generator().manual_seed(1)
    linear = nn.Linear(width, rows, bias=bias).requires_grad_(False)
    return QuantizedLinear(linear, torch.randn(rows, width, generator=random), kind, CPU)


def test_the_levels_are_the_papers() -> None:
    """Appendix E: the means of neighbouring quantiles, 8 below and 9 above 0, of which 0 is one and the same."""
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2
    up = [NormalDist().inv_cdf(offset + (0.5 - offset) * i / 8) for i in range(8)]
    down = [-NormalDist().inv_cdf(offset + (0.5 - offset) * i / 7) for i in range(7)]
    expected = sorted(v / up[0] for v in (*up, 0.0, *down))
    assert pytest.approx(expected, abs=1e-6) == NF4  # theirs were computed in float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 5), (8, 64), (7, 100)])
def test_every_number_becomes_the_nearest_one(kind: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 0
    codes, scales = encode(weight, kind)
    assert codes.nbytes + scales.nbytes == stored(weight.numel(), kind)
    whole = QuantizedLinear(nn.Linear(shape[1], shape[0]), weight, kind, CPU).values().flatten()
    levels = torch.tensor(NF4) if kind == "nf4" else torch.arange(-127, 128) / 127
    for block, found in zip(weight.flatten().split(BLOCK), whole.split(BLOCK), strict=True):
        most = block.abs().max()
        nearest = (levels * most - block[:, None]).abs().min(1).values
        torch.testing.assert_close((found - block).abs(), nearest, rtol=0, atol=1e-6 * most.item())
    assert whole[0] == 0


def test_codes_are_those_of_bitsandbytes() -> None:
    """Written by bitsandbytes 0.50.2: quantize_4bit(weight, quant_type="nf4")."""
    weight = (torch.arange(128.0) * 37 % 101 - 50).view(2, 64) * torch.tensor([[1.0], [0.015625]])
    codes, scales = encode(weight, "nf4")
    assert bytes(codes.tolist()).hex() == (
        "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c1"
        "6d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e29f3b05d17e29f3c05d18"
    )
    assert scales.tolist() == [50.0, 0.78125]


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_what_is_not_finite_is_refused(kind: str) -> None:
    layer = QuantizedLinear(nn.Linear(64, 2), torch.zeros(2, 64), kind, CPU)
    assert not layer.values().any()
    with pytest.raises(BirlError, match=rf"lora\.quantize={kind}: .*NaN"):
        encode(torch.full((2, 64), float("nan")), kind)


def test_every_byte_is_two_numbers() -> None:
    layer = layer_of("nf4", 8, 64)
    codes = torch.arange(256, dtype=torch.uint8)
    found = decode(codes, torch.full((8,), 2.0), layer.pairs, torch.Size((8, 64)))
    assert found.flatten().tolist() == [2.0 * torch.tensor(NF4[n]).item() for b in range(256) for n in (b >> 4, b & 15)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_and_its_gradient_are_those_of_the_matrix(kind: str, dtype: torch.dtype) -> None:
    layer, x = layer_of(kind), torch.randn(2, 5, 40, dtype=dtype, requires_grad=True)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    y = layer(x)
    assert torch.equal(y, F.linear(x, layer.values().to(dtype), layer.bias)) and torch.equal(y, layer(x.detach()))
    y.backward(torch.ones_like(y))
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(y) @ layer.matrix())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_quantised_model_is_verified_and_computes_with_the_numbers_of_its_codes(kind: str, name: str) -> None:
    model = made(name)
    head, count = model.get_output_embeddings(), len(quantizable(model))  # pyright: ignore
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    quantize(model, kind)
    assert len(quantized_layers(model)) == count > 0 and type(head) is nn.Linear
    verify(model)
    after = dict(values(model))
    assert after.keys() == before.keys()
    for name, value in after.items():
        changed = name in quantized_layers(model)
        assert torch.equal(value, before[name]) != changed
        assert (value - before[name]).norm() <= (0.12 if kind == "nf4" else 0.01) * before[name].norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_quantised_as_it_is_read(kind: str, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes of the whole model, but never two weights in float32."""
    from birl.models.load import load_model

    whole, read = quantize(load_model(tiny), kind), quantize(sketched(tiny, CPU), kind)
    for one, other in zip(whole.buffers(), read.buffers(), strict=True):
        assert torch.equal(one, other)
    for (name, one), (_, other) in zip(whole.named_parameters(), read.named_parameters(), strict=True):
        assert one.is_meta == other.is_meta and (one.is_meta or torch.equal(one, other)), name
    assert whole.state_dict().keys() == read.state_dict().keys()
