"""Gradients over ranks: their sum, and the norm that one rank alone would have computed."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from birl.parallel.ranks import Ranks

BUCKET = 2**24  # numbers that are sent at once: 64 MiB


class Masters(Protocol):
    tensors: dict[str, Tensor]

    def copies(self, name: str) -> int: ...


def global_norm(masters: Masters, ranks: Ranks) -> Tensor:
    """sqrt(sum of squares) of the whole gradient, each element counted once however many ranks have it."""
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
    """Every rank's gradients become the sum over the group, in place, in buckets."""
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
