"""Find and join the Ray cluster of a job, or start one on this machine.

Every client of a Ray cluster can execute code on it. Ray requires a token if RAY_AUTH_MODE=token, which `ray start`
sets only if it finds a token; a cluster without one is refused, unless a key allows it.

Ray reads RAY_AUTH_MODE only on import, so it is set before.

python -m birl.launch.ray_cluster COUNT SECONDS waits until the cluster of this machine has so many machines, and fails
if it takes longer: for the head of a cluster whose machines join one by one.
"""

import atexit
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from birl.errors import BirlError, first_line
from birl.launch import ray_guard

NAMESPACE = "birl"
HEAD = "node:__internal_head__"  # a resource that only the head node has
LOCAL = "127.0.0.1"
STORE = 200 * 2**20  # bytes of Ray's object store in a cluster that we start; jobs do not use it
START = 120.0  # seconds
LISTEN = 3.0  # seconds for a head to accept a connection; Ray itself would try for minutes
MODE = "RAY_AUTH_MODE"
#: 0: Ray keeps 127.0.0.1, on every system. Otherwise it replaces it by the machine's address, and listens there.
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
OPEN = (
    "anybody who reaches that cluster could run programs on it. Start it with RAY_AUTH_MODE=token and a token (`ray "
    "get-auth-token --generate`), or set launch.without_token=true where its network has no other users."
)
_guard: "subprocess.Popen[str] | None" = None  # of a cluster that this process has started and not kept


def library() -> Any:
    """Import `ray`. Raises `BirlError` if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise BirlError(
            "Ray is not installed for this Python: pip install 'birl[ray]', or make setup-ray and use .venv-ray."
        ) from error


def connect(address: str, *, start: bool = False, without_token: bool = False, private: bool = False) -> Any:
    """Join the cluster at `address` (host:port; empty or auto: RAY_ADDRESS, else the one on this machine); returns the
    package. With `start` one is started on this machine if there is none: it ends with this process unless `keep` is
    called, and other runs do not find a `private` one. Raises `BirlError`."""
    if "ray" in sys.modules and library().is_initialized():
        return library()
    if not without_token and os.environ.get(MODE, "token") != "token":
        raise BirlError(f"{MODE}={os.environ[MODE]}: {OPEN}")
    wanted = (address if address != "auto" else "") or os.environ.get("RAY_ADDRESS", "")
    place = wanted or running()
    if place and not listens(place):
        place = ""
    begins = start and not wanted and not place
    ray = prepared(local=begins or is_local(place), without_token=without_token)
    if begins:
        place = begin(private=private)
    try:
        if place and _join(ray, place):
            return ray
    except BaseException:
        end()
        raise
    end()
    where = f"launch.address={wanted}" if wanted else "launch.address is empty, RAY_ADDRESS too"
    raise BirlError(
        f"{where}: no Ray cluster answers there that takes this token (RAY_AUTH_TOKEN, or the file "
        "~/.ray/auth_token, which must be the cluster's). Start one with `ray start --head`, or name another."
    )


def prepared(*, local: bool, without_token: bool) -> Any:
    """Import Ray with the right environment. Raises `BirlError` if it was imported before with another."""
    wanted = {} if without_token else {MODE: "token"}
    wanted |= {LOOPBACK: "0"} if local else {}
    if "ray" in sys.modules:
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                raise BirlError(
                    f"Ray was imported before birl could set {name}={value}, which Ray reads at import: set it in the "
                    "environment, or import ray later."
                )
    os.environ.update(wanted)
    return library()


def running() -> str:
    """Address (host:port) of the newest cluster that was started on this machine, from Ray's notes; empty if there is
    none. It may have ended."""
    return noted(Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray"))


def noted(folder: Path) -> str:
    try:
        return (folder / "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def listens(address: str) -> bool:
    """Whether a server accepts connections at `address` (host:port)."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTEN).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def is_local(address: str) -> bool:
    """Whether `address` (host:port) is on the loopback."""
    return address.rpartition(":")[0] in (LOCAL, "localhost", "[::1]")


