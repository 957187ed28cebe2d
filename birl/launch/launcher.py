"""Interface of launchers, which are chosen by one word. A launcher is a module of this folder with `Keys` and the
functions of `Launcher`; the data to find a job again is in launch.json of the run folder, without secrets."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from birl.cache import cache_folder
from birl.errors import BirlError, did_you_mean
from birl.launch.job import Job
from birl.launch.plan import WHOLE, typed
from birl.named import module
from birl.regular import open_regular, read_bytes, write_whole

FILE = "launch.json"
POLL = 0.2  # s between two polls of a log
#: modules of birl.launch -> what they start a job on
WHERE = {
    "local": "processes of this machine, supervised",
    "torchrun": "the learner's ranks by torchrun, on this machine or on each of several",
    "slurm": "one batch job of a Slurm cluster",
    "ray": "actors of a Ray cluster, supervised; nodes may come and go",
    "modal": "containers of Modal's cloud, paid by the second",
    "aws": "machines of its own in AWS, as a Ray cluster",
    "kubernetes": "pods of a Kubernetes cluster, by SkyPilot",
    "skypilot": "machines of whichever cloud has them, by SkyPilot",
}
PROCESSES = ("local", "torchrun")  # launchers of processes on this machine
HERE = (*PROCESSES, "slurm", "ray")  # launchers whose run folder is on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A submitted job. `id`: of the job at the place where it runs; `more`: further data of the launcher.

    Example: Handle(where="slurm", id="4711", run="runs/demo", name="demo")
    """

    __pydantic_config__ = WHOLE

    where: str
    id: str
    run: str
    name: str
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def save(self) -> None:
        """Write launch.json. Raises `BirlError` with the job's id for the place's own commands if that fails."""
        file, text = Path(self.run) / FILE, f"{json.dumps(asdict(self), indent=1)}\n".encode()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text)
        except (OSError, BirlError) as error:
            raise BirlError(
                f"{error}\n`birl status` and `birl stop` do not know of {self.where} {self.id}: end it there by hand "
                "before you launch again."
            ) from error
        with suppress(OSError):  # without this file, --trust is needed
            note = _note(text)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of one process of a job. `state`: waiting | running | restarting | done | failed | stopped | unknown."""

    role: str
    index: int
    state: str
    where: str = ""  # machine, pid, node
    detail: str = ""


class Launcher(Protocol):
    """Interface of the modules `birl.launch.WHERE`. One that can change the number of engines also has `scale(handle,
    change)`, which returns the new number; one whose handles have `more` has `More`, its dataclass."""

    Keys: type[Any]

    def render(self, job: Job, keys: Any) -> dict[str, str]:
        """Dry run: files that would be written, by name, with their text, and the commands under "commands"."""
        ...

    def submit(self, job: Job, keys: Any) -> Handle:
        """Start the job, detached from this process. Raises `BirlError`."""
        ...

    def status(self, handle: Handle) -> Sequence[Status]: ...

    def logs(self, handle: Handle, role: str, follow: bool) -> Iterator[str]:
        """Lines of a role's log ("": all); with `follow` until the job ends."""
        ...

    def stop(self, handle: Handle) -> str:
        """Let the job save and end, and release its machines; returns after that. Returns the state of a job that had
        ended before; else empty. Raises `BirlError`."""
        ...


def launcher(where: str) -> Launcher:
    if where not in WHERE:
        places = ", ".join(WHERE)
        raise BirlError(f"There is no place {where[:40]!r}; there are {places}.{did_you_mean(where, WHERE)}")
    return module(f"birl launch {where}", f"birl.launch.{where}")


def _note(launch: bytes) -> Path:
    """File that exists if this account launched the job of this launch.json."""
    return cache_folder("launched") / hashlib.sha256(launch).hexdigest()


def find(run: str, trusted: bool = False) -> Handle:
    """Handle of the job of a run folder. Raises `BirlError` if none was launched from there. The folder may be a copy:
    then it has no job. It may also come from another person, and Ray or ssh would connect to their cluster, or follow
    their files: launchers beyond this machine are accepted if this account launched the job, or if `trusted`."""
    file = Path(run) / FILE
    try:
        text = read_bytes(file)
        handle: Handle = typed(Handle, text)
        if handle.id.startswith("-"):
            raise ValueError(f"the id {handle.id!r} would be an option of the programs that ask for the job")
        if kind := getattr(launcher(handle.where), "More", None):
            handle = replace(handle, more=asdict(typed(kind, json.dumps(handle.more))))
        if handle.where not in PROCESSES and not trusted and not _note(text).exists():
            raise BirlError(
                f"{file} was not written by `birl launch` of this account ({_note(text).parent} has no note of it). It "
                f"says which {handle.where} job is asked, by programs that can run anything here: if you know who "
                "wrote the folder, add --trust."
            )
        return replace(handle, run=os.path.abspath(run)) if handle.where in HERE else handle
    except FileNotFoundError:
        if not Path(run).exists():
            raise BirlError(f"there is no folder {run}; `birl runs` lists the runs there are") from None
        raise BirlError(f"{run} was not started by `birl launch`: it has no {FILE}") from None
    except (OSError, ValueError) as error:
        raise BirlError(f"{file} cannot be read: {error}") from error


def log_lines(
    files: Callable[[], Mapping[str, Path]],
    follow: bool,
    over: Callable[[], bool],
    start: Mapping[Path, int] = MappingProxyType({}),
) -> Iterator[str]:
    """Lines of log files. `files` returns the current logs by prefix of their lines (if there are several); `follow`
    continues until `over`. `start`: first byte to read in a file."""
    read = dict(start)
    while True:
        last = not follow or over()
        logs = files()
        for label, file in logs.items():
            for line in _new_lines(file, read, last):
                yield f"{label} | {line}" if len(logs) > 1 else line
        if last:
            return
        time.sleep(POLL)


def _new_lines(file: Path, read: dict[Path, int], last: bool) -> list[str]:
    """Whole lines since the last call; with `last` also an incomplete one."""
    try:
        with open_regular(file) as opened:
            opened.seek(read.get(file, 0))
            result = opened.read()
    except OSError:
        return []
    if not last:
        result = result[: result.rfind(b"\n") + 1]
    read[file] = read.get(file, 0) + len(result)
    return result.decode(errors="replace").splitlines()


def changed(now: int, change: str) -> int:
    """Number of engines after `change`, which is +2, -1 or 4. Raises `BirlError`."""
    if not re.fullmatch(r"[+-]?\d{1,4}", change):
        raise BirlError(f"engines={change}: write engines=4, engines=+2 or engines=-1")
    number = now + int(change) if change[0] in "+-" else int(change)
    if number < 1:
        raise BirlError(f"engines={change}: at least one must stay, and there are {now}")
    return number
