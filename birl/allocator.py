"""How the C library gives memory back. Matters on CPU, costs nothing."""

import contextlib
import ctypes
import sys


def keep_memory() -> None:
    """Have glibc reuse big blocks instead of returning them to the kernel after every operation: page faults on fresh
    activations otherwise take a third of a training step. One arena, as the others always return big blocks; call this
    before any thread starts, because a thread keeps the arena that it first got."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8
        libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, -1)  # never
