"""Weights packed for products on birl's kernels, once and again after changes, and where their gradients are stored.

A learner's parameter in bfloat16 has a float32 master (`parameter.master`), in which its gradient is accumulated. If
the parameter is composed of others, its master has no gradient of this size (`absorb`, learner/lora.py).
Shapes: T rows, N outputs, K inputs.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from birl.kernels import Kernels
from birl.kernels.tensors import PANEL, PackedWeight, coded_size, packed_size
from birl.models.low_rank import Active, absorb_low_rank, add_low_rank, low_rank_by_input
from birl.models.quantized import matrix_of

HUGE, MAPPED = 2**21, 2**25  # bytes of a page, and of a mapping


class LastingMemory:
    """Memory for what every step reads, weights and KV cache, in pages of 2 MiB if the kernel has some: a thread of an
    AMD EPYC (Zen 4) reads 28 GB/s instead of 20. A mapping is freed with the last tensor in it."""

    def __init__(self) -> None:
        self.mapping: mmap.mmap | None = None
        self.used = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] elements, not initialised."""
        size = -(-count * dtype.itemsize // 64) * 64
        if self.mapping is None or self.used + size > len(self.mapping):
            self.mapping = mmap.mmap(-1, max(size, MAPPED) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.used = -torch.frombuffer(self.mapping, dtype=torch.uint8).data_ptr() % HUGE
            with suppress(OSError, AttributeError):
                self.mapping.madvise(mmap.MADV_HUGEPAGE)
        self.used += size
        return torch.frombuffer(self.mapping, dtype=dtype, count=count, offset=self.used - size)


class Matrix:
    """Weights [N_i, K] concatenated along N, as one product by birl's kernel, packed once and again whenever they have
    changed."""

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
        """`halves`: both projections of a SwiGLU, laid out so that the engine can compute it with the product. `names`
        of the layers, by which `active` has LoRA terms for them (models/low_rank.py). `codes`: bfloat16 weights that
        are exact in int8 (models/quantized.py) are read as codes. `memory`: shared by all matrices of a model."""
        self.memory = memory or LastingMemory()
        self.kernels, self.linears, self.halves, self.codes = kernels, linears, halves, codes
        self.names, self.active = names, active or Active()
        self.packed: PackedWeight | None = None
        self.bias: Tensor | None = None
        self.made_of: tuple[tuple[int, int], ...] = ()

    @property
    def weights(self) -> list[Tensor]:
        return [matrix_of(m) for m in self.linears]

    def parameters(self) -> list[Tensor]:
        """Weights, then biases."""
        return [m.weight for m in self.linears] + [m.bias for m in self.linears if m.bias is not None]

    def layout(self) -> PackedWeight:
        """The weights packed for the product. `_version` counts most writes to a tensor; for the others call
        `weights_changed`."""
        now = tuple((p.data_ptr(), p._version) for p in self.parameters())
        if self.packed is None or now != self.made_of:
            weights = self.weights
            into = self.packed or self._room(sum(self.sizes), weights[0].shape[1])
            pack = self.kernels.encode if self.codes else self.kernels.pack
            self.packed = pack(weights, into=into, halves=self.halves)
            self.bias = None if self.linears[0].bias is None else torch.cat([m.bias.detach() for m in self.linears])
            self.made_of = now
        return self.packed

    def _room(self, rows: int, columns: int) -> PackedWeight:
        size, dtype = (coded_size, torch.int8) if self.codes else (packed_size, self.kernels.dtype)
        return PackedWeight(self.memory.take(size(rows, columns), dtype), rows, columns, self.halves)

    def stale(self) -> None:
        """Mark the packed weights as outdated."""
        self.made_of = ()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        if self.active.groups:  # rounded once: LoRA terms below half a step of the sum would be lost otherwise
            return self.floats(x).to(x.dtype)
        return self.kernels.gemm(x, self.layout(), self.bias)

    def extended(self, x: Tensor, y: Tensor) -> Tensor:
        """y = x W', plus the LoRA terms of the rows that have some."""
        if self.active.groups:
            add_low_rank(self.active.groups, self.names, self.sizes, x, y, self.kernels)
        return y

    @property
    def sizes(self) -> list[int]:
        return [m.out_features for m in self.linears]

    def add(self, x: Tensor, to: Tensor) -> None:
        """to += x W', to [T, N] float32."""
        self.kernels.gemm(x, self.layout(), self.bias, add_to=to)
        self.extended(x, to)

    def floats(self, x: Tensor) -> Tensor:
        """x W' in float32."""
        packed = self.layout()
        y = self.kernels.gemm_float(x, packed, self.bias)
        if packed.halves:  # whose panels alternate
            y = y.view(len(y), -1, 2, PANEL).transpose(1, 2).reshape(y.shape)
        return self.extended(x, y)

    def sample(self, x: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """For a head: one token for each row of x [B, K], and its log-prob, sampled as `Kernels.sample` does."""
        return self.kernels.head_sample(x, self.layout(), self.bias, temperatures, uniforms)

    def logprobs(self, x: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """For a head: log-prob of each row's target, log-normaliser and entropy, each [T], as in `Kernels.logprobs`."""
        return self.kernels.head_logprobs(x, self.layout(), self.bias, targets, temperature)

    def by_input(self, grad: Tensor) -> Tensor:
        """grad W: the gradient with respect to the input, [T, N] -> [T, K]."""
        by_x = self.kernels.gemm(grad, self.kernels.pack(self.weights, transposed=True))
        if self.active.groups:
            low_rank_by_input(self.active.groups, self.names, self.sizes, grad, by_x, self.kernels)
        return by_x

    def by_parameters(self, x: Tensor, grad: Tensor) -> list[Tensor | None]:
        """grad' x for each of `parameters()`; None if it went into a float32 master (`deposit`) or the parameter is
        frozen."""
        weights = [m.weight for m in self.linears]
        sizes = [len(w) for w in weights]
        if self.active.groups:
            absorb_low_rank(self.active.groups, self.names, sizes, x, grad, self.kernels)
        result: list[Tensor | None] = [None] * len(weights)
        if any(w.requires_grad for w in weights):
            packed = self.kernels.pack([x], transposed=True)
            result = [outer(self.kernels, w, g, packed) for w, g in zip(weights, grad.split(sizes, 1), strict=True)]
        if self.bias is not None:
            sums = grad.sum(0, dtype=torch.float32).split(sizes)
            result += [deposit(m.bias, g) for m, g in zip(self.linears, sums, strict=True)]
        return result


def deposit(parameter: Tensor, grad: Tensor) -> Tensor | None:
    """Add a float32 gradient to the parameter's float32 master, if it has one; else return it in the parameter's dtype.
    None if frozen."""
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
    """The gradient of a weight, accumulated in float32 in place. None if it is frozen."""
    if not parameter.requires_grad:
        return None
    into, add = gradient_place(parameter)
    k.outer(grad, x, into, add)
    return unless_placed(parameter, into)


def unless_placed(parameter: Tensor, into: Tensor) -> Tensor | None:
    """The value that autograd gets for a gradient in `gradient_place`: None if that is a master's."""
    master = getattr(parameter, "master", None)
    if master is None:
        return into.to(parameter.dtype)
    return master.absorb(into) if hasattr(master, "absorb") else None


def gradient_place(parameter: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, bool]:
    """The tensor of a parameter's gradient, float32 in its master, and whether to add to its content. Without a master
    it is new, in `dtype`."""
    master = getattr(parameter, "master", None)
    device = "cpu" if parameter.is_meta else parameter.device  # quantised codes, whose products on a GPU do not use it
    if master is None or hasattr(master, "absorb"):
        return torch.empty(parameter.shape, dtype=dtype, device=device), False
    add = master.grad is not None
    if not add:
        master.grad = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    return master.grad, add
