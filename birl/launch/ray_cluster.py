"""The Ray cluster that a job runs on: found, started on this machine where there is none, and joined.

Whoever may speak to a Ray cluster may run anything on it. Ray asks for a token where RAY_AUTH_MODE=token, which `ray
start` sets only where it finds a token; a cluster that does not ask for one is refused, unless we are told otherwise.
"""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from birl.errors import BirlError, first_line

NAMESPACE = "birl"
HEAD = "node:__internal_head__"  # a resource that only the head node has
LOCAL = "127.0.0.1"
STORE = 200 * 2**20  # bytes of Ray's object store in a cluster that we start: nothing of a job goes through it
START = 120.0  # seconds
OPEN = (
    "anybody who reaches that cluster could run programs on it. Start it with RAY_AUTH_MODE=token and a token (`ray "
    "get-auth-token --generate`), or set launch.without_token=true where nobody else is in its network."
)


def library() -> Any:
    """The package `ray`. Raises `BirlError` where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise BirlError(
            "Ray is not installed for this Python: pip install 'birl[ray]', or make setup-ray and use .venv-ray."
        ) from error


def connect(address: str, *, start: bool = False, without_token: bool = False) -> Any:
    """Join the cluster at `address` (host:port; empty: RAY_ADDRESS, else the one on this machine); gives the package.
    With `start` one is started on this machine where there is none. Raises `BirlError`."""
    ray = library()
    if ray.is_initialized():
        return ray
    if not without_token and os.environ.setdefault("RAY_AUTH_MODE", "token") != "token":
        raise BirlError(f"RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']}: {OPEN}")
    wanted = address or os.environ.get("RAY_ADDRESS", "")
    found = _join(ray, wanted or "auto")
    if not found and start and not wanted:
        begin()
        found = _join(ray, "auto")
    if not found:
        where = f"launch.address={wanted}" if wanted else "launch.address is empty, RAY_ADDRESS too"
        raise BirlError(
            f"{where}: no Ray cluster answers there that takes this token (RAY_AUTH_TOKEN, or the file "
            "~/.ray/auth_token, which must be the cluster's). Start one with `ray start --head`, or name another."
        )
    return ray


def _join(ray: Any, address: str) -> bool:
    """Whether there is one that lets us in: where the token is wrong, Ray says the same as where there is none."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        return False
    except Exception as error:
        raise BirlError(f"launch.address={address}: {first_line(error)}") from error
    return True


def begin() -> None:
    """A cluster of this machine alone, which nobody else reaches, and which goes on when this process ends."""
    program = Path(sys.executable).with_name("ray")
    ray = str(program) if program.exists() else shutil.which("ray") or "ray"
    if os.environ.get("RAY_AUTH_MODE") == "token":
        _call(
            [ray, "get-auth-token", "--generate"]
        )  # the one that is there, else a new one; what it prints is no log's
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: the job would wait for everything else here
    store = f"--object-store-memory={STORE}"
    _call([ray, "start", "--head", f"--node-ip-address={LOCAL}", "--port=0", store, "--disable-usage-stats"])
    print("No Ray cluster was there, so one was started on this machine; `ray stop` ends it.", flush=True)


def _call(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=START)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-3:]
        raise BirlError(f"`{' '.join(command)}` failed: {' '.join(said)}") from error


def room(ray: Any) -> str:
    """What the cluster has, for messages."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(n, 0):g} of {total.get(n, 0):g} {n} free" for n in ("CPU", "GPU") if total.get(n))
