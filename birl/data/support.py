"""Supports of a micro-batch's predictions (the tokens that they were sampled from), and uploads to a device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from birl.samples import Support


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to `device`. To a GPU it is copied asynchronously from pinned memory, without waiting for queued
    work."""
    if torch.device(device).type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def uploaded(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return upload(torch.tensor(values, dtype=dtype), device)


@dataclass(frozen=True, slots=True, eq=False)
class SupportRows:
    """Supports of U predictions: their sizes, counts [U] int64, 0 for all tokens; the tokens, ids [K] int64; and the
    start of each support in `ids`, U + 1 numbers on the host."""

    counts: Tensor
    ids: Tensor
    starts: Sequence[int]

    @classmethod
    def of(cls, support: Support) -> "SupportRows":
        counts = torch.from_numpy(support.counts).to(torch.int64)
        return cls(counts, torch.from_numpy(support.ids).to(torch.int64), (0, *counts.cumsum(0).tolist()))

    def to(self, device: torch.device | str) -> "SupportRows":
        return replace(self, counts=upload(self.counts, device), ids=upload(self.ids, device))

    def rows(self, chosen: Tensor) -> "SupportRows":
        """Supports of the predictions `chosen` [C], on the CPU, in this order."""
        begin, device = torch.tensor(self.starts, dtype=torch.int64), self.ids.device
        counts = begin.diff()[chosen]
        ends = counts.cumsum(0)
        starts = (0, *ends.tolist())
        place = torch.repeat_interleave(begin[chosen] - (ends - counts), counts) + torch.arange(starts[-1])
        return SupportRows(upload(counts, device), self.ids[upload(place, device)], starts)

    def outside(self, rows: slice, first: int, vocab: int) -> Tensor:
        """Mask [rows, tokens] bool of the tokens from `first` on that are outside a prediction's support."""
        counts, ids = self.counts[rows], self.ids[self.starts[rows.start] : self.starts[rows.stop]] - first
        row = torch.repeat_interleave(torch.arange(len(counts), device=ids.device), counts, output_size=len(ids))
        result = torch.ones(len(counts) * vocab + 1, dtype=torch.bool, device=ids.device)
        place = (row * vocab + ids).where((ids >= 0) & (ids < vocab), len(result) - 1)  # others behind all
        result[place] = False
        return result[:-1].view(len(counts), vocab).logical_and_((counts > 0)[:, None])
