"""Rounding of float32 masters to bfloat16 weights such that small optimizer steps have an effect.

A weight is a rounded master, or a rounded W + s B A of LoRA. The initial values decide the effect of the first steps:

    halfway between two weights   (of what was float16 or 4 bits once) a step of any size, 1e-8 as well as 1e-5, rounds
                                  it along its own sign: SmolLM2's log-probs move by 0.4 nats a token
    the weight itself             (of what is published in bfloat16) nothing happens until the steps add up to half the
                                  distance to the next weight: at 1e-5 the policy moves by a thirtieth of what it should
    uniformly in between          a step of d moves d / distance of the weights by the distance, so the weights move by
                                  the step in the mean, as if each step were rounded stochastically (arXiv:1502.02551)
                                  with a random number that is drawn once; so is what was trained in float32

`Dither` turns the second case into the third: each element has a fixed offset. The initial weights do not change by
it.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from birl.parallel.layout import Layout

if TYPE_CHECKING:
    from birl.learner.lora import Adapter
    from birl.learner.optimizer import Masters

LENGTH = 2**22  # of the noise, which is repeated after its end
#: of the 2^15 float32 numbers that round to a bfloat16 number on one side; 8 are left for rounding errors
MOST = 2**15 - 8


@torch.no_grad()
def on_grid(tensors: Iterable[Tensor], dtype: torch.dtype = torch.bfloat16) -> int:
    """Round float32 tensors in place to the nearest numbers of `dtype`; returns the number of changed elements."""
    changed = 0
    for tensor in tensors:
        rounded = tensor.to(dtype).to(tensor.dtype)
        changed += int((rounded != tensor).sum())
        tensor.copy_(rounded)
    return changed


@torch.no_grad()
def noise(device: torch.device) -> Tensor:
    """[LENGTH] int32, uniform from -MOST to MOST: an integer hash of 1, 2, 3 ..., the same on every device."""
    x = torch.arange(1, LENGTH + 1, dtype=torch.int64, device=device)
    for _ in range(2):  # products stay below 2^63
        x.bitwise_xor_(x >> 16).mul_(0x45D9F3B).bitwise_and_(2**32 - 1)
    return x.bitwise_xor_(x >> 16).remainder_(2 * MOST + 1).sub_(MOST).to(torch.int32)


@dataclass(frozen=True, slots=True)
class Dither:
    """Offsets that are added to the elements of one tensor before they are rounded to the nearest bfloat16 numbers.
    `rows` [R, 1] and `columns` [C] int64: their sum is an element's index in `noise`."""

    noise: Tensor
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, name: str, shape: Iterable[int], noise: Tensor, layout: Layout | None = None) -> "Dither":
        """Offsets of the tensor `name` of `shape` [..., C], or of this rank's part of it; they depend on indices in the
        whole tensor, so that they are the same for any number of ranks."""
        shape = tuple(shape) or (1,)
        rows = torch.full((1,), zlib.crc32(name.encode()), dtype=torch.int64, device=noise.device)
        columns = rows
        for dim, size in enumerate(shape):
            alone = [size if other == dim else 1 for other in range(len(shape))]
            index = torch.arange(size, dtype=torch.int64, device=noise.device).view(alone)
            if layout is not None:
                index = layout.along(dim, tuple(alone)).part(index)
            columns = index.flatten()
            if dim < len(shape) - 1:
                stride = torch.Size(shape[dim + 1 :]).numel()
                rows = (rows.unsqueeze(1) + columns * stride).flatten()
        return cls(noise, rows.unsqueeze(1), columns)

    @torch.no_grad()
    def __call__(self, value: Tensor) -> Tensor:
        """Offset `value` float32 in place: a bfloat16 number within the range that rounds to it; for others the share
        of elements rounded up equals their distance from the lower number. 0 stays, as float32 is no finer there."""
        if not value.numel():  # a rank's part of a vector that has fewer numbers than there are ranks
            return value
        if not value.is_contiguous():
            return value.copy_(self(value.contiguous()))
        width = len(self.columns)
        step = max((2**18 if value.device.type == "cpu" else 2**24) // width, 1)  # places have 8 bytes each
        for one, where in zip(value.view(-1, width).split(step), self.rows.split(step), strict=True):
            offset = self.noise[(where + self.columns).bitwise_and_(LENGTH - 1)]
            one.view(torch.int32).add_(offset.mul_(one.abs() >= torch.finfo(torch.float32).tiny))
        return value


@torch.no_grad()
def dither(masters: "Masters", dtype: torch.dtype) -> int:
    """Set the initial values of masters: rounded to `dtype`, and for bfloat16 dithered within the range that rounds to
    them. Returns the number of elements that were not numbers of `dtype`."""
    changed = on_grid((master.data for master in masters.tensors.values()), dtype)
    if dtype != torch.bfloat16 or not masters.tensors:
        return changed
    line = noise(next(iter(masters.tensors.values())).device)
    for name, master in masters.tensors.items():
        whole = masters.whole(name, master.data)
        layout = Layout.of(whole) if isinstance(whole, DTensor) else None
        Dither.of(name, whole.shape, line, layout)(master.data)
    return changed


def dither_merges(adapters: "dict[str, Adapter]", dtype: torch.dtype, layouts: dict[str, Layout] | None = None) -> None:
    """Dither LoRA's merged weights from now on, if they are rounded to bfloat16. `layouts`: those of sharded weights,
    by name."""
    if dtype != torch.bfloat16 or not adapters:
        return
    line = noise(next(iter(adapters.values())).a.device)
    for name, adapter in adapters.items():
        weight, layout = f"{name}.weight", (layouts or {}).get(f"{name}.weight")
        adapter.dither = Dither.of(weight, layout.shape if layout else adapter.parameter.shape, line, layout)
