"""A card that is not there: tensors of the device cuda without contents, on any machine. What runs on them shows which
operations are launched, on which devices and types, and whether one waits for a value."""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import birl.models
from birl.engine.graphs import Watch
from birl.models import fused, fused_decoder, paged_triton

CUDA = torch.device("cuda", 0)
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
NO_KERNEL = {"device", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "lift_fresh"}

WIDE = ("combine_kernel", *(f"{name}_kernel" for name in ("chunks", "bound", "ends", "sample")))  # read float32


def launches(func: Any) -> bool:
    """Does this operation launch a kernel? Views and allocations do not."""
    views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
    return not views and func.__name__.partition(".")[0] not in NO_KERNEL


class Kernels(ModuleType):
    """In place of a module of Triton kernels: each may be launched on any grid, and notes that it was."""

    def __init__(self, name: str, launched: Callable[..., None]) -> None:
        super().__init__(name)
        self.launched = launched

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_kernel"):
            raise AttributeError(name)
        launched = self.launched

        class Kernel:
            def __getitem__(self, grid: object) -> Callable[..., None]:
                return lambda *args, **options: launched(name, args)

        return Kernel()


class Step(Watch):
    """Within, what is launched is counted, each operation once. Raises `AssertionError` where one waits for the device,
    leaves it, computes in float64, or is given float32 where its input is meant to be bfloat16. `wide`: how many
    products are in float32 and meant to be."""

    def __init__(self, wide: int = 0) -> None:
        super().__init__(CUDA)
        self.launches: Counter[str] = Counter()
        self.wide = wide

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        assert not self.problem, self.problem
        name = func.__name__.partition(".")[0]
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        assert all(t.dtype != torch.float64 for t in tensors), f"{func} computes in float64"
        if name in PRODUCTS:
            left = next(t for t in args if isinstance(t, Tensor) and t.ndim > 1)
            if left.dtype != torch.bfloat16 and left.shape[-1] > 1:  # angles are an outer product
                self.wide -= 1
                assert self.wide >= 0, f"{func} multiplies in float32"
        if launches(func):
            self.launches[name] += 1
        return result

    def launched(self, name: str, args: tuple[Any, ...]) -> None:
        """A kernel of birl's: all but these read bfloat16 first."""
        tensors = [t for t in args if isinstance(t, Tensor)]
        assert all(t.device == CUDA and t.dtype != torch.float64 for t in tensors), (
            f"{name} has another device's tensor"
        )
        bf16 = name in WIDE or all(t.dtype == torch.bfloat16 for t in tensors[:2])
        assert bf16, f"{name} has float32"
        self.launches[name] += 1


@contextmanager
def card(monkeypatch: pytest.MonkeyPatch, launched: Callable[..., None]) -> Iterator[None]:
    """Within, the machine has a card of the kind of an H100, and Triton."""
    slots = (ctypes.c_void_p * 2).in_dll(
        ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    for name in ("digest_kernels", "fused_kernels", "paged_kernels", "sample_kernels"):
        module = Kernels(f"birl.models.{name}", launched)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(birl.models, name, module, raising=False)
    for user in (fused, fused_decoder, paged_triton):
        monkeypatch.setattr(user, "has_triton", lambda: True)
    before = slots[1]
    slots[1] = before or slots[0]  # choosing the device: the CPU's guard, which does nothing
    try:
        with FakeTensorMode(), torch.no_grad():
            yield
    finally:
        slots[1] = before
