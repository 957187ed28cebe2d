"""Differentiable collectives: over ranks that share packed rows, and over tensor-parallel ranks. n ranks.

Gradients of data that several ranks used are added in float32 and in the ranks' order, whatever dtype is sent, so that
they are the same in every run.

Attention and MLPs are split over tensor-parallel ranks: each has some heads, some columns. Between them, norms and
residuals are computed by every rank for all tokens or, with sequence parallelism, for T / tp of them.

                 into a split block               out of it
    all tokens   unchanged                        sum over the ranks
                 backward: sum                    backward: unchanged
    T / tp       all-gather                       sum, of which each rank keeps its tokens (reduce-scatter)
                 backward: reduce-scatter         backward: all-gather

Megatron-LM, arXiv:1909.08053 section 3 (f and g); arXiv:2205.05198 section 4.2.2 (g and its conjugate). Activations are
[T, H] or [1, T, H]: the last dimension but one is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the older name warns


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather of rows in the order of ranks: [T, ...] -> [n T, ...]. In the backward pass each rank receives the
    gradients of its own rows, and adds them."""
    return _Gather.apply(x, group)  # pyright: ignore


def swap(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: x[i] goes to rank i, and [i] of the result comes from it: [n, ...] -> [n, ...]. Backward the same."""
    return _Swap.apply(x, group)  # pyright: ignore


def join(
    figures: Sequence[Tensor], order: Tensor, counts: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Gather the figures of each rank's tokens on every rank: float32 [counts[rank]] each -> [N] each.

    `order` [N]: index of the gathered tokens, rank by rank. Every rank then computes the same loss of all tokens, and
    the gradient of its own figures is complete: the backward pass communicates nothing.
    """
    return _Join.apply(order, counts, group, *figures)  # pyright: ignore


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        result = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        all_gather(result, x.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        parts = _sent(grads[0].unflatten(0, (ctx.group.size(), -1)), ctx.group)
        return parts.sum(0, dtype=torch.float32).to(parts.dtype), None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sent(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sent(grads[0], ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: Tensor, counts: Sequence[int], group: dist.ProcessGroup, *figures: Tensor
    ) -> tuple[Tensor, ...]:
        rank, longest = dist.get_rank(group), max(counts)
        ctx.own = order.split(list(counts))[rank]
        ctx.set_materialize_grads(False)  # a figure that the loss does not use has no gradient
        own = torch.nn.functional.pad(torch.stack(figures), (0, longest - counts[rank]))
        result = own.new_empty(len(counts) * len(figures), longest)
        all_gather(result, own, group=group)
        parts = result.view(len(counts), len(figures), longest)
        whole = own.new_empty(len(figures), len(order))
        whole[:, order] = torch.cat([part[:, :n] for part, n in zip(parts, counts, strict=True)], 1)
        return tuple(row.clone() for row in whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *(None if g is None else g[ctx.own] for g in grads)


def _sent(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(result, x.contiguous(), group=group)
    return result


reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # the older name warns


@dataclass(frozen=True, slots=True)
class Regions:
    """The tensor-parallel ranks; with `sequence` also the tokens between the split blocks are split over them."""

    group: dist.ProcessGroup
    sequence: bool

    def enter(self, x: Tensor) -> Tensor:
        """Enter a split block, in which each rank computes a part of the output."""
        return _Enter.apply(x, self)  # pyright: ignore

    def leave(self, x: Tensor) -> Tensor:
        """Leave a split block: `x` is this rank's summand of the output."""
        return _Leave.apply(x, self)  # pyright: ignore

    def end(self, x: Tensor) -> Tensor:
        """After the last layer: all tokens on every rank. All ranks must compute the same with them."""
        return _End.apply(x, self) if self.sequence else x  # pyright: ignore


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, regions: Regions) -> Tensor:
        ctx.regions = regions
        return gathered(x, regions.group) if regions.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        reduce = scattered if ctx.regions.sequence else summed
        return reduce(grads[0], ctx.regions.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, regions: Regions) -> Tensor:
        ctx.regions = regions
        return (scattered if regions.sequence else summed)(x, regions.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gathered(grads[0], ctx.regions.group) if ctx.regions.sequence else grads[0], None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, regions: Regions) -> Tensor:
        ctx.regions = regions
        return gathered(x, regions.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        group = ctx.regions.group
        return grads[0].chunk(dist.get_world_size(group), dim=-2)[dist.get_rank(group)], None


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T / tp, H] of each rank -> [T, H]."""
    *ones, tokens, width = x.shape
    whole = x.new_empty(tokens * dist.get_world_size(group), width)
    all_gather(whole, x.reshape(tokens, width).contiguous(), group=group)
    return whole.view(*ones, -1, width)


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, H] summed over the ranks; each gets its [T / tp, H]."""
    *ones, tokens, width = x.shape
    part = x.new_empty(tokens // dist.get_world_size(group), width)
    reduce_scatter(part, x.reshape(tokens, width).contiguous(), group=group)
    return part.view(*ones, -1, width)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce (sum) into a new tensor: others may still read `x`, such as the gradient of a residual."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
