"""log p(target | context) and entropy from hidden states, without ever holding logits for all tokens.

The engine and the learner both end here: the same head, float32 softmax, the same temperature.
Shapes: N trained tokens, C tokens in a chunk, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK = 128  # tokens whose logits exist at once: C x V x 6 bytes (150 MB for a vocabulary of 49,152)


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """logits / temperature in float32, [C, V]. The product itself runs in the weights' type."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def token_logprobs(
    hidden: Tensor, head: torch.nn.Linear, targets: Tensor, temperature: float = 1.0, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden) / temperature)[target], and the entropy of that distribution.

    hidden [N, H], targets [N] -> logprobs [N], entropy [N], both float32 and differentiable.
    """
    return _TokenLogprobs.apply(hidden, head.weight, head.bias, targets, temperature, chunk)  # pyright: ignore


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax(l), l = logits / t, entropy h:  d logp / d l = onehot - p  and  d h / d l = -p (log p + h).

    Logits are recomputed in the backward pass, so that memory does not grow with N x V.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for cut in _chunks(len(hidden), chunk):
            logits = scaled_logits(hidden[cut], weight, bias, temperature)
            norm = logits.logsumexp(-1, keepdim=True)
            logprobs[cut] = (logits.gather(1, targets[cut, None]) - norm)[:, 0]
            logp = logits.sub_(norm)
            entropy[cut] = -(logp.exp().mul_(logp)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        if grad_logp is None and grad_entropy is None:
            return (None,) * 6
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for cut in _chunks(len(hidden), ctx.chunk):
            logp = scaled_logits(hidden[cut], weight, bias, ctx.temperature).log_softmax(-1)
            p = logp.exp()
            grad = torch.zeros_like(p)
            if grad_entropy is not None:
                h = -(p * logp).sum(-1, keepdim=True)
                grad.sub_(p * (logp + h) * grad_entropy[cut, None])
            if grad_logp is not None:
                grad.sub_(p.mul_(grad_logp[cut, None]))
                grad.scatter_add_(1, targets[cut, None], grad_logp[cut, None])
            grad = grad.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[cut] = grad @ weight
            grad_weight += grad.T @ hidden[cut]
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]
