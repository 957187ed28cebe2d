"""Attention within trees as matrix products in float32, for the CPU.

PyTorch's fused kernel is made for long sequences on many cores. For packed trees of a few hundred tokens its backward
pass takes longer than all of a layer's matrix products, and each tree's slices of queries, keys and values cost a
zero-filled gradient of full size. Here one autograd function goes over all trees, computes probabilities again instead
of keeping them, and never holds more than `SCORES` of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

SCORES = 2**22  # attention scores that exist at once: 16 MiB, and as much again for what is computed from them

Block = tuple[slice, slice, Tensor]  # rows, the columns they may see, and 0 or -inf for each pair


def tree_attention(query: Tensor, key: Tensor, value: Tensor, biases: Sequence[Tensor], scale: float) -> Tensor:
    """softmax(scale q k' + bias) v within each tree: query [H, T, D], key [K, T, D], value [K, T, D'] -> [T, H, D'].

    `biases` has one [n, n] float32 tensor for each tree, in order: 0 where row may see column, else -inf. Columns later
    than their row are never seen.
    """
    return _TreeAttention.apply(query, key, value, biases, scale)  # pyright: ignore


class _TreeAttention(torch.autograd.Function):
    """With p = softmax(s), o = p v:  dv = p' do,  dp = do v',  ds = p (dp - sum(p dp)),  dq = scale ds k,
    dk = scale ds' q.  Heads of one key head are rows of one product."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, biases: Sequence[Tensor], scale: float) -> Tensor:
        output = value.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for block in blocks(biases, query.shape[0]):
            rows, columns, _ = block
            p = probabilities(query, key, block, scale)[0]
            result = torch.bmm(p, value[:, columns].float())
            output[rows] = result.view(query.shape[0], -1, value.shape[2]).transpose(0, 1)
        ctx.save_for_backward(query, key, value)
        ctx.biases, ctx.scale = biases, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        kv_heads = key.shape[0]
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros(key.shape, dtype=torch.float32)
        grad_value = torch.zeros(value.shape, dtype=torch.float32)
        for block in blocks(ctx.biases, query.shape[0]):
            rows, columns, _ = block
            p, q, k = probabilities(query, key, block, ctx.scale)
            grad = grads[0][rows].transpose(0, 1).reshape(kv_heads, -1, value.shape[2]).float()
            grad_value[:, columns] += torch.bmm(p.transpose(1, 2), grad)
            grad_p = torch.bmm(grad, value[:, columns].float().transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, torch.float32)
            grad_query[:, rows] = torch.bmm(grad_scores, k).mul_(ctx.scale).view(query.shape[0], -1, query.shape[2])
            grad_key[:, columns] += torch.bmm(grad_scores.transpose(1, 2), q)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def probabilities(query: Tensor, key: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """softmax of a block's scores [K, G rows, columns], with the scaled queries and the keys that gave them."""
    rows, columns, bias = block
    kv_heads, _, size = key.shape
    q = query[:, rows].reshape(kv_heads, -1, size).float() * scale
    k = key[:, columns].float()
    scores = torch.bmm(q, k.transpose(1, 2))
    scores.view(kv_heads, -1, *bias.shape).add_(bias)
    return scores.softmax(-1), q, k


def blocks(biases: Sequence[Tensor], heads: int) -> Iterator[Block]:
    """Rows of each tree in pieces of at most `SCORES` scores, with all columns that are not later than the last row."""
    start = 0
    for bias in biases:
        n = len(bias)
        step = max(1, SCORES // (heads * n))
        for first in range(0, n, step):
            last = min(first + step, n)
            yield slice(start + first, start + last), slice(start, start + last), bias[first:last, :last]
        start += n
