"""Top-k, top-p and min-p: the words that a token may be drawn from.

The words of a row are ranked by logit / temperature, equal ones by their ids. The first `top_k` are kept; of these each
before which less than `top_p` of their mass lies, so one always remains; of these all with at least `min_p` times the
likeliest one's probability. What is kept is therefore the beginning of the ranking. `restrict` sorts, and is the
definition; on a GPU the end of it is searched instead (`birl/models/sample_kernels.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from birl.types import SamplingParams


def plain(params: SamplingParams) -> bool:
    """From the whole distribution, or greedy?"""
    return not params.temperature or not (params.top_k or params.top_p < 1 or params.min_p)


def limits_of(params: Sequence[SamplingParams]) -> Tensor | None:
    """[B, 3] float32 on the CPU: top_k, top_p and log min_p of each row, and 0, 1 and -inf for one that is `plain`.
    None where all are."""
    if all(plain(p) for p in params):
        return None
    rows = [(0, 1, 0) if plain(p) else (p.top_k, p.top_p, p.min_p) for p in params]
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
    keep &= (probability.cumsum(-1) - probability < top_p) | (top_p == 1)
    keep &= ranked >= ranked[:, :1] + min_p
    return torch.empty_like(logits).scatter_(-1, order, ranked.where(keep, float("-inf")))
