"""Bytes that collectives bring to a rank, counted at PyTorch's dispatcher, and the minimum of each form."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from birl.models.shape import Shape

# for n ranks: bytes that a ring brings to each of them, from the bytes of the whole
SHARES: dict[str, Callable[[int], float]] = {
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "reduce": lambda n: 2 * (n - 1) / n,
    "exchange": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "receive": lambda n: 1.0,
}
# operator -> kind, and the argument that is the whole
PLAIN = {
    "_allgather_base_": ("gather", 0),
    "allgather_": ("gather", 0),
    "_reduce_scatter_base_": ("scatter", 1),
    "reduce_scatter_": ("scatter", 1),
    "allreduce_": ("reduce", 0),
    "alltoall_base_": ("exchange", 1),
    "alltoall_": ("exchange", 1),
    "broadcast_": ("broadcast", 0),
    "recv_": ("receive", 0),
}
FUNCTIONAL = {
    "all_gather_into_tensor": "gather",
    "reduce_scatter_tensor": "scatter",
    "all_reduce": "reduce",
    "all_reduce_": "reduce",
    "all_to_all_single": "exchange",
    "broadcast": "broadcast",
}


class Traffic(TorchDispatchMode):
    """Counts bytes by kind of collective and name of the group while the mode is on, also of the backward pass.

    Example: with Traffic() as traffic: learner.learn(work, stats); traffic.bytes["gather"]
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "c10d" and name in PLAIN:
            kind, place = PLAIN[name]
            group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            self._add(kind, size(args[place]), dist.ProcessGroup.unbox(group))
        elif space == "_c10d_functional" and name in FUNCTIONAL:
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            whole = size(args[0]) * (group.size() if name == "all_gather_into_tensor" else 1)
            self._add(FUNCTIONAL[name], whole, group)
        return func(*args, **(kwargs or {}))

    def _add(self, kind: str, whole: int, group: dist.ProcessGroup) -> None:
        brought = round(SHARES[kind](group.size()) * whole)
        self.bytes[kind] += brought
        self.groups[group.group_name] += brought

    @property
    def total(self) -> int:
        return self.bytes.total()


def size(value: Any) -> int:
    """Bytes of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(size(v) for v in value)


def least(form: str, ranks: int, shape: Shape, batches: int, tokens: int, trained: int = 0) -> float:
    """Minimum of bytes that a rank receives in an optimizer step of `batches` micro-batches with `tokens` packed
    tokens, `trained` of them trained.

    ddp: float32 gradients once, 2 (n - 1) / n. fsdp: bfloat16 weights for each pass of a micro-batch, the embedding's
    for one, float32 gradients for each micro-batch, (n - 1) / n of each. tp: hidden states gathered and scattered at
    both ends of attention and MLP, after the embedding and before the head, in both passes. cp: as fsdp, which splits
    weights over these ranks, too; and keys and values gathered once, their gradients scattered. bfloat16 except for
    gradients of weights.
    """
    part = (ranks - 1) / ranks
    moved = 2 * batches * part
    weights = batches * part * (2 * 2 * shape.active + 2 * shape.embedding + 4 * shape.parameters)
    needs = {
        "ddp": 2 * part * 4 * shape.parameters,
        "fsdp": weights,
        "tp": moved * shape.hidden * (8 * shape.layers * tokens + 2 * (tokens + trained)),
        "cp": weights + moved * tokens * shape.layers * 2 * 2 * shape.kv_heads * shape.head_dim,
    }
    return needs[form]


def context_bytes(
    form: str, *, ranks: int, tokens: int, heads: int, kv_heads: int, size: int, layers: int, element: int
) -> int:
    """Bytes that each rank sends in a forward pass of context parallelism, and again in the backward pass.

    tokens: of the whole row; size: of a head; element: bytes of a number. gather: the own keys and values to all others
    (backward their gradients come from all others). ulysses: all heads except its own of its tokens' queries, keys and
    values, and all tokens except its own of its heads' results.
    """
    own = tokens // ranks * size * layers * element  # one head of the own tokens
    if form == "gather":
        return (ranks - 1) * own * 2 * kv_heads
    sent_heads = kv_heads if kv_heads % ranks == 0 else ranks  # fewer than ranks are sent more than once
    return (ranks - 1) * own * (2 * heads + 2 * sent_heads) // ranks


def figures_bytes(ranks: int, longest: int, figures: int = 2) -> int:
    """`context_bytes` of float32 figures of trained tokens, at most `longest` on a rank; none in the backward pass."""
    return (ranks - 1) * longest * figures * 4
