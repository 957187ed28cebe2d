"""FSDP2 applied to a model: each rank keeps its shard of every weight, and has a whole layer only while it
computes.

Gradients are summed over the ranks in float32, never averaged: the weights of a micro-batch hold the step's
denominator already.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import Shard

from birl.models.device import device_of
from birl.models.vision import language_model
from birl.parallel.experts import spread
from birl.parallel.ranks import Ranks

# of layers with experts or tp; no layer's output is changed in place here
warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")


class GlooReduceScatter(ReduceScatter):
    """Reduce-scatter for FSDP over Gloo, whose own one is an all-reduce of a full copy: twice the bytes.

    Every rank sends each other rank its part, and sums the received ones in the order of the ranks, so that the sum
    does not depend on timing.

    All units share one send buffer: large blocks allocated and freed between the gradients, which stay, would fragment
    the C library's heap.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.float32)
        self._filling = False  # whether the buffer is allocated for the next call

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer. FSDP allocates the input first, then the output, then calls."""
        if self._filling:
            return torch.empty(*size, dtype=dtype, device=device)
        self._filling = True
        (count,) = size
        if self._buffer.numel() < count or self._buffer.dtype != dtype:
            self._buffer = torch.empty(count, dtype=dtype, device=device)
        return self._buffer[:count]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """`input_tensor` [n m] on each of n ranks, `output_tensor` [m]. Raises `RuntimeError` if FSDP does not use it
        as assumed here: gradients would be wrong."""
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


def shard(root: nn.Module, model: nn.Module, ranks: Ranks, dtype: torch.dtype, *, offload: bool = False) -> None:
    """Shard `model`'s parameters over `ranks`, each decoder layer as a unit, the embedding and an untied head as one
    each, and all others with `root`, the module whose forward pass is called. Computes in `dtype`; parameters keep
    their type, gradients are float32. A layer is freed between the forward and the backward pass. `offload`: shards are
    in CPU memory. Experts may be spread over some of the ranks before (`experts.py`)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if parameters else None, cast_forward_inputs=False
    )
    pinned = device_of(model).type == "cuda"
    kept = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    comm = GlooReduceScatter() if device_of(model).type == "cpu" else None
    mesh: Any = ranks.mesh  # FSDP does not know the replicas: it would sum over them in every micro-batch

    def wrap(unit: nn.Module, mesh: DeviceMesh, **more: Any) -> None:
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=kept, **more)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # Gloo has no other reduction, and a factor of 1 needs none
        if comm is not None and mesh.shape[-1] > 1:
            unit.set_custom_reduce_scatter(comm)

    for unit in spread(model, ranks) if ranks.grid.ep > 1 else ():
        rest: Any = ranks.experts  # the first dimension is split over ep
        wrap(unit, rest["rest"], reshard_after_forward=True, shard_placement_fn=lambda _: Shard(1))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # pyright: ignore
    if head.weight is not embedding.weight:
        wrap(embedding, mesh["shard"], reshard_after_forward=True)
        embedding.set_unshard_in_backward(False)  # the backward pass reads no weight of it
        wrap(head, mesh["shard"], reshard_after_forward=False)  # its backward pass follows
        head.compute = lambda compute: compute()  # `layout.gathered_for`
        register_fsdp_forward_method(head, "compute")
    for unit in (*layers(model), root):
        wrap(unit, mesh["shard"], reshard_after_forward=unit is not root)
    register_fsdp_forward_method(root, "states")


def settle(root: nn.Module) -> None:
    """Move parameters that got values after `shard` to their final memory, unit by unit: FSDP pads uneven shards, and
    pins those in CPU memory, by moving them on first use, after which references to a shard would be outdated.
    `unshard` does the same before it gathers."""
    for unit in root.modules():
        group = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
        if group is not None:
            group.lazy_init()


def layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: the outermost modules that transformers marks as unsplittable. None of a vision tower, which
    a rank calls as often as its samples have pictures: it is gathered with `root`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    every = [m for m in (language_model(model) or model).modules() if type(m).__name__ in names]
    within = {id(inner) for m in every for inner in m.modules() if inner is not m}  # Mamba's mixers
    return [m for m in every if id(m) not in within]
