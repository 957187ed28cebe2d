"""Segment sums and means over a sample's trained tokens, broadcast back to them: the only place where the tokens of a
sample are combined.

`sample` [N] int64: the sample of each token. A sample's tokens are contiguous; its number is arbitrary, as a
micro-batch has only some of the samples. Every function accepts N = 0.
"""

import torch
from torch import Tensor


def starts(sample: Tensor) -> Tensor:
    """True where sample_t differs from sample_{t-1}, and at t = 0: the first token of each sample. [N] -> [N] bool."""
    first = torch.ones_like(sample, dtype=torch.bool)
    first[1:] = sample[1:] != sample[:-1]
    return first


def ends(sample: Tensor) -> Tensor:
    """True at the last token of each sample. [N] -> [N] bool."""
    last = torch.ones_like(sample, dtype=torch.bool)
    last[:-1] = sample[1:] != sample[:-1]
    return last


def positions(sample: Tensor) -> Tensor:
    """Samples numbered 0, 1, ... in order of appearance. [N] -> [N] int64."""
    return starts(sample).cumsum(0) - 1


def totals(values: Tensor, sample: Tensor) -> Tensor:
    """sum_t values_t of each sample, in order of appearance. [N], [N] -> [S], differentiable in values."""
    position = positions(sample)
    count = int(position[-1]) + 1 if len(position) else 0
    return values.new_zeros(count).index_add(0, position, values)


def segment_sum(values: Tensor, sample: Tensor) -> Tensor:
    """sum_t values_t of the token's sample. [N], [N] -> [N], differentiable in values. Never syncs with the device."""
    position = positions(sample)
    return torch.zeros_like(values).index_add(0, position, values)[position]


def segment_mean(values: Tensor, sample: Tensor) -> Tensor:
    """1/|o| sum_t values_t of the token's sample. [N], [N] -> [N], differentiable in values."""
    return segment_sum(values, sample) / segment_sum(torch.ones_like(values), sample)
