"""One word says where a job runs. A launcher is a module of this folder with `Keys` and these functions; what it needs
to find the job again is in launch.json of the run folder, without any secret."""

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
POLL = 0.2  # s between two looks at a log
#: modules of birl.launch, and what they start a job on
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
PROCESSES = ("local", "torchrun")  # of this machine
HERE = (*PROCESSES, "slurm", "ray")  # the run folder is where `birl status` is asked for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A job that was submitted. `id`: what the place calls it; `more`: what else the launcher wants to know again.

    Example: Handle(where="slurm", id="4711", run="runs/demo", name="demo")
    """

    __pydantic_config__ = WHOLE

    where: str
    id: str
    run: str
    name: str
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def save(self) -> None:
        """Raises `BirlError` with what to ask for by the place's own commands where it cannot be noted."""
        file, text = Path(self.run) / FILE, f"{json.dumps(asdict(self), indent=1)}\n".encode()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text)
        except (OSError, BirlError) as error:
            raise BirlError(
                f"{error}\n`birl status` and `birl stop` do not know of {self.where} {self.id}: end it there by hand "
                "before you launch again."
            ) from error
        with suppress(OSError):  # without a note, --trust is needed
            note = _note(text)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One process of a job. `state`: waiting | running | restarting | done | failed | stopped | unknown."""

    role: str
    index: int
    state: str
    where: str = ""  # machine, pid, node
    detail: str = ""


class Launcher(Protocol):
    """What `birl.launch.WHERE` has; one that can change the number of engines has `scale(handle, change)` besides,
    which gives the new one; one whose handles have `more` has `More`, a dataclass of it."""

    Keys: type[Any]

    def render(self, job: Job, keys: Any) -> dict[str, str]:
        """What would be written and run, by name: files with their text, commands under "commands". Nothing is done."""
        ...

    def submit(self, job: Job, keys: Any) -> Handle:
        """Start it, detached from this process. Raises `BirlError`."""
        ...

    def status(self, handle: Handle) -> Sequence[Status]: ...

    def logs(self, handle: Handle, role: str, follow: bool) -> Iterator[str]:
        """Lines of a role ("" all); with `follow` until the job ends."""
        ...

    def stop(self, handle: Handle) -> str:
        """Let it save and end, and give its machines back; returns when it has. The state in which it had ended before,
        where it had; else empty. Raises `BirlError`."""
        ...


def launcher(where: str) -> Launcher:
    if where not in WHERE:
        places = ", ".join(WHERE)
        raise BirlError(f"There is no place {where[:40]!r}; there are {places}.{did_you_mean(where, WHERE)}")
    return module(f"birl launch {where}", f"birl.launch.{where}")


def _note(launch: bytes) -> Path:
    """Exists where this account launched the job of this launch.json."""
    return cache_folder("launched") / hashlib.sha256(launch).hexdigest()


def find(run: str, trusted: bool = False) -> Handle:
    """The job of a run folder. Raises `BirlError` where none was launched from there. A folder that is read here may be
    a copy, and is none of the run that it was copied from. It may be of a stranger, whose cluster Ray or ssh would ask,
    or whose files they would follow: one of a place beyond this machine is believed if this account launched it, or
    `trusted`."""
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
    """`files` gives the logs that there are now, by what to write before their lines where there are several. With
    `follow` until `over`. `start`: where to begin in a file [bytes]."""
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
    """Whole lines since the last look; at the last one the rest too."""
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
    """A number of engines after `change`, which is +2, -1 or 4. Raises `BirlError`."""
    if not re.fullmatch(r"[+-]?\d{1,4}", change):
        raise BirlError(f"engines={change}: write engines=4, engines=+2 or engines=-1")
    number = now + int(change) if change[0] in "+-" else int(change)
    if number < 1:
        raise BirlError(f"engines={change}: at least one must stay, and there are {now}")
    return number
