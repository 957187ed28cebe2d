"""What tensors take: the largest one that is made, and the most that all of them take at once."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Within, memory that operations of PyTorch give to tensors is counted [bytes], also of tensors without contents;
    what is inside of one operation is not, nor what was there before."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__()
        self.largest, self.now, self.peak = 0, 0, 0
        self.known = {t.untyped_storage()._cdata for t in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t.untyped_storage()._cdata for t in tensors((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            self._count(tensor, given)
        return result

    def _count(self, tensor: Tensor, given: list[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or key in given:
            return
        self.known.add(key)
        self.now += size
        self.largest, self.peak = max(self.largest, size), max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def tensors(tree: Any) -> list[Tensor]:
    """Those that have memory which PyTorch knows; oneDNN's laid-out weights have not."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and not t.is_mkldnn]
