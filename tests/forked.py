"""`birl` in a process that is forked from one that has imported everything: it starts in tenths of a second.

For tests of what the process does; that `python -m birl` starts at all is tested elsewhere."""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing import reduction
from typing import IO, Any, TextIO

import torch

from birl.process import tied
from tests.parallel.processes import SERVER


class Forked:
    """What `subprocess.Popen` gives, as far as tests ask for it. `both`: stdout and stderr are one pipe."""

    def __init__(self, words: list[str], env: Mapping[str, str] | None = None, both: bool = False) -> None:
        ours, theirs = SERVER.Pipe(duplex=False)
        self._process = SERVER.Process(target=_birl, args=(words, dict(env or os.environ), os.getcwd(), theirs, both))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout: TextIO = os.fdopen(os.dup(ours.fileno()), errors="replace")
        ours.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("birl", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _birl(words: list[str], env: dict[str, str], folder: str, pipe: Any, both: bool) -> None:
    _become(env, folder, pipe.fileno(), (1, 2) if both else (1,))
    pipe.close()
    from birl.cli import main

    _end(main(words))


def _become(env: dict[str, str], folder: str, out: int, streams: tuple[int, ...]) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for stream in streams:
        os.dup2(out, stream)
    # the old ones would seek
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or 1))


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def popen(command: list[str], **options: Any) -> Any:
    """For `birl.process`, instead of `subprocess.Popen`: `python -m MODULE` is forked, anything else is started."""
    words = command[len(tied([])) :]
    return Group(words, **options) if words[:2] == [sys.executable, "-m"] else subprocess.Popen(command, **options)


class Descriptor:
    """A file that a forked process has, too; there it is the number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _detached, (reduction.DupFd(self.number),)


def _detached(copy: Any) -> int:
    return copy.detach()


class Group(Forked):
    """The same with a session and files of its own, as `birl.process.ProcessGroup` starts it."""

    def __init__(
        self, words: list[str], *, stdin: int, stdout: IO[bytes], env: Mapping[str, str], cwd: str | None, **_: Any
    ) -> None:
        self.stdin: IO[bytes] | None = None
        if stdin == subprocess.PIPE:
            source, into = os.pipe()
            self.stdin = os.fdopen(into, "wb")
        else:
            source = os.open(os.devnull, os.O_RDONLY)
        files = Descriptor(source), Descriptor(stdout.fileno())
        self._process = SERVER.Process(target=_module, args=(words[2:], dict(env), cwd or os.getcwd(), *files))
        self._process.start()
        os.close(source)
        assert self._process.pid is not None
        self.pid = self._process.pid
        while self.poll() is None and os.getpgid(self.pid) != self.pid:  # its group can be killed from here on
            time.sleep(0.01)


def _module(words: list[str], env: dict[str, str], folder: str, source: int, out: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: the fork server ends with the tests
    os.setsid()
    os.dup2(source, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    _become(env, folder, out, (1, 2))
    sys.argv = words
    code: Any = 0
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    _end(code if isinstance(code, int) else int(code is not None))
