"""Placement of tensors over ranks, for tensors that are computed on as shards and saved whole."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of a tensor of `shape` on `mesh`: along each axis it is sharded in one dimension, or replicated."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> "Layout":
        return cls(tensor.device_mesh, tensor.placements, tuple(tensor.shape))

    def along(self, dim: int, shape: tuple[int, ...]) -> "Layout":
        """Layout of a tensor of another shape that is sharded along the axes that shard `dim` here, and only these."""
        kept = tuple(p if cut(p) == dim else Replicate() for p in self.placements)
        return Layout(self.mesh, kept, shape)

    def whole(self, part: Tensor, like: Sequence[int] = ()) -> DTensor:
        """Return this rank's shard as a DTensor. If its rows are shorter than those of this rank's shard `like` (scales
        of blocks of a row), so are the whole's."""
        shape = self.shape
        if like and part.shape[-1] != like[-1]:
            ways = math.prod(self.mesh.size(i) for i, p in enumerate(self.placements) if cut(p) == len(shape) - 1)
            shape = (*shape[:-1], part.shape[-1] * ways)
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        meta = TensorMeta(torch.Size(shape), stride, part.dtype)
        # `DTensor.from_local` copies a shard in CPU memory (optimizer.offload=cpu) to the mesh's GPU
        return DTensor(part, DTensorSpec(self.mesh, self.placements, tensor_meta=meta), requires_grad=False)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's shard, a view, of a tensor that every rank has whole."""
        sizes, start = compute_local_shape_and_global_offset(torch.Size(self.shape), self.mesh, self.placements)
        return whole[tuple(slice(first, first + n) for first, n in zip(start, sizes, strict=True))]

    def copies(self) -> int:
        """Number of ranks that hold each element."""
        inside = math.prod(self.mesh.size(i) for i, p in enumerate(self.placements) if p.is_replicate())
        return inside * (dist.get_world_size() // self.mesh.size())

    def groups(self, dim: int) -> list[dist.ProcessGroup]:
        """Process groups over which `dim` is sharded, one for each axis."""
        axes = [i for i, p in enumerate(self.placements) if cut(p) == dim and self.mesh.size(i) > 1]
        return [self.mesh.get_group(i) for i in axes]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut(placement: Placement) -> int | None:
    """The sharded dimension, or None; torch has two classes with one."""
    return getattr(placement, "dim", None)


def drop_gathered(root: nn.Module) -> None:
    """Call before weights change: FSDP keeps the gathered weights of `root` itself until the next backward pass, and
    would use the old values after a forward pass without one."""
    if isinstance(root, FSDPModule):
        root.reshard()


def gathered_for(layer: nn.Module, compute: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """Return compute(hidden), which reads weights of `layer`. An FSDP unit (`shard.py`) is gathered before, and freed
    after its backward pass, or at once without one. FSDP does not see `hidden`: it would reduce the gradient there, in
    float32 and beside all activations, instead of at the end."""
    if not isinstance(layer, FSDPModule):
        return compute(hidden)
    result = layer.compute(partial(compute, hidden))  # pyright: ignore
    if not torch.is_grad_enabled():
        layer.reshard()
    elif hidden.requires_grad:
        hidden.register_hook(lambda grad: layer.reshard())
    return result


def computed_in(layer: nn.Linear) -> torch.dtype:
    """Compute type of a layer's weight: FSDP may keep shards of another type."""
    own = layer._get_fsdp_state()._mp_policy.param_dtype if isinstance(layer, FSDPModule) else None
    return own or layer.weight.dtype
