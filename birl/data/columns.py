"""Values of the trained tokens of samples: from micro-batches, and to and from one value for each token."""

from collections.abc import Sequence

import numpy as np
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
    """[N] float32: log-probs of the trained tokens under the weights that sampled them."""
    return torch.from_numpy(sample.logprobs[sample.mask])


def per_token(sample: Sample) -> np.ndarray:
    """[T]: advantages."""
    return np.broadcast_to(np.asarray(sample.advantage, np.float32), len(sample.tokens))


def spread(sample: Sample, values: Tensor) -> np.ndarray:
    """One value for each trained token -> one for each token, 0 where nothing is trained."""
    result = np.zeros(len(sample.tokens), np.float32)
    result[sample.mask] = values.numpy()
    return result
