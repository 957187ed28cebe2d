"""Divergence between the next-token distributions of learner and teacher over the vocabulary, without storing all
logits.

As in `logprobs.py` the forward pass goes over the tokens in chunks, and the backward pass over the vocabulary. A local
teacher is given by its hidden states and head, and its logits are computed when needed, a chunk at a time, twice; or
only its most likely tokens are, once.

Shapes: N tokens, H and G hidden sizes of learner and teacher, V vocabulary, k most likely tokens.
"""

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from birl.algorithms.divergence import Divergence
from birl.models import shape
from birl.models.heads import AfterHead
from birl.models.logprobs import HeadGradient, chunks, pieces, scaled_logits

TENSORS = 8  # upper bound of tensors of a chunk's size that exist at once


class Head(NamedTuple):
    """Parameters of a head, hidden states -> logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None
    after: AfterHead | None
    temperature: float

    def logits(self, hidden: Tensor, vocab: slice) -> Tensor:
        bias = None if self.bias is None else self.bias[vocab]
        return scaled_logits(hidden, self.weight[vocab], bias, self.temperature, self.after)


class Full(NamedTuple):
    """A teacher for a comparison over all tokens: its hidden states [N, G] and its head."""

    hidden: Tensor
    head: Head


class TopK(NamedTuple):
    """A teacher's k most likely tokens [N, k] int64, and log-probs [N, k + 1] of these and, last, of all others
    together. This is one distribution over k + 1 buckets; the learner's is over the same buckets. Merging tokens never
    raises a divergence, so it is a lower bound of that over all tokens."""

    ids: Tensor
    logprobs: Tensor


def top_k(target: Full, k: int, size: int) -> TopK:
    """Return the k most likely of the first `size` tokens."""
    hidden, head = target
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(len(hidden), k + 1, dtype=torch.float32, device=hidden.device)
    for rows in chunks(len(hidden), _room(hidden) // size):
        logits = head.logits(hidden[rows], slice(0, size))
        ids[rows] = logits.topk(k).indices
        logprobs[rows] = _buckets(logits, ids[rows])
    return TopK(ids, logprobs)


def token_divergence(
    hidden: Tensor, head: Head, target: Full | TopK, function: Callable[[Tensor, Tensor], Divergence], chunk: int = 0
) -> Tensor:
    """[N, H] -> [N] float32, in nats, differentiable with respect to `hidden` and the learner's head. If one head has
    more rows than the other (padding after the same tokens), both distributions are over the tokens that both have.
    `chunk`: logits in memory at once, 0 for the device's default."""
    chunk = chunk or _room(hidden)
    if isinstance(target, TopK):
        return _BucketDivergence.apply(hidden, head.weight, head.bias, head, target, function, chunk)  # pyright: ignore
    return _TokenDivergence.apply(hidden, head.weight, head.bias, head, target, function, chunk)  # pyright: ignore


