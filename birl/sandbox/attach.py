"""Confines a program that its caller talks to over standard input and output, like other programs in a sandbox, for its
whole life. It is code that the user chose, so it keeps the user's id; it can read only the given places."""

import asyncio
import base64
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from birl.errors import BirlError
from birl.sandbox import command as commands
from birl.sandbox import confine, seccomp
from birl.sandbox.open import INSTALL, PROBE, seen
from birl.sandbox.protocol import Ending, Limits, Result
from birl.sandbox.worker import SIGNALS_STAY_INSIDE

KINDS = ("bubblewrap", "landlock")  # real security boundaries, best first
LIMITS = Limits(seconds=3600, cpu_seconds=3600, memory_mb=16384, processes=256, file_mb=256, open_files=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """How a program is confined. `kind`: one of KINDS; `places`: files and folders outside of the system's that it can
    read; `python`: the interpreter that confines it."""

    kind: str
    places: tuple[str, ...] = ()
    python: str = sys.executable
    limits: Limits = field(default=LIMITS)

    def words(
        self, command: Sequence[str], environment: dict[str, str], scratch: str, opened: ExitStack
    ) -> tuple[list[str], list[int]]:
        """Command line of a confined program, and the file descriptors that it inherits, which `opened` closes.
        `scratch`: an empty folder, the only one that it can write to, unless it has its own /tmp."""
        alone = self.kind == "bubblewrap"
        program = seccomp.assemble(
            namespaces=alone,
            ipc=alone,
            signals=alone or confine.landlock_version() >= SIGNALS_STAY_INSIDE,
            own_user=alone,
            counted=False,
        )
        order = {
            "command": list(command),
            "environment": environment,
            "folder": "/tmp" if alone else scratch,
            "limits": {name: getattr(self.limits, name) for name in self.limits.__slots__},
            "kind": self.kind,
            "uid": 0,
            "readable": [*commands.readable(self.python), *self.places],
            "filter": base64.b64encode(program).decode(),
        }
        if not alone:
            return commands.plain(self.python, json.dumps(order), "confine"), []
        sources = commands.sources(opened)
        words = commands.bubblewrap(
            self.python, json.dumps(order), sources, self.limits, main="confine", places=self.places
        )
        return words, [fd for fd, _ in sources]


async def confinement(kind: str, places: Sequence[str], key: str) -> Confinement:
    """A tested confinement of this kind; auto: the best one that works. `key`: its name in messages. Raises `BirlError`
    with the reasons if none works."""
    failed = []
    for name in KINDS if kind == "auto" else (kind,):
        result = Confinement(kind=name, places=tuple(dict.fromkeys(places)))
        if not (reason := await problem(result)):
            return result
        failed.append(f"{name}: {reason}")
    raise BirlError(f"{key}={kind} does not work on this machine ({'; '.join(failed)}). Install {INSTALL}.")


async def problem(one: Confinement) -> str:
    """Why programs cannot be confined so. Empty: a trial program could compute, and reached nothing outside."""
    with ExitStack() as opened:
        scratch = opened.enter_context(tempfile.TemporaryDirectory(prefix="birl-sandbox-"))
        try:
            words, fds = one.words([one.python, "-I", "-S", "-c", PROBE], {}, scratch, opened)
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=-1, stderr=-1, env={}, pass_fds=fds, cwd="/"
            )
            out, err = await asyncio.wait_for(process.communicate(), 20)
        except (BirlError, OSError, TimeoutError) as error:
            return str(error) or "the trial run did not end"
    result = Result(ending=Ending.OK, kind=one.kind, stdout=out, stderr=err, exit_code=process.returncode)
    known = ["be root"] if one.kind == "landlock" and os.geteuid() == 0 else []  # without root's capabilities
    known += ["read /root"] if any(Path("/root") in Path(p).parents for p in one.places) else []  # parent of these
    return seen(result, one.kind, known)