def _join(ray: Any, address: str) -> bool:
    """Whether the cluster could be joined. With a wrong token Ray reports the same as without a cluster."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        return False
    except Exception as error:
        raise BirlError(f"launch.address={address}: {first_line(error)}") from error
    return True


def begin(*, private: bool = False) -> str:
    """Start a cluster that other machines cannot reach; returns its address. It ends with this process, unless `keep`
    is called. Other runs do not find a `private` one. Raises `BirlError`."""
    global _guard
    end()
    ray = program()
    if os.environ.get(MODE) == "token":
        _call([ray, "get-auth-token", "--generate"])  # an old token, or a new one; its output must not be logged
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: all other processes would have priority
    atexit.register(end)  # runs while Ray's client still works
    folder = tempfile.mkdtemp(prefix="birl-ray-") if private else ""
    with socket.create_server((LOCAL, 0)) as free:
        port = free.getsockname()[1]
    address = f"{LOCAL}:{port}"
    command = [ray, "start", "--head", "--block", f"--node-ip-address={LOCAL}", f"--port={port}"]
    command += ["--include-dashboard=false", f"--object-store-memory={STORE}", "--disable-usage-stats"]
    command += [f"--temp-dir={folder}"] if private else []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        _guard = subprocess.Popen(
            [sys.executable, "-I", "-S", ray_guard.__file__, folder, *command], stdin=subprocess.PIPE, stdout=log,
            stderr=subprocess.STDOUT, env={**os.environ, LOOPBACK: "0"}, text=True, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + START
        while (noted(Path(folder)) if private else running()) != address or not listens(address):
            if _guard.poll() is not None or time.monotonic() > until:
                log.seek(0)
                tail = " ".join(log.read().strip().splitlines()[-3:])
                end()
                raise BirlError(f"`{' '.join(command)}` failed: {tail or f'it did not listen within {START:g} s'}")
            time.sleep(0.1)
    return address


def keep() -> None:
    """Let the cluster that this process started outlive it."""
    global _guard
    if _guard is not None:
        guard, _guard = _guard, None
        assert guard.stdin is not None
        with suppress(BrokenPipeError), guard.stdin:
            guard.stdin.write("keep")
        print("No Ray cluster was there, so one was started on this machine; `ray stop` ends it.", flush=True)


def end() -> None:
    """End the cluster that this process started and did not keep, if there is one."""
    global _guard
    if _guard is None:
        return
    guard, _guard = _guard, None
    if "ray" in sys.modules and library().is_initialized():
        library().shutdown()  # Ray ends a client whose cluster has ended
    assert guard.stdin is not None
    guard.stdin.close()
    try:
        guard.wait(ray_guard.GRACE + 5)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)
        guard.wait()


def program() -> str:
    """Ray's command line program, of the current Python."""
    own = Path(sys.executable).with_name("ray")
    return str(own) if own.exists() else shutil.which("ray") or "ray"


def _call(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=START)
    except (OSError, subprocess.SubprocessError) as error:
        tail = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-3:]
        raise BirlError(f"`{' '.join(command)}` failed: {' '.join(tail)}") from error


def find_actor(ray: Any, name: str) -> Any:
    """The actor of this name; None if the cluster has none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def room(ray: Any) -> str:
    """Resources of the cluster, for messages."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(n, 0):g} of {total.get(n, 0):g} {n} free" for n in ("CPU", "GPU") if total.get(n))


def main() -> int:
    count, seconds = int(sys.argv[1]), float(sys.argv[2])
    ray, until = library(), time.monotonic() + seconds
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    try:
        while (there := sum(bool(node["Alive"]) for node in ray.nodes())) < count and time.monotonic() < until:
            time.sleep(2.0)
    finally:
        ray.shutdown()
    if there < count:
        print(f"birl: {there} of {count} machines came within {seconds:g} s (launch.wait)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
