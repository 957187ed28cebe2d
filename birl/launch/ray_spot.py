"""Plan of a supervisor on a Ray cluster, and its view of each process of the job: the actor that hosts it, and its last
known state."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from birl.launch.job import Job, Role
from birl.launch.ray_host import Host, Order, Seen

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
