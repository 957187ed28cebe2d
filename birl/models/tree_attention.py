"""Attention within trees as matrix products in float32, for the CPU, and for soft caps and sinks, which no kernel
computes.

PyTorch's fused kernel is made for long sequences on many cores. For packed trees of a few hundred tokens its backward
pass takes longer than all of a layer's matrix products, and slicing queries, keys and values of each tree costs a
zero-filled gradient of full size. Here one autograd function processes all trees, recomputes probabilities instead of
keeping them, and never holds more than `SCORES` of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCORES = 2**22  # attention scores in memory at once: 16 MiB, and as much again for values computed from them

Columns = slice | Tensor  # contiguous, or int64 indices
Block = tuple[slice, Columns, Tensor]  # rows, the columns they may attend to, and 0 or -inf for each pair


class Area(NamedTuple):
    """First row, the columns that the rows may attend to, and 0 or -inf for each pair, float32 [rows, columns].
    `causal`: the last column is the last row's own token, and so on upwards; no row attends to a later one."""

    first: int
    columns: Columns
    bias: Tensor
    causal: bool = True


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    areas: Sequence[Area],
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k' + bias) v within each area: query [H, T, D], key [K, S, D], value [K, S, D'] -> [T, H, D'].
    With `cap` the scores s become cap tanh(s / cap) before the bias. `sinks` [H] add one score without a value to each
    softmax of a head.

    Every row belongs to one area, every column to any number of them. The rows of a tree's node are an area; its
    columns are the node's ancestors and itself.
    """
    return _TreeAttention.apply(query, key, value, areas, scale, cap, sinks)  # pyright: ignore


class _TreeAttention(torch.autograd.Function):
    """With p = softmax(s), o = p v:  dv = p' do,  dp = do v',  ds = p (dp - sum(p dp)),  dq = scale ds k, dk = scale
    ds' q.  Query heads of one key head are rows of one product. A sink has the remaining probability, 1 - sum(p), and
    no value:  dsink = -(1 - sum(p)) sum(p dp)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, areas: Sequence[Area], scale: float, cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        output = value.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for block in blocks(areas, query.shape[0]):
            rows, columns, _ = block
            p = probabilities(query, key, block, scale, cap, sinks)[0]
            result = torch.bmm(p, value[:, columns].float())
            output[rows] = result.view(query.shape[0], -1, value.shape[2]).transpose(0, 1)
        ctx.save_for_backward(query, key, value, sinks)
        ctx.areas, ctx.scale, ctx.cap = areas, scale, cap
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        kv_heads = key.shape[0]
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros(key.shape, dtype=torch.float32, device=key.device)
        grad_value = torch.zeros(value.shape, dtype=torch.float32, device=key.device)
        for block in blocks(ctx.areas, query.shape[0]):
            rows, columns, _ = block
            p, q, k, slope = probabilities(query, key, block, ctx.scale, ctx.cap, sinks)
            grad = grads[0][rows].transpose(0, 1).reshape(kv_heads, -1, value.shape[2]).float()
            grad_value[:, columns] += torch.bmm(p.transpose(1, 2), grad)
            grad_p = torch.bmm(grad, value[:, columns].float().transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, torch.float32)
            if grad_sinks is not None:
                left = 1 - p.sum(-1)
                grad_sinks -= (left * (p * grad_p).sum(-1)).view(query.shape[0], -1).sum(1)
            if slope is not None:
                grad_scores.mul_(slope)
            grad_query[:, rows] = torch.bmm(grad_scores, k).mul_(ctx.scale).view(query.shape[0], -1, query.shape[2])
            grad_key[:, columns] += torch.bmm(grad_scores.transpose(1, 2), q)
        by_sinks = None if grad_sinks is None or sinks is None else grad_sinks.to(sinks.dtype)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None, by_sinks


def probabilities(
    query: Tensor, key: Tensor, block: Block, scale: float, cap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """softmax of a block's scores [K, G rows, columns], the scaled queries and the keys of that product, and the factor
    of the scores' gradient from the cap."""
    rows, columns, bias = block
    kv_heads, _, size = key.shape
    q = query[:, rows].reshape(kv_heads, -1, size).float() * scale
    k = key[:, columns].float()
    scores, slope = capped(torch.bmm(q, k.transpose(1, 2)), cap)
    scores.view(kv_heads, -1, *bias.shape).add_(bias)
    if sinks is None:
        return scores.softmax(-1), q, k, slope
    each = sinks.float().view(kv_heads, -1, 1).expand(-1, -1, len(bias)).reshape(kv_heads, -1, 1)
    return softmax_beside(scores, each), q, k, slope


def capped(scores: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """cap tanh(scores / cap), in place, and its derivative with respect to the scores."""
    if cap is None:
        return scores, None
    tanh = scores.div_(cap).tanh_()
    return tanh * cap, tanh.square_().neg_().add_(1.0)


def softmax_beside(scores: Tensor, sink: Tensor) -> Tensor:
    """softmax over scores [..., N] and one more, [..., 1], without the probability of the latter."""
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def blocks(areas: Sequence[Area], heads: int) -> Iterator[Block]:
    """Split each area's rows into blocks of at most `SCORES` scores; causal blocks end at the column of the last row's
    own token."""
    for row, column, bias, causal in areas:
        rows, columns = bias.shape
        step = max(1, SCORES // (heads * columns))
        for first in range(0, rows, step):
            last = min(first + step, rows)
            seen = columns - rows + last if causal else columns
            chosen = slice(column.start, column.start + seen) if isinstance(column, slice) else column[:seen]
            yield slice(row + first, row + last), chosen, bias[first:last, :seen]
