"""The operations between the products of a decoder, fused for CUDA: add and norm, rotary embedding, SwiGLU.

Each is one Triton kernel forward and one backward (`fused_kernels.py`) where the tensors are on a GPU and Triton is
installed, and plain PyTorch with the same rounding everywhere else. The plain form is the definition; tests compare
the two.

Shapes: T tokens, S size of a row, D head size.
"""

import functools
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PARTS = 256  # programs of the norm's backward pass, each with its own sum of the weight's gradient


@functools.cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def triton_kernels() -> Any:
    """The kernels, for callers that are type-checked without Triton."""
    from birl.models import fused_kernels

    return fused_kernels


def on_gpu(x: Tensor) -> bool:
    """Do the Triton kernels take this tensor?"""
    return x.is_cuda and has_triton()


def power_of_two(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()


def warps(block: int) -> int:
    """Warps of a program that handles a row of `block` elements at once."""
    return min(max(block // 512, 4), 16)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s = x + delta and weight * s / rms(s): x, delta [T, S] -> both [T, S]. Rounded where transformers rounds."""
    if not on_gpu(x):
        return plain_add_norm(x, delta, weight, eps)
    return _AddNorm.apply(x, delta, weight, eps)  # pyright: ignore


def plain_add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if delta is None else x + delta
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return total, weight * normed.to(x.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, rstd = launch_add_norm(x.contiguous(), None if delta is None else delta.contiguous(), weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.added = delta is not None
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        by_total, by_y = grads
        if by_y is None:
            return by_total, by_total if ctx.added else None, None, None
        by_x, by_weight = launch_norm_backward(total, weight, rstd, by_y.contiguous(), by_total)
        return by_x, by_x if ctx.added else None, by_weight, None


def launch_add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """-> s, y, 1 / rms(s) [T]."""
    rows, size = x.shape
    total = x if delta is None else torch.empty_like(x)
    y, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    block = power_of_two(size)
    other = x if delta is None else delta
    triton_kernels().add_norm_kernel[(rows,)](
        x, other, weight, total, y, rstd, size, eps, ADD=delta is not None, BLOCK=block, num_warps=warps(block)
    )
    return total, y, rstd


def launch_norm_backward(
    total: Tensor, weight: Tensor, rstd: Tensor, by_y: Tensor, by_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """-> gradients by s (its own, `by_total`, included) and by the weight."""
    rows, size = total.shape
    step, block = min(rows, PARTS), power_of_two(size)
    by_x = torch.empty_like(total)
    parts = torch.empty(step, size, dtype=torch.float32, device=total.device)
    other = by_y if by_total is None else by_total.contiguous()
    triton_kernels().norm_backward_kernel[(step,)](
        total, weight, rstd, by_y, other, by_x, parts, rows, size, step,
        ADD=by_total is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return by_x, parts.sum(0).to(weight.dtype)


def rotary(qkv: Tensor, cosine: Tensor, sine: Tensor, rotated: int) -> Tensor:
    """The first `rotated` heads turned by their position: qkv [T, heads, D], cosine and sine [T, D / 2] in qkv's
    type."""
    if not on_gpu(qkv):
        return plain_rotary(qkv, cosine, sine, rotated)
    return _Rotary.apply(qkv, cosine, sine, rotated)  # pyright: ignore


def plain_rotary(qkv: Tensor, cosine: Tensor, sine: Tensor, rotated: int) -> Tensor:
    turned, rest = qkv.split([rotated, qkv.shape[1] - rotated], dim=1)
    a, b = turned.chunk(2, -1)
    c, s = cosine[:, None], sine[:, None]
    return torch.cat([torch.cat([a * c - b * s, b * c + a * s], -1), rest], 1)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cosine: Tensor, sine: Tensor, rotated: int) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.rotated = rotated
        return launch_rotary(qkv.contiguous(), cosine, sine, rotated, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return launch_rotary(grads[0].contiguous(), cosine, sine, ctx.rotated, -1.0), None, None, None


def launch_rotary(qkv: Tensor, cosine: Tensor, sine: Tensor, rotated: int, sign: float) -> Tensor:
    rows, heads, size = qkv.shape
    result = torch.empty_like(qkv)
    triton_kernels().rotary_kernel[(rows,)](
        qkv, result, cosine, sine, rotated, heads, sign, HALF=size // 2, HEADS=power_of_two(heads), num_warps=4
    )
    return result


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2 I] -> [T, I]."""
    if not on_gpu(gate_up):
        return plain_swiglu(gate_up)
    return _SwiGLU.apply(gate_up)  # pyright: ignore


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return launch_swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return launch_swiglu_backward(gate_up, grads[0].contiguous())


def launch_swiglu(gate_up: Tensor) -> Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    triton_kernels().swiglu_kernel[(rows, -(-inner // 1024))](gate_up, y, inner, BLOCK=1024, num_warps=4)
    return y


def launch_swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    rows, inner = grad.shape
    result = torch.empty_like(gate_up)
    triton_kernels().swiglu_backward_kernel[(rows, -(-inner // 1024))](
        gate_up, grad, result, inner, BLOCK=1024, num_warps=4
    )
    return result
