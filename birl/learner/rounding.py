"""The float32 numbers that master weights begin with, where the model computes in bfloat16.

A weight of the model is its master rounded, so a master may be any number that rounds to the weight. Which one decides
what the first steps do:

    halfway between two weights   (of what was float16 or 4 bits once) a step of any size, 1e-8 as well as 1e-5, rounds
                                  it along its own sign: SmolLM2's log-probs move by 0.4 nats a token
    the weight itself             (of what is published in bfloat16) nothing happens until the steps add up to half the
                                  distance to the next weight: a step at 1e-5 moves the policy by a tenth of what it
                                  should
    anywhere between, evenly      a step of d moves d / distance of the weights by the distance, so the weights move by
                                  the step in the mean, as if each step were rounded stochastically (arXiv:1502.02551)
                                  with a random number that is drawn once; so is what was trained in float32

`dither` makes the third of all. The weights that the model computes with do not change by it.
"""

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from birl.parallel.layout import Layout

if TYPE_CHECKING:
    from birl.learner.optimizer import MasterWeights, ShardedMasterWeights

BLOCK = {"cpu": 2**18, "cuda": 2**24}  # elements whose indices, in 8 bytes each, are there at once
LOW = 2**16  # float32 numbers from one bfloat16 number to the next


@torch.no_grad()
def on_grid(tensors: Iterable[Tensor], dtype: torch.dtype = torch.bfloat16) -> int:
    """Round float32 tensors in place to the nearest numbers of `dtype`; gives how many elements changed."""
    changed = 0
    for tensor in tensors:
        rounded = tensor.to(dtype).to(tensor.dtype)
        changed += int((rounded != tensor).sum())
        tensor.copy_(rounded)
    return changed


@torch.no_grad()
def dither(masters: "MasterWeights | ShardedMasterWeights", dtype: torch.dtype) -> int:
    """Put each master, in place, where its name and its place in the whole tensor say, among the numbers that round to
    its weight: the same on any number of ranks. Gives how many elements were not numbers of `dtype`. A weight of 0
    keeps 0, around which float32 and bfloat16 are equally fine; in other types than bfloat16 all keep the weight."""
    changed = on_grid((master.data for master in masters.tensors.values()), dtype)
    if dtype == torch.bfloat16:
        for name, master in masters.tensors.items():
            _dither(master.data, _places(masters.whole(name, master.data)), zlib.crc32(name.encode()))
    return changed


def _dither(part: Tensor, places: list[Tensor], seed: int) -> None:
    """`places` [R, 1] and [C], int64: sums of a row's and a column's are indices in the whole tensor."""
    rows, columns = places
    bits = part.view(-1, len(columns)).view(torch.int32)
    step = max(BLOCK.get(part.device.type, 2**18) // max(len(columns), 1), 1)
    for one, where in zip(bits.split(step), rows.split(step), strict=True):
        x = (where + columns).bitwise_xor_(seed).bitwise_and_(2**32 - 1)
        for _ in range(2):  # an integer hash of 32 bits: products stay below 2^63
            x.bitwise_xor_(x >> 16).mul_(0x45D9F3B).bitwise_and_(2**32 - 1)
        offset = x.bitwise_xor_(x >> 16).bitwise_and_(LOW - 1).sub_(LOW // 2).clamp_(min=1 - LOW // 2)
        one.add_(offset.mul_(one.bitwise_and(2**31 - 1) != 0).to(torch.int32))


def _places(whole: Tensor) -> list[Tensor]:
    """Of this rank's part of a tensor of [..., C]: where its rows begin in the whole, and its columns within a row."""
    shape, device = tuple(whole.shape) or (1,), whole.device
    layout = Layout.of(whole) if isinstance(whole, DTensor) else None
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        alone = [size if other == dim else 1 for other in range(len(shape))]
        index = torch.arange(size, dtype=torch.int64, device=device).view(alone)
        if layout is not None:
            index = layout.along(dim, tuple(alone)).part(index)
        if dim == len(shape) - 1:
            return [rows.mul_(size).unsqueeze(1), index.flatten()]
        rows = (rows.unsqueeze(1) * size + index.flatten()).flatten()
    raise AssertionError
