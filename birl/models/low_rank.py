"""LoRA terms of linear layers: y = x W' + (x A') B', with different A and B for different rows of one pass, and none
for some. The weights W are never changed, so many adapters (LoRA, arXiv:2106.09685) share one base model in one pass.

Rows of one adapter are contiguous (`RowGroup`). A row's result depends only on that row and its adapter, bit for bit on
birl's bfloat16 kernels; the gradient of A and B only on the adapter's rows, in their order.

Shapes: T rows, K inputs, N outputs, R the rank, padded with zeros to a multiple of 32 (the kernels' blocks).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from birl.kernels import Kernels
from birl.kernels.tensors import BLOCK, PackedWeight

Step = Callable[[Tensor, Any], Tensor]  # of a layer that keeps a state (models/states.py)
HEAD = "lm_head"  # name of the output layer's factors in every model


@dataclass(slots=True, eq=False)
class Factors:
    """A [R, K] and B [N, R] of one layer in the compute dtype; B includes the scale. `gradients`: float32 sums of the
    same shapes, if they are trained."""

    a: Tensor
    b: Tensor
    gradients: tuple[Tensor, Tensor] | None = None
    layouts: dict[str, PackedWeight] = field(default_factory=dict)

    @classmethod
    def of(cls, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> "Factors":
        """From float32 masters A [r, K], B [N, r], rounded once; if neither is trained they may be shared."""
        extra = -len(a) % BLOCK
        return cls(pad(a, (0, 0, 0, extra)).to(dtype), pad(b * scale, (0, extra)).to(dtype).contiguous())

    def layout(self, k: Kernels, what: str, transposed: bool = False) -> PackedWeight:
        """`a` or `b` packed for the kernels' product, once."""
        key = what + "'" * transposed
        if key not in self.layouts:
            self.layouts[key] = k.pack([getattr(self, what)], transposed=transposed)
        return self.layouts[key]

    def down(self, x: Tensor, k: Kernels | None) -> Tensor:
        """x A': [T, K] -> [T, R]."""
        return x @ self.a.T if k is None else k.gemm(x, self.layout(k, "a"))

    def up(self, x: Tensor, k: Kernels | None, to: Tensor) -> None:
        """to += (x A') B', to [T, N] in the dtype of x or float32; the sum is rounded once."""
        u = self.down(x, k)
        if k is None:
            to += u @ self.b.T
        elif to.dtype == torch.float32:
            k.gemm(u, self.layout(k, "b"), add_to=to)
        else:
            to.copy_(k.gemm_float(u, self.layout(k, "b")).add_(to))

    def by_input(self, grad: Tensor, k: Kernels | None, to: Tensor) -> None:
        """to += (grad B) A, to [T, K] float32."""
        if k is None:
            to += (grad @ self.b) @ self.a
        else:
            k.gemm(k.gemm(grad, self.layout(k, "b", True)), self.layout(k, "a", True), add_to=to)

    def absorb(self, x: Tensor, grad: Tensor, k: Kernels | None) -> None:
        """Add the gradients with respect to A, (grad B)' x, and B, grad' (x A'), to the sums."""
        if self.gradients is None:
            return
        by_a, by_b = self.gradients
        u = self.down(x, k)
        if k is None:
            by_a += ((grad @ self.b).T @ x).float()
            by_b += (grad.T @ u).float()
        else:
            gu = k.gemm(grad, self.layout(k, "b", True))
            k.outer(gu, k.pack([x], transposed=True), by_a, True)
            k.outer(grad, k.pack([u], transposed=True), by_b, True)


