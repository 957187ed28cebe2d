"""Attention within the trees of a packed row by one call of PyTorch's FlashAttention, on CUDA.

Queries are the packed row, cut into segments: the nodes of its trees. A node's keys are those of its ancestors and its
own, so keys and values are gathered by an index; if no tree branches, nothing is gathered. FlashAttention aligns causal
masks and windows at the last query and the last key (bottom right) of each segment, which is what a node needs: its
query i attends to all ancestors and to the node's first i + 1 keys.

Shapes: T packed tokens, H query heads, K key heads, D head size, N gathered keys, S segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from birl.data.support import upload
from birl.data.trees import Tree, ways
from birl.models.fused import launch_sum_copies, on_gpu


@dataclass(frozen=True)
class Segments:
    """Arguments of `flash`. starts_q, starts_k: int32 [S + 1]; index: int64 [N], or None if keys are not gathered. Made
    once a batch, used by every layer."""

    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int
    index: Tensor | None
    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def copies(self, rows: int) -> tuple[Tensor, Tensor]:
        """For each of `rows` keys the gathered keys that are copies of it: order[starts[row] : starts[row + 1]]. order
        int64 [N], starts int64 [rows + 1]."""
        assert self.index is not None
        if rows not in self.known:
            index, order = self.index.sort(stable=True)
            every = torch.arange(rows + 1, dtype=torch.int64, device=index.device)
            self.known[rows] = order, torch.searchsorted(index, every)
        return self.known[rows]


def segments(trees: Sequence[Tree], device: torch.device) -> Segments:
    """Segments of a row of trees. Computed on the host and copied to `device` once."""
    seen = [(node.count, way) for node, way in ways(trees)]
    return cut(seen, device, any(len(way) > 1 for _, way in seen))


def cut(
    seen: Sequence[tuple[int, Sequence[range]]],
    device: torch.device,
    gathered: bool = True,
    places: Tensor | None = None,
) -> Segments:
    """`seen`: for each segment its number of queries, and the tokens that its last query attends to, in order. Without
    `gathered` they are the row's keys unchanged. `places` [T]: index of each token's key, if not in the row's order."""
    queries = [n for n, _ in seen]
    keys = [sum(map(len, ranges)) for _, ranges in seen]
    tokens = [torch.arange(r.start, r.stop) for _, ranges in seen for r in ranges]
    index = upload(torch.cat(tokens), device) if gathered else None
    if index is not None and places is not None:
        index = places[index]
    counts = torch.tensor([[0, *queries], [0, *keys]], dtype=torch.int32)
    starts = upload(counts.cumsum(1, dtype=torch.int32), device)
    return Segments(starts[0], starts[1], max(queries, default=0), max(keys, default=0), index)


def takes(query: Tensor, value: Tensor) -> bool:
    """Query, value [..., D]: whether FlashAttention supports them; not float32, and no head size above 256."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and size % 8 == 0
        and size <= 256
        and value.shape[-1] == size
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attend(cut: Segments, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """query [T, H, D], key and value [T, K, D] -> [T, H, D]."""
    if cut.index is not None:
        key, value = _Gather.apply(key, cut), _Gather.apply(value, cut)  # pyright: ignore
    return flash(query, key, value, cut.starts_q, cut.starts_k, cut.longest_q, cut.longest_k, scale, window)


def flash(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """`torch.nn.attention.varlen.varlen_attn` without its custom operator, whose Python overhead takes longer than the
    launch; autograd derives it. Masks are aligned at the last query and key."""
    left = -1 if window is None else window - 1  # `window` includes the query's own position, FlashAttention's does not
    return torch.ops.aten._flash_attention_forward(
        query, key, value, starts_q, starts_k, longest_q, longest_k, 0.0, window is None, return_debug_mask=False,
        scale=scale, window_size_left=left, window_size_right=0,
    )[0]  # fmt: skip


class _Gather(torch.autograd.Function):
    """Rows by index. The gradient of a row is the float32 sum over its copies, rounded once; `index_select` would
    accumulate in bfloat16, once for each branch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Segments) -> Tensor:
        ctx.rows, ctx.cut = x.shape[0], cut
        assert cut.index is not None
        return x.index_select(0, cut.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad, index = grads[0], ctx.cut.index
        if on_gpu(grad):
            return launch_sum_copies(grad.contiguous(), *ctx.cut.copies(ctx.rows)), None
        total = torch.zeros(ctx.rows, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None
