"""Limits the total memory of several processes with a control group of Linux, version 1 or 2, if one can be created.

Memory file systems count too: their pages are charged to the writer. Any step may be refused by the system; then there
is no group, and the processes are monitored instead (`guest.py`).
"""

import contextlib
import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MIB = 1 << 20


class MemoryGroup:
    """A control group below this process's own, for one run at a time.

    Example: group = MemoryGroup.make("birl-1-0")
             if group is not None:
                 group.limit(512)
                 subprocess.run([*group.join, "python3", "main.py"])
                 group.killed()  # whether the kernel killed for memory since `limit`
    """

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version
        self._kills = 0
        self._limit = 0

    @classmethod
    def make(cls, name: str) -> "MemoryGroup | None":
        for version, parent in _places():
            _sweep(parent)
            group = cls(parent / name, version)
            try:
                group.folder.mkdir()
                group.limit(1024)
                (group.folder / "cgroup.procs").read_text()
                if os.access(group.folder / "cgroup.procs", os.W_OK):
                    return group
            except OSError:
                pass
            group.remove()
        return None

    @property
    def join(self) -> list[str]:
        """Words before a command that put it into the group. A shell, because joining between fork and exec of this
        process would copy its page tables, which are gigabytes if a model is in training."""
        return ["/bin/sh", "-c", f'echo 0 > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def limit(self, memory_mb: int) -> None:
        self._kills = self._count()
        if memory_mb == self._limit:
            return
        size = str(memory_mb * MIB)
        if self.version == 2:
            (self.folder / "memory.max").write_text(size)
            self._try("memory.swap.max", "0")
        else:
            self._try("memory.memsw.limit_in_bytes", "-1")  # must not be below the other: first up
            (self.folder / "memory.limit_in_bytes").write_text(size)
            self._try("memory.memsw.limit_in_bytes", size)
        self._limit = memory_mb

    def killed(self) -> bool:
        return self._count() > self._kills

    def kill(self) -> None:
        """Kill all processes in the group, including those started meanwhile."""
        for _ in range(200):
            result: list[int] = []
            with contextlib.suppress(OSError):
                result = [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]
            if not result:
                return
            for pid in result:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def remove(self) -> None:
        for _ in range(50):  # a group can be removed a moment after its last process was killed
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.01)

    def _count(self) -> int:
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError):
            for line in (self.folder / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        return 0

    def _try(self, name: str, value: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / name).write_text(value)


def _sweep(parent: Path) -> None:
    """Remove groups of killed launchers. A group with processes cannot be removed, so nothing is lost."""
    for folder in parent.glob("birl-sandbox-*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if not Path(f"/proc/{int(folder.name.split('-')[2])}").exists():
                folder.rmdir()


def _places() -> list[tuple[int, Path]]:
    """Places for memory groups: below this process's own group, else below the root."""
    result = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                result += [(1, ROOT / "memory" / path.lstrip("/")), (1, ROOT / "memory")]
            elif not controllers:  # version 2; a group with processes cannot have limited groups below it
                own = ROOT / path.lstrip("/")
                result += [(2, own), (2, own.parent), (2, ROOT)]
    return [(version, place) for version, place in result if place.is_dir() and place.is_relative_to(ROOT)]
