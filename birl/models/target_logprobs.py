"""Rows with target tokens under a frozen model with LoRA, for training as a service: their packing, in which the common
prefix of neighbouring rows is computed once, and the log-probs of several given tokens at each position.

Positions are processed in chunks, forward and backward, since the head's weight needs no gradient. With one target per
position the numbers equal those that the engine samples with, bit for bit on birl's kernels. Under tensor parallelism
all ranks get the same positions, and compute the logits of their own tokens.

Shapes: N positions, H hidden size, K targets at each, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from birl.data.trees import Tree
from birl.models import shape
from birl.models.decoder import decoder_for
from birl.models.forward import logits
from birl.models.heads import head
from birl.models.logprobs import first_row, float_logits, float_product
from birl.models.low_rank import HEAD, RowGroup, absorb_low_rank, add_low_rank, low_rank_by_input
from birl.parallel.layout import Layout, local
from birl.text.pictures import FIRST


class Top(NamedTuple):
    """The most likely tokens of each position, [N, k], and their log-probs."""

    tokens: Tensor
    logprobs: Tensor


def target_logprobs(model: nn.Module, hidden: Tensor, targets: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """log softmax(head(hidden))[targets]: hidden [N, H], targets [N, K] int64, groups of the N positions -> [N, K]
    float32, differentiable with respect to `hidden` and the head's LoRA factors."""
    return _TargetLogprobs.apply(hidden, targets, model, groups)  # pyright: ignore


