"""Broadcast of tensors from one process to several: rank 0 sends, the others receive (weights.method=nccl).

Uses torch.distributed without its global state: a separate process group on a store that rank 0's process hosts. NCCL
if the weights are on CUDA, else Gloo. Only bytes cross it. A store and a group have no password: every process that
reaches their ports can disturb them, so received weights are compared with digests sent separately.
"""

import asyncio
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from birl.engines.wire import Invitation
from birl.errors import BirlError, WeightsFailed, first_line
from birl.hosts import own_address
from birl.models.released import Shapes, nbytes

T = TypeVar("T")
GLOO, NCCL = "gloo", "nccl"


class Source(Protocol):
    """The tensors that rank 0 sends. `flat`: tensors of one type, concatenated as 1-D; it may block, and is called in
    the group's thread."""

    @property
    def shapes(self) -> Shapes: ...
    def flat(self, names: Sequence[str]) -> Tensor: ...


class BroadcastGroup:
    """One rank of a broadcast group. `device`: of its buckets.

    Torch's calls block and cannot be interrupted (Gloo's `abort` does not), so they run in a separate thread. A waiting
    caller returns when the group is closed, or after the invitation's timeout; the thread itself may need that long
    once more. Gloo broadcasts along a tree: if one rank hangs, those below it hang too. Every failure is
    `WeightsFailed` "unreachable", and the group cannot be used after it: close it.

    `called_back`: the other ranks can be told to stop waiting for a broadcast (`leave`). Ranks that cannot are sent all
    buckets, with any contents, before `send` raises.
    """

    called_back = True

    def __init__(self, invitation: Invitation, device: torch.device) -> None:
        self.invitation, self.device = invitation, device
        self.closed = threading.Event()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[..., None]] | None] = queue.SimpleQueue()
        self._waits: set[asyncio.Future[Any]] = set()
        self._group: Any = None  # only for the thread: destroying it waits for its operations
        self._thread = threading.Thread(target=self._work, name=f"broadcast {invitation.group}", daemon=True)
        self._thread.start()

    @staticmethod
    def host(address: str, timeout: float) -> tuple[Any, str]:
        """Host the meeting point of the ranks. Returns an object to keep alive, and the `store` of an invitation."""
        return host_store(address, timeout)

    @property
    def name(self) -> str:
        return self.invitation.group

    async def open(self) -> None:
        """Connect; returns when all ranks have joined."""
        await self._do(self._open)

    async def send(self, source: Source) -> None:
        """Send the weights (rank 0). Takes memory for one bucket at a time beside the source's own tensors."""

        def work() -> None:
            failure = None
            for names in pieces(source.shapes, self.invitation.bucket_mb):
                try:
                    flat = source.flat(names).view(torch.uint8)
                except Exception as error:
                    if self.called_back:
                        raise
                    failure = failure or error
                    flat = torch.zeros(nbytes(names, source.shapes), dtype=torch.uint8, device=self.device)
                self._broadcast(flat)
            if failure is not None:
                raise failure

        await self._do(work)

    async def receive(self, shapes: Shapes) -> dict[str, Tensor]:
        """Receive the weights (other ranks)."""

        def work() -> dict[str, Tensor]:
            result: dict[str, Tensor] = {}
            for names in pieces(shapes, self.invitation.bucket_mb):
                sizes = [prod(shapes[name][0]) for name in names]
                flat = torch.empty(sum(sizes), dtype=shapes[names[0]][1], device=self.device)
                self._broadcast(flat.view(torch.uint8))
                parts = flat.split(sizes)
                result |= {name: part.view(shapes[name][0]) for name, part in zip(names, parts, strict=True)}
            return result

        return await self._do(work)

    def close(self) -> None:
        """Close the group (event loop's thread). Other ranks notice at their next operation or by timeout."""
        if not self.closed.is_set():
            self.closed.set()
            self._jobs.put(None)
            for future in tuple(self._waits):
                _settle(future, None, self._failed("it was left"))

    def join(self, seconds: float) -> None:
        """Wait for the thread of a closed group."""
        self._thread.join(seconds)

    async def _do(self, work: Callable[[], T]) -> T:
        if self.closed.is_set():
            raise self._failed("it was left")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._waits.add(future)

        def told(*results: Any) -> None:
            loop.call_soon_threadsafe(partial(_settle, future, *results))

        self._jobs.put((work, told))
        try:
            async with asyncio.timeout(self.invitation.timeout):
                return await future
        except TimeoutError as error:
            raise self._failed(f"it took longer than {self.invitation.timeout:g} s") from error
        except (RuntimeError, OSError) as error:  # torch's own errors are all RuntimeError
            cause = str(error).partition("Last error:\n")[2].splitlines()[:1]  # NCCL's own words
            raise self._failed(": ".join([first_line(error), *cause])) from error
        finally:
            self._waits.discard(future)

    def _failed(self, why: str) -> WeightsFailed:
        given = self.invitation
        return WeightsFailed("unreachable", f"Broadcast {given.group}, rank {given.rank} of {given.size}: {why}")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, tell = job
            result, error = None, None
            try:
                result = work()
            except Exception as failure:
                error = failure
            try:
                tell(result, error)
            except RuntimeError:  # the event loop is closed
                break
            del job, work, tell, result, error  # holds no weights while it waits for the next job
        self._group = None

    def _open(self) -> None:
        given, span = self.invitation, timedelta(seconds=self.invitation.timeout)
        host, port = store_address(given.store)
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=span)
        make = _nccl if given.backend == NCCL else _gloo
        self._group = make(self._named(client), given, self.device, own_address(host))
        self._greet()

    def _named(self, store: Any) -> Any:
        """The group's namespace in a store."""
        return dist.PrefixStore(self.name, store)

    def _greet(self) -> None:
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects at its first operation

    def _broadcast(self, flat: Tensor) -> None:
        work = self._group.broadcast(flat, 0)
        if self.invitation.backend != NCCL:
            work.wait()
            return
        deadline = time.monotonic() + self.invitation.timeout  # NCCL's own would end the process
        while not work.is_completed():
            if self.closed.is_set() or time.monotonic() > deadline:
                self._group.abort()
                raise RuntimeError("the broadcast was aborted")
            time.sleep(0.0005)
        result = getattr(work, "get_future_result", None)  # an error of NCCL completes it too, and `wait` is silent
        if result is not None and result().done() and result().value():
            self._group.abort()
            raise RuntimeError("NCCL has lost another rank")
        work.wait()


