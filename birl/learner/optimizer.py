"""AdamW on float32 master weights, its schedule, and clipping by the global norm.

The module that generates and trains holds its weights in the compute type. When that is bfloat16, each parameter has a
float32 master: gradients are summed in float32, AdamW updates the master, and the parameter is the master rounded.
AdamW on bfloat16 weights would not move them at all at the learning rates of reinforcement learning: the step is
smaller than half a unit in the last place (measured; `tests/learner/test_optimizer.py`).
"""

from math import cos, pi

import torch
from torch import Tensor, nn

from birl.models import decoder, fused_decoder


class Masters:
    """float32 masters of a module's parameters; `tensors[name].grad` is the float32 gradient summed over
    micro-batches."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = model
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.tensors: dict[str, Tensor] = {}
        self.separate = dtype != torch.float32
        for name, parameter in self.parameters.items():
            if not self.separate:
                self.tensors[name] = parameter
                continue
            self.tensors[name] = parameter.data.float()
            parameter.data = self.tensors[name].to(dtype)
            parameter.register_post_accumulate_grad_hook(_move_grad_to(self.tensors[name]))
            parameter.master = self.tensors[name]  # pyright: ignore  birl's kernels add gradients to it directly

    def publish(self) -> None:
        """Round the masters into the module's own parameters, and have every copy of them made anew."""
        decoder.weights_changed(self.model)
        fused_decoder.weights_changed(self.model)
        if self.separate:
            with torch.no_grad():
                torch._foreach_copy_(list(self.parameters.values()), list(self.tensors.values()))


def _move_grad_to(master: Tensor):
    def hook(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:  # the kernels have put it where it belongs
            return
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad += grad
        parameter.grad = None

    return hook


def adamw(masters: Masters, *, betas: tuple[float, float], eps: float, weight_decay: float) -> torch.optim.AdamW:
    """Weight decay is for matrices; norms and biases have none."""
    tensors = list(masters.tensors.values())
    groups = [
        {"params": [t for t in tensors if t.ndim >= 2], "weight_decay": weight_decay},
        {"params": [t for t in tensors if t.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, eps=eps, fused=True)


def learning_rate(step: int, *, peak: float, schedule: str, warmup: int, total: int | None, min_ratio: float) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then constant, or linear or cosine decay to min_ratio *
    peak at `total`. A pure function of the step, so nothing of it needs saving."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant" or total is None:
        return peak
    done = min((step - warmup) / max(total - 1 - warmup, 1), 1.0)
    share = 1 - done if schedule == "linear" else (1 + cos(pi * done)) / 2
    return peak * (min_ratio + (1 - min_ratio) * share)
