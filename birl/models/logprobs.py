"""log p(target | context) and entropy from hidden states, without storing logits of all tokens.

Used by the engine and the learner: the same head, float32 softmax, the same temperature.
The forward pass goes over the tokens in chunks, the backward pass over the vocabulary: each piece of the weight's
gradient is then complete when it is written, and nothing of size [V, H] is accumulated repeatedly (measured: half of
the backward pass of a small model). The gradient of the loss depends on the log-probs, so logits are recomputed in the
backward pass; a piece of their gradient is computed, used for both products, and freed before the next; `shape.py` has
the memory that this takes.

Shapes: N trained tokens, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from birl.data.support import SupportRows
from birl.kernels.tensors import CELL
from birl.models import shape
from birl.models.decoder import Decoder
from birl.models.fused import on_gpu, triton_kernels
from birl.models.heads import AfterHead
from birl.models.matrix import Matrix, deposit, gradient_place, unless_placed

ALIGNED = 64
CACHED = 1536  # tokens of the vocabulary whose columns, turned by `Kernels.outer`, fit into a second-level cache
# logit of a token outside of the support: its probability is 0, and products with 0 are 0, not NaN
OUTSIDE = -1e15


class Behind(NamedTuple):
    """Steps after the head: the architecture's operation, and the supports that tokens were sampled from."""

    after: AfterHead | None = None
    support: SupportRows | None = None

    def restrict(self, logits: Tensor, rows: slice, first: int) -> Tensor:
        """Mask, in place, the logits [rows, tokens] of the tokens `rows`, for the vocabulary from `first` on."""
        if self.support is None:
            return logits
        return logits.masked_fill_(self.support.outside(rows, first, logits.shape[1]), OUTSIDE)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, [N, K] [K, M] -> [N, M]; not differentiable. On a CPU by oneDNN: PyTorch's own product is MKL's,
    which uses half the width of an AMD processor's registers."""
    if a.device.type == "cpu" and a.numel() and b.numel() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    return a @ b


def float_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, [N, K] [K, M] -> [N, M], for any dtype of both: products of bfloat16 are exact in float32, and
    their sums are never rounded to bfloat16. Not differentiable."""
    if a.dtype == torch.float32:
        return product(a, b)
    if a.is_cuda and torch.version.hip is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    a, out = a.float(), torch.empty(len(a), b.shape[1], dtype=torch.float32, device=a.device)
    for columns in chunks(b.shape[1], shape.WIDENED // len(b)):
        out[:, columns] = product(a, b[:, columns].float())
    return out


def float_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden W' + bias in float32: [C, H], [V, H], [V] -> [C, V]. The logits of engine and learner, unless birl's CPU
    kernels compute them."""
    logits = float_product(hidden, weight.T)
    return logits if bias is None else logits.add_(bias)


def final_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, after: AfterHead | None) -> Tensor:
    """`float_logits` with the architecture's operation after the head, [C, V]."""
    logits = float_logits(hidden, weight, bias)
    return logits if after is None else after.apply(logits)


def scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, after: AfterHead | None = None
) -> Tensor:
    """logits / temperature in float32, [C, V]."""
    logits = final_logits(hidden, weight, bias, after)
    return logits if temperature == 1.0 else logits.div_(temperature)


