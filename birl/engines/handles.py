"""A bucket of tensors in shared memory: offered by its owner, described in JSON, copied by another local process.

On a GPU the description is a handle of CUDA's inter-process communication, which works for processes on one GPU; on a
CPU it names a file in shared memory. Nothing is unpickled.

    {"bytes": 4096, "file": "birl-bucket-17-5f0e..."}
    {"bytes": 4096, "gpu": "<UUID>", "handle": base64, "size", "offset", "counter": base64, "counter_offset",
     "event": base64, "wait": true}        the results of torch's `UntypedStorage._share_cuda_`, which count references
"""

import asyncio
import mmap
import os
import re
import secrets
import stat
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birl.models.device import gpu

ROOT = Path("/dev/shm")
FILE = re.compile(r"birl-bucket-[0-9]+-[0-9a-f]{16}")
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
CUDA = {"gpu": str, "handle": str, "size": int, "offset": int}
CUDA |= {"counter": str, "counter_offset": int, "event": str, "wait": bool}


@asynccontextmanager
async def lent(flat: Tensor) -> AsyncIterator[dict[str, Any]]:
    """Share a contiguous 1-D tensor that begins its storage; yields its description. Other processes may read it until
    the block ends. Raises `OSError` if shared memory is full."""
    if flat.device.type == "cuda":
        _, handle, size, offset, counter, counter_offset, event, wait = flat.untyped_storage()._share_cuda_()
        texts = {"handle": handle, "counter": counter, "event": event}
        numbers = {"size": size, "offset": offset, "counter_offset": counter_offset, "wait": bool(wait)}
        same = {"bytes": flat.nbytes, "gpu": gpu(flat.device)}
        try:
            yield same | numbers | {key: b64encode(value).decode() for key, value in texts.items()}
        except BaseException:  # a process that did not read it will not decrement the counter: it would stay forever
            torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)  # pyright: ignore
            raise
        return
    path = ROOT / f"birl-bucket-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        await asyncio.to_thread(_write, path, flat)
        yield {"bytes": flat.nbytes, "file": path.name}
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, flat: Tensor) -> None:
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(opened, 0, flat.nbytes)  # a full /dev/shm is an `OSError` here, but a SIGBUS later
        with mmap.mmap(opened, flat.nbytes) as shared:
            shared[:] = flat.view(torch.uint8).numpy().data
    finally:
        os.close(opened)


def sweep() -> None:
    """Remove the buckets of processes that have ended."""
    for path in ROOT.glob("birl-bucket-*"):
        if FILE.fullmatch(path.name) and not Path(f"/proc/{path.name.split('-')[2]}").exists():
            with suppress(OSError):  # of another user
                path.unlink()


def borrowed(memory: Mapping[str, Any], device: torch.device, most: int) -> Tensor:
    """A copy of the current bytes [n], at most `most`, that a description refers to, on `device` or on the CPU. Raises
    `ValueError` if they cannot be read here."""
    count = memory.get("bytes")
    if type(count) is not int or not 0 < count <= most:
        raise ValueError(f"memory.bytes must be a whole number above 0, the model's {most} at most")
    if set(memory) == {"bytes", "file"}:
        return _file(memory["file"], count)
    if set(memory) != {"bytes", *CUDA} or any(type(memory[key]) is not kind for key, kind in CUDA.items()):
        raise ValueError(f"memory must have bytes and file, or bytes, {', '.join(CUDA)}, each of its type")
    if not gpu(device) or memory["gpu"] != gpu(device):
        raise ValueError(
            f"the learner's weights are on GPU {memory['gpu']}, and the engine's on {gpu(device) or 'a CPU'}: CUDA IPC "
            "needs one GPU for both; use weights.method=nccl or direct"
        )
    if min(memory["size"], memory["offset"], memory["counter_offset"]) < 0 or memory["size"] < count:
        raise ValueError("memory is smaller than its bytes")
    handle, counter, event = (b64decode(memory[key], validate=True) for key in ("handle", "counter", "event"))
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            *(device.index, handle, memory["size"], memory["offset"], counter, memory["counter_offset"], event),
            memory["wait"],
        )
    except RuntimeError as error:
        raise ValueError(f"CUDA cannot open the learner's memory: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (count,)).clone()  # pyright: ignore


def _file(name: Any, count: int) -> Tensor:
    if not isinstance(name, str) or not FILE.fullmatch(name):
        raise ValueError(f"memory.file: {name!r} is not a bucket in shared memory")
    try:
        opened = os.open(ROOT / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(
            f"memory.file: {name} cannot be opened ({error.strerror}): weights.method=ipc is for engines on the "
            "learner's machine; use nccl or direct"
        ) from None
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_size < count:
            raise ValueError(f"memory.file: {name} has {status.st_size} bytes, and should have {count}")
        result = torch.empty(count, dtype=torch.uint8)
        with mmap.mmap(opened, count, prot=mmap.PROT_READ) as shared:
            result.numpy().data[:] = shared[:]
        return result
    finally:
        os.close(opened)


def parts(flat: Tensor, layouts: Any) -> dict[str, Tensor]:
    """Split `flat`, bytes [n], into tensors by [name, shape, type, offset in bytes]. Raises `ValueError`."""
    if not isinstance(layouts, list):
        raise ValueError("tensors must be a list of [name, shape, type, offset]")
    result: dict[str, Tensor] = {}
    for row in layouts:
        if not isinstance(row, list) or [type(x) for x in row] != [str, list, str, int]:
            raise ValueError("tensors must be a list of [name, shape, type, offset]")
        name, shape, kind, offset = row
        if kind not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"tensors: {name} is {kind} {shape}; types are {', '.join(DTYPES)}")
        dtype = DTYPES[kind]
        end = offset + prod(shape) * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize or end > len(flat):
            raise ValueError(f"tensors: {name} is at {offset} to {end} of {len(flat)} bytes")
        result[name] = flat[offset:end].view(dtype).view(shape)
    return result


def layouts(names: Sequence[str], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> list[list[Any]]:
    """Layouts for `parts` of concatenated tensors."""
    result, offset = [], 0
    for name in names:
        shape, dtype = shapes[name]
        result.append([name, list(shape), str(dtype).removeprefix("torch."), offset])
        offset += prod(shape) * dtype.itemsize
    return result
