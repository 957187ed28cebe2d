"""AdamW on float32 master weights, its schedule, and clipping by the global norm.

The module that generates and trains holds its weights in the compute type. If that is bfloat16, each parameter has a
float32 master: gradients are summed in float32, AdamW updates the master, and the parameter is the master rounded.
`rounding.py` chooses the initial values of masters.

AdamW on bfloat16 weights would not move them at all at the learning rates of reinforcement learning: the step is
smaller than half a unit in the last place (measured; `tests/learner/test_optimizer.py`).
"""

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn

from birl.models.decoder import weights_changed
from birl.parallel.layout import Layout
from birl.parallel.ranks import sum_gradients

#: suffixes of names of parameters that are added or multiplied elementwise, even if they have two dimensions: biases of
#: experts, scales of heads, Mamba's A
ELEMENTWISE = ("bias", "A_log", "scale")


class Masters:
    """Trained float32 `tensors` by name, whole on every rank, and `marks`: further tensors that a checkpoint must
    match."""

    tensors: dict[str, Tensor]
    marks: dict[str, Tensor]

    def whole(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor of a master's size, or of its optimizer state, in the form for a checkpoint."""
        return value

    def copies(self, name: str) -> int:
        """Number of ranks that hold each element of a master; 0: all ranks."""
        return 0

    def publish(self) -> None:
        """Call after a step: updates the module's parameters. Nothing to do if they are the masters."""

    def loaded(self) -> None:
        """Call after writing `tensors`."""
        self.publish()


class MasterWeights(Masters):
    """float32 masters of a module's parameters; `tensors[name].grad` is the float32 gradient summed over
    micro-batches. With `offload` masters, gradients and AdamW's state are in CPU memory, and its step runs there."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, offload: bool = False) -> None:
        self.model = model
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.tensors, self.marks = {}, {}
        self.separate = offload or dtype != torch.float32
        self.gradients = Gradients() if offload else None
        for name, parameter in self.parameters.items():
            if not self.separate:
                self.tensors[name] = parameter
                continue
            master = parameter.data.to("cpu" if offload else parameter.device, torch.float32, copy=offload)
            if offload and parameter.is_cuda:  # copying it back needs no detour then
                master = master.pin_memory()
            self.tensors[name] = master
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(move_grad_to(master, self.gradients))
            if not offload:
                parameter.master = master  # pyright: ignore  birl's kernels add gradients to it directly

    def gather(self) -> None:
        """Call before a step: waits until every offloaded gradient is in its master."""
        if self.gradients is not None:
            self.gradients.arrive()

    def publish(self) -> None:
        """Round the masters into the module's parameters, and invalidate all copies of these."""
        weights_changed(self.model)
        if self.separate and self.tensors:
            with torch.no_grad():
                if self.gradients is not None:
                    for name, parameter in self.parameters.items():
                        bring(parameter, self.tensors[name])
                    return
                torch._foreach_copy_(list(self.parameters.values()), list(self.tensors.values()))

    def weights(self) -> dict[str, Tensor]:
        return {name: master.data for name, master in self.tensors.items()}


class ShardedMasterWeights(Masters):
    """This rank's shards of the parameters of a model split by FSDP. They are the float32 masters themselves; copies in
    the compute type exist only temporarily."""

    def __init__(self, parameters: dict[str, Any], summands: Sequence[str] = (), group: Any = None) -> None:
        """`parameters`: DTensors by name. `summands`: those that are replicated over `group` while each rank has a
        summand of the gradient."""
        self.parameters, self.group = parameters, group
        self.summands = [name for name in summands if name in parameters]
        self.tensors = {n: p.to_local().detach() for n, p in self.parameters.items()}
        self.marks = {}

    def gather(self) -> None:
        """Move every gradient, which FSDP has summed over the ranks, to its shard."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.tensors[name].grad = parameter.grad.to_local()
                parameter.grad = None
        sum_gradients([self.tensors[name] for name in self.summands], self.group)

    def weights(self) -> dict[str, Tensor]:
        """Weights by name, as DTensors."""
        return {name: p.data for name, p in self.parameters.items()}

    def whole(self, name: str, value: Tensor) -> Tensor:
        """Return a shard as its DTensor; a step count, which is not sharded, unchanged."""
        return value if value.ndim == 0 else Layout.of(self.parameters[name]).whole(value, self.tensors[name].shape)

    def copies(self, name: str) -> int:
        return Layout.of(self.parameters[name]).copies()


class Gradients:
    """Gradients in transfer to CPU memory (`optimizer.offload=cpu`): from a GPU into pinned memory, overlapped with the
    backward pass; on a CPU they are copied synchronously. `send` starts a copy after the gradient's computation, and
    `arrive` adds finished copies to the masters' float32 gradients, in the order of sending."""

    def __init__(self) -> None:
        self.under_way: deque[tuple[Tensor, Any, Any]] = deque()
        self.stream: torch.cuda.Stream | None = None

    def send(self, grad: Tensor, master: Any) -> None:
        host, sent = staging(grad, grad.dtype), None
        if grad.is_cuda:
            self.stream = self.stream or torch.cuda.Stream(grad.device)
            self.stream.wait_stream(torch.cuda.current_stream(grad.device))
            with torch.cuda.stream(self.stream):
                host.copy_(grad, non_blocking=True)
                sent = self.stream.record_event()
            grad.record_stream(self.stream)  # its memory is not given to others before
        else:
            host.copy_(grad)
        self.under_way.append((host, master, sent))
        self.arrive(wait=False)

    def arrive(self, wait: bool = True) -> None:
        """Add sent gradients to the masters. Without `wait` only finished copies, and not the last one sent."""
        while len(self.under_way) > (0 if wait else 1):
            host, master, sent = self.under_way[0]
            if sent is not None:
                if not wait and not sent.query():
                    return
                sent.synchronize()
            self.under_way.popleft()
            add_grad(master, host)


def add_grad(master: Any, grad: Tensor) -> None:
    """Add to the float32 sum in `master.grad`; `grad` may have another type."""
    master.grad = grad.to(torch.float32) if master.grad is None else master.grad.add_(grad)


def staging(like: Tensor, dtype: torch.dtype) -> Tensor:
    """CPU memory for a copy to or from the device of `like`. PyTorch caches pinned memory, and does not reuse it before
    copies that were started on it are finished."""
    return torch.empty(like.shape, dtype=dtype, pin_memory=like.is_cuda)


def bring(parameter: Tensor, master: Tensor) -> None:
    """Round a master into the parameter; the copy is asynchronous, so the next master is rounded meanwhile."""
    host = staging(parameter, parameter.dtype)
    host.copy_(master)
    parameter.copy_(host, non_blocking=True)


def move_grad_to(master: Any, gradients: Gradients | None = None):
    """Return a hook for a parameter after its backward pass: adds the gradient to the float32 `master.grad`, through
    `gradients` if that is in CPU memory."""

    def hook(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:  # the kernels have added it to the master
            return
        if gradients is not None:
            gradients.send(grad.detach(), master)
        else:
            add_grad(master, grad)
        parameter.grad = None

    return hook


def adamw(
    masters: Masters,
    model: nn.Module,
    *,
    kind: str = "adamw",
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    still: Collection[str] = (),
) -> torch.optim.AdamW:
    """Return the optimizer. Weight decay applies to matrices, not to norms and biases, nor to those of experts [E, A].
    `kind`: adamw | adamw8bit | muon, whose momentum is the first of `betas`; `still`: names of masters that keep their
    values. The state is created here, not at the first step, as a checkpoint may be loaded before that."""
    moving = {name: tensor for name, tensor in masters.tensors.items() if name not in still}
    tensors = list(moving.values())
    decayed = {n: t.ndim >= 2 and not n.endswith(ELEMENTWISE) for n, t in moving.items()}
    groups = [
        {"params": [t for n, t in moving.items() if decayed[n]], "weight_decay": weight_decay},
        {"params": [t for n, t in moving.items() if not decayed[n]], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if kind == "adamw8bit":
        from birl.learner.adamw8bit import AdamW8bit, first_state

        optimizer = AdamW8bit(groups, betas=betas, eps=eps)
        optimizer.state.update({t: first_state(t, masters.whole(n, t.data).shape) for n, t in moving.items()})
        return optimizer
    if kind == "muon":
        from birl.learner.muon import Muon, hidden

        matrices = hidden(model)
        stepped = {t: partial(masters.whole, n) for n, t in moving.items() if n in matrices}
        return Muon(groups, stepped, betas=betas, eps=eps)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)
    optimizer.state.update({t: wide_state(t) for t in tensors})
    return optimizer


def wide_state(master: Tensor) -> dict[str, Tensor]:
    """State of fused AdamW: float32 moments of 0 and the step count."""
    step = torch.zeros((), dtype=torch.float32, device=master.device)
    return {"step": step, "exp_avg": torch.zeros_like(master.data), "exp_avg_sq": torch.zeros_like(master.data)}


def learning_rate(step: int, *, peak: float, schedule: str, warmup: int, total: int | None, min_ratio: float) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then constant, or linear or cosine decay to min_ratio *
    peak at `total`, which no step reaches, as in transformers: a step at rate 0 would be for nothing. So is the first
    step of the warm-up, 1 / `warmup` of the peak. A pure function of the step, so nothing of it needs saving."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant" or total is None:
        return peak
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    share = 1 - done if schedule == "linear" else (1 + cos(pi * done)) / 2
    return peak * (min_ratio + (1 - min_ratio) * share)
