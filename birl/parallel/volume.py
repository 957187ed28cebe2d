"""How many bytes a rank sends: counted, and what it has to send at least.

Counted is what the bandwidth-optimal form of each collective sends, over n ranks: a rank's own data to all others
(all-gather, all-to-all), everything but its own part (reduce-scatter), both of them (all-reduce).
"""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: c10d operator -> its argument that is sent, and how many bytes a rank sends for each of its bytes and of n ranks
SENT = {
    "_allgather_base_": (1, lambda n: n - 1),
    "allgather_": (1, lambda n: n - 1),
    "alltoall_base_": (1, lambda n: (n - 1) / n),
    "_reduce_scatter_base_": (1, lambda n: (n - 1) / n),
    "reduce_scatter_": (1, lambda n: (n - 1) / n),
    "allreduce_": (0, lambda n: 2 * (n - 1) / n),
}


class Volume(TorchDispatchMode):
    """Counts the collectives that are called within. Example: `with Volume() as volume: ...; volume.bytes[group]`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()  # by the name of the group
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name in SENT:
            place, factor = SENT[name]
            group = next(dist.ProcessGroup.unbox(a) for a in args if type(a).__name__ == "ScriptObject")
            sent = sum(t.numel() * t.element_size() for t in _tensors(args[place]))
            self.bytes[group.group_name] += round(sent * factor(group.size()))
            self.calls[group.group_name] += 1
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in _tensors(part)]


def context_bytes(
    form: str, *, ranks: int, tokens: int, heads: int, kv_heads: int, size: int, layers: int, element: int
) -> int:
    """What context parallelism makes each rank send in a forward pass, and again in the backward pass [bytes].

    tokens: of the whole row; size: of a head; element: bytes of a number. gather: the own keys and values to all others
    (backward their gradients come from all others). ulysses: of the own tokens' queries, keys and values all heads but
    its own, and of the own heads' results all tokens but its own.
    """
    own = tokens // ranks * size * layers * element  # one head of the own tokens
    if form == "gather":
        return (ranks - 1) * own * 2 * kv_heads
    sent_heads = kv_heads if kv_heads % ranks == 0 else ranks  # fewer than ranks are sent more than once
    return (ranks - 1) * own * (2 * heads + 2 * sent_heads) // ranks


def figures_bytes(ranks: int, longest: int, figures: int = 2) -> int:
    """The same for float32 figures of the trained tokens, of which a rank has `longest` at most. Backward none."""
    return (ranks - 1) * longest * figures * 4
