"""Bytes of live storages while a step runs, and the most of them: what an allocator that loses nothing would hold."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from birl.parallel.layout import local


class Peak(TorchDispatchMode):
    """Within, `now` counts the storages that live, of those that operations gave or `hold` was told of, and `most` is
    the largest that it was. A tensor without contents has a storage of the size that it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def hold(self, tensor: Tensor) -> None:
        storage = local(tensor).untyped_storage()  # a DTensor has none, and says the size of the whole
        if (key := storage._cdata) not in self.sizes:
            self.sizes[key] = 0
            weakref.finalize(storage, self.gone, key)
        self.resized(key, storage.nbytes())

    def resized(self, key: int, size: int) -> None:
        self.now += size - self.sizes[key]
        self.sizes[key] = size
        self.most = max(self.most, self.now)

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        return result


@contextmanager
def peak(patch: pytest.MonkeyPatch) -> Iterator[Peak]:
    """Within, storages that FSDP empties and fills again count, too."""
    result, plain = Peak(), torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        plain(storage, size)
        if storage._cdata in result.sizes:
            result.resized(storage._cdata, size)

    patch.setattr(torch.UntypedStorage, "resize_", resize)
    with result:
        yield result
