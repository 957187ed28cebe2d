"""A child process that ends when this process ends, however that ends, and takes with it all that it started."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from birl.regular import check_target

# Runs before the command, in its process. A preexec_fn would run between fork and exec of a process with threads, where
# a lock may be held for ever. PR_SET_PDEATHSIG (1) survives exec; the parent may have died before it was set.
WRAPPER = """
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that wanted this one is gone")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


class ProcessGroup:
    """`command`, started in a process group of its own, which the terminal's Ctrl-C does not reach. What it prints is
    appended to `log`, in a folder that is made; `text` is its standard input.

    On Linux the kernel ends the command when the *thread* that started it ends: start it from the main thread. What the
    command starts is ended by `kill`, not by the kernel. Raises `OSError` where the log cannot be written.

    Example: child = ProcessGroup(["birl", "serve", "port=8000"], log=Path("engine.log"), env=os.environ)
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str], folder: str | None = None, text: str = ""
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        check_target(log)
        with log.open("ab") as out:
            self.said_from = out.tell()  # where its part of the log begins [bytes]
            self._leader = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", WRAPPER, str(os.getpid()), *command],
                stdin=subprocess.PIPE if text else subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=folder,
                start_new_session=True,
            )
        self._swept = False
        if text:
            _write(self._leader.stdin, text)

    @property
    def pid(self) -> int:
        return self._leader.pid

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def code(self) -> int | None:
        """None while the command runs; negative for a signal."""
        return self._leader.poll()

    def how(self) -> str:
        """How it ended, for a sentence that begins with its name."""
        code = self.code
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def signal(self, number: int) -> None:
        """To the command alone, where it still runs."""
        self._leader.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._leader.wait(seconds)
        return not self.alive

    def kill(self) -> None:
        """The whole group, once, and no zombie stays. A group whose leader is gone may still have members; later its
        number may belong to another process."""
        if self._swept:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(10.0)  # one that the kernel does not let go of must not keep the others alive
        self._swept = True


def _write(stdin: IO[bytes] | None, text: str) -> None:
    assert stdin is not None
    with contextlib.suppress(BrokenPipeError), stdin:  # one that ended at once is reported by its exit code
        stdin.write(text.encode())
