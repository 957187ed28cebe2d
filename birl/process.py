"""Child processes that end when this process ends, in any way, together with their own children. The terminal's Ctrl-C
does not reach them; their parent decides. `ProcessGroup`: one child; `Process`: a child with a readiness check,
graceful shutdown and restarts."""

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

from birl.errors import BirlError, EngineDown
from birl.regular import check_target

LONGEST = 30.0  # s, longest delay before a restart
POLL = 0.05  # s between polls of a process that starts or ends

# Runs in the child before the command. A preexec_fn would run between fork and exec of a process with threads, where a
# lock may be held for ever. PR_SET_PDEATHSIG (1) survives exec; the parent may have died before it was set.
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

# As WRAPPER, but it stays, as the parent of all that the command starts (PR_SET_CHILD_SUBREAPER, 36): it kills these
# and removes the folder when its own parent dies. It ends as the command does.
GUARD = """
import ctypes, os, shutil, signal, sys
from pathlib import Path
def run():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
    try:
        os.execvp(sys.argv[3], sys.argv[3:])
    except OSError as error:
        os.write(2, f"{sys.argv[3]}: {error.strerror}".encode())
        os._exit(1)
if sys.platform != "linux":
    run()
before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
prctl = ctypes.CDLL(None).prctl
prctl(1, signal.SIGUSR1, 0, 0, 0)
prctl(36, 1, 0, 0, 0)
orphan = os.getppid() != int(sys.argv[1])
if not (command := os.fork()):
    prctl(1, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    run()
os.closerange(0, 1024)
while not orphan:
    orphan = signal.sigwait({signal.SIGUSR1, signal.SIGCHLD}) == signal.SIGUSR1
    pid = not orphan
    while pid:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == command:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if os.WIFSIGNALED(status):
                os.kill(os.getpid(), os.WTERMSIG(status))
            os._exit(os.waitstatus_to_exitcode(status) & 255)
def children():
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                yield int(stat.parent.name)
        except OSError:
            pass
while left := list(children()):
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""


def guarded(command: Sequence[str], folder: str) -> list[str]:
    """The command, wrapped so that it, all processes that it started and this temporary folder end with this process
    (Linux), however it ends. Start it as `tied`; signals but SIGKILL to its group reach it alone."""
    return [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), folder, *command]


def tied(command: Sequence[str]) -> list[str]:
    """The command, wrapped so that the kernel (Linux) kills it when the *thread* that started it ends: start it from
    the main thread, or from that of the event loop."""
    return [sys.executable, "-I", "-S", "-c", WRAPPER, str(os.getpid()), *command]


def kill(group: int) -> None:
    """Kill all processes of a group. The group may no longer exist."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def end_strays(mark: str, file: str = "environ") -> None:
    """Kill processes that left their group, by this text in their environment, or in their `cmdline` (Linux)."""
    for _ in range(20):
        left = strays(mark, file)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break


def strays(mark: str, file: str = "environ") -> list[int]:
    """Ids of processes with this text in that file of /proc, except zombies. Empty if the text is empty, which all
    contain."""
    result = []
    for entry in Path("/proc").glob("[0-9]*") if mark else ():
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if mark.encode() in (entry / file).read_bytes():
                result.append(int(entry.name))
    return result


