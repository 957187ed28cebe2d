"""Processes of a job on the nodes of a Ray cluster: the actor that hosts one (`Host`), and the supervisor's view of it
(`Spot`), with the supervisor's plan. The kernel kills a process with its actor, which ends with its node.

The output of the process goes to a file on that node, which the actor reads; Ray's object store is not used.
"""

import codecs
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from birl.engines import names
from birl.launch.job import Job, Role
from birl.launch.ray_cluster import library
from birl.process import ProcessGroup

LAST = 2000  # bytes of a log that are searched for its last line
NO_PROCESS = 127  # code of a process that could not be started


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A process to start. `name`: under which an engine registers on its node; `log` and `folder` are paths there.

    Example: Order(command=("python", "-m", "birl", "rl"), folder="/home/me", log="runs/demo/launch/learner-0.log",
                   generation=1)
    """

    command: tuple[str, ...]
    folder: str
    log: str
    generation: int  # number of the start of this process, from 1
    name: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)  # may hold secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """State of a host. `code`: of a process that has ended, negative for a signal; `pid` 0: none was started yet.

    Example: Seen(ip="10.0.0.7", node="5f2c01", gcs="10.0.0.1:6379", pid=4711, generation=1)
    """

    ip: str
    node: str
    gcs: str
    pid: int = 0
    generation: int = 0
    code: int | None = None
    address: str = ""  # of an engine that is ready
    last: str = ""  # last line that an ended process printed

    @property
    def running(self) -> bool:
        return self.generation > 0 and self.code is None


class Host:
    """Actor class. Every method returns at once. Ray calls them in the actor's main thread, as the kernel kills a child
    when the *thread* that started it ends."""

    def __init__(self, place: dict[str, Any] | None = None) -> None:
        self.place: dict[str, Any] = place or here()  # fields of Seen
        with contextlib.suppress(OSError):  # Ray's workers have 15 (RAY_worker_niceness); only root can reset it
            os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0), 0))
        self.order: Order | None = None
        self.child: ProcessGroup | None = None
        self.problem = ""
        self.known: dict[str, names.Entry] = {}  # address -> entry of an engine, for the learner
        self.beating: threading.Thread | None = None

    def look(self) -> Seen:
        if self.order is None:
            return Seen(**self.place)
        code = NO_PROCESS if self.child is None else self.child.code
        if code is not None:
            self._sweep()
        return Seen(
            **self.place,
            pid=self.child.pid if self.child else 0,
            generation=self.order.generation,
            code=code,
            address=next(iter(names.find(self.order.name)[-1:]), "") if self.order.name and code is None else "",
            last="" if code is None else self.problem or self._last(),
        )

    def begin(self, order: Order) -> None:
        """Start the process. A failure is reported by `look`."""
        self._sweep()
        self.order, self.child, self.problem = order, None, ""
        os.environ.update({k: v for k, v in order.env.items() if k == "BIRL_CACHE"})  # where names are looked up
        python, *rest = order.command
        command = [python if os.access(python, os.X_OK) else sys.executable, *rest]
        # without Ray's variables for its workers: the child is not one
        keep = ("RAY_AUTH_", "RAY_USAGE_STATS")
        own = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") or k.startswith(keep)}
        env = own | {"RAY_ADDRESS": self.place["gcs"]} | dict(order.env)
        try:
            self.child = ProcessGroup(command, log=Path(order.folder, order.log), env=env, folder=order.folder)
        except OSError as error:
            self.problem = f"{error.filename}: {error.strerror} on node {self.place['ip']}; see launch.folder"

    def signal(self, number: int) -> None:
        """Send a signal to the process; SIGKILL also to all that it has started."""
        if number == signal.SIGKILL:
            self._sweep()
        elif self.child is not None:
            self.child.signal(number)

    def _sweep(self) -> None:
        if self.child is not None:
            self.child.kill()

    def port(self) -> int:
        """A free port of this node, for the ranks' rendezvous."""
        with socket.socket(socket.AF_INET6 if ":" in self.place["ip"] else socket.AF_INET) as result:
            result.bind((self.place["ip"], 0))
            return result.getsockname()[1]

    def introduce(self, name: str, addresses: tuple[str, ...]) -> None:
        """Register exactly these engines under that name on this node, for the learner."""
        for address in set(self.known) - set(addresses):
            names.forget(self.known.pop(address))
        for address in addresses:
            if address not in self.known:
                self.known[address] = names.register(name, address, os.getpid(), "")
        if self.beating is None:
            self.beating = threading.Thread(target=self._beat, daemon=True)
            self.beating.start()

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(names.BEAT):
            for entry in list(self.known.values()):
                with contextlib.suppress(OSError):
                    names.touch(entry)

    def leave(self) -> None:
        """Clean up at the end of the job."""
        self._sweep()
        for entry in self.known.values():
            names.forget(entry)
        self.known = {}

    def read(self, start: int, most: int = 65536) -> tuple[str, int]:
        """The log from byte `start` on (negative: from its end), and the start of the next part, after the last whole
        character."""
        if self.order is None:
            return "", 0
        try:
            with Path(self.order.folder, self.order.log).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size + start, 0) if start < 0 else start if start <= size else 0)
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                result = decoder.decode(file.read(most))
                return result, file.tell() - len(decoder.getstate()[0])
        except FileNotFoundError:
            return "", 0

    def _last(self) -> str:
        lines = self.read(-LAST, LAST)[0].splitlines()
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def here() -> dict[str, str]:
    """Node of this actor."""
    ray = library()
    context = ray.get_runtime_context()
    return {"ip": ray.util.get_node_ip_address(), "node": context.get_node_id()[:8], "gcs": context.gcs_address}