class _TokenDivergence(torch.autograd.Function):
    """With respect to the learner's logit l / t of token v:  dD / dl_v = flow_v - q_v sum(flow)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, target: Full,
        function: Callable[[Tensor, Tensor], Divergence], chunk: int,
    ) -> Tensor:  # fmt: skip
        size = min(len(weight), len(target.head.weight))
        value, total, norm, their_norm = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device).unbind()
        for rows in chunks(len(hidden), chunk // size):
            logq = _normalised(head.logits(hidden[rows], slice(0, size)), norm[rows])
            logp = _normalised(target.head.logits(target.hidden[rows], slice(0, size)), their_norm[rows])
            terms, flow = function(logq, logp)
            value[rows], total[rows] = terms.sum(-1), flow.sum(-1)
            del logq, logp, terms, flow  # before the next logits
        theirs = target.hidden, target.head.weight, target.head.bias
        ctx.save_for_backward(hidden, weight, bias, *theirs, total, norm, their_norm)
        ctx.head, ctx.their_head, ctx.function, ctx.chunk, ctx.size = head[2:], target.head[2:], function, chunk, size
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, theirs, their_weight, their_bias, total, norm, their_norm = ctx.saved_tensors
        head, their_head = Head(weight, bias, *ctx.head), Head(their_weight, their_bias, *ctx.their_head)
        result = HeadGradient(hidden, weight, bias, ctx.needs_input_grad)
        for vocab in pieces(ctx.size, ctx.chunk, len(hidden)):
            logq = head.logits(hidden, vocab).sub_(norm[:, None])
            logp = their_head.logits(theirs, vocab).sub_(their_norm[:, None])
            flow = ctx.function(logq, logp).flow
            by_logit = torch.addcmul(flow, logq.exp(), total[:, None], value=-1)
            del logp, flow
            result.add(vocab, _by_head(head, by_logit.mul_(grads[0][:, None]), logq.add_(norm[:, None])))
            del logq, by_logit
        result.nothing(slice(ctx.size, len(weight)))
        return *result.all(), None, None, None, None


class _BucketDivergence(torch.autograd.Function):
    """For a token v of bucket b:  dD / dl_v = q_v / Q_b flow_b - q_v sum(flow), Q_b the bucket's probability."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, target: TopK,
        function: Callable[[Tensor, Tensor], Divergence], chunk: int,
    ) -> Tensor:  # fmt: skip
        value, norm, rest = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device).unbind()
        flow = torch.empty_like(target.logprobs)
        for rows in chunks(len(hidden), chunk // len(weight)):
            logits = head.logits(hidden[rows], slice(0, len(weight)))
            torch.logsumexp(logits, -1, out=norm[rows])
            logq = _buckets(logits, target.ids[rows])
            rest[rows] = logq[:, -1]
            terms, flow[rows] = function(logq, target.logprobs[rows])
            value[rows] = terms.sum(-1)
            del logits  # before the next
        ctx.save_for_backward(hidden, weight, bias, target.ids, flow, norm, rest)
        ctx.head, ctx.chunk = head[2:], chunk
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, likely, flow, norm, rest = ctx.saved_tensors
        head, result = Head(weight, bias, *ctx.head), HeadGradient(hidden, weight, bias, ctx.needs_input_grad)
        total, own = flow.sum(-1), flow[:, :-1]
        for vocab in pieces(len(weight), ctx.chunk, len(hidden)):
            logits = head.logits(hidden, vocab)
            at = (likely - vocab.start).clamp_(0, logits.shape[1] - 1)
            here = (likely >= vocab.start) & (likely < vocab.stop)
            # no data-dependent shapes, which would sync with a GPU
            others = (logits - norm[:, None]).scatter_reduce_(1, at, torch.where(here, -inf, inf), "amin")
            by_logit = others.sub_(rest[:, None]).exp_().mul_(flow[:, -1:]).scatter_add_(1, at, own.where(here, 0.0))
            by_logit.addcmul_((logits - norm[:, None]).exp_(), total[:, None], value=-1)
            result.add(vocab, _by_head(head, by_logit.mul_(grads[0][:, None]), logits))
            del logits, others, by_logit
        return *result.all(), None, None, None, None


def _by_head(head: Head, by_logit: Tensor, logits: Tensor) -> Tensor:
    """Gradient by logits / t (overwritten) -> gradient by the head's output, in the weight's dtype."""
    if head.after is not None:
        by_logit.mul_(head.after.slope(logits.mul_(head.temperature)))
    return by_logit.div_(head.temperature).to(head.weight.dtype)


def _normalised(logits: Tensor, norm: Tensor) -> Tensor:
    """log-softmax of the logits, in place; the log-sum-exp goes into `norm`."""
    torch.logsumexp(logits, -1, out=norm)
    return logits.sub_(norm[:, None])


def _buckets(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of the given tokens [N, k] and of all others together, [N, k + 1]. Overwrites the logits. The others
    are summed directly: 1 minus the given tokens' probability would be only rounding when that is nearly 1."""
    norm, named = logits.logsumexp(-1, keepdim=True), logits.gather(1, ids)
    rest = logits.scatter_(1, ids, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([named, rest], -1).sub_(norm)


def _room(hidden: Tensor) -> int:
    return (shape.GPU_CHUNK if hidden.is_cuda else shape.CHUNK) // TENSORS
