"""What hostile programs reach in a kind of sandbox on this machine: tried once since it started, and then kept."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from birl.cache import alone, cache_folder
from birl.sandbox import hostile
from birl.sandbox.cgroup import MemoryGroup
from birl.sandbox.command import HERE, SYSTEM_PATH

log = logging.getLogger(__name__)

STATUS = ("CapEff", "NoNewPrivs", "Seccomp")  # what this process may do, as in /proc/self/status


async def reached(kind: str, python: str, *, anew: bool = False) -> dict[str, str]:
    """For every hostile program, what it reached: empty, it was stopped. `anew`: whatever is kept."""
    path = cache_folder("sandbox") / f"{kind}-{_digest(_circumstances(kind, python))}.json"
    with contextlib.ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, alone(path))
        kept = None if anew else _read(path)
        if kept is None:
            kept = await hostile.all_of(kind, python)
            _write(path, kept)
        return kept


def _circumstances(kind: str, python: str) -> dict[str, Any]:
    """What the answer depends on."""
    group = MemoryGroup.make(f"birl-sandbox-{os.getpid()}-trial-{os.urandom(3).hex()}")
    if group is not None:
        group.remove()
    programs = [Path(name) for name in (python, shutil.which("bwrap", path=SYSTEM_PATH)) if name]
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "kind": kind,
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "kernel": platform.uname()[2:5],
        "user": os.geteuid(),
        "counted": group is not None,
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in ("user", "pid")],
        "status": [line for line in status if line.startswith(STATUS)],
        "programs": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in programs],
        "sources": [_digest(path.read_text()) for path in sorted(HERE.glob("*.py"))],
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, str] | None:
    """None where there is none, or it is not an answer for each program."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    names = [one.name for one in hostile.ATTACKS] + [hostile.FORGED]
    good = isinstance(kept, dict) and list(kept) == names and all(isinstance(what, str) for what in kept.values())
    return kept if good else None


def _write(path: Path, kept: dict[str, str]) -> None:
    half = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    try:
        half.write_text(json.dumps(kept, indent=1))
        half.replace(path)
    except OSError as error:
        log.warning("What hostile programs reach in sandboxes cannot be kept: %s. Set BIRL_CACHE.", error)
        with contextlib.suppress(OSError):
            half.unlink()
