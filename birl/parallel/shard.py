"""FSDP2 on a model, from outside: each rank keeps its part of every weight, and has a layer whole only while it
computes.

Gradients are summed over the ranks in float32, never averaged: the weights of a micro-batch hold the step's
denominator already.
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from birl.models.device import device_of
from birl.parallel.ranks import Ranks


def shard(
    root: nn.Module, model: nn.Module, ranks: Ranks, dtype: torch.dtype, *, reshard: bool = True, offload: bool = False
) -> None:
    """Split `model`'s parameters over `ranks`, each decoder layer as a unit and all the rest with `root`, the module
    whose forward pass is called. Computes in `dtype`; parameters stay as they are, gradients are float32. `reshard`:
    give a layer back between the forward and the backward pass. `offload`: parts live in CPU memory."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if parameters else None, cast_forward_inputs=False
    )
    pinned = device_of(model).type == "cuda"
    kept = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    for unit in (*layers(model), root):
        fully_shard(
            unit,
            mesh=ranks.sharding,
            mp_policy=policy,
            offload_policy=kept,
            reshard_after_forward=reshard and unit is not root,
        )
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other, and 1 needs no factor


def settle(root: nn.Module) -> None:
    """Parameters that were given values after `shard` take their final place now: FSDP pads uneven parts by moving
    them, at the first use, and whoever had hold of a part would then have an old one."""
    assert isinstance(root, FSDPModule)
    root.unshard()
    root.reshard()


def layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: the modules that transformers says must not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [m for m in model.modules() if type(m).__name__ in names]


def drop_gathered(root: nn.Module) -> None:
    """Before weights change: FSDP keeps what it has gathered for `root` itself until the next backward pass, and after
    a forward pass without one would go on with the old values."""
    if isinstance(root, FSDPModule):
        root.reshard()


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())
