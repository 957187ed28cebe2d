"""Which sandbox this machine can have: found out by a trial run, never by looking for a program."""

import asyncio
import contextlib
import json
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.sandbox import attacks
from birl.sandbox.code import Case, SandboxFailed, run_test
from birl.sandbox.command import interpreters
from birl.sandbox.local import LocalSandbox
from birl.sandbox.protocol import Limits, Result, Sandbox

log = logging.getLogger(__name__)

AUTO = ("zygote", "bubblewrap", "landlock")  # real boundaries, the best first
LOCAL = (*AUTO, "process")
INSTALL = "apt-get install bubblewrap, or a kernel with Landlock (5.13 or newer)"

# Tries what must not work, and says what did. Exit code 0 alone would prove nothing.
PROBE = """
import ctypes, json, os, socket
worked = []
def attempt(name, action):
    try:
        action()
    except OSError:
        return
    worked.append(name)
def read(path):
    return lambda: open(path, "rb").read(1)
attempt("open a socket", lambda: socket.socket().close())
attempt("read /etc/shadow", read("/etc/shadow"))
attempt("read /root", lambda: os.listdir("/root"))
attempt("write to /usr", lambda: os.mkdir("/usr/birl-probe") or os.rmdir("/usr/birl-probe"))
attempt("write to /var/tmp", lambda: os.mkdir("/var/tmp/birl-probe") or os.rmdir("/var/tmp/birl-probe"))
attempt("open core_pattern", lambda: os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY)))
if ctypes.CDLL(None).unshare(0x10000000) == 0:
    worked.append("make a user namespace")
if os.getuid() == 0:
    worked.append("be root")
print(json.dumps({"worked": worked, "answer": 6 * 7}))
"""


async def open_sandbox(kind: str = "auto", *, workers: int = 0) -> Sandbox:
    """A sandbox of this kind, tried out. Raises `BirlError` where it does not work, saying why and what to do.

    `workers`: programs that run at once, 0: one for each core. auto takes the first of zygote, bubblewrap and landlock
    that works; `process` is taken only when it is named.
    """
    if kind == "modal":
        from birl.sandbox.modal import ModalSandbox

        return await ModalSandbox.open(workers=workers)
    if kind not in (*LOCAL, "auto"):
        raise BirlError(f"sandbox.kind={kind}: must be auto | {' | '.join(LOCAL)} | modal.")
    failed: dict[str, list[str]] = {}  # kinds by the reason that they have in common
    for name in AUTO if kind == "auto" else (kind,):
        found = await tried(name)
        if found.python:
            if failed:
                log.warning("sandbox.kind=auto is %s here, because %s", name, _reasons(failed))
            return LocalSandbox(name, python=found.python, workers=workers)
        failed.setdefault(found.reason, []).append(name)
    raise BirlError(f"sandbox.kind={kind} does not work on this machine ({_reasons(failed)}). Install {INSTALL}.")


def _reasons(failed: dict[str, list[str]]) -> str:
    """Each reason once."""
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in failed.items())


@dataclass(frozen=True, slots=True)
class Trial:
    """The interpreter that a kind of sandbox works with, or why it works with none."""

    python: str
    reason: str


async def tried(kind: str) -> Trial:
    failed: dict[str, list[str]] = {}  # interpreters by reason
    for python in interpreters():
        reason = await problem(kind, python)
        if not reason:
            return Trial(python, "")
        failed.setdefault(reason, []).append(python)
    return Trial("", "; ".join(failed) if len(failed) < 2 else _reasons(failed))


async def problem(kind: str, python: str) -> str:
    """Why a kind of sandbox cannot be used here. Empty: a trial run went well, and nothing of what it tried worked."""
    if platform.system() != "Linux":
        return f"needs Linux, and this is {platform.system()}"
    try:
        async with LocalSandbox(kind, python=python, workers=1) as sandbox:
            result = await sandbox.run({"probe.py": PROBE}, ["python", "probe.py"], Limits(seconds=10))
            return _seen(result, kind) or ("" if kind == "process" else await _hostile(sandbox))
    except (BirlError, OSError, SandboxFailed) as error:
        return str(error)


def _seen(result: Result, kind: str) -> str:
    """What is wrong with a kind in which the probe came to this. Empty: nothing."""
    if not result.good:
        said = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return result.detail or f"the trial run ended with exit code {result.exit_code}: {' '.join(said)}"
    try:
        found: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        return "the trial run printed something else than it should"
    if found.get("answer") != 42:
        return "the trial run computed something else than it should"
    if found["worked"] and kind != "process":
        return f"a program in it could {', '.join(found['worked'])}"
    return ""


async def _hostile(sandbox: Sandbox) -> str:
    """What hostile programs reach that a hidden test must be kept from: those of attacks.py that take no time. All of
    them are run by `python -m birl.sandbox`."""
    limits, facts = Limits(seconds=10), {"folder": "/tmp", "sleep": f"3{int.from_bytes(os.urandom(4)):010d}"}
    test, right = Case(snippet="assert add(1, 2) == 3"), "def add(a, b):\n    return a + b"
    for name in ("the request in frames", "the request in /proc/self/mem"):
        if (await run_test(sandbox, attacks.FORGERIES[name], test, limits)).passed:
            return f"a program in it could read its hidden test from {name}"
    verdict = await run_test(sandbox, right, test, limits)
    if not verdict.passed:
        return f"a right program fails a test in it: {verdict.detail}"
    for program in (attacks.LEAVE + attacks.DAEMON, attacks.FIND):
        files = {"main.py": attacks.START + attacks.PLACES + program}
        result = await sandbox.run(files, ["python", "main.py"], limits, json.dumps(facts))
        if b"BROKEN" in result.stdout:
            return f"a program in it left something for the next: {result.stdout.decode(errors='replace')[:200]}"
    return "a program in it outlives its run" if _running(facts["sleep"]) else ""


def _running(word: str) -> bool:
    """Whether a process has this word in its command."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                return True
    return False


def available() -> dict[str, Trial]:
    """What came of a trial run of each kind that is a boundary."""

    async def ask() -> dict[str, Trial]:
        return {kind: await tried(kind) for kind in AUTO}

    return asyncio.run(ask())
