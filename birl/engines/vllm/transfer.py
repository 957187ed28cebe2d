"""vLLM's own weight transfer engines, started with --weight-transfer-config '{"backend": "nccl"}': its workers join a
NCCL communicator by its unique id alone, and receive each bucket as one packed buffer. Rank 0 is in this process,
without torch.distributed, by the C API of PyTorch's NCCL
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html)."""

import ctypes
import functools
from base64 import b64decode, b64encode
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from birl.engines.collective import BroadcastGroup, pieces, shapes_in
from birl.engines.peer import QUICK
from birl.engines.transfer import Transfer
from birl.engines.wire import Invitation
from birl.errors import BirlError, EngineDown
from birl.models.released import nbytes


class Group(BroadcastGroup):
    """NCCL communicator of the learner and vLLM. `store` of its invitation is the unique id, base64."""

    called_back = False  # a worker waits inside NCCL

    @staticmethod
    def host(address: str, timeout: float) -> tuple[Any, str]:
        return None, b64encode(unique_id()).decode()

    def _open(self) -> None:
        given = self.invitation
        self._group = Communicator(b64decode(given.store), given.size, self.device)


class VLLMTransfer(Transfer):
    group = Group

    async def ranks(self) -> int:
        result = await self.peer.json("GET", "/server_info?config_format=json", timeout=QUICK)
        has = (result["vllm_config"].get("weight_transfer_config") or {}).get("backend")
        if has != "nccl":
            raise BirlError(
                f"weights.method=nccl: {self.adapter.address} was started with {has or 'no'} weight transfer "
                'engine: start vLLM with --weight-transfer-config \'{"backend": "nccl"}\'.'
            )
        return int((await self.peer.json("GET", "/get_world_size", timeout=QUICK))["world_size"])

    async def enter(self, invitation: Invitation) -> None:
        with suppress(EngineDown, BirlError):  # of an earlier group
            await self.call("/shutdown_weight_transfer_engine")
        shapes = shapes_in(invitation)
        largest = max(nbytes(names, shapes) for names in pieces(shapes, invitation.bucket_mb))
        info = {
            **{"nccl_unique_id_b64": invitation.store, "rank_offset": invitation.rank, "world_size": invitation.size},
            **{"packed": True, "packed_buffer_size_bytes": largest, "packed_num_buffers": 1},
        }
        await self.call("/init_weight_transfer_engine", {"init_info": info})

    async def call(self, path: str, body: dict[str, Any] | None = None) -> None:
        await self.peer.call("POST", path, timeout=self.seconds, json=body or {})

    async def begin(self) -> None:
        try:
            await self.call("/start_weight_update")
        except EngineDown:  # an interrupted update is open
            with suppress(EngineDown, BirlError):
                await self.finish()
            await self.call("/start_weight_update")

    async def bucket(self, rows: dict[str, Any], last: str) -> None:
        info = {"names": rows["names"], "dtype_names": rows["dtypes"], "shapes": rows["shapes"]}
        await self.call("/update_weights", {"update_info": info})

    async def finish(self) -> None:
        await self.call("/finish_weight_update")


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
    """The NCCL library. Raises `BirlError` if there is none."""
    try:
        result = ctypes.CDLL("libnccl.so.2" if torch.version.hip is None else "librccl.so.1")
        for name, types in CALLS.items():
            getattr(result, name).argtypes = types
        result.ncclGetErrorString.restype = result.ncclGetLastError.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise BirlError(
            f"weights.method=nccl: NCCL cannot be loaded ({error}): install PyTorch for CUDA, or use reload."
        ) from error
    return result


def call(name: str, *args: Any) -> None:
    """Call a NCCL function. Raises `RuntimeError` with NCCL's message."""
    check(name, getattr(library(), name)(*args))


def check(name: str, code: int) -> None:
    if code not in (SUCCESS, IN_PROGRESS):
        cause = (library().ncclGetLastError(None) or b"").decode()
        raise RuntimeError(f"{name}: {library().ncclGetErrorString(code).decode()}\nLast error:\n{cause}")


def unique_id() -> bytes:
    """Unique id of a communicator, 128 bytes."""
    result = UniqueId()
    call("ncclGetUniqueId", ctypes.byref(result))
    return bytes(result)


class Communicator:
    """Rank 0 of `size`; returns when all ranks have joined and run one all-reduce, as vLLM's do first. `broadcast` and
    `abort` are those of torch's process groups. It has a stream of its own, or the learner's kernels would wait for
    engines, and forever for one that is lost here."""

    def __init__(self, identity: bytes, size: int, device: torch.device) -> None:
        self.device, self.comm = device, P()
        torch.cuda.set_device(device)
        self.stream = torch.cuda.Stream(device)
        call("ncclCommInitRank", ctypes.byref(self.comm), size, UniqueId.from_buffer_copy(identity), 0)
        one = torch.zeros(1, device=device, dtype=torch.float32)
        call("ncclAllReduce", one.data_ptr(), one.data_ptr(), 1, FLOAT32, SUM, self.comm, self.after())
        self.stream.synchronize()

    def after(self) -> int:
        """The stream, behind what the current one computes."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return self.stream.cuda_stream

    def broadcast(self, flat: Tensor, root: int) -> "Sending":
        """Broadcast `flat`: uint8 [n], contiguous; it must be kept until that is completed."""
        call("ncclBroadcast", flat.data_ptr(), flat.data_ptr(), flat.numel(), UINT8, root, self.comm, self.after())
        return Sending(self)

    def abort(self) -> None:
        """Abort the communicator, including kernels that wait for other ranks."""
        comm, self.comm = self.comm, P()
        if comm:
            call("ncclCommAbort", comm)

    def __del__(self) -> None:
        with suppress(RuntimeError):
            self.abort()


class Sending:
    def __init__(self, group: Communicator) -> None:
        self._group, self._event = group, torch.cuda.Event()
        self._event.record(group.stream)

    def is_completed(self) -> bool:
        """Whether the broadcast is done. Raises `RuntimeError` if another rank is lost, as far as NCCL notices."""
        code = INT()
        call("ncclCommGetAsyncError", self._group.comm, ctypes.byref(code))
        check("ncclBroadcast", code.value)
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()
