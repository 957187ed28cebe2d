"""What runs inside of Modal's containers: the processes of a job, watched. Modal's client is not imported here: what it
gives (notes that all containers of a job share, a tunnel to a port, a volume) comes as arguments."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from birl.errors import BirlError

BEAT = 5.0  # s between two notes
START = 1800.0  # s that engines may take to come: a GPU has to be found, the image and the model fetched


class Notes(Protocol):
    """What the containers of a job and its client tell one another: `modal.Dict`."""

    def get(self, key: str, default: Any = None) -> Any: ...
    def put(self, key: str, value: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerWork:
    """What one container is asked to do. `place`: the run folder on the volume, `run`: what the command calls it.
    `engines`: the name under which engines register, and `count` of them. `seconds`: longest life; then it is stopped,
    saves, and is started again. `idle` [s] without a request ends an engine.

    Example: ContainerWork(command=("python", "-m", "birl", "rl", ...), run="runs/demo", place="/birl/runs/demo")
    """

    command: Sequence[str]
    run: str
    place: str
    engines: str = ""
    count: int = 0
    seconds: float = 86000.0
    idle: float = 1800.0


class Ended(Exception):
    """A process ended that should be started again, which Modal does after any exception."""


RUNNING: "list[Streamed]" = []


def end_all(patience: float = 25.0) -> None:
    """Modal gives a container that has to go about 30 s."""
    for child in RUNNING:
        child.end(patience)


class Streamed:
    """A command; what it prints is appended to `log`, and goes to this process's output behind `who`."""

    def __init__(self, who: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.who = who
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._copy, args=(log,), daemon=True)
        self._thread.start()
        RUNNING.append(self)

    def _copy(self, log: Path) -> None:
        assert self.process.stdout is not None
        with log.open("ab", buffering=0) as file:
            for line in self.process.stdout:
                file.write(line)
                sys.stdout.write(f"[{self.who}] {line.decode(errors='replace')}")
                sys.stdout.flush()

    def end(self, patience: float) -> int:
        """SIGTERM, and SIGKILL for its whole group after `patience` [s]. Returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.wait(patience)

    def wait(self, patience: float) -> int:
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        self._thread.join(5.0)
        return code


def link(work: ContainerWork) -> Path:
    """The folder on the volume, made, and reachable under the name that the command uses. Raises `BirlError`."""
    place, here = Path(work.place), Path(work.run)
    place.mkdir(parents=True, exist_ok=True)
    if here.is_symlink():
        here.unlink()
    if here.exists() and here.resolve() != place.resolve():
        raise BirlError(f"run={work.run}: is a file or folder of the container already; choose another run=...")
    if not here.exists():
        here.parent.mkdir(parents=True, exist_ok=True)
        here.symlink_to(place, target_is_directory=True)
    return place
