"""Weights in int8, 32 numbers of a row with one scale, a power of two (MXINT8 of the OCP's microscaling formats).

    w ~ code x 2^e      code a whole number from -127 to 127, e the smallest whole number with which the largest fits

What the codes stand for is exact in bfloat16. So a module whose weights are `rounded` is an ordinary one, whatever
computes it, and birl's CPU kernels read half of its bytes (`Kernels.encode`) with the same bits.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birl.errors import BirlError
from birl.kernels.tensors import BLOCK
from birl.models.decoder import weights_changed
from birl.models.forward import forget
from birl.models.slices import quantizable


def rounded(weight: Tensor) -> Tensor:
    """[N, K], of any type -> what int8 holds of it, in that type: no number moves by more than 1 / 127 of its block's
    largest. Rounding twice is rounding once. Raises `BirlError` for NaN and infinity."""
    rows, columns = weight.shape
    blocks = F.pad(weight.detach().float(), (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    bits = blocks.abs().amax(2, keepdim=True).view(torch.int32)
    exponent = (bits >> 23) - 6 + ((bits & 0x7FFFFF) > 0x7E0000)  # as in gemm.c
    if bits.max() >= 0x7F800000:
        raise BirlError("engine.weights=int8: a weight holds NaN or infinity. Take a model without.")
    exponent = exponent.maximum((exponent.amax(1, keepdim=True) - 60).clamp(min=1))
    scale, inverse = ((e << 23).view(torch.float32) for e in (exponent, 254 - exponent))
    return (blocks * inverse).round_().mul_(scale).view(rows, -1)[:, :columns].to(weight.dtype)


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """All linear layers of the body, in place, but routers; kernels may read codes of them (`Decoder`) from now on."""
    for linear in quantizable(model).values():
        linear.weight.data.copy_(rounded(linear.weight))
    if getattr(model, "in_int8", False):
        weights_changed(model)
    else:
        cast(Any, model).in_int8 = True
        forget(model)
