"""Cores and memory that a process may use, and settings of the C library's allocator. Standard library only."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def keep_memory() -> None:
    """Make glibc reuse big blocks instead of returning them to the kernel after every operation: page faults on fresh
    activations otherwise take a third of a training step. Uses one arena, as the others always return big blocks. Call
    this before any thread starts, because a thread keeps the arena that it first got."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8
        libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, -1)  # never


def trim_memory() -> None:
    """Return freed memory that `keep_memory` kept to the kernel (glibc only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def system_memory() -> tuple[int, int]:
    """Total and free memory [bytes], within the limits of the control groups; zeros if the system does not tell. Page
    cache counts as free: the kernel gives it up on demand."""
    try:
        total, free = (_sizes(PROC / "meminfo").get(name, 0) * 1024 for name in ("MemTotal:", "MemAvailable:"))
    except (OSError, ValueError):
        return 0, 0
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for group in _groups("memory"):
            with contextlib.suppress(OSError, ValueError):  # "max" where there is none
                most = int((group / limit).read_text(encoding="utf-8"))
                taken = int((group / used).read_text(encoding="utf-8")) - _sizes(group / "memory.stat").get(cached, 0)
                total, free = min(total, most), max(min(free, most - taken), 0)
    return total, free


def _sizes(file: Path) -> dict[str, int]:
    """Parse lines such as `MemTotal: 24684084 kB`."""
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def cores() -> int:
    """Number of cores that this process may use: a container or `taskset` often allows fewer than the machine has. A
    quota of processor time is rounded down: with one thread more all others would wait for it."""
    some = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(some, int(quota() or some)), 1)


def quota() -> float:
    """Limit of processor time by control groups [cores]; 0 if there is none."""
    limits = []
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # "max" where there is none
            time, period = (group / "cpu.max").read_text(encoding="utf-8").split()
            limits.append(int(time) / int(period))
        with contextlib.suppress(OSError, ValueError):  # version 1: -1 if there is none
            time, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period"))
            limits.append(int(time) / int(period))
    return min((limit for limit in limits if limit > 0), default=0.0)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups (version 2 and 1) of this process; in a container, whose own folder is the root,
    some may not exist."""
    with contextlib.suppress(OSError):
        for line in (PROC / "self/cgroup").read_text(encoding="utf-8").splitlines():
            _, names, path = line.split(":", 2)
            mounts = [name for name in names.split(",") if name == controller] if names else ["", "unified"]
            for mount in mounts:
                for group in (Path(path), *Path(path).parents):
                    yield GROUPS / mount / str(group).lstrip("/")
