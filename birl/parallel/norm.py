"""Gradients over ranks: all-reduce, and the global norm as a single rank would compute it."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from birl.parallel.ranks import Ranks

BUCKET = 2**24  # numbers of one all-reduce: 64 MiB


class Masters(Protocol):
    tensors: dict[str, Tensor]

    def copies(self, name: str) -> int: ...


def global_norm(masters: Masters, ranks: Ranks) -> Tensor:
    """Norm of the whole gradient, sqrt(sum of squares); each element counts once, however many ranks hold it."""
    if not ranks.sharded:
        return torch.nn.utils.get_total_norm([t.grad for t in masters.tensors.values() if t.grad is not None])
    squares = [
        torch.linalg.vector_norm(tensor.grad, dtype=torch.float64).square() / (masters.copies(name) or ranks.grid.size)
        for name, tensor in masters.tensors.items()
        if tensor.grad is not None
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt().float()


def sum_gradients(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce gradients (sum) over the group, in place, in buckets."""
    grads = [t.grad for t in tensors if t.grad is not None]
    while grads:
        bucket, size = [], 0
        while grads and (not bucket or size + grads[-1].numel() <= BUCKET):
            bucket.append(grads.pop())
            size += bucket[-1].numel()
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat, group=group)
        for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
