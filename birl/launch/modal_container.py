"""Runs and watches a job's processes in Modal's containers. Modal's client is not imported here: its objects (notes
that all containers of a job share, a tunnel to a port, a volume) are arguments.

An engine without requests ends, so that no GPU is paid for after the learner has died."""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from birl.engines import names
from birl.errors import STOPPED, BirlError
from birl.launch.launcher import log_lines
from birl.process import ProcessGroup

BEAT = 5.0  # s between two notes
START = 1800.0  # s for engines to start: assign a GPU, download image and model
UNCOUNTED = ("/metrics", "/health", "/ready")  # routes that do not count as use of an engine
RUNNING: "list[Streamed]" = []


class Notes(Protocol):
    """Key-value store shared by the job's containers and its client: `modal.Dict`."""

    def get(self, key: str, default: Any = None) -> Any: ...
    def put(self, key: str, value: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerWork:
    """Work of one container. `place`: the run folder on the volume, `run`: its path in the command. `engines`: name
    under which engines register, `count`: their number. `seconds`: longest life; then it is stopped, saves, and is
    restarted. `idle`: seconds without a request after which an engine ends.

    Example: ContainerWork(command=("python", "-m", "birl", "rl", ...), run="runs/demo", place="/birl/runs/demo")
    """

    command: Sequence[str]
    run: str
    place: str
    engines: str = ""
    count: int = 0
    seconds: float = 86000.0
    idle: float = 1800.0


class Ended(Exception):
    """Raised when a process has ended and should be restarted: Modal retries after any exception."""


def end_all(patience: float = 25.0) -> None:
    """End all processes. Modal gives a container about 30 s to end."""
    for child in RUNNING:
        child.end(patience)


class Streamed(ProcessGroup):
    """A command whose output is appended to `log`, and to this process's output with the prefix `who`."""

    def __init__(self, who: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        super().__init__(command, log=log, env={**os.environ, "PYTHONUNBUFFERED": "1", **env})
        self._thread = threading.Thread(target=self._show, args=(who,), daemon=True)
        self._thread.start()
        RUNNING.append(self)

    def _show(self, who: str) -> None:
        for line in log_lines(lambda: {who: self.log}, True, lambda: not self.alive, {self.log: self.began_at}):
            sys.stdout.write(f"[{who}] {line}\n")
            sys.stdout.flush()

    def end(self, seconds: float) -> int:
        code = super().end(seconds)
        self._thread.join(5.0)
        return 1 if code is None else code


class Tunnel(Protocol):
    @property
    def url(self) -> str: ...


def serve(
    work: ContainerWork,
    number: int,
    notes: Notes,
    *,
    forward: Callable[[int], AbstractContextManager[Tunnel]],
    beat: float = BEAT,
    start: float = START,
) -> int:
    """An engine's container: run the command, open its port to clients with the token, note its address, until the job
    is over or sends no more requests. Raises `Ended` if it ends by itself, and `BirlError`."""
    if not os.environ.get("BIRL_TOKEN"):
        raise BirlError("an engine is reached over the network, so it needs the environment variable BIRL_TOKEN")
    began = time.time()
    log = Path(work.place) / "launch" / f"engine-{number}.log"
    child = Streamed(f"engine {number}", work.command, log, {"BIRL_HOST": "0.0.0.0"})
    try:
        address = registered(child, work.engines, began, start)
        port = urlsplit(address).port
        assert port is not None
        with forward(port) as tunnel:
            return beats(child, number, notes, tunnel.url, f"http://127.0.0.1:{port}", work, beat)
    finally:
        code = end(child)
        notes.put(f"engine/{number}", {"state": "stopped", "detail": f"exit code {code}", "time": time.time()})


def end(child: Streamed) -> int:
    """End the process; returns its exit code, 0 if it ended on request."""
    code = child.end(30.0)
    return 0 if code in STOPPED else code


def registered(child: Streamed, name: str, began: float, patience: float) -> str:
    """Address of the server, once it has registered. An earlier one, killed in the same container, may still be
    registered. Raises `Ended`, `BirlError`."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if result := [entry.address for entry in names.entries(name) if entry.since >= began]:
            return result[-1]
        if not child.alive:
            raise Ended(f"the engine ended with exit code {child.code} before it was ready")
        time.sleep(0.1)
    raise BirlError(f"the engine was not ready within {patience:g} s")


def beats(child: Streamed, number: int, notes: Notes, url: str, local: str, work: ContainerWork, beat: float) -> int:
    count, asked, used = 0, -1, time.monotonic()
    while child.alive:
        count += 1
        about = {"state": "running", "url": url, "beat": f"{os.getpid()}-{count}", "time": time.time()}
        try:
            notes.put(f"engine/{number}", {**about, "task": os.environ.get("MODAL_TASK_ID", "")})
            over = notes.get("over")
        except Exception as error:  # network failure: the engine itself continues
            over = False
            print(f"birl: no word from outside: {error}", flush=True)
        if over:
            return end(child)
        if (now := requests_of(local)) != asked:
            asked, used = now, time.monotonic()
        if time.monotonic() - used > work.idle:
            print(f"birl: no requests for {work.idle:g} s; the engine ends", flush=True)
            return end(child)
        child.wait(beat)
    raise Ended(f"the engine ended with exit code {child.code}")


def requests_of(address: str) -> int:
    """Number of requests that a server has answered, without health checks."""
    token = {"Authorization": f"Bearer {os.environ.get('BIRL_TOKEN', '')}"}
    try:
        text = httpx.get(f"{address}/metrics", headers=token, timeout=10.0, trust_env=False).text
    except httpx.HTTPError:
        return -1
    lines = re.findall(r'^birl_requests_total\{route="([^"]*)".*\} ([0-9.e+]+)$', text, re.MULTILINE)
    return sum(int(float(value)) for route, value in lines if route not in UNCOUNTED)
