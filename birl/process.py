"""Child processes that end when this process ends, however that ends, and take with them all that they started: the
terminal's Ctrl-C does not reach them, their parent decides. `ProcessGroup` is one of them, `Process` one that is waited
for until it is ready, drained, and started again."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from birl.errors import BirlError, EngineDown
from birl.regular import check_target

LONGEST = 30.0  # s that a process waits before it is started again
POLL = 0.05  # s between two looks at a process that is to start or to end

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


def tied(command: Sequence[str]) -> list[str]:
    """The command, which the kernel (Linux) ends when the *thread* that started it ends: start it from the main
    thread, or from that of the event loop."""
    return [sys.executable, "-I", "-S", "-c", WRAPPER, str(os.getpid()), *command]


def kill(group: int) -> None:
    """All processes of a group. Its number may be unused by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def end_strays(mark: str, file: str = "environ") -> None:
    """End what left its process group, and still has this text in its environment, or in its `cmdline` (Linux)."""
    for _ in range(20):
        left = strays(mark, file)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break


def strays(mark: str, file: str = "environ") -> list[int]:
    """Processes with this text in that file of /proc, without those that have ended and are not yet collected. None for
    an empty one, which every process has."""
    result = []
    for entry in Path("/proc").glob("[0-9]*") if mark else ():
        with contextlib.suppress(OSError):  # ended, or another user's
            if mark.encode() in (entry / file).read_bytes():
                result.append(int(entry.name))
    return result


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
            self.began_at = out.tell()  # where its part of the log begins [bytes]
            self._leader = subprocess.Popen(
                tied(command),
                stdin=subprocess.PIPE if text else subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=folder,
                start_new_session=True,
            )
        self.log, self._swept = log, False
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

    def end(self, seconds: float) -> int | None:
        """SIGTERM, and SIGKILL for the whole group after so long. Its exit code."""
        self.signal(signal.SIGTERM)
        self.wait(seconds)
        self.kill()
        return self.code

    def tail(self, size: int = 8192) -> str:
        """The end of what it printed, at most `size` [bytes]."""
        with self.log.open("rb") as file:
            file.seek(max(self.began_at, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace")

    def kill(self) -> None:
        """The whole group, once, and no zombie stays. A group whose leader is gone may still have members; later its
        number may belong to another process."""
        if self._swept:
            return
        kill(self.pid)
        self.wait(10.0)  # one that the kernel does not let go of must not keep the others alive
        self._swept = True


def _write(stdin: IO[bytes] | None, text: str) -> None:
    assert stdin is not None
    with contextlib.suppress(BrokenPipeError), stdin:  # one that ended at once is reported by its exit code
        stdin.write(text.encode())


class Process:
    """`command` in a process group of its own, with `env` added to this process's environment (None takes a variable
    away); what it prints is appended to `log`.

    `ready()` is asked until it gives True, for at most `start_timeout` [s]; `EngineDown` from it means not yet.
    `terminate` waits `stop_timeout` [s] between SIGTERM and SIGKILL. At most `max_restarts` within `window` [s], the
    first after `backoff` [s], each further one after twice as long, at most LONGEST.

    Start it from the main thread (`ProcessGroup`). Children of the child are killed by `terminate`.

    Example: port = free_port()
             client = Client(f"http://127.0.0.1:{port}")
             child = Process(["birl", "serve", f"port={port}"], log=Path("engine.log"), ready=answers(client.info))
             await child.start()
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        ready: Callable[[], Awaitable[bool]],
        env: Mapping[str, str | None] | None = None,
        start_timeout: float = 300.0,
        stop_timeout: float = 15.0,
        max_restarts: int = 5,
        window: float = 3600.0,
        backoff: float = 1.0,
    ) -> None:
        self.command, self.log, self.ready = [str(part) for part in command], Path(log), ready
        self.env = {k: v for k, v in {**os.environ, **(env or {})}.items() if v is not None}
        self.start_timeout, self.stop_timeout = start_timeout, stop_timeout
        self.max_restarts, self.window, self.backoff = max_restarts, window, backoff
        self.restarts: deque[float] = deque()  # when, within the window
        self._child: ProcessGroup | None = None
        self._busy = asyncio.Lock()

    @property
    def pid(self) -> int:
        """0 before the first start."""
        return self._child.pid if self._child else 0

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    async def start(self) -> None:
        """Returns when it is ready. Raises `BirlError` with the end of its log where it ends before, or is late; then
        no process is left."""
        async with self._busy:
            await self._start()

    async def terminate(self) -> None:
        """SIGTERM, so that it can finish what it does; SIGKILL for it and all its children afterwards."""
        async with self._busy:
            await self._terminate()

    async def restart(self) -> None:
        """End it where it still lives, wait, start it. Raises `BirlError` where that was done too often, or fails."""
        async with self._busy:
            now = time.monotonic()
            while self.restarts and now - self.restarts[0] > self.window:
                self.restarts.popleft()
            if len(self.restarts) >= self.max_restarts:
                raise BirlError(
                    f"{self._name} was started again {len(self.restarts)} times within {self.window:g} s, and not once "
                    f"more. {self._last()}"
                )
            wait = min(self.backoff * 2 ** len(self.restarts), LONGEST)
            self.restarts.append(now)
            await self._terminate()
            await asyncio.sleep(wait)
            await self._start()

    async def __aenter__(self) -> "Process":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.terminate()

    @property
    def _name(self) -> str:
        return f"`{' '.join(self.command)[:120]}`"

    async def _start(self) -> None:
        if self.alive:
            raise BirlError(f"{self._name} runs already, as process {self.pid}.")
        if shutil.which(self.command[0], path=self.env.get("PATH")) is None:
            raise BirlError(f"{self.command[0]} is not there, or is no program.")
        self._spawn()
        try:
            await self._until_ready()
        except BaseException:  # Ctrl-C too: it would be left behind
            self._kill()
            raise

    def _spawn(self) -> None:
        try:
            self._child = ProcessGroup(self.command, log=self.log, env=self.env)
        except OSError as error:
            raise BirlError(f"The log {self.log} can not be written: {error.strerror}.") from error

    async def _until_ready(self) -> None:
        assert self._child is not None
        began = time.monotonic()
        while (left := began + self.start_timeout - time.monotonic()) > 0:
            if not self.alive:
                raise BirlError(f"{self._name} {self._child.how()} before it was ready. {self._last()}")
            with contextlib.suppress(EngineDown, TimeoutError):
                async with asyncio.timeout(left):
                    if await self.ready() and self.alive:  # else another process has its port
                        return
            await asyncio.sleep(POLL)
        raise BirlError(f"{self._name} was not ready within {self.start_timeout:g} s. {self._last()}")

    async def _terminate(self) -> None:
        if self.alive:
            assert self._child is not None
            self._child.signal(signal.SIGTERM)
            deadline = time.monotonic() + self.stop_timeout
            try:
                while self.alive and time.monotonic() < deadline:
                    await asyncio.sleep(POLL)
            finally:
                self._kill()
        else:
            self._kill()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _last(self, lines: int = 12) -> str:
        """The end of what it printed since its last start."""
        result = self._child.tail().splitlines()[-lines:] if self._child else []
        return f"Its last lines, from {self.log}:\n" + "\n".join(f"    {x[:300]}" for x in result or ["(none)"])


def answers(ask: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[bool]]:
    """For `Process(ready=...)`: as soon as `ask` gives something instead of raising `EngineDown`."""

    async def ready() -> bool:
        await ask()
        return True

    return ready


def flags(values: Mapping[str, object]) -> list[str]:
    """The words of a command; None leaves a flag out.

    Example: flags({"--port": 8000, "--dtype": None}) == ["--port", "8000"]
    """
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


def free_port() -> int:
    """A free one on this machine's loopback. Another process may take it before the child does; then
    the child ends, and says so in its log."""
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return result.getsockname()[1]
