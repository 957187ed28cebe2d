"""Muon: steps along the orthogonalised momentum of hidden matrices (K. Jordan, 2024; arXiv:2502.16982, algorithm 1).

M <- mu M + (1 - mu) G;   O = orthogonal((1 - mu) G + mu M);   W <- (1 - lr decay) W - 0.2 lr sqrt(max(A, B)) O

for a weight W [A, B] and its gradient G, as in `torch.optim.Muon`. The factor (arXiv:2502.16982, section 2.2) gives the
step the root mean square of AdamW's, so that `lr` and decay have the same meaning. Hidden matrices are all but
embeddings, heads, kernels of convolutions and parameters that are multiplied or added elementwise (`ELEMENTWISE`);
stacked experts [E, A, B] are E matrices, a fused matrix of the model (gate_up_proj, qkv_proj) is one. All other
parameters are stepped by AdamW.

Of a sharded matrix each rank has a shard of M; a step gathers the whole matrix to orthogonalise, one at a time, and
every rank computes the same. Experts that are sharded as whole matrices need no gather.
"""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from birl.learner.optimizer import ELEMENTWISE, wide_state
from birl.models.heads import HEADS
from birl.parallel.layout import Layout, cut

COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # of the quintic iteration, by K. Jordan
RMS = 0.2  # of AdamW's steps

Whole = Callable[[Tensor], Tensor]  # this rank's shard of a tensor of a matrix's size -> the DTensor


def hidden(model: nn.Module) -> set[str]:
    """Names of the matrices that Muon steps."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # pyright: ignore[reportCallIssue]
    apart = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    outside = {id(p) for m in (*ends, *apart) if m is not None for p in m.parameters()}
    return {
        name
        for name, p in model.named_parameters()
        if matrix(p.shape)
        and id(p) not in outside
        and not name.endswith(ELEMENTWISE)
        and name.split(".")[0] not in HEADS
    }


def matrix(shape: torch.Size) -> bool:
    return len(shape) in (2, 3) and min(shape[-2:]) > 1


class Muon(torch.optim.AdamW):
    """AdamW for `groups`, except that the keys of `matrices` are stepped by Muon; values: shard -> DTensor."""

    def __init__(self, groups: list[dict[str, Any]], matrices: Mapping[Tensor, Whole], **options: Any):
        super().__init__(groups, fused=True, **options)
        self.matrices = matrices
        for group in groups:
            for master in group["params"]:
                first = {"momentum": torch.zeros_like(master.data)} if master in matrices else wide_state(master)
                self.state[master] = first

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Gradients of matrices that Muon steps are set to None afterwards."""
        for group in self.param_groups:
            for master in group["params"]:
                if master in self.matrices and master.grad is not None:
                    self._step(master, master.grad, group)
                    master.grad = None
        super().step(closure)

    def _step(self, master: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["betas"][0]
        mean = self.state[master]["momentum"].lerp_(grad, 1 - momentum)
        whole = self.matrices[master](grad.lerp(mean, momentum))
        result = orthogonal_part(whole) if isinstance(whole, DTensor) else orthogonal(whole)
        scale = RMS * sqrt(max(whole.shape[-2:]))
        master.detach().mul_(1 - lr * group["weight_decay"]).add_(result, alpha=-lr * scale)


def orthogonal_part(update: DTensor) -> Tensor:
    """This rank's part of `orthogonal(update)`."""
    inside = {update.ndim - 2, update.ndim - 1}
    if inside.isdisjoint(map(cut, update.placements)):
        return orthogonal(update.to_local())
    return Layout.of(update).part(orthogonal(update.full_tensor()))


def orthogonal(update: Tensor) -> Tensor:
    """[..., A, B] float32 -> nearly U V^T of each matrix's singular value decomposition U S V^T, float32: five
    iterations X <- a X + (b X X^T + c (X X^T)^2) X on a matrix of Frobenius norm 1, which leave singular values of 0.7
    to 1.2 (K. Jordan, 2024). In bfloat16 on a GPU, in float32 on a CPU."""
    x = update.to(torch.bfloat16) if update.is_cuda else update
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(EPS)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(update.dtype)