PATIENCE = 30.0  # seconds without an answer after which a node counts as lost


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPlan:
    """Plan of the supervisor. `folder`: working directory of the processes; times in seconds.

    Example: RayPlan(job=derive("rl", ["recipe.yaml"], keys), folder="/home/me")
    """

    job: Job
    folder: str
    nodes: int = 1
    restarts: int = 3
    start_timeout: float = 600.0
    keep: float = 3600.0
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    token: str = field(default="", repr=False)


def actor_name(job: str, role: str = "", index: int = 0) -> str:
    return f"birl:{job}:{role}:{index}" if role else f"birl:{job}"


def bundles(job: Job) -> list[dict[str, float]]:
    """Resources of each process, in order of the roles."""
    return [needs(role) for role in job.roles for _ in range(role.count)]


def needs(role: Role) -> dict[str, float]:
    """Resources of a process, in Ray's form."""
    return {k: v for k, v in {"CPU": role.cpus, "GPU": role.gpus, "memory": role.memory_gb * 2**30}.items() if v}


def strategy(nodes: int) -> str:
    """Placement strategy. A single machine must not become two, as engines listen on its loopback only."""
    return "STRICT_PACK" if nodes == 1 else "SPREAD"


@dataclass(slots=True, eq=False, kw_only=True)
class Spot:
    """One process of the job. `name`: of its actor; `place`: Ray's placement options. `up`: its process was started,
    and is not known to have ended."""

    role: Role
    index: int
    name: str
    place: dict[str, Any]
    host: Any = None
    question: Any = None  # pending answer
    asked: float = 0.0  # time of the question
    wanted: float = 0.0  # time since which it waits for a place; 0: it has one
    seen: Seen | None = None
    up: bool = False
    leaving: int = 0  # 1: it is to end, without a restart; 2: it got the signal
    generation: int = 0  # number of starts of its process
    failures: int = 0
    after: float = 0.0  # not restarted before this time [s of the monotonic clock]
    detail: str = ""  # last failure

    @property
    def running(self) -> bool:
        return self.seen is not None and self.seen.running

    @property
    def code(self) -> int | None:
        return self.seen.code if self.seen is not None else None

    @property
    def address(self) -> str:
        return self.seen.address if self.up and self.seen is not None else ""

    def ask(self, ray: Any) -> None:
        """Ask the actor for its state. Finds the actor of the name, or creates it; Ray answers when it is placed."""
        if self.host is None:
            made = ray.remote(Host).options(name=self.name, lifetime="detached", get_if_exists=True, **self.place)
            self.host = made.remote()
            self.wanted = self.wanted or time.monotonic()
        if self.question is None:
            self.question, self.asked = self.host.look.remote(), time.monotonic()

    def hear(self, ray: Any) -> str:
        """Process the answer, if it has come. Returns why the actor was lost; empty if it was not, or never started."""
        if self.question is None:
            return ""
        if not ray.wait([self.question], timeout=0)[0]:
            late = self.seen is not None and time.monotonic() - self.asked > PATIENCE
            return self._lost(ray, f"node {self.where} did not answer for {PATIENCE:g} s") if late else ""
        question, self.question = self.question, None
        try:
            seen: Seen = ray.get(question)
        except ray.exceptions.ActorUnavailableError:  # it may recover, and is asked again
            return ""
        except ray.exceptions.RayActorError as error:
            return self._lost(ray, f"node {self.where}: {summary(error)}")
        self.seen, self.wanted = seen, 0.0
        if self.generation == 0:  # an earlier supervisor started it
            self.generation, self.up = seen.generation, seen.running
            self.failures = max(self.generation - 1, 0)
        return ""

    def _lost(self, ray: Any, why: str) -> str:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.host)  # so that nothing of it keeps running, if it is alive
        there = self.seen is not None
        self.host = self.question = self.seen = None
        self.up, self.detail = False, why
        return why if there else ""

    def begin(self, order: Order) -> None:
        assert self.host is not None and self.seen is not None
        self.generation, self.up = order.generation, True
        self.host.begin.remote(order)
        self.seen = replace(self.seen, generation=order.generation, code=None, address="", pid=0)

    def signal(self, number: int) -> None:
        if self.host is not None:
            self.host.signal.remote(number)

    @property
    def where(self) -> str:
        return f"{self.seen.ip} {self.seen.node}" if self.seen is not None else ""

    @property
    def ending(self) -> str:
        """How its process ended, for messages."""
        code = self.code or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        last = f": {self.seen.last}" if self.seen is not None and self.seen.last else ""
        return f"{self.role.name} {self.index} {how}{last}"


def summary(error: BaseException) -> str:
    """Short text of an error of Ray, whose messages have a page of details after the first lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((x for x in lines if x.startswith("The actor ") and "because" in x), lines[0] if lines else "")
    return (cause or type(error).__name__)[:300]
