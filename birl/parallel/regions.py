"""Where activations change hands between tensor-parallel ranks.

Attention and MLPs are split over the ranks: each has some heads, some columns. What lies between them, norms and
residuals, every rank computes for all tokens or, with sequence parallelism, for T / tp of them.

                 into a split block               out of it
    all tokens   as it is                         sum over the ranks
                 backward: sum                    backward: as it is
    T / tp       all-gather                       sum, of which each rank keeps its tokens (reduce-scatter)
                 backward: reduce-scatter         backward: all-gather

Megatron-LM, arXiv:1909.08053 section 3 (f and g); arXiv:2205.05198 section 4.2.2 (g and its conjugate).
Activations are [T, H] or [1, T, H]: the last dimension but one is the one that is cut.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from birl.parallel.exchange import all_gather

reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # the older name warns


@dataclass(frozen=True, slots=True)
class Regions:
    """The ranks that layers are split over; with `sequence` also the tokens between the split blocks."""

    group: dist.ProcessGroup
    sequence: bool

    def enter(self, x: Tensor) -> Tensor:
        """Before a split block, whose output each rank knows in part."""
        return _Enter.apply(x, self)  # pyright: ignore

    def leave(self, x: Tensor) -> Tensor:
        """After a split block: `x` is this rank's summand."""
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
    """[T, H] summed over the ranks, of which each gets its [T / tp, H]."""
    *ones, tokens, width = x.shape
    part = x.new_empty(tokens // dist.get_world_size(group), width)
    reduce_scatter(part, x.reshape(tokens, width).contiguous(), group=group)
    return part.view(*ones, -1, width)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A new tensor: others may still read `x`, such as the gradient of a residual."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
