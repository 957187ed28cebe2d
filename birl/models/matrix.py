"""Weights for products on birl's kernels: laid out once and again when they have changed, and where their gradients go.

A learner's parameter in bfloat16 has a float32 master (`parameter.master`); its gradient is summed right there. Where
the parameter is made of others, its master keeps none of this size (`absorb`, learner/lora.py).
Shapes: T rows, N outputs, K inputs.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from birl.kernels import Kernels
from birl.kernels.tensors import PANEL, PackedWeight, coded_size, packed_size
from birl.models.low_rank import Active, absorb_low_rank, add_low_rank, low_rank_by_input
from birl.models.quantized import matrix_of

HUGE, MAPPED = 2**21, 2**25  # bytes of a page, and of a mapping


class LastingMemory:
    """For weights that every step reads, in pages of 2 MiB where the kernel has some: a thread of an AMD EPYC (Zen 4)
    reads 28 GB/s instead of 20. A mapping is given back with the last tensor in it."""

    def __init__(self) -> None:
        self.mapping: mmap.mmap | None = None
        self.used = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count], not initialised."""
        size = -(-count * dtype.itemsize // 64) * 64
        if self.mapping is None or self.used + size > len(self.mapping):
            self.mapping = mmap.mmap(-1, max(size, MAPPED) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.used = -torch.frombuffer(self.mapping, dtype=torch.uint8).data_ptr() % HUGE
            with suppress(OSError, AttributeError):
                self.mapping.madvise(mmap.MADV_HUGEPAGE)
        self.used += size
        return torch.frombuffer(self.mapping, dtype=dtype, count=count, offset=self.used - size)


class Matrix:
    """Weights [N_i, K] below one another, as one product. In bfloat16 by our own kernel, in float32 by oneDNN, both
    with weights laid out once and again whenever they have changed."""

    def __init__(
        self,
        kernels: Kernels,
        linears: Sequence[nn.Linear],
        halves: bool = False,
        names: Sequence[str] = (),
        active: Active | None = None,
        codes: bool = False,
        memory: LastingMemory | None = None,
    ) -> None:
        """`halves`: of the two sides of a SwiGLU, laid out so that the engine can compute it with the product. `names`
        of the layers, by which `active` has low-rank additions to them (models/low_rank.py). `codes`: weights in
        bfloat16 that int8 holds (models/quantized.py), and is read instead. `memory`: of all matrices of a model."""
        self.memory = memory or LastingMemory()
        self.kernels, self.linears, self.halves, self.codes = kernels, linears, halves, codes
        self.names, self.active = names, active or Active()
        self.packed: PackedWeight | Tensor | None = None
        self.bias: Tensor | None = None
        self.made_of: tuple[tuple[int, int], ...] = ()

    @property
    def weights(self) -> list[Tensor]:
        return [matrix_of(m) for m in self.linears]

    def parameters(self) -> list[Tensor]:
        """Weights, then biases."""
        return [m.weight for m in self.linears] + [m.bias for m in self.linears if m.bias is not None]

    def layout(self) -> Any:
        """The weights as the product wants them. `_version` counts most of what is written into a tensor; for the rest
        there is `weights_changed`."""
        now = tuple((p.data_ptr(), p._version) for p in self.parameters())
        if self.packed is None or now != self.made_of:
            weights, old = self.weights, self.packed
            if self.kernels.dtype == torch.bfloat16:
                into = old if isinstance(old, PackedWeight) else self._room(sum(self.sizes), weights[0].shape[1])
                pack = self.kernels.encode if self.codes else self.kernels.pack
                self.packed = pack(weights, into=into, halves=self.halves)
            else:
                self.packed = None  # the memory first
                joined = weights[0] if len(weights) == 1 else torch.cat(weights)
                self.packed = torch.ops.mkldnn._reorder_linear_weight(joined, 32)
            self.bias = None if self.linears[0].bias is None else torch.cat([m.bias.detach() for m in self.linears])
            self.made_of = now
        return self.packed

    def _room(self, rows: int, columns: int) -> PackedWeight:
        size, dtype = (coded_size, torch.int8) if self.codes else (packed_size, torch.bfloat16)
        return PackedWeight(self.memory.take(size(rows, columns), dtype), rows, columns, self.halves)

    def stale(self) -> None:
        """The weights have changed."""
        self.made_of = ()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        packed = self.layout()
        if isinstance(packed, PackedWeight):
            if self.active.groups:  # rounded once: what is less than half a step of the sum would be lost otherwise
                return self.floats(x).to(x.dtype)
            return self.kernels.gemm(x, packed, self.bias)
        return self.extended(x, torch.ops.mkldnn._linear_pointwise(x, packed, self.bias, "none", [], ""))

    def extended(self, x: Tensor, y: Tensor) -> Tensor:
        """y = x W', with the low-rank additions of the rows that have some."""
        if self.active.groups:
            add_low_rank(self.active.groups, self.names, self.sizes, x, y, self.on_kernels)
        return y

    @property
    def sizes(self) -> list[int]:
        return [m.out_features for m in self.linears]

    @property
    def on_kernels(self) -> Kernels | None:
        """Those for products, which are PyTorch's in float32."""
        return self.kernels if self.kernels.dtype == torch.bfloat16 else None

    def add(self, x: Tensor, to: Tensor) -> None:
        """to += x W', to [T, N] float32."""
        packed = self.layout()
        if isinstance(packed, PackedWeight):
            self.kernels.gemm(x, packed, self.bias, add_to=to)
            self.extended(x, to)
        else:
            to += self(x)

    def floats(self, x: Tensor) -> Tensor:
        """x W' in float32."""
        packed = self.layout()
        if isinstance(packed, PackedWeight):
            y = self.kernels.gemm_float(x, packed, self.bias)
            if packed.halves:  # whose panels take turns
                y = y.view(len(y), -1, 2, PANEL).transpose(1, 2).reshape(y.shape)
            return self.extended(x, y)
        return self(x)

    def sample(self, x: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Of a head: one word for each row of x [B, K], and its log-prob, drawn as `Kernels.sample` does."""
        packed = self.layout()
        if isinstance(packed, PackedWeight):
            return self.kernels.head_sample(x, packed, self.bias, temperatures, uniforms)
        return self.kernels.sample(self(x), temperatures, uniforms)

    def logprobs(self, x: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of a head: log-prob of each row's target, log-normaliser and entropy, each [T], as in `Kernels.logprobs`."""
        packed = self.layout()
        if isinstance(packed, PackedWeight):
            return self.kernels.head_logprobs(x, packed, self.bias, targets, temperature)
        return self.kernels.logprobs(self(x), targets, temperature)

    def by_input(self, grad: Tensor) -> Tensor:
        """grad W: the gradient by the input, [T, N] -> [T, K]."""
        weights = self.weights
        if self.kernels.dtype == torch.bfloat16:
            by_x = self.kernels.gemm(grad, self.kernels.pack(weights, transposed=True))
        else:
            parts = zip(grad.split([len(w) for w in weights], 1), weights, strict=True)
            by_x, *rest = (torch.mm(g, w) for g, w in parts)
            for part in rest:
                by_x += part
        if self.active.groups:
            low_rank_by_input(self.active.groups, self.names, self.sizes, grad, by_x, self.on_kernels)
        return by_x

    def by_parameters(self, x: Tensor, grad: Tensor) -> list[Tensor | None]:
        """grad' x for each of `parameters()`; None where it went into a float32 master (`deposit`), and not computed
        for what is frozen."""
        weights = [m.weight for m in self.linears]
        sizes = [len(w) for w in weights]
        if self.active.groups:
            absorb_low_rank(self.active.groups, self.names, sizes, x, grad, self.on_kernels)
        trained = [w.requires_grad for w in weights]
        result: list[Tensor | None]
        if not any(trained):
            result = [None] * len(weights)
        elif self.kernels.dtype == torch.bfloat16:
            packed = self.kernels.pack([x], transposed=True)
            result = [outer(self.kernels, w, g, packed) for w, g in zip(weights, grad.split(sizes, 1), strict=True)]
        elif all(trained) and not any(w.is_meta for w in weights):
            result = [*torch.mm(grad.T, x).split(sizes)]
        else:
            parts = zip(weights, grad.split(sizes, 1), strict=True)
            result = [deposit(w, torch.mm(g.T, x)) if w.requires_grad else None for w, g in parts]
        if self.bias is not None:
            sums = grad.sum(0, dtype=torch.float32).split(sizes)
            result += [deposit(m.bias, g) for m, g in zip(self.linears, sums, strict=True)]
        return result


def deposit(parameter: Tensor, grad: Tensor) -> Tensor | None:
    """Add a float32 gradient to the parameter's float32 master, if it has one; else give it back in its own type.
    Of a frozen one there is none."""
    if not parameter.requires_grad:
        return None
    master = getattr(parameter, "master", None)
    if master is None:
        return grad.to(parameter.dtype)
    if hasattr(master, "absorb"):
        return master.absorb(grad)
    master.grad = grad.clone() if master.grad is None else master.grad.add_(grad)
    return None


def outer(k: Kernels, parameter: Tensor, grad: Tensor, x: PackedWeight) -> Tensor | None:
    """The gradient of a weight, summed in float32 right where it belongs. Of a frozen one there is none."""
    if not parameter.requires_grad:
        return None
    into, add = gradient_place(parameter)
    k.outer(grad, x, into, add)
    return unless_placed(parameter, into)


def unless_placed(parameter: Tensor, into: Tensor) -> Tensor | None:
    """What autograd gets as a gradient in `gradient_place`: nothing where that is a master's."""
    master = getattr(parameter, "master", None)
    if master is None:
        return into.to(parameter.dtype)
    return master.absorb(into) if hasattr(master, "absorb") else None


def gradient_place(parameter: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, bool]:
    """Where a parameter's gradient is, float32 in its master, and whether there is something in it already. Without a
    master it is new, in `dtype`."""
    master = getattr(parameter, "master", None)
    device = "cpu" if parameter.is_meta else parameter.device  # codes, whose products on a GPU need no such place
    if master is None or hasattr(master, "absorb"):
        return torch.empty(parameter.shape, dtype=dtype, device=device), False
    add = master.grad is not None
    if not add:
        master.grad = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    return master.grad, add
