"""Plan and state of a supervisor: files in the folder `launch` of a run. They contain no secrets: a token is in the
environment."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from birl.errors import BirlError
from birl.regular import check_target, open_regular, read_bytes, read_text, write_whole
from birl.track.runs import began_at

FOLDER = "launch"  # of a run folder
PLAN, STATE, LOCK, LOG, WANTED = "plan.json", "state.json", "supervisor.lock", "supervisor.log", "engines.wanted"
WHOLE = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """`engine`: the command of each of `count` engines, empty without engines; they register under `engines`.
    `devices`: the GPUs of this machine; the learner has the first `learner_gpus`, each engine the next `engine_gpus`.
    `threads`: CPU threads of the learner; 0: all. `place`: folder of this machine in the run folder, if the run has
    several machines.

    Example: LaunchPlan(name="demo", run="runs/demo", learner=("python", "-m", "birl", "rl", ...))
    """

    __pydantic_config__ = WHOLE

    name: str
    run: str
    learner: tuple[str, ...]
    engine: tuple[str, ...] = ()
    count: int = 0
    engines: str = ""
    restarts: int = 3
    threads: int = 0
    devices: tuple[str, ...] = ()
    learner_gpus: float = 0.0
    engine_gpus: float = 0.0
    place: str = ""

    @property
    def home(self) -> Path:
        return Path(self.run) / self.place

    @property
    def folder(self) -> Path:
        return self.home / FOLDER

    @property
    def devices_needed(self) -> int:
        return ceil(self.learner_gpus) + ceil(self.count / self._sharing) * ceil(self.engine_gpus)

    def most_engines(self) -> int:
        """Largest number of engines for the free GPUs."""
        free = len(self.devices) - ceil(self.learner_gpus)
        return int(free // ceil(self.engine_gpus) * self._sharing) if self.engine_gpus else 1000

    def of(self, role: str, index: int) -> list[str]:
        """GPUs of one process: whole ones, or one that it shares with others."""
        if role == "learner":
            return list(self.devices[: ceil(self.learner_gpus)])
        each = ceil(self.engine_gpus)
        start = ceil(self.learner_gpus) + index // self._sharing * each
        return list(self.devices[start : start + each])

    @property
    def _sharing(self) -> int:
        """Number of engines that share one GPU."""
        return int(1 / self.engine_gpus) if 0 < self.engine_gpus < 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process in state.json. For `state` see `launcher.Status`; `since` in seconds of the clock."""

    role: str
    index: int
    state: str
    pid: int = 0
    restarts: int = 0
    since: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """`state`: running | done | failed | stopped. `engines`: wanted number of engines."""

    __pydantic_config__ = WHOLE

    state: str
    pid: int
    engines: int = 0
    parts: tuple[ProcessState, ...] = ()
    detail: str = ""


def text(data: object) -> str:
    return json.dumps(data, indent=1) + "\n"


def write(file: Path, data: object) -> None:
    """Write a file atomically. Raises `BirlError`."""
    write_whole(file, text(data).encode())


def save(plan: LaunchPlan) -> Path:
    plan.folder.mkdir(parents=True, exist_ok=True)
    write(plan.folder / PLAN, asdict(plan))
    return plan.folder / PLAN


def load(file: Path) -> LaunchPlan:
    """Raises `BirlError`."""
    try:
        return typed(LaunchPlan, read_bytes(file))
    except (OSError, ValueError) as error:
        raise BirlError(f"{file} cannot be read: {error}") from error


def read_state(folder: Path) -> State | None:
    try:
        return typed(State, read_bytes(folder / STATE))
    except (OSError, ValueError):
        return None


def typed(kind: type[Any], data: bytes | str) -> Any:
    """Parse JSON as the dataclass `kind`. Raises `ValueError`, of one line, if it does not fit."""
    try:
        return TypeAdapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(": ".join([*map(str, first["loc"]), first["msg"]])) from None


def wanted(folder: Path, most: int) -> int | None:
    """Number of engines that `birl scale` requested; None without a valid request."""
    with contextlib.suppress(OSError, ValueError):
        text = read_text(folder / WANTED).strip()
        if len(text) <= 4 and 1 <= int(text) <= most:
            return int(text)
    return None


def supervised(folder: Path) -> int:
    """Pid of the run's current supervisor; 0 if there is none. A supervisor has an exclusive lock, which ends with it.
    Readers take a shared lock: otherwise two concurrent readers would take each other for a supervisor."""
    try:
        with open_regular(folder / LOCK) as file:
            pid, began, *_ = (*file.read(100).decode("ascii", "replace").split(), "", "")
            number = int(pid) if pid.isdecimal() else -1
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return number
            except OSError:  # a disk without locks, such as Lustre
                return number if began and began == began_at(number) else 0
    except FileNotFoundError:
        pass
    return 0


def elsewhere(folder: Path) -> str:
    """Host name of the supervisor, if it is another machine; else empty."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        host = read_text(folder / LOCK).split()[2]
        return host if host != socket.gethostname() else ""
    return ""


@contextlib.contextmanager
def lock(folder: Path, patience: int = 20) -> Iterator[None]:
    """Lock the folder as the only supervisor. Raises `BirlError`. Retries, as readers lock it briefly."""
    check_target(folder / LOCK)
    file = (folder / LOCK).open("a+")
    with file:
        for left in reversed(range(patience)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError) and not supervised(folder):
                    break
                if not left:
                    raise BirlError(f"{folder.parent} is supervised already by process {supervised(folder)}") from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(f"{os.getpid()}\n{began_at(os.getpid())}\n{socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
