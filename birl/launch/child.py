"""One process of a supervised job: started, stopped, and started again later."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from birl.launch.plan import ProcessState
from birl.process import ProcessGroup

PATIENCE = 15.0  # s between SIGTERM and SIGKILL; an engine answers what it has meanwhile
SHOWN = 300  # characters of its last line


class Child:
    """Appends what it prints to `log`. Its group ends with it, and it ends when this process ends (on Linux)."""

    def __init__(self, role: str, index: int, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.role, self.index, self.command, self.log, self.env = role, index, tuple(command), log, env
        self.state, self.detail, self.since, self.restarts, self.backoff = "waiting", "", time.time(), -1, 1.0
        self.began = 0.0  # its last start
        self._process: ProcessGroup | None = None
        self._told = True  # its end was reported
        self._again = 0.0  # when to start it; 0: never
        self._until = 0.0  # when it must have ended

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    def start(self) -> None:
        self._process = ProcessGroup(
            self.command, log=self.log, env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env}
        )
        self.state, self.detail, self._told, self._again = "running", "", False, 0.0
        self.began = self.since = time.time()
        self.restarts += 1

    def ended(self) -> int | None:
        """Its exit code, once; None while it runs, and afterwards."""
        if self._told or self._process is None or (code := self._process.code) is None:
            return None
        self._told, self.since = True, time.time()
        self._process.kill()
        self.state, self.detail = "failed" if code else "done", self._process.how()
        return code

    def later(self, seconds: float) -> None:
        self._again = time.monotonic() + seconds
        self.state, self.detail = "restarting", f"{self.detail}; again in {seconds:g} s"

    def due(self) -> bool:
        return 0 < self._again <= time.monotonic()

    def end(self) -> None:
        """SIGTERM; see `late`."""
        self._again = 0.0
        self.signal(signal.SIGTERM)
        self._until = time.monotonic() + PATIENCE

    def late(self) -> bool:
        return 0 < self._until <= time.monotonic()

    def signal(self, number: int, instead: int = 0) -> None:
        """To it, or to a process below it that leads."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(instead or self.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def last(self) -> str:
        """The last line that it printed."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            return lines[-1].strip()[:SHOWN] if lines else "it has printed nothing"
        return "its log cannot be read"

    def part(self) -> ProcessState:
        pid = self.pid if self.alive else 0
        return ProcessState(
            role=self.role,
            index=self.index,
            state=self.state,
            pid=pid,
            restarts=max(self.restarts, 0),
            since=round(self.since, 3),
            detail=self.detail,
        )
