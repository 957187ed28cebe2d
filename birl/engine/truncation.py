"""Top-k, top-p and min-p: the support that a token is drawn from.

The tokens of a row are ranked by logit / temperature, equal ones by their ids. The first `top_k` are kept; of these
each before which less than `top_p` of their mass lies, so one always remains; of these all with at least `min_p` times
the highest probability. What is kept is the beginning of the ranking. `restrict` sorts, and is the definition; on a
GPU the end of it is searched instead (`birl/models/sample_kernels.py`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birl.types import SamplingParams


def room_of(params: Sequence[SamplingParams]) -> int:
    """The largest support that is reported for any of these rows; 0 where none is."""
    return max((p.top_k for p in params if p.told), default=0)


def limits_of(params: Sequence[SamplingParams]) -> Tensor | None:
    """[B, 3] float32 on the CPU: top_k, top_p and log min_p of each row, and 0, 1 and -inf for one that is plain.
    None where all are."""
    if all(p.plain for p in params):
        return None
    rows = [(0, 1, 0) if p.plain else (p.top_k, p.top_p, p.min_p) for p in params]
    result = torch.tensor(rows, dtype=torch.float32)
    result[:, 2].log_()
    return result


def restrict(logits: Tensor, limits: Tensor) -> Tensor:
    """-inf in place of what is not kept. logits [B, V], after temperature; limits [B, 3], or [1, 3] for all rows.
    Never waits for the device."""
    top_k, top_p, min_p = limits.T.unsqueeze(-1)
    order = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = logits.gather(-1, order)
    keep = (torch.arange(logits.shape[1], device=logits.device) < top_k) | (top_k == 0)
    probability = ranked.where(keep, float("-inf")).softmax(-1)
    keep = keep & ((probability.cumsum(-1) - probability < top_p) | (top_p == 1))  # of [1, 3] limits it was [1, V]
    keep &= ranked >= ranked[:, :1] + min_p
    return torch.empty_like(logits).scatter_(-1, order, ranked.where(keep, float("-inf")))


def kept(logits: Tensor, room: int) -> Tensor:
    """What `restrict` left [B, V] -> [B, 1 + room] int32: how many tokens these are, and which, in rising order. A row
    that has more says how many alone. Never waits for the device."""
    left = logits > float("-inf")
    place = left.cumsum(-1, dtype=torch.int32)
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device).expand(logits.shape)
    result = torch.zeros(len(logits), room + 2, dtype=torch.int32, device=logits.device)
    # the others go behind the last one
    result.scatter_(1, place.where(left & (place <= room), room + 1).to(torch.int64), ids)
    result[:, 0] = place[:, -1]
    return result[:, : room + 1]


def supports(kept: Tensor | None, params: Sequence[SamplingParams]) -> list[NDArray[np.int32] | None]:
    """[B, 1 + room] -> of each row the support of its token; None where these are all, or not asked."""
    if kept is None:
        return [None] * len(params)
    rows = zip(kept.cpu().numpy(), params, strict=True)
    return [row[1 : 1 + row[0]].copy() if p.told else None for row, p in rows]
