"""Frozen weights in 4 or 8 bits (QLoRA, arXiv:2305.14314), and linear layers that compute with them.

A weight [N, K] is cut, in row-major order, into blocks of 64 numbers, each with its largest magnitude m in float32:

    nf4     the nearest of 16 levels, times m; two codes a byte, the first in the upper half (0.5625 bytes a number)
    int8    an integer from -127 to 127, times m / 127                                        (1.0625 bytes a number)

The layer multiplies by one matrix, in the model's compute dtype: round(code x scale), and if LoRA trains it
round(round(code x scale) + s B A). Forward and backward pass, engine and weight sync all use `matrix`, so they have the
same numbers. In a product it exists for that product only.

`rounded` is for an engine's weights (engine.weights=int8), 32 numbers of a row with one scale, a power of two (MXINT8
of the OCP's microscaling formats):

    w ~ code x 2^e      code an integer from -127 to 127, e the smallest integer with which the largest number fits

The decoded numbers are exact in bfloat16. So a module whose weights are `rounded` is an ordinary one for any
implementation, and birl's CPU kernels read half of its bytes (`Kernels.encode`) with the same bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birl.errors import BirlError
from birl.kernels.tensors import BLOCK as MX_BLOCK

BLOCK = 64
#: quantiles of a normal distribution, scaled to [-1, 1] and with an exact 0; arXiv:2305.14314, appendix E
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BITS = {"nf4": 4, "int8": 8}


def encode(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes (nf4: uint8 [ceil(NK / 64) * 32], int8: int8 [ceil(NK / 64) * 64]) and scales [ceil(NK / 64)] float32;
    computed on the CPU, so equal on all machines. Raises `BirlError` for a weight that holds NaN or infinity."""
    flat = weight.detach().float().cpu().flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    if not scales.isfinite().all():
        raise BirlError(f"lora.quantize={kind}: a weight holds NaN or infinity. Take a model without.")
    if kind == "int8":
        scales = scales / 127
    normed = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    if kind == "int8":
        return normed.round().clamp(-127, 127).to(torch.int8).flatten(), scales
    levels = torch.tensor(NF4, dtype=torch.float32)
    pairs = torch.bucketize(normed, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1], scales


def decode(codes: Tensor, scales: Tensor, pairs: Tensor, shape: torch.Size) -> Tensor:
    """The numbers [N, K] float32. `pairs` [256, 2]: those of each byte of nf4. One product each, so the same bits on
    every device."""
    wide = F.embedding(codes.int(), pairs) if codes.dtype == torch.uint8 else codes.float()
    return wide.view(-1, BLOCK).mul_(scales[:, None]).view(-1)[: shape.numel()].view(shape)


def stored(count: int, kind: str) -> int:
    """Bytes of an encoded weight of `count` numbers."""
    return -(-count // BLOCK) * (BLOCK * BITS[kind] // 8 + 4)


def rounded(weight: Tensor) -> Tensor:
    """Round a weight [N, K] of any dtype to its int8 encoding, in the same dtype: no number changes by more than 1 /
    127 of its block's largest. Idempotent. Raises `BirlError` for NaN and infinity."""
    rows, columns = weight.shape
    blocks = F.pad(weight.detach().float(), (0, -columns % MX_BLOCK)).view(rows, -1, MX_BLOCK)
    bits = blocks.abs().amax(2, keepdim=True).view(torch.int32)
    exponent = (bits >> 23) - 6 + ((bits & 0x7FFFFF) > 0x7E0000)  # as in gemm.c
    if bits.max() >= 0x7F800000:
        raise BirlError("engine.weights=int8: a weight holds NaN or infinity. Take a model without.")
    exponent = exponent.maximum((exponent.amax(1, keepdim=True) - 60).clamp(min=1))
    scale, inverse = ((e << 23).view(torch.float32) for e in (exponent, 254 - exponent))
    return (blocks * inverse).round_().mul_(scale).view(rows, -1)[:, :columns].to(weight.dtype)


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is codes and scales. `weight` has shape, dtype and, if LoRA trains it, a master with
    A and B (`Adapter` of learner/lora.py), but no values: it is on the meta device."""

    codes: Tensor
    scales: Tensor
    pairs: Tensor

    def __init__(self, linear: nn.Linear, weight: Tensor, kind: str, device: torch.device) -> None:
        """`linear`: the layer to replace; `weight` [N, K]: its values."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        meta = torch.empty(weight.shape, dtype=linear.weight.dtype, device="meta")
        self.weight, self.bias = nn.Parameter(meta, requires_grad=False), linear.bias
        codes, scales = encode(weight, kind)
        byte = torch.arange(256)
        pairs = torch.tensor(NF4, dtype=torch.float32)[torch.stack([byte >> 4, byte & 15], 1)]
        for name, tensor in (("codes", codes), ("scales", scales), ("pairs", pairs)):
            self.register_buffer(name, tensor.to(device), persistent=False)

    def values(self) -> Tensor:
        """[N, K] float32, without rounding and without A and B."""
        return decode(self.codes, self.scales, self.pairs, self.weight.shape)

    def base(self) -> Tensor:
        """[N, K] float32: W that LoRA adds to, rounded to the model's compute dtype."""
        return self.values().to(self.weight.dtype).float()

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """[N, K] in the model's compute dtype: the matrix that the layer multiplies by."""
        master: Any = getattr(self.weight, "master", None)
        return (self.values() if master is None else master.merged()).to(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return _Product.apply(x, self.weight, self.bias, self)  # pyright: ignore
        return F.linear(x, self.matrix(), self.bias)


class _Product(torch.autograd.Function):
    """Saves only the input; the matrix is decoded again for the backward pass. The gradients of A and B go to the
    master (`absorb_product`), that of a bias is not computed: it is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else x.new_empty(0))
        ctx.layer, ctx.trained = layer, weight.requires_grad
        return F.linear(x, layer.matrix(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer, grad = ctx.saved_tensors, ctx.layer, grads[0]
        if ctx.trained:
            layer.weight.master.absorb_product(x.flatten(0, -2), grad.flatten(0, -2))
        return grad @ layer.matrix() if ctx.needs_input_grad[0] else None, None, None, None


LINEAR = (nn.Linear, QuantizedLinear)  # exactly these classes multiply by a matrix and do nothing else


def matrix_of(linear: nn.Linear) -> Tensor:
    """[N, K]: the matrix that a linear layer multiplies by, detached."""
    return linear.matrix() if isinstance(linear, QuantizedLinear) else linear.weight.detach()


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantised layers, by the names of their weights."""
    return {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