def _gloo(store: Any, given: Invitation, device: torch.device, address: str) -> Any:
    options = c10d.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=given.timeout)
    options._threads = 1
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]  # only listens there
    return c10d.ProcessGroupGloo(store, given.rank, given.size, options)


NCCL_ENV = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_environment = threading.Lock()


def _nccl(store: Any, given: Invitation, device: torch.device, address: str) -> Any:
    """A NCCL group whose failure does not end the process: by default, a lost rank ends the processes of all others."""
    torch.cuda.set_device(device)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * given.timeout)
    with _environment:  # read by the constructor; the learner's own groups keep theirs
        before = {key: os.environ.get(key) for key in NCCL_ENV}
        os.environ.update(NCCL_ENV)
        try:
            return c10d.ProcessGroupNCCL(store, given.rank, given.size, options)
        finally:
            for key, value in before.items():
                os.environ.pop(key, None) if value is None else os.environ.update({key: value})


def backend(device: torch.device) -> str:
    """Backend for a device. Raises `BirlError` if it is not available."""
    name = NCCL if device.type == "cuda" else GLOO
    if not dist.is_available() or not (dist.is_nccl_available() if name == NCCL else dist.is_gloo_available()):
        raise BirlError(f"weights.method=nccl: this build of PyTorch has no {name}; use weights.method=direct.")
    return name


def shapes_in(invitation: Invitation) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the tensors that rank 0 will send."""
    return {name: (shape, getattr(torch, kind)) for name, shape, kind in invitation.tensors}


def pieces(shapes: Shapes, bucket_mb: float) -> list[list[str]]:
    """Names of the tensors of each bucket, the same on every rank: of one type, sorted, at most `bucket_mb` [MiB],
    unless a single tensor is larger."""
    result: list[list[str]] = []
    room, last = 0.0, None
    for name in sorted(shapes, key=lambda n: (str(shapes[n][1]), n)):
        dtype = shapes[name][1]
        size = nbytes([name], shapes)
        if dtype != last or size > room:
            result.append([])
            room, last = bucket_mb * 2**20, dtype
        result[-1].append(name)
        room -= size
    return result


def host_store(address: str, timeout: float) -> tuple[Any, str]:
    """A store that listens at this local address, at a free port, and its host:port. It lives as long as the returned
    object."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listens:  # torch's own would listen at every address of the machine
        listens.bind((address, 0))
        listens.listen(1024)
        port = listens.getsockname()[1]
        span = timedelta(seconds=timeout)
        store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=span, master_listen_fd=listens.detach()
        )
    return store, f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def store_address(text: str) -> tuple[str, int]:
    """Split host:port. Raises `ValueError`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"store must be host:port, got {text!r}")
    return host, int(port)


def _settle(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
