"""Ray actors that hold environments; their number follows the number of waiting episodes."""

import asyncio
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from birl.config import schema
from birl.config.schema.kinds import Count
from birl.envs.calls import called
from birl.envs.open import World, open_world
from birl.errors import BirlError, first_line
from birl.launch.ray_cluster import library, room
from birl.types import Conversation, Feedback, Message, Task
from birl.waits import waiting

CLOSE = 60.0  # seconds
SILENT = 5.0  # seconds without a first actor after which the reason is printed


@dataclass
class Config:
    inner: str = ""
    """Environment that runs in the actors: any env.kind with start and step, such as webarena."""
    keys: list[str] = field(default_factory=list)
    """Keys of the inner environment without the env. prefix, as in env.keys=[verified=true]."""
    least: int = 1
    """Minimum number of actors."""
    most: int = 4
    """Maximum number of actors."""
    episodes: Count = 8
    """Concurrent episodes per actor."""
    idle: float = 60.0
    """Idle time after which an actor is ended, down to env.least [s]."""
    cpus: float = 1.0
    """CPU cores of each actor."""
    address: str = ""
    """Address of the Ray cluster, as host:port. Empty: the cluster of the run, else one on this machine, else a new one
    that ends with the run."""
    start_timeout: float = 600.0
    """Timeout of the first actor's scheduling and start [s]."""


