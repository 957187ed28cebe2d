"""`birl` in a process that is forked from one that has imported everything: it starts in tenths of a second.

For tests of what the process does; that `python -m birl` starts at all is tested elsewhere."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, TextIO

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
    import torch

    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for stream in (1, 2) if both else (1,):
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
