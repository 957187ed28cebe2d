"""Reduce-scatter for FSDP over Gloo, whose own is an all-reduce of a copy of everything: twice the bytes, and as much
memory again."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class GlooReduceScatter(ReduceScatter):
    """Every rank sends each other one its part, and sums what it gets in the order of the ranks, so that the sum does
    not depend on who was faster.

    What is sent lies in one buffer for all units: large blocks that come and go between the gradients, which stay,
    leave holes in the C library's memory.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.float32)
        self._filling = False  # the buffer has been given away for the call that follows

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP asks for the input first, then for the output, then calls."""
        if self._filling:
            return torch.empty(*size, dtype=dtype, device=device)
        self._filling = True
        (count,) = size
        if self._buffer.numel() < count or self._buffer.dtype != dtype:
            self._buffer = torch.empty(count, dtype=dtype, device=device)
        return self._buffer[:count]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """`input_tensor` [n m] on each of n ranks, `output_tensor` [m]. Raises `RuntimeError` where FSDP does not do
        what this relies on: gradients would be wrong."""
        ours = self._buffer.data_ptr()
        if op != dist.ReduceOp.SUM or async_op or input_tensor.data_ptr() != ours or output_tensor.data_ptr() == ours:
            raise RuntimeError(f"this version of FSDP reduces gradients in another way: {op}, async_op={async_op}")
        self._filling = False
        n, own = group.size(), group.rank()
        parts = list(input_tensor.view(n, -1))
        received = [torch.empty_like(output_tensor) for _ in range(n - 1)]
        received.insert(own, parts[own])
        others = [rank for rank in range(n) if rank != own]
        waits = [dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
        waits += [dist.isend(parts[rank], group=group, group_dst=rank) for rank in others]
        for wait in waits:
            assert wait is not None
            wait.wait()
        torch.add(received[0], received[1], out=output_tensor)
        for part in received[2:]:
            output_tensor.add_(part)
