"""Interface of sandboxes: `Sandbox`, the `Limits` of a run and its `Result`. Standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Protocol

from birl.errors import BirlError


class Ending(StrEnum):
    """How a run ended. `ok`: the program ended by itself, with any exit code."""

    OK = "ok"
    TIMEOUT = "timeout"  # the wall clock or processor time limit
    MEMORY = "memory"  # all processes together exceeded the limit
    OUTPUT = "output"  # too much on stdout or stderr, or in files
    KILLED = "killed"  # by a signal that is not the sandbox's: a crash, or its own kill
    ERROR = "error"  # the sandbox itself failed; says nothing about the program


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of a run. Each one is enforced from outside of the program.

    Example: Limits(seconds=2, memory_mb=256)
    """

    seconds: float = 10.0
    """Wall clock [s]."""
    cpu_seconds: int = 10
    """Processor time of each process [s]."""
    memory_mb: int = 1024
    """Memory of all processes together, and address space of each [MiB]."""
    processes: int = 40
    """Processes and threads at once."""
    file_mb: int = 64
    """Each file, and all files of the run together [MiB]."""
    output_bytes: int = 1 << 20
    """Standard output and standard error, each [bytes]."""
    open_files: int = 64
    """File descriptors of each process."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise BirlError(f"limits.{name}={getattr(self, name)}: must be more than 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a run. `exit_code`: None if a signal ended it; `signal`: 0 if none did. `warning`: says that `kind` is
    no security boundary against hostile programs; empty if it is one.

    Example: Result(stdout=b"7\\n", exit_code=0, seconds=0.01, ending=Ending.OK, kind="bubblewrap")
    """

    ending: Ending
    kind: str
    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int | None = None
    signal: int = 0
    seconds: float = 0.0
    truncated: bool = False
    """Whether a part of stdout or stderr was discarded."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """The collected files: regular ones that exist and are not too large."""
    detail: str = ""
    """Why it did not end as `ok`."""
    warning: str = ""

    @property
    def good(self) -> bool:
        return self.ending is Ending.OK and self.exit_code == 0

    @property
    def last(self) -> str:
        """The last line of its output, at most 300 characters; else why it ended."""
        text = self.stderr.decode(errors="replace").strip() or self.stdout.decode(errors="replace").strip()
        return text.rpartition("\n")[2].strip()[:300] or self.detail or f"exit code {self.exit_code}"


class Sandbox(Protocol):
    """Runs untrusted programs; concurrent runs on one event loop are safe.

    `files` are written to the working folder, which is new, empty and removed afterwards. The command `python` stands
    for a Python interpreter, `["python", "main.py"]`; everything else is looked up in PATH. `collect`: files of the
    working folder to return. The program sees no environment variables but PATH, HOME and LANG.

    Example: result = await sandbox.run({"main.py": "print(6 * 7)"}, ["python", "main.py"], Limits(seconds=2))
    """

    @property
    def kind(self) -> str: ...

    async def run(
        self,
        files: Mapping[str, bytes | str],
        command: Sequence[str],
        limits: Limits,
        stdin: bytes | str = "",
        collect: Sequence[str] = (),
    ) -> Result: ...

    async def close(self) -> None: ...


def inside(name: str) -> str:
    """Normalised name of a file in the working folder. Raises `BirlError` for one that leads elsewhere."""
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or not path.parts:
        raise BirlError(f"file {name!r}: must be a path within the sandbox's working folder, such as src/main.py.")
    return str(path)


def as_bytes(content: bytes | str) -> bytes:
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