def token_logprobs(
    hidden: Tensor,
    head: torch.nn.Linear,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = 0,
    decoder: Decoder | None = None,
    after: AfterHead | None = None,
    support: SupportRows | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden) / temperature)[target], and the entropy of that distribution; with `support` over its
    tokens j only, log p = l_a - log sum of exp l_j (Keep Sampling Mask, arXiv:2512.02556 section 3.1).

    hidden [N, H], targets [N] -> logprobs [N], entropy [N], both float32 and differentiable. With `decoder` its kernels
    compute them, bit for bit as the engine samples. `chunk`: logits in memory at once, 0 for the device's default. If
    the head's weight is a DTensor, its tokens are split over ranks, which must all get the same inputs: each computes
    logits of its own tokens only. `after`: the operation after the head (`models/heads.py`).
    """
    behind = Behind(after, support)
    chunk = chunk or (shape.GPU_CHUNK if hidden.is_cuda else shape.CHUNK)
    if isinstance(weight := head.weight, DTensor):
        first, group = first_row(weight), weight.device_mesh.get_group()
        targets, behind = targets - first, Behind(after, support and replace(support, ids=support.ids - first))
        bias = head.bias.to_local() if isinstance(head.bias, DTensor) else None
        return _TokenLogprobs.apply(hidden, weight.to_local(), bias, targets, temperature, chunk, group, behind)  # pyright: ignore
    if decoder is not None:
        assert after is None, "the kernels know no factor or cap behind the head"
        return _KernelLogprobs.apply(  # pyright: ignore
            hidden, head.weight, head.bias, targets, temperature, chunk, decoder.head, support
        )
    return _TokenLogprobs.apply(hidden, head.weight, head.bias, targets, temperature, chunk, None, behind)  # pyright: ignore


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax(l), l = logits / t, entropy h:  d logp / d l = onehot - p  and  d h / d l = -p (log p + h).

    Logits are recomputed in the backward pass, so that memory does not grow with N x V. With a `group` V is this rank's
    part of the vocabulary, and targets count from its first token; ranks exchange [N] numbers, and going back the
    gradient of `hidden`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int,
        group: dist.ProcessGroup | None, behind: Behind,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, norm = torch.empty_like(logprobs), torch.empty_like(logprobs)
        chosen = targets if group is None else targets.clamp(0, len(weight) - 1)
        for rows in chunks(len(hidden), chunk // len(weight)):
            _figures(rows, hidden, weight, bias, chosen, temperature, behind, (logprobs, entropy, norm))
        if group is not None:
            logprobs, entropy, norm = over_parts(logprobs, entropy, norm, chosen == targets, group)
        ctx.save_for_backward(hidden, weight, bias, targets, norm, entropy)
        ctx.temperature, ctx.chunk, ctx.group, ctx.behind = temperature, chunk, group, behind
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norm, entropy = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        if grad_logp is None and grad_entropy is None:
            return (None,) * 8
        result = HeadGradient(hidden, weight, bias, ctx.needs_input_grad)
        context = (targets, norm, entropy, grad_logp, grad_entropy)
        for vocab in pieces(len(weight), ctx.chunk, len(hidden)):
            part_bias = None if bias is None else bias[vocab]
            result.add(
                vocab, _by_logits(hidden, weight[vocab], part_bias, ctx.temperature, ctx.behind, *context, vocab.start)
            )  # not bound to a name, so that it is freed before the next logits
        if ctx.group is not None:
            dist.all_reduce(result.by_hidden, group=ctx.group)
        return *result.all(), None, None, None, None, None


class HeadGradient:
    """Gradients of hidden states [N, H], and of the head's weight and bias, from that of its logits, piece by piece of
    the vocabulary. `wanted`: which of the three; that of hidden states is always computed."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        self.hidden, self.weight = hidden, weight
        self.by_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        self.into, self.adds = gradient_place(weight, weight.dtype) if wanted[1] else (None, False)
        self.by_bias = torch.empty_like(bias) if bias is not None and wanted[2] else None

    def add(self, vocab: slice, grad: Tensor) -> None:
        """Add the logits' gradient of some tokens, [N, tokens] in the weight's dtype."""
        self.by_hidden += float_product(grad, self.weight[vocab])
        if self.into is not None and self.into.dtype == self.weight.dtype:
            torch.mm(grad.T, self.hidden, out=self.into[vocab])
        elif self.into is not None:
            part = float_product(grad.T, self.hidden)
            self.into[vocab] = part.add_(self.into[vocab]) if self.adds else part
            del part
        if self.by_bias is not None:
            self.by_bias[vocab] = grad.sum(0, dtype=torch.float32)

    def nothing(self, vocab: slice) -> None:
        """Set the gradients of these tokens to 0."""
        if self.into is not None and not self.adds:
            self.into[vocab] = 0
        if self.by_bias is not None:
            self.by_bias[vocab] = 0

    def all(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        by_weight = None if self.into is None else unless_placed(self.weight, self.into)
        return self.by_hidden.to(self.hidden.dtype), by_weight, self.by_bias


def _figures(
    rows: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
    behind: Behind, into: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Write log-probs, entropies and log-sum-exps of some tokens into the tensors [N] of all."""
    own, given = targets[rows], (hidden[rows], weight, bias)
    logprobs, entropy, norm = (figure[rows] for figure in into)
    if on_gpu(hidden):
        logits = behind.restrict(final_logits(*given, behind.after), rows, 0)
        return launch_logprobs(logits, own, temperature, logprobs, entropy, norm)
    logits = behind.restrict(scaled_logits(*given, temperature, behind.after), rows, 0)
    torch.logsumexp(logits, -1, out=norm)
    torch.sub(logits.gather(1, own[:, None])[:, 0], norm, out=logprobs)
    logp = logits.sub_(norm[:, None])
    torch.neg((logp.exp().mul_(logp)).sum(-1), out=entropy)


def _by_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, behind: Behind,
    targets: Tensor, norm: Tensor, entropy: Tensor, by_logp: Tensor | None, by_entropy: Tensor | None, first: int,
) -> Tensor:  # fmt: skip
    """The gradient of the head's output for the tokens from `first` on, [N, tokens] in the weight's dtype."""
    every = slice(0, len(hidden))
    if behind.after is not None:  # chain rule through the operation after the head
        logits = final_logits(hidden, weight, bias, behind.after)
        slope = behind.after.slope(logits)
        behind.restrict(logits, every, first)
        if on_gpu(hidden):
            launch_logprobs_backward(logits, logits, targets, norm, entropy, by_logp, by_entropy, first, temperature)
            return logits.mul_(slope).to(weight.dtype)
        logp = logits.div_(temperature).sub_(norm[:, None])
        grad = logits_gradient(logp, targets, entropy, by_logp, by_entropy, first)
        return grad.mul_(slope).div_(temperature).to(weight.dtype)
    if not on_gpu(hidden):
        grads = entropy, by_logp, by_entropy
        grad = logits_gradient(
            behind.restrict(scaled_logits(hidden, weight, bias, temperature), every, first).sub_(norm[:, None]),
            targets, *grads, first,
        )  # not bound to a name, so the logits are freed by now  # fmt: skip
        return grad.div_(temperature).to(weight.dtype)
    logits = behind.restrict(float_logits(hidden, weight, bias), every, first)
    grad = logits if weight.dtype == torch.float32 else torch.empty_like(logits, dtype=weight.dtype)
    launch_logprobs_backward(logits, grad, targets, norm, entropy, by_logp, by_entropy, first, temperature)
    return grad


def over_parts(
    logprobs: Tensor, entropy: Tensor, norm: Tensor, here: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy and log-sum-exp over all tokens, from those over each rank's tokens, [N] each. `here`:
    whether this rank has the target.

    With r a rank, Z_r its sum and h_r its entropy, w_r = Z_r / Z:  log p = log p_r + log w_r  and
    h = sum over r of w_r (h_r - log w_r), whose terms are never negative.
    """
    largest = norm.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total = (norm - largest).exp()
    dist.all_reduce(total, group=group)
    whole = largest + total.log()
    log_share = norm - whole
    result = torch.stack([(logprobs + log_share).where(here, 0.0), log_share.exp() * (entropy - log_share)])
    dist.all_reduce(result, group=group)
    return result[0].clone(), result[1].clone(), whole  # FSDP does not accept views


def first_row(weight: DTensor) -> int:
    """First row of this rank's part of a sharded weight: torch splits [V, H] into parts of ceil(V / ranks)."""
    return weight.device_mesh.get_local_rank() * -(-weight.shape[0] // weight.device_mesh.size())


def logits_gradient(
    logp: Tensor, targets: Tensor, entropy: Tensor, by_logp: Tensor | None, by_entropy: Tensor | None, first: int
) -> Tensor:
    """The gradient of logits / t of the tokens from `first` on, whose log-probs are logp [N, tokens] (overwritten)."""
    grad, spread = (logp.exp_(), None) if by_entropy is None else (logp.exp(), logp)
    if spread is not None and by_entropy is not None:
        spread.add_(entropy[:, None]).mul_(grad).mul_(by_entropy[:, None])
    grad.mul_(0.0 if by_logp is None else -by_logp[:, None])
    if by_logp is not None:
        inside = ((targets >= first) & (targets < first + logp.shape[1])).nonzero()[:, 0]
        grad[inside, targets[inside] - first] += by_logp[inside]
    return grad if spread is None else grad.sub_(spread)


def launch_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, logprobs: Tensor, entropy: Tensor, norm: Tensor
) -> None:
    """One pass over logits [N, V] of any dtype; float32 [N] results are written to the given tensors."""
    rows, vocab = logits.shape
    if rows:
        triton_kernels().logprob_kernel[(rows,)](
            logits, targets, logprobs, entropy, norm, vocab, temperature, BLOCK=4096, num_warps=8
        )  # fmt: skip


def launch_logprobs_backward(
    logits: Tensor, grad: Tensor, targets: Tensor, norm: Tensor, entropy: Tensor, by_logp: Tensor | None,
    by_entropy: Tensor | None, first: int, temperature: float,
) -> None:  # fmt: skip
    """Logits [N, tokens] -> their gradient, written to `grad` in its dtype; it may be the logits' own memory."""
    rows, vocab = logits.shape
    if rows:
        triton_kernels().logprob_backward_kernel[(rows, -(-vocab // 4096))](
            logits, grad, targets, norm, entropy,
            norm if by_logp is None else by_logp.contiguous(), norm if by_entropy is None else by_entropy.contiguous(),
            vocab, first, temperature,
            LOGP=by_logp is not None, ENTROPY=by_entropy is not None, BLOCK=4096, num_warps=8,
        )  # fmt: skip


class _KernelLogprobs(torch.autograd.Function):
    """`_TokenLogprobs` on birl's kernels, with the head's weight packed once and logits that are not rounded."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int,
        head: Matrix, support: SupportRows | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        logprobs, entropy, norm = torch.empty(3, len(hidden), dtype=torch.float32).unbind()
        # one number is kept for a cell of tokens, unless some are masked
        wide = CELL if support is None else 1
        for rows in chunks(len(hidden), chunk * wide // len(weight)):
            if support is None:
                result = head.logprobs(hidden[rows], targets[rows], temperature)
            else:  # divided as the engine does it (`sampler.given`)
                logits = Behind(None, support).restrict(head.floats(hidden[rows]).div_(temperature), rows, 0)
                result = head.kernels.logprobs(logits, targets[rows], 1.0)
            logprobs[rows], norm[rows], entropy[rows] = result
        ctx.save_for_backward(hidden, weight, bias, targets, norm, entropy)
        ctx.temperature, ctx.chunk, ctx.head, ctx.support = temperature, chunk, head, support
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norm, entropy = ctx.saved_tensors
        if (grads[0] is None and grads[1] is None) or not len(hidden):
            return torch.zeros_like(hidden), *(None,) * 7
        head: Matrix = ctx.head
        k = head.kernels
        count, extra = len(hidden), -len(hidden) % 32  # products need whole tiles; rows of zeros have no gradient
        hidden, targets = pad(hidden, (0, 0, 0, extra)), pad(targets, (0, extra), value=-1)
        norm, entropy = pad(norm, (0, extra)), pad(entropy, (0, extra))
        by_logp, by_entropy = (None if g is None else pad(g, (0, extra)).contiguous() for g in grads)
        into, add = gradient_place(weight) if ctx.needs_input_grad[1] else (None, False)
        by_bias = torch.empty(bias.shape, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        by_hidden = torch.zeros(hidden.T.shape, dtype=torch.float32)  # all products here have the tokens as rows
        context = (targets, ctx.temperature, norm, entropy, by_logp, by_entropy)
        packed = k.pack([hidden])
        turned = None if into is None else k.pack([hidden], transposed=True)
        for vocab in pieces(len(weight), ctx.chunk, len(hidden), least=32):
            part = weight[vocab]
            logits = k.gemm_float(part, packed)
            if bias is not None:
                logits += bias[vocab, None]
            if ctx.support is not None:
                outside = ctx.support.outside(slice(0, count), vocab.start, len(part))
                logits[:, :count].masked_fill_(outside.T, OUTSIDE)
            grad = k.logprobs_backward(logits, *context, vocab.start)
            del logits  # before their gradient is packed, and before the next
            if into is not None and turned is not None:
                if add:
                    k.gemm(grad, turned, add_to=into[vocab])
                else:
                    k.gemm_float(grad, turned, into=into[vocab])
            for rows in chunks(len(part), CACHED):
                k.outer(part[rows], k.pack([grad[rows]], transposed=True), by_hidden, True)
            if by_bias is not None:
                by_bias[vocab] = grad.sum(1, dtype=torch.float32)
            del grad
        by_weight = None if into is None else unless_placed(weight, into)
        found_bias = None if bias is None or by_bias is None else deposit(bias, by_bias)
        return by_hidden.T[:count].to(hidden.dtype).contiguous(), by_weight, found_bias, None, None, None, None, None


def chunks(n: int, size: int) -> list[slice]:
    size = max(size, 1)
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def pieces(vocab: int, chunk: int, rows: int, least: int = 1) -> list[slice]:
    """Slices of a vocabulary, each of at most `chunk` logits of `rows` tokens, but a multiple of `least` tokens. From
    `ALIGNED` tokens on, multiples of those: cuBLAS uses much slower kernels if rows are not aligned."""
    size = max(chunk // max(rows, 1), least)
    return chunks(vocab, size - size % (ALIGNED if size >= ALIGNED else least))
