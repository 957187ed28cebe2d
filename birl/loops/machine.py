"""The compute thread, and two settings of the C library that cost nothing and matter on CPU."""

import contextlib
import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch


def compute_thread(threads: int = 0) -> ThreadPoolExecutor:
    """One thread for everything that computes, the engine and the learner alike: they alternate, so a second would only make a
    second pool of OpenMP threads that fight for the same cores. `threads` 0: as many as this process may use."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    keep_memory()
    return ThreadPoolExecutor(1, thread_name_prefix="compute")


def keep_memory() -> None:
    """Have glibc reuse big blocks instead of returning them to the kernel after every operation: page faults on fresh
    activations otherwise take a third of a training step. One arena, as other arenas always return big blocks."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8
        libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 1 << 30)
