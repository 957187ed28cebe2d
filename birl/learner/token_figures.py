"""Values of the trained tokens of samples: from micro-batches, and to and from one value for each token.

Among them what rollouts.jsonl says of single tokens beside the engine's figures: the advantage where an episode has
more than one, the entropy, and how far the learner's log-prob is from the engine's.

The learner's figures are those of the pass in which a sample was first trained: the loss provides them at no extra
computation. They take 6 to 14 bytes a token in the file. Samples without a gradient are not computed and have none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birl.data.pack import Batch
from birl.learner.learner import Loss
from birl.types import Sample

#: identifies a sample by group, episode and tokens: two samples of one episode differ in their tokens
Key = tuple[int, int, bytes]
DIGITS = 4


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


def key(sample: Sample) -> Key:
    return sample.group, sample.episode, sample.tokens.tobytes()


def watched(losses: Sequence[Loss], kept: dict[int, Tensor]) -> list[Loss]:
    """The same losses of one optimizer step; `kept` gets the log-probs and entropies that they are given."""

    def over(number: int, loss: Loss) -> Loss:
        def inner(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            kept[number] = torch.stack([logp.detach(), entropy.detach()], dim=1).float()
            return loss(logp, entropy, batch)

        return inner

    return [over(number, loss) for number, loss in enumerate(losses)]


def figures_of(batches: Sequence[Batch], watched: Sequence[Tensor], samples: Sequence[Sample]) -> dict[Key, Tensor]:
    """Log-prob and entropy of the trained tokens of each sample [T, 2]. `watched`: the recorded ones of each batch."""
    return dict(zip(map(key, samples), by_sample(batches, watched, len(samples)), strict=True))


def token_figures(samples: Sequence[Sample], seen: Mapping[Key, Tensor]) -> Callable[[Sample], dict[str, Any]]:
    """Return a function that gives the extra fields of a sample's record, with values for trained tokens only.
    `samples`: with advantages; `seen`: the learner's figures."""
    credited = {key(s): s for s in samples if isinstance(s.advantage, np.ndarray)}

    def of(sample: Sample) -> dict[str, Any]:
        result: dict[str, Any] = {}
        place = key(sample)
        if place in credited:
            own = credited[place]
            result["advantages"] = per_token(own)[own.mask].tolist()
        if place in seen and len(seen[place]) == sample.mask.sum():
            logp, entropy = seen[place].double().T.tolist()
            gaps = [now - then for now, then in zip(logp, sample.logprobs[sample.mask].tolist(), strict=True)]
            result["gaps"] = [_short(gap) for gap in gaps] if any(gaps) else 0.0
            result["entropies"] = [_short(value) for value in entropy]
        return result

    return of


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
