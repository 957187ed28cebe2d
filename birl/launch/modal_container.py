"""Runs and watches a job's processes in Modal's containers. Modal's client is not imported here: its objects (notes
that all containers of a job share, a tunnel to a port, a volume) are arguments.

An engine without requests ends, so that no GPU is paid for after the learner has died. The learner's container waits
for engines, runs the learner, stops it, and reports how it ended. Each engine notes its address every few seconds, and
is registered there under the engines' name, for `engine.attach`."""

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
from birl.errors import MISTAKE, STOPPED, BirlError
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


LIFE = 6  # beats without a new note after which an engine counts as lost
COMMIT = 60.0  # s between two commits of the volume
SAVE = 900.0  # s that a learner may take to save and end
FINAL = (0, MISTAKE, *STOPPED)  # exit codes after which a restart would not help


class Directory:
    """Registers engines with fresh notes under `name` on this machine, and removes those that stopped."""

    def __init__(self, notes: Notes, name: str, count: int, beat: float = BEAT) -> None:
        self.notes, self.name, self.count, self.beat = notes, name, count, beat
        self.entries: dict[int, names.Entry] = {}
        self._heard: dict[int, tuple[object, float]] = {}  # last beat, and the time when it changed
        self._over = threading.Event()

    def look(self) -> None:
        for number in range(self.count):
            note = self.notes.get(f"engine/{number}") or {}
            beat, known = note.get("beat"), self._heard.get(number)
            if known is None:  # may be the last note of an engine that is long gone
                self._heard[number] = (beat, float("-inf"))
            elif beat != known[0]:
                self._heard[number] = (beat, time.monotonic())
            fresh = time.monotonic() - self._heard[number][1] < LIFE * self.beat
            self._keep(number, str(note.get("url", "")) if fresh and note.get("state") == "running" else "")

    def _keep(self, number: int, url: str) -> None:
        entry = self.entries.get(number)
        if entry is not None and entry.address != url:
            names.forget(self.entries.pop(number))
            entry = None
        if entry is not None:
            names.touch(entry)
        elif url:
            self.entries[number] = names.register(self.name, url, os.getpid(), f"engine {number}")

    def missing(self) -> list[int]:
        return [number for number in range(self.count) if number not in self.entries]

    def __enter__(self) -> "Directory":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._over.wait(self.beat):
            try:
                self.look()
            except Exception as error:  # notes out of reach: engines stay registered until their entries expire
                print(f"birl: engines cannot be looked up now: {error}", flush=True)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10.0)
        for entry in self.entries.values():
            names.forget(entry)


def link(work: ContainerWork) -> Path:
    """Create the run folder on the volume, and link it to the path in the command. Raises `BirlError`."""
    place, here = Path(work.place), Path(work.run)
    place.mkdir(parents=True, exist_ok=True)
    if here.is_symlink():
        here.unlink()
    if here.exists() and here.resolve() != place.resolve():
        raise BirlError(f"run={work.run}: is a file or folder of the container already; choose another run=...")
    if not here.exists():
        here.parent.mkdir(parents=True, exist_ok=True)
        here.symlink_to(place, target_is_directory=True)
    return place


def learn(
    work: ContainerWork,
    notes: Notes,
    *,
    spawn: Callable[[int], object],
    commit: Callable[[], object],
    beat: float = BEAT,
    start: float = START,
) -> int:
    """The learner's container: wait for engines (`spawn(number)` starts a missing one), run the command, and stop it
    when the notes request it. Returns its exit code, or 2 if engines do not start. Raises `Ended` if it is to be
    restarted, as Modal does after any exception."""
    starts = int((notes.get("learner") or {}).get("starts", 0)) + 1

    def note(state: str, detail: str = "") -> None:
        about = {"state": state, "starts": starts, "task": os.environ.get("MODAL_TASK_ID", ""), "detail": detail}
        notes.put("learner", {**about, "time": time.time()})

    note("running", "starting")
    try:
        folder = link(work)
        with Directory(notes, work.engines, work.count, beat) as directory:
            if not await_engines(directory, notes, note, spawn, first=starts == 1, start=start):
                note("stopped")
                notes.put("over", True)
                return 0
            child = Streamed("learner 0", work.command, folder / "launch" / "learner-0.log", {})
            code, why = watch(child, notes, note, commit, work.seconds, beat)
    except BirlError as error:
        print(f"birl: {error}", flush=True)
        note("failed", str(error))
        notes.put("over", True)
        return 2
    finally:
        written(commit)
    if why == "time" and code in (0, *STOPPED):
        note("restarting", "its time limit")
        raise Ended(f"after {work.seconds / 3600:.1f} hours it saved and is started again")
    if code not in FINAL:
        note("restarting", f"exit code {code}")
        raise Ended(f"`{' '.join(work.command)[:200]}` ended with exit code {code}")
    ended = "stopped" if why == "stop" or code in STOPPED else "done" if code == 0 else "failed"
    note(ended, "" if code in (0, *STOPPED) else f"exit code {code}")
    notes.put("over", True)
    return code


def await_engines(
    directory: Directory,
    notes: Notes,
    note: Callable[[str, str], None],
    spawn: Callable[[int], object],
    *,
    first: bool,
    start: float,
) -> bool:
    """Wait until all engines have registered; False if the job is stopped before. Raises `BirlError`."""
    began, spawned = time.monotonic(), False
    while missing := directory.missing():
        waited = time.monotonic() - began
        if notes.get("stop"):
            return False
        if not spawned and (first or waited > 3 * directory.beat):  # else engines of an earlier start exist
            spawned = True
            for number in missing:
                spawn(number)
        if waited > start:
            raise BirlError(
                f"engines {', '.join(map(str, missing))} did not come within {start:g} s. `birl logs RUN engine` shows "
                "why; launch.engine_gpu names their GPU."
            )
        note("running", f"waits for {len(missing)} of {directory.count} engines")
        time.sleep(directory.beat)
    return True


def watch(
    child: Streamed,
    notes: Notes,
    note: Callable[[str, str], None],
    commit: Callable[[], object],
    seconds: float,
    beat: float,
) -> tuple[int, str]:
    """Wait until the child has ended; returns its exit code, and why it was ended: "" (by itself), stop or time."""
    began = committed = time.monotonic()
    while child.alive:
        try:
            note("running", "")
            if notes.get("stop"):
                return child.end(SAVE), "stop"
        except Exception as error:  # network failure: the learner itself continues
            print(f"birl: no word from outside: {error}", flush=True)
        if time.monotonic() - committed > COMMIT:
            committed = time.monotonic()
            written(commit)
        if time.monotonic() - began > seconds:
            return child.end(SAVE), "time"
        child.wait(beat)
    return child.end(10.0), ""


def written(commit: Callable[[], object]) -> None:
    """Commit the volume, so that others see the files. Modal also commits periodically and at the end. While files are
    open, its client raises after the commit, as it cannot reload the volume."""
    try:
        commit()
    except Exception as error:
        print(f"birl: the volume was not written, or not read: {error}", flush=True)
