"""Engines in Modal's containers, and how the learner's container knows them: each notes its address every few seconds;
the learner's registers it under the engines' name on its own machine, where `engine.attach` looks. An engine that
gets no requests ends by itself, so that no GPU is paid for after a learner that is gone."""

import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from birl.engines import names
from birl.errors import BirlError
from birl.exits import STOPPED
from birl.launch.modal_roles import BEAT, START, ContainerWork, Ended, Notes, Streamed

LIFE = 6  # beats after which an engine that notes nothing is taken for gone
UNCOUNTED = ("/metrics", "/health", "/ready")  # routes that say nothing about whether an engine is used


class Tunnel(Protocol):
    @property
    def url(self) -> str: ...


class Directory:
    """Engines that note new beats are registered under `name` on this machine; one that stopped is forgotten."""

    def __init__(self, notes: Notes, name: str, count: int, beat: float = BEAT) -> None:
        self.notes, self.name, self.count, self.beat = notes, name, count, beat
        self.entries: dict[int, names.Entry] = {}
        self._heard: dict[int, tuple[object, float]] = {}  # last beat, and when it was another than before
        self._over = threading.Event()

    def look(self) -> None:
        for number in range(self.count):
            note = self.notes.get(f"engine/{number}") or {}
            beat, known = note.get("beat"), self._heard.get(number)
            if known is None:  # may be the last word of one that is long gone
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
            except Exception as error:  # the notes are out of reach: engines stay as long as names live
                print(f"birl: engines cannot be looked up now: {error}", flush=True)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10.0)
        for entry in self.entries.values():
            names.forget(entry)


def serve(
    work: ContainerWork,
    number: int,
    notes: Notes,
    *,
    forward: Callable[[int], AbstractContextManager[Tunnel]],
    beat: float = BEAT,
    start: float = START,
) -> int:
    """An engine's container: the command, its port open to those who have the token, its address noted, until the job
    is over or gets no more requests. Raises `Ended` where it ended by itself, and `BirlError`."""
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
    """Its exit code, once it has ended; 0 where it ended on request."""
    code = child.end(30.0)
    return 0 if code in STOPPED else code


def registered(child: Streamed, name: str, began: float, patience: float) -> str:
    """The address of the server, as soon as it has its name; one from before, which was killed in the same container,
    may still have it. Raises `Ended`, `BirlError`."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if result := [entry.address for entry in names.entries(name) if entry.since >= began]:
            return result[-1]
        if child.process.poll() is not None:
            raise Ended(f"the engine ended with exit code {child.process.returncode} before it was ready")
        time.sleep(0.1)
    raise BirlError(f"the engine was not ready within {patience:g} s")


def beats(child: Streamed, number: int, notes: Notes, url: str, local: str, work: ContainerWork, beat: float) -> int:
    count, asked, used = 0, -1, time.monotonic()
    while child.process.poll() is None:
        count += 1
        about = {"state": "running", "url": url, "beat": f"{os.getpid()}-{count}", "time": time.time()}
        try:
            notes.put(f"engine/{number}", {**about, "task": os.environ.get("MODAL_TASK_ID", "")})
            over = notes.get("over")
        except Exception as error:  # the network: the engine itself goes on
            over = False
            print(f"birl: no word from outside: {error}", flush=True)
        if over:
            return end(child)
        if (now := requests_of(local)) != asked:
            asked, used = now, time.monotonic()
        if time.monotonic() - used > work.idle:
            print(f"birl: no requests for {work.idle:g} s; the engine ends", flush=True)
            return end(child)
        try:
            child.process.wait(beat)
        except subprocess.TimeoutExpired:
            continue
    raise Ended(f"the engine ended with exit code {child.process.returncode}")


def requests_of(address: str) -> int:
    """How many requests a server has answered, but those that only look whether it is there."""
    request = urllib.request.Request(
        f"{address}/metrics", headers={"Authorization": f"Bearer {os.environ.get('BIRL_TOKEN', '')}"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10.0) as answer:
            text = answer.read().decode()
    except OSError:
        return -1
    lines = re.findall(r'^birl_requests_total\{route="([^"]*)".*\} ([0-9.e+]+)$', text, re.MULTILINE)
    return sum(int(float(value)) for route, value in lines if route not in UNCOUNTED)
