"""Three collectives with their gradients, over the ranks of a group that share packed rows. n ranks.

Gradients of what several ranks used are added in float32 and in the ranks' order, whatever they travel in, so that they
are the same in every run.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the older name warns


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows, one rank's behind another's: [T, ...] -> [n T, ...]. Backward each rank is sent the gradients
    of its own rows, and adds them."""
    return _Gather.apply(x, group)  # pyright: ignore


def swap(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x[i] goes to rank i, and what it sent is found at [i]: [n, ...] -> [n, ...]. Backward the same."""
    return _Swap.apply(x, group)  # pyright: ignore


def join(
    figures: Sequence[Tensor], order: Tensor, counts: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Figures of the tokens that each rank has -> of all, on every rank: float32 [counts[rank]] each -> [N] each.

    `order` [N]: which tokens they are, one rank's behind another's. Every rank goes on with the same loss of all
    tokens, and its gradient by its own ones is all that is its to send back: backward nothing travels.
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
        ctx.set_materialize_grads(False)  # a figure that the loss does not read has no gradient to compute
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
