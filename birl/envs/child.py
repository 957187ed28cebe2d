"""Child processes of environments. Each leads a group of its own (`start_new_session=True`), so that it is ended
together with all that it started, and ends with the trainer, however that ends."""

import contextlib
import os
import shutil
import signal
from collections.abc import Sequence


def tied(words: Sequence[str]) -> list[str]:
    """The command, which the kernel ends when the *thread* that started it ends: start it from the event loop's. As it
    is where there is no setpriv (not on Linux)."""
    setpriv = shutil.which("setpriv")
    return [*([setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []), *words]


def kill(group: int) -> None:
    """All processes of a group. Its number may be unused by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