@dataclass(eq=False)
class AdapterWeights:
    """The factors of one adapter, by layer name; immutable. `number` identifies their content: KV cache pages are
    reused only for the same one."""

    number: int
    factors: Mapping[str, Factors]

    @property
    def nbytes(self) -> int:
        """Bytes in memory, with the layouts so far."""
        every = self.factors.values()
        return sum(f.a.nbytes + f.b.nbytes + sum(p.data.nbytes for p in [*f.layouts.values()]) for f in every)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows `start` to `stop` of a pass use this adapter."""

    start: int
    stop: int
    adapter: AdapterWeights


def row_groups(adapters: Sequence[AdapterWeights | None]) -> list[RowGroup]:
    """Groups of consecutive rows with the same adapter; `adapters`: that of each row."""
    result, start = [], 0
    for adapter, rows in groupby(adapters, key=lambda x: x):
        stop = start + len(list(rows))
        if adapter is not None:
            result.append(RowGroup(start, stop, adapter))
        start = stop
    return result


@dataclass(slots=True)
class Active:
    """The row groups of the current pass; layers read it. `trained`: gradients of the factors are needed."""

    groups: Sequence[RowGroup] = ()
    trained: bool = False

    def carried(self, rows: Tensor, step: Step) -> tuple[Tensor, Step]:
        """For a layer that keeps a state, whose `step` computes other rows than the pass, in another order: rows [1, T,
        H + 1] with the number of their group, and a step that reads it."""
        groups = self.groups
        column = rows.new_zeros(*rows.shape[:2], 1)
        for number, group in enumerate(groups, 1):
            column[:, group.start : group.stop] = number

        def own(x: Tensor, state: Any) -> Tensor:
            numbers = x[..., -1].flatten().int().tolist()
            self.groups = row_groups([groups[n - 1].adapter if n else None for n in numbers])
            try:
                return step(x[..., :-1].contiguous(), state)
            finally:
                self.groups = groups

        return torch.cat([rows, column], -1), own


ACTIVE: "WeakKeyDictionary[nn.Module, Active]" = WeakKeyDictionary()


def active_in(model: nn.Module) -> Active:
    return ACTIVE.setdefault(model, Active())


@contextmanager
def adapted(model: nn.Module, groups: Sequence[RowGroup], trained: bool = False) -> Iterator[None]:
    """Context in which rows of passes through `model` use these adapters; it must include the backward pass."""
    active = active_in(model)
    before = active.groups, active.trained
    active.groups, active.trained = groups, trained
    try:
        yield
    finally:
        active.groups, active.trained = before


def _parts(
    groups: Sequence[RowGroup], names: Sequence[str], sizes: Sequence[int]
) -> Iterator[tuple[slice, slice, Factors]]:
    """Rows and columns of the concatenated layers `names` that a group has factors for, and these."""
    for group in groups:
        start = 0
        for name, size in zip(names, sizes, strict=True):
            if (factors := group.adapter.factors.get(name)) is not None:
                yield slice(group.start, group.stop), slice(start, start + size), factors
            start += size


def add_low_rank(groups: Sequence[RowGroup], names: Sequence[str], sizes: Sequence[int], x: Tensor, to: Tensor,
                 k: Kernels | None) -> None:  # fmt: skip
    """to [T, sum of sizes] += each group's LoRA terms of the layers `names`, which all have the input x [T, K]."""
    for rows, columns, factors in _parts(groups, names, sizes):
        factors.up(x[rows], k, to[rows, columns])


def low_rank_by_input(groups: Sequence[RowGroup], names: Sequence[str], sizes: Sequence[int], grad: Tensor,
                      to: Tensor, k: Kernels | None) -> None:  # fmt: skip
    """to [T, K] += the input's gradient through the LoRA terms, of grad [T, sum of sizes]; rounded once."""
    for group in groups:
        own = slice(group.start, group.stop)
        whole = to[own].float()
        for rows, columns, factors in _parts([group], names, sizes):
            factors.by_input(grad[rows, columns], k, whole)
        to[own] = whole.to(to.dtype)


def absorb_low_rank(groups: Sequence[RowGroup], names: Sequence[str], sizes: Sequence[int], x: Tensor, grad: Tensor,
                    k: Kernels | None) -> None:  # fmt: skip
    """Add each group's gradients of A and B to their sums."""
    for rows, columns, factors in _parts(groups, names, sizes):
        factors.absorb(x[rows], grad[rows, columns], k)


def hook(model: nn.Module, layers: Mapping[str, nn.Linear], inside: bool = False) -> None:
    """Add the LoRA terms in transformers' forward, for a model that birl's kernels do not support. `inside`: before
    tensor parallelism sums over ranks (`parallel/tensor.py`); the engine replaces a layer's forward."""
    active = active_in(model)
    for module in (m for m in model.modules() if hasattr(m, "layer_idx")):
        module.low_rank = active  # pyright: ignore
    for name, layer in layers.items():
        added = _Hook(name, active)
        if inside:
            layer.forward = partial(added.forward, layer.forward)  # pyright: ignore
        else:
            layer.register_forward_hook(added)


@dataclass(frozen=True, slots=True)
class _Hook:
    name: str
    active: Active

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        groups = [g for g in self.active.groups if self.name in g.adapter.factors]
        if not groups:
            return None
        leaf = torch.empty(0, dtype=torch.float32, requires_grad=self.active.trained)
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        return output + _LowRank.apply(x, leaf, self.name, groups).view_as(output)  # pyright: ignore

    def forward(self, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        output = base(x)
        added = self(cast("Any", None), (x,), output)
        return output if added is None else added


class _LowRank(torch.autograd.Function):
    """Zeros in rows without an adapter. `leaf` makes autograd reach this node although all weights are frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, name: str, groups: Sequence[RowGroup]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name, ctx.groups = name, groups
        size = len(groups[0].adapter.factors[name].b)
        result = torch.zeros(len(x), size, dtype=x.dtype, device=x.device)
        add_low_rank(groups, [name], [size], x, result, None)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad, shape = grads[0], ([ctx.name], [grads[0].shape[1]])
        absorb_low_rank(ctx.groups, *shape, x, grad, None)
        by_x = torch.zeros_like(x)
        low_rank_by_input(ctx.groups, *shape, grad, by_x, None)
        return by_x, None, None, None