class ProcessGroup:
    """A command in its own process group, which the terminal's Ctrl-C does not reach. Its output is appended to `log`,
    whose folder is created; `text`: its standard input.

    On Linux the kernel kills the command when the *thread* that started it ends: start it from the main thread.
    Children of the command are killed by `kill`, not by the kernel. Raises `OSError` if the log cannot be written.

    Example: child = ProcessGroup(["birl", "serve", "port=8000"], log=Path("engine.log"), env=os.environ)
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str], folder: str | None = None, text: str = ""
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        check_target(log)
        with log.open("ab") as out:
            self.began_at = out.tell()  # start of its part of the log [bytes]
            stdin = subprocess.PIPE if text else subprocess.DEVNULL
            self._leader = subprocess.Popen(
                tied(command), stdin=stdin, stdout=out, stderr=out, env=env, cwd=folder, start_new_session=True
            )
        self.log, self._swept = log, False
        if (pipe := self._leader.stdin) is not None:
            with contextlib.suppress(BrokenPipeError), pipe:  # if it ended at once, its exit code tells
                pipe.write(text.encode())

    @property
    def pid(self) -> int:
        return self._leader.pid

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def code(self) -> int | None:
        """Exit code; None while the command runs, negative for a signal."""
        return self._leader.poll()

    def how(self) -> str:
        """How it ended, as the rest of a sentence after its name."""
        code = self.code
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def signal(self, number: int) -> None:
        """Send a signal to the command alone, if it still runs."""
        self._leader.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Wait for the end; whether it ended within that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._leader.wait(seconds)
        return not self.alive

    def end(self, seconds: float) -> int | None:
        """Send SIGTERM, after so many seconds SIGKILL to the whole group. Returns the exit code."""
        self.signal(signal.SIGTERM)
        self.wait(seconds)
        self.kill()
        return self.code

    def tail(self, size: int = 8192) -> str:
        """The last part of its output, at most `size` [bytes]."""
        with self.log.open("rb") as file:
            file.seek(max(self.began_at, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill the whole group, once, and reap it. A group whose leader ended may still have members; later its number
        may belong to another process."""
        if self._swept:
            return
        kill(self.pid)
        self.wait(10.0)  # a process that the kernel does not release must not keep the others alive
        self._swept = True


class Process:
    """A command in its own process group, with `env` added to this process's environment (None removes a variable); its
    output is appended to `log`.

    `ready()` is polled until it returns True, for at most `start_timeout` [s]; `EngineDown` from it means not yet.
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
        self.restarts: deque[float] = deque()  # times of restarts within the window
        self._child: ProcessGroup | None = None
        self._busy = asyncio.Lock()

    @property
    def pid(self) -> int:
        """Process id; 0 before the first start."""
        return self._child.pid if self._child else 0

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    async def start(self) -> None:
        """Start it and wait until it is ready. Raises `BirlError` with the end of its log if it ends before or is late;
        then no process is left."""
        async with self._busy:
            await self._start()

    async def terminate(self) -> None:
        """Send SIGTERM, so that it can finish its work; then SIGKILL to it and all its children."""
        async with self._busy:
            await self._terminate()

    async def restart(self) -> None:
        """End it if it is alive, wait, start it again. Raises `BirlError` after too many restarts, or if it fails."""
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
        try:
            self._child = ProcessGroup(self.command, log=self.log, env=self.env)
        except OSError as error:
            raise BirlError(f"The log {self.log} can not be written: {error.strerror}.") from error
        try:
            await self._until_ready()
        except BaseException:  # also at Ctrl-C: it would be left running
            self._child.kill()
            raise

    async def _until_ready(self) -> None:
        assert self._child is not None
        began = time.monotonic()
        while (left := began + self.start_timeout - time.monotonic()) > 0:
            if not self.alive:
                raise BirlError(f"{self._name} {self._child.how()} before it was ready. {self._last()}")
            with contextlib.suppress(EngineDown, TimeoutError):
                async with asyncio.timeout(left):
                    if await self.ready() and self.alive:  # otherwise another process has its port
                        return
            await asyncio.sleep(POLL)
        raise BirlError(f"{self._name} was not ready within {self.start_timeout:g} s. {self._last()}")

    async def _terminate(self) -> None:
        if self._child is None:
            return
        self._child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self.stop_timeout
        try:
            while self.alive and time.monotonic() < deadline:
                await asyncio.sleep(POLL)
        finally:
            self._child.kill()

    def _last(self, lines: int = 12) -> str:
        """The last lines of its output since its last start."""
        result = self._child.tail().splitlines()[-lines:] if self._child else []
        return f"Its last lines, from {self.log}:\n" + "\n".join(f"    {x[:300]}" for x in result or ["(none)"])


def answers(ask: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[bool]]:
    """For `Process(ready=...)`: True as soon as `ask` returns instead of raising `EngineDown`."""

    async def ready() -> bool:
        await ask()
        return True

    return ready


def flags(values: Mapping[str, object]) -> list[str]:
    """Command-line words for these flags; None leaves a flag out.

    Example: flags({"--port": 8000, "--dtype": None}) == ["--port", "8000"]
    """
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


def free_port() -> int:
    """A free port on this machine's loopback. Another process may take it before the child does; then the child ends,
    with a message in its log."""
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return result.getsockname()[1]
