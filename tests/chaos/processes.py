"""Processes of a run: started, frozen, killed, cut off from the disk, and found again afterwards (Linux)."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from birl.process import tied

FORK = multiprocessing.get_context("forkserver")


@dataclass(slots=True)
class Child:
    """A process that was started here. `lines` is what it has printed so far."""

    pid: int
    ask: Callable[[], int | None]  # its exit code, negative for a signal; None while it runs
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    @property
    def code(self) -> int | None:
        return self.ask()

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def read(self, stream: int) -> None:
        def reading() -> None:
            with os.fdopen(stream, errors="replace") as file:
                self.lines.extend(line.rstrip("\n") for line in file)

        self.reader = threading.Thread(target=reading, daemon=True)
        self.reader.start()

    def output(self) -> list[str]:
        """All of it, once the process has ended. A grandchild may still hold the pipe."""
        if self.reader is not None:
            self.reader.join(1.0)
        return self.lines


Start = Callable[[list[str]], Child]


def started(words: list[str]) -> Child:
    """`birl WORDS`, as a user starts it; it does not outlive this process. Its output is a pipe, not a file as that of
    `Group`: `no_room` would cut that off with its other files, and bytecode, which no later process could import."""
    process = subprocess.Popen(
        tied([sys.executable, "-m", "birl", *words]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    child = Child(process.pid, process.poll)
    child.read(os.dup(process.stdout.fileno()))
    process.stdout.close()
    return child


def forked(words: list[str]) -> Child:
    """The same from a process that has imported everything already, for tests that have no time."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_birl, args=(words, theirs))
    process.start()
    theirs.close()
    assert process.pid is not None

    def code() -> int | None:
        return process.exitcode

    child = Child(process.pid, code)
    child.read(os.dup(ours.fileno()))
    ours.close()
    return child


def _birl(words: list[str], pipe: Any) -> None:
    import ctypes

    import torch

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: the fork server ends with this process
    os.setsid()
    sys.dont_write_bytecode = True  # see `started`
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what runs in its background
    for stream in (1, 2):
        os.dup2(pipe.fileno(), stream)
    pipe.close()
    # the old ones would seek
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    from birl.cli import main

    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def preload() -> None:
    """Before the first `forked` of this process."""
    from tests.parallel.processes import PRELOADED  # of the one server that a process has

    FORK.set_forkserver_preload(PRELOADED)


def no_room(pid: int, limit: int) -> None:
    """From now on no file of this process grows beyond `limit` bytes: a write fails as it does on a full disk, with
    another errno (EFBIG). It needs no privileges, no file system, and nothing of the process."""
    with suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))


def room(pid: int) -> None:
    with suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


@dataclass(frozen=True, slots=True)
class Server:
    """An engine: its process, and how it is asked."""

    pid: int
    port: int
    token: str = ""

    def info(self) -> dict[str, Any]:
        """Empty where it does not answer."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/info", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=1.0) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return {}


def about(root: Path) -> dict[int, list[str]]:
    """Every living process that has `root` in its command line, but this one and those above it: pid -> words."""
    found: dict[int, list[str]] = {}
    ours = ancestors()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in ours:
            continue
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(str(root) in word for word in words) and _lives(int(folder.name)):
                found[int(folder.name)] = words
    return found


def ancestors() -> set[int]:
    found, pid = set(), os.getpid()
    while pid:
        found.add(pid)
        pid = parent_of(pid)
    return found


def parent_of(pid: int) -> int:
    """0 where there is none, or no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def servers_of(root: Path, parent: int) -> list[Server]:
    """The engines that the learner has started."""
    found = []
    for pid, words in about(root).items():
        ports = [w.removeprefix("port=") for w in words if w.startswith("port=")]
        with suppress(OSError, ValueError):
            if "serve" not in words or parent_of(pid) != parent:
                continue
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            token = next((v.removeprefix("BIRL_TOKEN=") for v in variables if v.startswith("BIRL_TOKEN=")), "")
            found.append(Server(pid, int(ports[0]), token))
    return sorted(found, key=lambda s: s.port)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
