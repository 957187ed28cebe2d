"""Rank 0 of a NCCL communicator without torch.distributed, by the C interface of the NCCL that PyTorch brings
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html). vLLM's workers join one by its unique id alone."""

import ctypes
import functools
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from birl.errors import BirlError

UINT8, FLOAT32, SUM, SUCCESS, IN_PROGRESS = 1, 7, 0, 0, 7
P, INT, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


CALLS = {
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(P), INT, UniqueId, INT],
    "ncclAllReduce": [P, P, SIZE, INT, INT, P, P],
    "ncclBroadcast": [P, P, SIZE, INT, INT, P, P],
    "ncclCommGetAsyncError": [P, ctypes.POINTER(INT)],
    "ncclCommAbort": [P],
}


@functools.cache
def library() -> Any:
    """Raises `BirlError` where there is none."""
    try:
        result = ctypes.CDLL("libnccl.so.2" if torch.version.hip is None else "librccl.so.1")
        for name, types in CALLS.items():
            getattr(result, name).argtypes = types
        result.ncclGetErrorString.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise BirlError(
            f"weights.method=nccl: NCCL cannot be loaded ({error}): install PyTorch for CUDA, or use reload."
        ) from error
    return result


def call(name: str, *args: Any) -> None:
    """Raises `RuntimeError` with NCCL's own words."""
    check(name, getattr(library(), name)(*args))


def check(name: str, code: int) -> None:
    if code not in (SUCCESS, IN_PROGRESS):
        raise RuntimeError(f"{name}: {library().ncclGetErrorString(code).decode()}")


def unique_id() -> bytes:
    """128 bytes that the ranks of one communicator share."""
    result = UniqueId()
    call("ncclGetUniqueId", ctypes.byref(result))
    return bytes(result)


class Communicator:
    """Rank 0 of `size`; returns when all ranks are there and have added one number, as vLLM's do first. `broadcast` and
    `abort` are those of torch's process groups."""

    def __init__(self, identity: bytes, size: int, device: torch.device) -> None:
        self.device, self.comm = device, P()
        torch.cuda.set_device(device)
        call("ncclCommInitRank", ctypes.byref(self.comm), size, UniqueId.from_buffer_copy(identity), 0)
        one = torch.zeros(1, device=device, dtype=torch.float32)
        call("ncclAllReduce", one.data_ptr(), one.data_ptr(), 1, FLOAT32, SUM, self.comm, self.stream())
        torch.cuda.current_stream(device).synchronize()

    def stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def broadcast(self, flat: Tensor, root: int) -> "Sending":
        """`flat`: uint8 [n], contiguous; it must stay until that is completed."""
        call("ncclBroadcast", flat.data_ptr(), flat.data_ptr(), flat.numel(), UINT8, root, self.comm, self.stream())
        return Sending(self)

    def abort(self) -> None:
        """Also ends kernels that wait for other ranks."""
        comm, self.comm = self.comm, P()
        if comm:
            call("ncclCommAbort", comm)

    def __del__(self) -> None:
        with suppress(RuntimeError):
            self.abort()


class Sending:
    def __init__(self, group: Communicator) -> None:
        self._group, self._event = group, torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(group.device))

    def is_completed(self) -> bool:
        """Raises `RuntimeError` where another rank is lost, as far as NCCL notices."""
        code = INT()
        call("ncclCommGetAsyncError", self._group.comm, ctypes.byref(code))
        check("ncclBroadcast", code.value)
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()
