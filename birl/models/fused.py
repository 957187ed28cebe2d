"""Operations between the products of a decoder, fused for CUDA: add and norm, rotary embedding, SwiGLU.

Each is one Triton kernel forward and one backward (`fused_kernels.py`) if the tensors are on a GPU and Triton is
installed, else plain PyTorch with the same rounding. The plain form is the definition; tests compare the two.

Shapes: T tokens, S size of a row, D head size.
"""

import functools
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PARTS = 1024  # programs of a norm's backward pass, each with a partial sum of the weight's gradient


@functools.cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def triton_kernels(of: str = "fused") -> Any:
    """Import a module of kernels, for callers that are type-checked without Triton."""
    return import_module(f"birl.models.{of}_kernels")


def on_gpu(x: Tensor) -> bool:
    """Whether the Triton kernels support this tensor."""
    return x.is_cuda and has_triton()


def power_of_two(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()


def warps(block: int) -> int:
    """Warps of a program that handles a row of `block` elements at once."""
    return min(max(block // 512, 4), 16)


@dataclass(frozen=True, slots=True)
class Form:
    """Form of an RMS norm. wide: multiplied by the weight in float32 and rounded once, else normalised, rounded and
    multiplied; one: multiplied by 1 + weight."""

    wide: bool = False
    one: bool = False


LLAMA, GEMMA, OLMO = Form(), Form(wide=True, one=True), Form(wide=True)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, form: Form = LLAMA) -> tuple[Tensor, Tensor]:
    """s = x + delta and weight * s / rms(s): x, delta [T, S] -> both [T, S]. Rounded where transformers rounds."""
    if not on_gpu(x):
        return plain_add_norm(x, delta, weight, eps, form)
    return _AddNorm.apply(x, delta, weight, eps, form)  # pyright: ignore


def plain_add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, form: Form = LLAMA
) -> tuple[Tensor, Tensor]:
    total = x if delta is None else x + delta
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if not form.wide:
        return total, weight * normed.to(x.dtype)
    return total, (normed * (1.0 + weight.float() if form.one else weight.float())).to(x.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, form: Form
    ) -> tuple[Tensor, Tensor]:
        delta = None if delta is None else delta.contiguous()
        total, y, rstd = launch_add_norm(x.contiguous(), delta, weight, eps, form)
        ctx.save_for_backward(total, weight, rstd)
        ctx.added, ctx.form = delta is not None, form
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        by_total, by_y = grads
        if by_y is None:
            return by_total, by_total if ctx.added else None, None, None, None
        by_x, by_weight = launch_norm_backward(total, weight, rstd, by_y.contiguous(), by_total, ctx.form)
        return by_x, by_x if ctx.added else None, by_weight, None, None


def launch_add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, form: Form = LLAMA
) -> tuple[Tensor, Tensor, Tensor]:
    """-> s, y, 1 / rms(s) [T]."""
    rows, size = x.shape
    total = x if delta is None else torch.empty_like(x)
    y, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    block = power_of_two(size)
    other = x if delta is None else delta
    triton_kernels().add_norm_kernel[(rows,)](
        x, other, weight, total, y, rstd, size, eps,
        ADD=delta is not None, WIDE=form.wide, ONE=form.one, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return total, y, rstd


def launch_norm_backward(
    total: Tensor, weight: Tensor, rstd: Tensor, by_y: Tensor, by_total: Tensor | None, form: Form = LLAMA
) -> tuple[Tensor, Tensor]:
    """-> gradients with respect to s (including `by_total`, its direct one) and the weight."""
    rows, size = total.shape
    step, block = min(rows, PARTS), power_of_two(size)
    by_x = torch.empty_like(total)
    parts = torch.empty(step, size, dtype=torch.float32, device=total.device)
    other = by_y if by_total is None else by_total.contiguous()
    triton_kernels().norm_backward_kernel[(step,)](
        total, weight, rstd, by_y, other, by_x, parts, rows, size, step,
        ADD=by_total is not None, ONE=form.one, BLOCK=block,
        num_warps=warps(2 * block),  # with half of them registers spill
    )  # fmt: skip
    return by_x, parts.sum(0).to(weight.dtype)


def rotary(qkv: Tensor, cosine: Tensor, sine: Tensor, rotated: int, pairs: bool = False) -> Tensor:
    """The first `rotated` heads rotated by their position: qkv [T, heads, D], cosine and sine [T, R / 2] in qkv's dtype
    or float32. The first R elements of a head are rotated: i with i + R / 2, or with `pairs` adjacent ones."""
    if not on_gpu(qkv):
        return plain_rotary(qkv, cosine, sine, rotated, pairs)
    return _Rotary.apply(qkv, cosine, sine, rotated, pairs)  # pyright: ignore


def plain_rotary(qkv: Tensor, cosine: Tensor, sine: Tensor, rotated: int, pairs: bool = False) -> Tensor:
    turned, rest = qkv.split([rotated, qkv.shape[1] - rotated], dim=1)
    turning, still = turned.tensor_split([2 * cosine.shape[1]], -1)
    c, s = cosine[:, None], sine[:, None]
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1) if pairs else turning.chunk(2, -1)
    result = (a * c - b * s).to(qkv.dtype), (b * c + a * s).to(qkv.dtype)
    both = torch.stack(result, -1).flatten(-2) if pairs else torch.cat(result, -1)
    return torch.cat([torch.cat([both, still], -1), rest], 1)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cosine: Tensor, sine: Tensor, rotated: int, pairs: bool) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.rotated, ctx.pairs = rotated, pairs
        return launch_rotary(qkv.contiguous(), cosine, sine, rotated, 1.0, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        grad = launch_rotary(grads[0].contiguous(), cosine, sine, ctx.rotated, -1.0, ctx.pairs)
        return grad, None, None, None, None


def launch_rotary(qkv: Tensor, cosine: Tensor, sine: Tensor, rotated: int, sign: float, pairs: bool = False) -> Tensor:
    rows, heads, size = qkv.shape
    half, result = cosine.shape[1], torch.empty_like(qkv)
    rest = size - 2 * half
    triton_kernels().rotary_kernel[(rows,)](
        qkv, result, cosine, sine, rotated, heads, sign, HALF=half, BLOCK=power_of_two(half), HEADS=power_of_two(heads),
        SIZE=size, REST=power_of_two(rest) if rest else 0, PAIRS=pairs, num_warps=4,
    )  # fmt: skip
    return result


class Heads(NamedTuple):
    """Norm of queries and keys, per head; the last heads are `kv_heads` of keys and as many of values."""

    kv_heads: int
    eps: float
    form: Form


def normed_heads(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cosine: Tensor, sine: Tensor, how: Heads
) -> Tensor:
    """Queries and keys normalised per head, with weights [D] each, and rotated: [T, heads + 2 kv_heads, D] -> the same.
    Only by kernels: `fused_layers.placed` is the definition."""
    return _Heads.apply(qkv, query_weight, key_weight, cosine, sine, how)  # pyright: ignore


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, query_weight: Tensor, key_weight: Tensor, *rest: Any) -> Tensor:
        cosine, sine, ctx.how = rest
        qkv = qkv.contiguous()
        ctx.save_for_backward(qkv, query_weight, key_weight, cosine, sine)
        return launch_heads(qkv, query_weight, key_weight, cosine, sine, ctx.how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, query_weight, key_weight, cosine, sine = ctx.saved_tensors
        by_qkv, by_weights = launch_heads_backward(
            qkv, query_weight, key_weight, cosine, sine, grads[0].contiguous(), ctx.how
        )
        return by_qkv, *by_weights.unbind(), None, None, None


def tile_of(qkv: Tensor, cosine: Tensor, how: Heads) -> tuple[int, dict[str, Any]]:
    """Number of head groups, one per program, and the constants of the kernels."""
    every, size = qkv.shape[1:]
    group, block = min(power_of_two(every), 8), power_of_two(size)
    constants = {"HALF": cosine.shape[1], "SIZE": size, "BLOCK": block, "GROUP": group, "ONE": how.form.one}
    return -(-every // group), {**constants, "num_warps": max(group * block // 256, 1)}


def launch_heads(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cosine: Tensor, sine: Tensor, how: Heads
) -> Tensor:
    groups, constants = tile_of(qkv, cosine, how)
    result = torch.empty_like(qkv)
    triton_kernels().heads_kernel[(len(qkv), groups)](
        qkv, result, query_weight, key_weight, cosine, sine, qkv.shape[1] - 2 * how.kv_heads, how.kv_heads, how.eps,
        WIDE=how.form.wide, **constants,
    )  # fmt: skip
    return result


def launch_heads_backward(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cosine: Tensor, sine: Tensor, grad: Tensor, how: Heads
) -> tuple[Tensor, Tensor]:
    """-> gradients with respect to qkv and both weights [2, D]."""
    groups, constants = tile_of(qkv, cosine, how)
    step, result = min(len(qkv), PARTS), torch.empty_like(qkv)
    parts = torch.empty(step * groups, 2, qkv.shape[2], dtype=torch.float32, device=qkv.device)
    triton_kernels().heads_backward_kernel[(step, groups)](
        qkv, grad, result, query_weight, key_weight, cosine, sine, parts,
        qkv.shape[1] - 2 * how.kv_heads, how.kv_heads, how.eps, len(qkv), step, **constants,
    )  # fmt: skip
    return result, parts.sum(0).to(query_weight.dtype)


def launch_sum_copies(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """The float32 sum of the rows order[starts[i]], ... order[starts[i + 1] - 1], rounded once: [N, ...] -> [T, ...].
    The order of summation is fixed, so that every run has the same bits."""
    rows, width = len(starts) - 1, copies[0].numel()
    result = torch.empty(rows, *copies.shape[1:], dtype=copies.dtype, device=copies.device)
    block = min(power_of_two(width), 1024)
    triton_kernels().sum_copies_kernel[(rows, -(-width // block))](
        copies, order, starts, result, width, BLOCK=block, num_warps=warps(block)
    )
    return result


def swiglu(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """silu(gate) * up, or gelu(gate) * up by tanh: [T, 2 I] -> [T, I]."""
    if not on_gpu(gate_up):
        return plain_swiglu(gate_up, gelu)
    return _SwiGLU.apply(gate_up, gelu)  # pyright: ignore


def plain_swiglu(gate_up: Tensor, gelu: bool = False) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gelu: bool) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.gelu = gelu
        return launch_swiglu(gate_up, gelu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return launch_swiglu_backward(gate_up, grads[0].contiguous(), ctx.gelu), None


def launch_swiglu(gate_up: Tensor, gelu: bool = False) -> Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    triton_kernels().swiglu_kernel[(rows, -(-inner // 1024))](gate_up, y, inner, GELU=gelu, BLOCK=1024, num_warps=4)
    return y


def launch_swiglu_backward(gate_up: Tensor, grad: Tensor, gelu: bool = False) -> Tensor:
    rows, inner = grad.shape
    result = torch.empty_like(gate_up)
    triton_kernels().swiglu_backward_kernel[(rows, -(-inner // 1024))](
        gate_up, grad, result, inner, GELU=gelu, BLOCK=1024, num_warps=4
    )
    return result