class Collector:
    """Actor that holds the environments of some episodes, by number. Its methods are coroutines that run
    concurrently."""

    def __init__(self, kind: str, options: dict[str, str], folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self.config = schema.Env(kind=kind, options=options)
        self.world: World | None = None
        self.open: dict[int, Any] = {}

    async def ready(self) -> str:
        """Node of the actor. Raises if the environment refuses its keys."""
        self.world = await open_world(self.config, no_text)
        if self.world.agent:
            raise BirlError(f"env.inner={self.config.kind}: an agent talks to the model itself; env=ray is for others.")
        return library().util.get_node_ip_address()

    async def rows(self, split: str) -> list[dict[str, Any]]:
        assert self.world is not None
        return [] if self.world.rows is None else await called(self.world.rows, split)

    async def admit(self, number: int, task: Task) -> tuple[Any, ...]:
        """Create the environment; returns its tools."""
        assert self.world is not None
        made: Any = self.world.open(task)
        if hasattr(made, "run"):
            raise BirlError(f"env.inner={self.config.kind}: an agent talks to the model itself; env=ray is for others.")
        self.open[number] = made
        if hasattr(made, "admit"):
            await made.admit()
        return tuple(getattr(made, "tools", ()))

    async def start(self, number: int) -> Conversation:
        return await called(self.open[number].start)

    async def step(self, number: int, reply: Message) -> Feedback:
        return await called(self.open[number].step, reply)

    async def close(self, number: int) -> None:
        if (made := self.open.pop(number, None)) is not None:
            await called(made.close)

    async def leave(self) -> None:
        for number in list(self.open):
            with suppress(Exception):
                await self.close(number)
        if self.world is not None:
            await self.world.close()


def no_text(prompt: Conversation) -> str:
    raise BirlError("env=ray: this environment needs the rendered prompt, which only rank 0 has.")


@dataclass(slots=True, eq=False)
class Place:
    """An actor, seen from rank 0."""

    actor: Any
    name: str
    ready: bool = False
    node: str = ""
    open: set[int] = field(default_factory=set[int])
    used: float = field(default_factory=time.monotonic)  # time of its last episode


class Collectors:
    """The actors of a run. Grows with the number of waiting episodes, shrinks when actors are idle."""

    def __init__(self, ray: Any, config: Config, options: dict[str, str]) -> None:
        self.ray, self.config, self.options = ray, config, options
        self.job = os.environ.get("BIRL_JOB") or f"pid-{os.getpid()}"
        self.places: list[Place] = []
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.numbers, self.names = count(), count()
        self.tasks: set[asyncio.Task[None]] = set()
        self.problem = ""  # why the last actor did not start
        self.lost = 0  # number of lost actors
        self.closed = False

    @classmethod
    async def start(cls, ray: Any, config: Config, options: dict[str, str]) -> "Collectors":
        made = cls(ray, config, options)
        telling = asyncio.create_task(made._tell())
        try:
            async with asyncio.timeout(config.start_timeout):
                await made._begin(made._add())
        except TimeoutError:
            raise BirlError(
                f"env=ray: no actor had a place within env.start_timeout={config.start_timeout:g} s. {made._needs()}"
            ) from None
        finally:
            telling.cancel()
        for _ in range(config.least - 1):
            made._grow()
        made._spawn(made._watch())
        return made

    async def _tell(self) -> None:
        await asyncio.sleep(SILENT)
        needs = await asyncio.to_thread(self._needs)
        print(f"env=ray: the first actor has not started for {SILENT:g} s. {needs}", flush=True)

    def _needs(self) -> str:
        return f"It needs env.cpus={self.config.cpus:g}, and the cluster has {room(self.ray) or 'no CPU'}."

    def rows(self, split: str) -> list[dict[str, Any]]:
        return self.ray.get(self.places[0].actor.rows.remote(split), timeout=self.config.start_timeout)

    async def room(self) -> tuple[Place, int]:
        """Wait in FIFO order for an actor with a free slot; returns it with a new episode number."""
        number = next(self.numbers)
        with waiting(f"episode {number}", "room in an actor", "environments"):
            while (place := self._free()) is None:
                self._need()
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self.waiting.append(turn)
                try:
                    await turn
                except asyncio.CancelledError:
                    self.waiting.remove(turn)
                    self._wake()  # its turn may have come already
                    raise
                self.waiting.remove(turn)
                if self.problem and not self.places:
                    raise BirlError(f"env=ray: no actor starts: {self.problem}")
        place.open.add(number)
        return place, number

    def leave(self, place: Place, number: int) -> None:
        place.open.discard(number)
        place.used = time.monotonic()
        self._wake()

    def gone(self, place: Place) -> None:
        """Remove a lost actor; its episodes fail in their own calls."""
        if place in self.places:
            self.places.remove(place)
            self.lost += 1
            self._need()
            self._wake()

    def _free(self) -> Place | None:
        """The ready actor with the fewest episodes, if one has a free slot."""
        ready = [p for p in self.places if p.ready and len(p.open) < self.config.episodes]
        return min(ready, key=lambda p: len(p.open), default=None)

    def _wake(self) -> None:
        free = sum(self.config.episodes - len(p.open) for p in self.places if p.ready)
        for turn in list(self.waiting)[: max(free, 0) if self.places else None]:
            if not turn.done():
                turn.set_result(None)

    def _need(self) -> None:
        """Add an actor if waiting episodes could fill it, or there are fewer than env.least."""
        starting = [p for p in self.places if not p.ready]
        backlog = len(self.waiting) + 1 - self.config.episodes * len(starting)
        if len(self.places) < self.config.least or (backlog > 0 and len(self.places) < self.config.most):
            self._grow()

    def _grow(self) -> None:
        if not self.closed:
            self._spawn(self._begin_or_drop(self._add()))

    def _add(self) -> Place:
        name = f"birl:{self.job}:env:{next(self.names)}"
        made = self.ray.remote(Collector).options(
            name=f"{name}:{os.getpid()}", num_cpus=self.config.cpus, scheduling_strategy="SPREAD",
            max_concurrency=4 * self.config.episodes + 8,
        )  # fmt: skip
        place = Place(made.remote(self.config.inner, self.options, os.getcwd()), name)
        self.places.append(place)
        return place

    async def _begin(self, place: Place) -> None:
        """Wait until the actor is ready. Raises `BirlError` if it does not start."""
        try:
            place.node = await place.actor.ready.remote()
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BirlError) else error
            raise BirlError(f"env=ray: {first_line(cause)}") from error
        except self.ray.exceptions.RayError as error:
            raise BirlError(f"env=ray: an actor did not start: {first_line(error)}") from error
        place.ready, place.used, self.problem = True, time.monotonic(), ""
        self._wake()

    async def _begin_or_drop(self, place: Place) -> None:
        try:
            async with asyncio.timeout(self.config.start_timeout):
                await self._begin(place)
        except (BirlError, TimeoutError) as error:
            self.problem = str(error) or f"it had no place within env.start_timeout={self.config.start_timeout:g} s"
            self.ray.kill(place.actor)
            if place in self.places:
                self.places.remove(place)
            if not self.places:
                self._wake()

    async def _watch(self) -> None:
        """End idle actors."""
        while True:
            await asyncio.sleep(min(self.config.idle, 5.0))
            now = time.monotonic()
            for place in list(self.places):
                idle = place.ready and not place.open and now - place.used > self.config.idle
                if idle and not self.waiting and len(self.places) > self.config.least:
                    self.places.remove(place)
                    await self._end(place)

    async def _end(self, place: Place) -> None:
        with suppress(self.ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(CLOSE):
                await place.actor.leave.remote()
        self.ray.kill(place.actor)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def close(self) -> None:
        self.closed = True
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(place) for place in self.places))
        self.places = []
