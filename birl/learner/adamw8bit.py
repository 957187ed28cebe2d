"""AdamW with both moments in 8 bits (arXiv:2110.02861): 2.03 bytes a parameter or a little more, instead of 8.

A moment of a weight [..., K] has a byte for each element and a float32 scale for each block of 256 elements of a row,
their largest absolute value. The last block of a row may be shorter: blocks end with their row, so results on ranks
that split the rows equal those of one rank bit for bit. An element is scale x level, with 256 levels that lie ten times
closer for each decade towards 0 (`levels`). A second moment above 0 is never rounded to 0: with a mean that is not 0
the step would be as large as 1 / eps allows. A step computes in float32, one piece of a weight at a time.

Vectors, tensors of fewer than 4,096 elements and rows of fewer than 64 keep float32 moments and PyTorch's fused step.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from birl.learner.optimizer import wide_state

BLOCK, SMALL, ROW = 256, 4096, 64
PIECE = 2**22  # elements that are computed at once: 16 MiB for each copy in float32
TINY = torch.finfo(torch.float32).tiny


def levels(signed: bool) -> Tensor:
    """[256] float32, ascending: dynamic tree quantisation (arXiv:2110.02861, section 1.3), the numbers of bitsandbytes
    and torchao. The decade below 10^(i - 6) has the middles of 2^i equal parts (twice as many if unsigned), i from 0 to
    6; and there are 0 and 1."""
    result = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float32)
        middles = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        result += [middles, -middles] if signed else [middles]
    return torch.cat(result).sort().values


def limits(of: Tensor) -> Tensor:
    """Limits between the levels [255], for rounding to the nearest one; if unsigned, only 0 itself is encoded as 0."""
    between = (of[1:] + of[:-1]) / 2
    return between if of[0] < 0 else torch.cat([of[:1], between[1:]])


def encode(values: Tensor, between: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] float32 -> codes [..., K] uint8 and scales [..., ceil(K / 256)] float32."""
    width = values.shape[-1]
    blocks = F.pad(values, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    codes = torch.bucketize(blocks / scales.clamp_min(TINY)[..., None], between, out_int32=True)
    return codes.to(torch.uint8).flatten(-2)[..., :width], scales


def decode(codes: Tensor, scales: Tensor, of: Tensor) -> Tensor:
    """Codes and scales -> values [..., K] float32."""
    return of[codes.int()].mul_(scales.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]])


def quantized(shape: Sequence[int]) -> bool:
    """Whether a tensor of that shape, as a whole, has moments in 8 bits."""
    return len(shape) > 1 and prod(shape) >= SMALL and shape[-1] >= ROW


def stored(shape: Sequence[int]) -> int:
    """Bytes of both moments of a tensor."""
    return 2 * (prod(shape) + 4 * prod(shape[:-1]) * -(-shape[-1] // BLOCK)) if quantized(shape) else 8 * prod(shape)


def first_state(master: Tensor, whole: Sequence[int]) -> dict[str, Tensor]:
    """Moments of 0 for this rank's part of a tensor of shape `whole`. The step count of 8-bit moments is in CPU memory,
    where the host reads it. If blocks of the part are not blocks of the whole row, the part's width is in the names of
    the scales, so that no other split of the rows reads them."""
    if not quantized(whole):
        return wide_state(master)
    state, width = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}, master.shape[-1]
    scales, own = (*master.shape[:-1], -(-width // BLOCK)), f".{width}" if width != whole[-1] and width % BLOCK else ""
    for moment, of in (("exp_avg", 127), ("exp_avg_sq", 0)):  # the code of 0
        state[moment] = torch.full(master.shape, of, dtype=torch.uint8, device=master.device)
        state[f"{moment}_scale{own}"] = torch.zeros(scales, dtype=torch.float32, device=master.device)
    return state


class AdamW8bit(torch.optim.AdamW):
    """`state` is set by the caller: `first_state` of each tensor."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, fused=True, **options)
        device = groups[0]["params"][0].device
        self.levels = [levels(signed).to(device) for signed in (True, False)]
        self.limits = [limits(levels(signed)).to(device) for signed in (True, False)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Gradients of tensors with 8-bit moments are set to None afterwards."""
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None and self.state[master]["exp_avg"].dtype == torch.uint8:
                    self._step(master, group)
                    master.grad = None
        super().step(closure)

    def _step(self, master: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), lr = self.state[master], group["betas"], group["lr"]
        state["step"] += 1
        first, second = (1 - beta ** state["step"].double() for beta in (beta1, beta2))
        tensors: list[Any] = [master.detach(), master.grad, *(t for name, t in state.items() if name != "step")]
        for weight, grad, codes, scales, codes_sq, scales_sq in pieces(tensors):
            mean = decode(codes, scales, self.levels[0]).lerp_(grad, 1 - beta1)
            square = decode(codes_sq, scales_sq, self.levels[1]).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            new = (*encode(mean, self.limits[0]), *encode(square, self.limits[1]))
            for into, value in zip((codes, scales, codes_sq, scales_sq), new, strict=True):
                into.copy_(value)
            step = mean.div_(square.div_(second).sqrt_().add_(group["eps"])).mul_(lr / first)
            weight.mul_(1 - lr * group["weight_decay"]).sub_(step)


def pieces(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield views of the same rows of all tensors, of at most PIECE elements."""
    first = tensors[0]
    rows = max(1, PIECE // max(1, first[:1].numel()))
    for parts in zip(*(t.split(rows) for t in tensors), strict=True):
        if first.ndim > 2 and parts[0].numel() > PIECE:
            yield from pieces([part[0] for part in parts])
        else:
            yield parts
