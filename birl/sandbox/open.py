"""Opens the sandbox that works on this machine, found by trial runs and not by the names of programs."""

import asyncio
import json
import logging
import platform
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from birl.errors import BirlError
from birl.sandbox.code import SandboxFailed
from birl.sandbox.command import interpreters
from birl.sandbox.local import LocalSandbox
from birl.sandbox.protocol import Limits, Result, Sandbox

log = logging.getLogger(__name__)

AUTO = ("zygote", "bubblewrap", "landlock")  # real security boundaries, best first
LOCAL = (*AUTO, "process")
INSTALL = "apt-get install bubblewrap, or a kernel with Landlock (5.13 or newer)"

# Tries forbidden actions and reports those that worked. Exit code 0 alone would prove nothing.
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
    """Open a sandbox of this kind after a trial run. Raises `BirlError` with reason and fix if it does not work.

    `workers`: concurrent programs, 0: one per core. auto takes the first of zygote, bubblewrap and landlock that works;
    `process` must be named.
    """
    if kind == "modal":
        from birl.sandbox.modal import ModalSandbox

        return await ModalSandbox.open(workers=workers)
    if kind not in (*LOCAL, "auto"):
        raise BirlError(f"sandbox.kind={kind}: must be auto | {' | '.join(LOCAL)} | modal.")
    failed: dict[str, list[str]] = {}  # kinds by common reason
    for name in AUTO if kind == "auto" else (kind,):
        result = await tried(name)
        if result.python:
            if failed:
                log.warning("sandbox.kind=auto is %s here, because %s", name, _reasons(failed))
            return LocalSandbox(name, python=result.python, workers=workers)
        failed.setdefault(result.reason, []).append(name)
    raise BirlError(f"sandbox.kind={kind} does not work on this machine ({_reasons(failed)}). Install {INSTALL}.")


def _reasons(failed: dict[str, list[str]]) -> str:
    """The reasons, each once."""
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in failed.items())


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of trial runs: the interpreter that a kind of sandbox works with, or why none works."""

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
    """Why a kind of sandbox cannot be used here. Empty: a trial run computes, and reaches nothing outside."""
    if platform.system() != "Linux":
        return f"needs Linux, and this is {platform.system()}"
    try:
        async with LocalSandbox(kind, python=python, workers=1) as sandbox:
            result = await sandbox.run({"probe.py": PROBE}, ["python", "probe.py"], Limits(seconds=10))
            return seen(result, kind)
    except (BirlError, OSError, SandboxFailed) as error:
        return str(error)


def seen(result: Result, kind: str, known: Collection[str] = ()) -> str:
    """What is wrong with a kind of sandbox by the result of its probe, except actions in `known`. Empty if nothing
    is."""
    if not result.good:
        errors = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return result.detail or f"the trial run ended with exit code {result.exit_code}: {' '.join(errors)}"
    try:
        report: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        return "the trial run printed something else than it should"
    if report.get("answer") != 42:
        return "the trial run computed something else than it should"
    worked = [name for name in report["worked"] if name not in known]
    if worked and kind != "process":
        return f"a program in it could {', '.join(worked)}"
    return ""


def available() -> dict[str, Trial]:
    """Trial run of each kind that is a security boundary."""

    async def ask() -> dict[str, Trial]:
        return {kind: await tried(kind) for kind in AUTO}

    return asyncio.run(ask())
