"""What cores and memory a process may use, and how the C library gives memory back. Standard library only."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path


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


def trim_memory() -> None:
    """Return to the kernel what `keep_memory` kept, where the C library is glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def system_memory() -> tuple[int, int]:
    """Total and free [bytes], no more than the control group allows; zeros where the system does not say. Memory that
    only caches files is free: the kernel gives it up on demand."""
    try:
        total, free = (_sizes(Path("/proc/meminfo")).get(name, 0) * 1024 for name in ("MemTotal:", "MemAvailable:"))
    except (OSError, ValueError):
        return 0, 0
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="utf-8"))  # "max" where there is none
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        used -= _sizes(group / "memory.stat").get("inactive_file", 0)
    except (OSError, ValueError):
        return total, free
    return min(total, limit), max(min(free, limit - used), 0)


def _sizes(file: Path) -> dict[str, int]:
    """Lines such as `MemTotal:  24684084 kB`."""
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def cores() -> int:
    """Cores that this process may use: a container or `taskset` often allows fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
