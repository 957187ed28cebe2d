"""The compute thread, and the memory of this process."""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import torch

from birl.allocator import cores, system_memory, trim_memory
from birl.errors import BirlError
from birl.models.device import use

SEGMENTS = 2**26  # bytes; of a segment of 2 to 20 MiB, one living tensor keeps all


@contextlib.contextmanager
def compute_thread(threads: int = 0, device: torch.device | None = None) -> Iterator[Executor]:
    """Start the one thread for all computation of engine and learner: they alternate, so a second thread would only
    create a second pool of OpenMP threads that compete for the same cores. `threads` 0: OMP_NUM_THREADS,
    else the cores that this process may use. `device`: the thread's current device if it is a GPU.

    The calling thread computes with one thread meanwhile, and gives its own pool back first: as soon as there are more
    pool threads than cores, idle or not, libgomp stops waiting actively, and everything takes twice as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    release_pool()

    def begin() -> None:
        torch.set_num_threads(threads or (before if os.environ.get("OMP_NUM_THREADS") else min(before, cores())))
        if device is not None:
            use(device)

    with ThreadPoolExecutor(1, "compute", begin) as pool:
        try:
            yield pool
        finally:
            pool.submit(release_pool)
            torch.set_num_threads(before)


def release_pool() -> None:
    """End the idle OpenMP threads of this thread (OpenMP 5's omp_pause_resource_all, if the library has it)."""
    with contextlib.suppress(OSError, AttributeError):
        soft = 1
        ctypes.CDLL(None).omp_pause_resource_all(soft)


def free_memory(device: torch.device) -> int:
    """Free memory of a device [bytes]; 0 if unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else system_memory()[1]


def total_memory(device: torch.device) -> int:
    """Total memory of a device [bytes]; 0 if unknown."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else system_memory()[0]


def give_back(device: torch.device) -> None:
    """Release cached memory that no tensor uses any more, for other processes."""
    gc.collect()  # modules and graphs that refer to each other
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    else:
        trim_memory()


def held_memory(device: torch.device) -> int:
    """Memory of a GPU reserved by this process, used or not [bytes]; 0 on a CPU, which has no such count."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def check_returned(returned: int, owed: int, device: torch.device, whose: str, fix: str) -> None:
    """Raises `BirlError` if less was released to the device than `owed` [bytes], with a tolerance for fragmentation and
    for `SEGMENTS` that a small tensor keeps."""
    if returned < 0.9 * owed - SEGMENTS:
        raise BirlError(
            f"{whose} gave back {max(returned, 0) / 2**30:.2f} GiB of {device}, and should have given back "
            f"{owed / 2**30:.2f} GiB: {(owed - returned) / 2**30:.2f} GiB are missing. {fix}"
        )


def peak_memory() -> float:
    """Largest resident set of this process so far [GiB]; NaN if unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
