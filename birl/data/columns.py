"""Values of the trained tokens of samples: from micro-batches, and to and from one value for each token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from birl.data.pack import Batch
from birl.types import Sample


def by_sample(batches: Sequence[Batch], outputs: Sequence[Tensor], count: int) -> list[Tensor]:
    """[N] of each micro-batch -> for each sample of the step the values of its trained tokens, on the CPU."""
    result: list[Tensor] = [torch.empty(0, dtype=torch.float32)] * count
    for batch, output in zip(batches, outputs, strict=True):
        number, size = torch.unique_consecutive(batch.sample, return_counts=True)
        for n, values in zip(number.tolist(), output.cpu().split(size.tolist()), strict=True):
            result[n] = values
    return result


def behaviour(sample: Sample) -> Tensor:
    """Log-probs of the trained tokens under the weights that sampled them."""
    return torch.tensor(trained(sample, sample.logprobs), dtype=torch.float32)


def trained(sample: Sample, column: Sequence[float]) -> list[float]:
    """Of one value for each token those of the trained ones."""
    return [value for value, m in zip(column, sample.mask, strict=True) if m]


def per_token(sample: Sample) -> tuple[float, ...]:
    return sample.advantage if isinstance(sample.advantage, tuple) else (sample.advantage,) * len(sample.tokens)


def spread(sample: Sample, values: Tensor) -> tuple[float, ...]:
    """One value for each trained token -> one for each token, 0 where nothing is trained."""
    each = iter(values.tolist())
    return tuple(next(each) if m else 0.0 for m in sample.mask)
