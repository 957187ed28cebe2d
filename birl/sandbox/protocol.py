"""What a sandbox is: `Sandbox`, the `Limits` of a run and its `Result`. Standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Protocol

from birl.errors import BirlError


class Ending(StrEnum):
    """How a run ended. `ok` says that the program ended by itself, with whatever exit code."""

    OK = "ok"
    TIMEOUT = "timeout"  # the wall clock or the processor time ran out
    MEMORY = "memory"  # all processes together held more than allowed
    OUTPUT = "output"  # too much on stdout and stderr, or in files
    KILLED = "killed"  # by a signal that was not ours: a crash, or its own kill
    ERROR = "error"  # the sandbox itself failed: says nothing about the program


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run may use. Every bound is enforced from outside of the program.

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
    """What a run gave. `exit_code` is None where a signal ended it, and `signal` is 0 where none did. `warning` says
    that `kind` is no boundary against hostile programs; it is empty where it is one.

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
    """Whether some of stdout or stderr was thrown away."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """The collected files: regular ones that were there and not too large."""
    detail: str = ""
    """Why it did not end as `ok`."""
    warning: str = ""

    @property
    def good(self) -> bool:
        return self.ending is Ending.OK and self.exit_code == 0

    @property
    def last(self) -> str:
        """The last line that it printed, at most 300 characters; else why it ended."""
        text = self.stderr.decode(errors="replace").strip() or self.stdout.decode(errors="replace").strip()
        return text.rpartition("\n")[2].strip()[:300] or self.detail or f"exit code {self.exit_code}"


class Sandbox(Protocol):
    """Runs untrusted programs. Safe for many runs at once on one event loop.

    `files` are put into the working folder, which is new, empty and gone afterwards. The command `python` means a
    Python interpreter, `["python", "main.py"]`; everything else is looked up in PATH. `collect` names files of the
    working folder that are wanted back. The program sees no environment variable but PATH, HOME and LANG.

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
    """The name of a file within the working folder. Raises `BirlError` for one that leads elsewhere."""
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or not path.parts:
        raise BirlError(f"file {name!r}: must be a path within the sandbox's working folder, such as src/main.py.")
    return str(path)


def as_bytes(content: bytes | str) -> bytes:
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