def adapted_logits(model: nn.Module, hidden: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """[N, H] -> [N, V] float32; under tensor parallelism of this rank's own tokens."""
    layer = head(model)
    if isinstance(layer.weight, DTensor):
        result = float_logits(hidden, local(layer.weight), None if layer.bias is None else local(layer.bias))
    else:
        result = logits(model, hidden)
    add_low_rank(groups, [HEAD], [result.shape[1]], hidden, result, _kernels(model))
    return result


def whole_logits(model: nn.Module, hidden: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """`adapted_logits` of the whole vocabulary on every rank."""
    part, weight = adapted_logits(model, hidden, groups), head(model).weight
    if not isinstance(weight, DTensor):
        return part
    return Layout(weight.device_mesh, (Shard(1),), (len(hidden), len(weight))).whole(part).full_tensor()


def pieces(count: int, vocab: int, device: torch.device, groups: Sequence[RowGroup]) -> list[tuple[slice, list]]:
    """Slices of positions whose logits fit into memory, and the groups of each."""
    step = max((shape.GPU_CHUNK if device.type == "cuda" else 2 * shape.CHUNK) // vocab, 1)
    result = []
    for start in range(0, count, step):
        stop = min(start + step, count)
        own = [(max(g.start, start) - start, min(g.stop, stop) - start, g.adapter) for g in groups]
        result.append((slice(start, stop), [RowGroup(*g) for g in own if g[0] < g[1]]))
    return result


@torch.no_grad()
def top_logprobs(model: nn.Module, hidden: Tensor, count: int, groups: Sequence[RowGroup]) -> Top:
    """The `count` most likely tokens of each position."""
    tokens = torch.empty(len(hidden), count, dtype=torch.int64)
    logprobs = torch.empty(len(hidden), count, dtype=torch.float32)
    for rows, own in pieces(len(hidden), head(model).weight.shape[0], hidden.device, groups):
        scores = whole_logits(model, hidden[rows], own)
        best = scores.topk(count)
        tokens[rows], logprobs[rows] = best.indices.cpu(), (best.values - scores.logsumexp(-1, keepdim=True)).cpu()
    return Top(tokens, logprobs)


@torch.no_grad()
def drawn(
    model: nn.Module, hidden: Tensor, uniforms: Tensor, temperature: float, groups: Sequence[RowGroup]
) -> tuple[Tensor, Tensor]:
    """Sample independently from each position's distribution, by uniform numbers [N, K] -> tokens [N, K] and their
    log-probs."""
    tokens = torch.empty(uniforms.shape, dtype=torch.int64)
    logprobs = torch.empty(uniforms.shape, dtype=torch.float32)
    for rows, own in pieces(len(hidden), head(model).weight.shape[0], hidden.device, groups):
        logp = (whole_logits(model, hidden[rows], own) / (temperature or 1.0)).log_softmax(-1)
        if temperature == 0:
            chosen = logp.argmax(-1, keepdim=True).expand(uniforms[rows].shape)
        else:
            cumulative = logp.exp().cumsum(-1)
            points = uniforms[rows].to(cumulative) * cumulative[:, -1:]
            chosen = torch.searchsorted(cumulative, points, right=True).clamp(max=logp.shape[1] - 1)
        tokens[rows], logprobs[rows] = chosen.cpu(), logp.gather(1, chosen).cpu()
    return tokens, logprobs


def _kernels(model: nn.Module) -> Any:
    return getattr(decoder_for(model), "kernels", None)


def _head_gradient(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Gradient by logits -> gradient by hidden states; the head's weight is packed for it once."""
    decoder = decoder_for(model)
    if decoder is not None:
        packed = decoder.kernels.pack(decoder.head.weights, transposed=True)
        return lambda grad: decoder.kernels.gemm(grad, packed)
    return lambda grad: float_product(grad, local(head(model).weight)).to(grad.dtype)


def _own_vocab(model: nn.Module) -> tuple[int, dist.ProcessGroup | None]:
    """First token of this rank's logits, and the process group of the ranks that have the others."""
    weight = head(model).weight
    return (first_row(weight), weight.device_mesh.get_group()) if isinstance(weight, DTensor) else (0, None)


class _TargetLogprobs(torch.autograd.Function):
    """With p = softmax(logits):  d logp_k / d logits = onehot(target_k) - p. Backward recomputes the logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, model: nn.Module, groups: Sequence[RowGroup]) -> Tensor:
        result = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        norm = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        decoder, (start, group) = decoder_for(model), _own_vocab(model)
        targets = targets - start
        for rows, own in pieces(len(hidden), head(model).weight.shape[0], hidden.device, groups):
            scores = adapted_logits(model, hidden[rows], own)
            at = targets[rows].clamp(0, scores.shape[1] - 1)
            result[rows] = scores.gather(1, at).where(at == targets[rows], 0.0)
            if decoder is None:
                norm[rows] = scores.logsumexp(-1)
            else:
                result[rows, 0], norm[rows], _ = decoder.kernels.logprobs(scores, targets[rows, 0].contiguous(), 1.0)
                result[rows, 1:] -= norm[rows, None]
        if group is not None:
            largest = norm.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            total = (norm - largest).exp_()
            dist.all_reduce(total, group=group)
            dist.all_reduce(result, group=group)
            norm = largest + total.log_()
        if decoder is None:
            result -= norm[:, None]
        ctx.save_for_backward(hidden, targets, norm)
        ctx.model, ctx.groups = model, groups
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, norm = ctx.saved_tensors
        by_logp, by_hidden, to_hidden = grads[0].float(), torch.zeros_like(hidden), _head_gradient(ctx.model)
        k, vocab = _kernels(ctx.model), head(ctx.model).weight.shape[0]
        for rows, own in pieces(len(hidden), vocab, hidden.device, ctx.groups):
            if not by_logp[rows].any():
                continue
            grad = adapted_logits(ctx.model, hidden[rows], own).sub_(norm[rows, None]).exp_()
            at = targets[rows].clamp(0, grad.shape[1] - 1)
            here = by_logp[rows].where(at == targets[rows], 0.0)
            grad.mul_(-by_logp[rows].sum(1, keepdim=True)).scatter_add_(1, at, here)
            rounded = grad.to(hidden.dtype)
            by_hidden[rows] = to_hidden(rounded)
            x = hidden[rows].contiguous()
            absorb_low_rank(own, [HEAD], [grad.shape[1]], x, rounded, k)
            part = by_hidden[rows]
            low_rank_by_input(own, [HEAD], [grad.shape[1]], rounded, part, k)
        if (group := _own_vocab(ctx.model)[1]) is not None:
            whole = by_hidden.float()
            dist.all_reduce(whole, group=group)
            by_hidden = whole.to(hidden.dtype)
        return by_hidden, None, None, None


SHARED = 16  # tokens: a shorter common prefix is not shared


@dataclass(frozen=True, slots=True, eq=False)
class TargetRow:
    """Tokens [T] int64 of one datum, and K target tokens predicted from each of them [T, K] int64."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Concatenated rows in which neighbours share their common prefix: tokens and positions [T], their trees, and for
    each row the places of its tokens."""

    tokens: Tensor
    positions: Tensor
    trees: list[Tree]
    places: list[Tensor]


def pack_rows(rows: Sequence[TargetRow]) -> PackedRows:
    """Pack rows as `data/pack.py` packs groups of samples. A row's results do not depend on other rows of its tree."""
    tokens, positions, trees, places, start = [], [], [], [], 0
    while rows:
        prefix, count = beginning(rows)
        head = rows[0].tokens[:prefix]
        tokens.append(head)
        positions.append(torch.arange(prefix, dtype=torch.int64))
        stem, end = torch.arange(start, start + prefix, dtype=torch.int64), start + prefix
        branches = []
        for row in rows[:count]:
            tail = row.tokens[prefix:]
            tokens.append(tail)
            positions.append(torch.arange(prefix, len(row.tokens), dtype=torch.int64))
            places.append(torch.cat([stem, torch.arange(end, end + len(tail), dtype=torch.int64)]))
            branches += [len(tail)] if len(tail) else []
            end += len(tail)
        trees.append(Tree.of(prefix, tuple(branches)))
        start, rows = end, rows[count:]
    return PackedRows(torch.cat(tokens), torch.cat(positions), trees, places)


def beginning(rows: Sequence[TargetRow]) -> tuple[int, int]:
    """Length [tokens] of the prefix that the first rows have in common, and the number of these rows."""
    first, common, count = rows[0].tokens, len(rows[0].tokens) - 1, 1
    for row in rows[1:]:
        size = min(common, len(row.tokens) - 1)
        apart = (row.tokens[:size] != first[:size]).nonzero()
        size = int(apart[0]) if len(apart) else size
        while size and first[size] >= FIRST and first[size - 1] >= FIRST:  # no picture is cut
            size -= 1
        if size < SHARED or 2 * size < common:
            break
        common, count = size, count + 1
    return (common, count) if count > 1 else (len(first), 1)
