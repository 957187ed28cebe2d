"""Per-token policy losses. Pure functions on packed 1-D float32 tensors [N]: trained tokens of all samples, one after
another.

They know nothing of masks, packing or denominators: `Batch.weights` holds those, and the loss is `(per_token *
weights).sum()`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Clipped(NamedTuple):
    loss: Tensor  # [N]
    ratio: Tensor  # [N] exp(logp - old_logp)
    clipped: Tensor  # [N] bool: the clip is active, the token has no gradient


def clip(logp: Tensor, old_logp: Tensor, advantages: Tensor, *, low: float, high: float) -> Clipped:
    """L_t = -min(w_t A_t, clip(w_t, 1 - low, 1 + high) A_t),  w_t = exp(logp_t - old_logp_t)   (PPO, arXiv:1707.06347
    eq. 7).

    high > low is DAPO's clip-higher (arXiv:2503.14476).
    """
    ratio = (logp - old_logp).exp()
    bounded = ratio.clamp(1 - low, 1 + high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    return Clipped(loss, ratio, clipped)
