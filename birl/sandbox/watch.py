"""Monitors a running program: reads its output, and ends it with all its children if it exceeds a limit.

Standard library only, because an interpreter without packages runs it.
"""

import base64
import contextlib
import os
import select
import signal
import time
from typing import Any

from birl.sandbox import folder
from birl.sandbox.confine import NAMESPACES, Request, Settings

MEMORY_FILES = ("/tmp", "/dev/shm")  # in namespaces, all writable places
MOST_FILES = 1 << 14
TICK = 0.02  # seconds between checks of memory, files and orphans
DRAIN = 1.0  # seconds for reading the rest of the pipes


class Watch:
    """One running program: its output, exceeded limits, and how it ended."""

    def __init__(
        self, program: int, request: Request, settings: Settings, control: int, pipes: dict[int, bytearray]
    ) -> None:
        self.program = program
        self.limits = request["limits"]
        self.kind = settings["kind"]
        self.own_user = bool(settings["uid"])
        self.watch_memory = request["watch_memory"]
        self.control = control
        self.pipes = pipes
        self.folder = os.open(".", os.O_DIRECTORY)
        self.began = time.monotonic()
        self.took = 0.0
        self.status: int | None = None
        self.ending = ""
        self.detail = ""
        self.cut = False

    def until_it_ends(self) -> None:
        poll = select.poll()
        ended = os.pidfd_open(self.program)
        for fd in (*self.pipes, ended):
            poll.register(fd, select.POLLIN)
        poll.register(self.control, select.POLLHUP)
        looked = 0.0
        while not self.ending and self.status is None:
            left = self.began + self.limits["seconds"] - time.monotonic()
            if left <= 0:
                self.stop("timeout", f"took longer than {self.limits['seconds']:g} s")
                break
            for fd, _ in poll.poll(min(left, TICK) * 1000 + 1):
                if fd == self.control:
                    self.stop("killed", "its caller stopped waiting")
                elif fd in self.pipes and not self._read(fd):
                    poll.unregister(fd)  # it closed its output, but may still run
            self._reap()
            if time.monotonic() - looked > TICK:
                self._look()
                looked = time.monotonic()
        self.took = time.monotonic() - self.began
        os.close(ended)
        os.close(self.folder)

    def stop(self, ending: str, detail: str) -> None:
        self.ending, self.detail = self.ending or ending, self.detail or detail

    def _read(self, fd: int) -> bool:
        """Read a part of an output. Returns whether there may be more."""
        part = os.read(fd, 1 << 16)
        room = self.limits["output_bytes"] - len(self.pipes[fd])
        self.pipes[fd] += part[:room]
        if len(part) > room:
            self.cut = True
            self.stop("output", f"wrote more than {self.limits['output_bytes']} bytes")
        return bool(part)

    def _reap(self) -> None:
        """Collect ended processes, including orphans, which are reparented to this process."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self.program:
                    self.status = status

    def _look(self) -> None:
        """Check limits that the kernel does not enforce here."""
        if self.watch_memory or (self.kind not in NAMESPACES and not self.own_user):
            members = self._members()
            if self.watch_memory and sum(map(_memory, members)) > self.limits["memory_mb"] << 20:
                self.stop("memory", f"all processes held more than {self.limits['memory_mb']} MiB")
            if len(members) > self.limits["processes"]:
                self.stop("killed", f"more than {self.limits['processes']} processes")
        if self.kind in NAMESPACES and sum(map(_entries, MEMORY_FILES)) > MOST_FILES:
            self.stop("output", f"more than {MOST_FILES} files and folders")
        if self.kind not in NAMESPACES:
            most = self.limits["file_mb"] << 20
            try:
                if folder.size(self.folder, most) > most:
                    self.stop("output", f"files of more than {self.limits['file_mb']} MiB")
            except OSError as error:
                self.stop("output", f"files that cannot be counted: {error}")

    def _members(self) -> list[int]:
        """All processes of the run: those of the namespace, or the descendants of this process."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if self.kind in NAMESPACES:
            return [pid for pid in pids if pid != os.getpid()]
        parents = {pid: _parent(pid) for pid in pids}
        result, grown = {os.getpid()}, True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in result} - result
            grown = bool(more)
            result |= more
        return list(result - {os.getpid()})

    def kill_everything(self) -> None:
        """Kill all processes of the run, including daemons and orphans, and wait until none is left."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                if self.kind in NAMESPACES and os.getpid() == 1:  # otherwise -1 would be all processes of the user
                    os.kill(-1, signal.SIGKILL)
                else:
                    os.killpg(self.program, signal.SIGKILL)
            if self.kind not in NAMESPACES:
                for pid in self._members():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            try:
                while True:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if pid == self.program:
                        self.status = status
                    if not pid:
                        time.sleep(0.001)
                        break
            except ChildProcessError:
                return
        self.stop("killed", "processes of the run cannot be killed")

    def drain(self) -> None:
        """Read the rest of the pipes. It ends, as all writers are dead."""
        deadline = time.monotonic() + DRAIN
        for fd in self.pipes:
            while time.monotonic() < deadline and len(self.pipes[fd]) < self.limits["output_bytes"]:
                if not select.select([fd], [], [], 0)[0] or not self._read(fd):
                    break

    def told(self) -> dict[str, Any]:
        out, err = (base64.b64encode(bytes(data)).decode() for data in self.pipes.values())
        status = self.status if self.status is not None else signal.SIGKILL
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number and not self.ending:
            if number == signal.SIGXCPU or (number == signal.SIGKILL and self.took > self.limits["cpu_seconds"]):
                self.stop("timeout", f"used more than {self.limits['cpu_seconds']} s of processor time")
            elif number == signal.SIGXFSZ:
                self.stop("output", f"wrote a file of more than {self.limits['file_mb']} MiB")
            else:
                self.stop("killed", f"ended by signal {number}")
        return {
            "ending": self.ending or "ok", "detail": self.detail, "stdout": out, "stderr": err, "truncated": self.cut,
            "exit_code": None if number else os.WEXITSTATUS(status), "signal": number, "seconds": self.took,
        }  # fmt: skip


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _memory(pid: int) -> int:
    """Memory of a process [bytes]: with its share of common pages, if that can be read."""
    wanted, file = (b"Pss:",), f"/proc/{pid}/smaps_rollup"
    for _ in range(2):
        try:
            with open(file, "rb") as result:
                return sum(int(line.split()[1]) for line in result if line.startswith(wanted)) << 10
        except OSError:
            wanted, file = (b"RssAnon:", b"RssShmem:"), f"/proc/{pid}/status"
    return 0


def _entries(place: str) -> int:
    about = os.statvfs(place)
    return about.f_files - about.f_ffree
