"""Supervisor actor of a job: it places, starts and polls the processes, and restarts those that are lost.

    engines    each separately: one that ends, or whose node is lost, is restarted on any node with room
    learner    all ranks together; if one is lost they resume from their newest checkpoint

It computes nothing and no token passes through it. If its own node is lost, Ray restarts it, and it finds its actors by
name. Secrets are in memory only.
"""

import os
import signal
import threading
import time
import traceback
from collections import deque
from typing import Any

from birl.errors import MISTAKE, STOPPED, first_line
from birl.launch.launcher import Status
from birl.launch.ray_cluster import HEAD, NAMESPACE, find_actor, library, room
from birl.launch.ray_host import Order, RayPlan, Spot, actor_name, bundles, needs, strategy

TICK = 0.5  # seconds between two polls
SAVE = 600.0  # seconds that the learner may take to save
LEAVE = 5.0  # seconds for the learner to learn that an engine will end
GRACE = 20.0  # seconds that engines may take to end
FORGET = 31.0  # seconds after which engines accept another learner, as one on another node is
EARLY = 60.0  # seconds; an invalid input fails earlier
TAIL = 65536  # bytes of each log that are kept after the end
ENDED = ("done", "failed", "stopped")


class Supervisor:
    """Actor class. Ray calls the methods in separate threads; one thread does the work."""

    def __init__(self, plan: RayPlan) -> None:
        self.ray, self.plan = library(), plan
        self.state, self.why = "running", ""  # for clients: "ended" only after all processes have ended
        self.verdict = ""  # final state
        self.stopping = False
        self.saving = 0.0  # deadline of the learner's saving [s of the monotonic clock]; 0: not requested
        self.began = 0.0  # start time of the learner; 0: an earlier supervisor started it
        self.after = 0.0  # it is not restarted before
        self.failures = 0
        self.wanted = 0  # number of engines; 0: those of the job
        self.events: deque[str] = deque(maxlen=200)
        self.rows: list[Status] = []
        self.tails: dict[tuple[str, int], tuple[str, int]] = {}  # end of each log, and the log's size
        self.group: Any = None
        self.spots: list[Spot] = []
        self.thread = threading.Thread(target=self._live, name="supervisor", daemon=True)
        self.thread.start()

    # --- methods for clients

    def status(self) -> tuple[str, str, list[Status]]:
        """The state of the job, why, and its processes."""
        return self.state, self.why, self.rows

    def guarded(self) -> bool:
        """Whether the cluster asks for a token: Ray's processes inherit the setting of its first one."""
        return os.environ.get("RAY_AUTH_MODE") == "token"

    def told(self) -> list[str]:
        """Log of events, with the time of day."""
        return list(self.events)

    def stop(self) -> None:
        self.stopping = True

    def scale(self, number: int = 0) -> int:
        """Set the number of engines (0: keep it) and return it; those beyond the job's own run on any node with
        room."""
        self.wanted = number or self.wanted
        return self.wanted

    def read(self, role: str, index: int, start: int) -> tuple[str, int]:
        """Part of a log from `start` on, and the start of the next part."""
        if (role, index) in self.tails:
            text, end = self.tails[role, index]
            kept = text.encode()
            return kept[max(start - end + len(kept), 0) :].decode(errors="replace"), end
        for spot in self.spots:
            if (spot.role.name, spot.index) == (role, index) and spot.host is not None and spot.seen is not None:
                return self.ray.get(spot.host.read.remote(start), timeout=GRACE)
        return "", start

    # --- main loop

    def _live(self) -> None:
        try:
            self._place()
            while not self.verdict:
                began = time.monotonic()
                try:
                    self._tick()
                except self.ray.exceptions.RayError as error:  # a node is being lost
                    self._tell(f"{type(error).__name__}: {first_line(error)}")
                self.rows = [self._row(spot) for spot in self.spots]
                time.sleep(max(began + TICK - time.monotonic(), 0))
        except Exception:
            self._end("failed", traceback.format_exc())
        self.state = "ending"
        try:
            self._clear()
        finally:
            self.state = self.verdict
            self.rows = [self._row(spot) for spot in self.spots]
            time.sleep(self.plan.keep)
            name = actor_name(self.plan.job.name)
            self.ray.kill(self.ray.get_actor(name, namespace=NAMESPACE))  # after an exit Ray would restart it

    def _place(self) -> None:
        job, ray = self.plan.job, self.ray
        name = actor_name(job.name)
        try:
            self.group = ray.util.get_placement_group(name)
        except ValueError:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                self._end("stopped", "its supervisor was lost after the end, and what it knew with it")
                return
            self.group = ray.util.placement_group(
                bundles(job), strategy=strategy(self.plan.nodes), name=name, lifetime="detached"
            )
        wanted = ((role, index) for role in job.roles for index in range(role.count))
        for number, (role, index) in enumerate(wanted):
            where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=number
            )
            place = {
                "num_cpus": role.cpus, "num_gpus": role.gpus, "memory": int(role.memory_gb * 2**30) or None,
                "scheduling_strategy": where, "namespace": NAMESPACE, "max_restarts": 0,
            }  # fmt: skip
            self.spots.append(Spot(role=role, index=index, name=actor_name(job.name, role.name, index), place=place))
        if job.engine is not None:
            while find_actor(ray, actor_name(job.name, job.engine.name, len(self.engines))):  # of an earlier supervisor
                self._add()
            self.wanted = len(self.engines)

    def _add(self) -> None:
        """Add an engine outside of the placement group."""
        last = self.engines[-1]
        name = actor_name(self.plan.job.name, last.role.name, last.index + 1)
        place = {**last.place, "scheduling_strategy": "SPREAD"}
        self.spots.append(Spot(role=last.role, index=last.index + 1, name=name, place=place))

    def _scale(self) -> None:
        """Add and remove engines. A removed engine is hidden from the learner first, and ends after its last answers.
        It ends even if the number grows again meanwhile; then others are added afterwards, as numbers have no gaps."""
        for place, spot in enumerate(self.engines):
            if not spot.leaving and place >= self.wanted:
                spot.leaving, spot.after = 1, time.monotonic() + LEAVE
                self._tell(f"{spot.role.name} {spot.index} is to end")
            elif spot.leaving and not spot.running:
                if spot.host is not None:
                    self.ray.kill(spot.host)
                self.spots.remove(spot)
            elif spot.leaving and time.monotonic() > spot.after:
                spot.signal(signal.SIGTERM if spot.leaving == 1 else signal.SIGKILL)
                spot.leaving, spot.after = 2, spot.after + GRACE
        if not any(spot.leaving for spot in self.engines):
            while len(self.engines) < self.wanted:
                self._add()

    @property
    def learners(self) -> list[Spot]:
        return [s for s in self.spots if s.role is self.plan.job.learner]

    @property
    def engines(self) -> list[Spot]:
        return [s for s in self.spots if s.role is not self.plan.job.learner]

    def _look(self) -> dict[Spot, str]:
        """Poll all actors. Returns the lost ones, and why."""
        for spot in self.spots:
            spot.ask(self.ray)
        self.ray.wait([s.question for s in self.spots], num_returns=len(self.spots), timeout=TICK)
        return {spot: why for spot in self.spots if (why := spot.hear(self.ray))}

    def _tick(self) -> None:
        lost = self._look()
        for spot, why in lost.items():
            self._tell(f"{spot.role.name} {spot.index} is lost: {why}")
        self._scale()
        for spot in self.engines:
            if not spot.leaving:
                self._engine(spot, lost.get(spot, ""))
        self._learner(next((why for spot, why in lost.items() if spot in self.learners), ""))
        late = [s for s in self.spots if s.wanted and time.monotonic() - s.wanted > self.plan.start_timeout]
        if late and not self.verdict:
            spot = late[0]
            why = (
                f"{spot.role.name} {spot.index} got no place within launch.start_timeout={self.plan.start_timeout:g} s"
            )
            needed = f"it needs {needs(spot.role)}, and the cluster has {room(self.ray)}"
            self._end("failed", f"{why}: {needed}. {spot.detail}")

    def _engine(self, spot: Spot, lost: str) -> None:
        if not lost and spot.up and not spot.running and spot.seen is not None:
            lost, spot.up, spot.detail = spot.ending, False, spot.ending
            self._tell(lost)
        if lost and not self.stopping:
            spot.failures += 1
            spot.after = time.monotonic() + backoff(spot.failures)
            if spot.failures > self.plan.restarts:
                self._end("failed", f"{lost} (launch.restarts={self.plan.restarts} are used up)")
        if spot.seen is None or spot.up or self.stopping or time.monotonic() < spot.after:
            return
        job, generation = self.plan.job, spot.generation + 1
        name = f"{job.engines}.engine-{spot.index}.{generation}"  # so that only this start is found by the name
        command = tuple(word.replace(job.engines, name) for word in spot.role.command)
        host = "127.0.0.1" if self.plan.nodes == 1 else spot.seen.ip
        self._begin(spot, generation, command, name, {"BIRL_HOST": host})

    def _learner(self, lost: str) -> None:
        """Handle all ranks of the learner as one."""
        spots = self.learners
        up = any(s.up for s in spots) or bool(lost)
        first = spots[0]
        if up:
            self._learning(spots, first, lost)
        elif self.stopping:
            self._end("stopped", "")
        elif any(s.running for s in spots):  # the remaining ranks of a lost group
            for spot in spots:
                spot.signal(signal.SIGKILL)
        elif all(s.seen is not None for s in spots) and time.monotonic() >= self.after:
            self._start(spots)

    def _learning(self, spots: list[Spot], first: Spot, lost: str) -> None:
        broken = next((s for s in spots if s.up and s.code not in (None, 0)), None)
        now = time.monotonic()
        if self.stopping and not lost and first.code in STOPPED:
            self._over(spots)
        elif lost or broken is not None:
            why = lost or (broken.ending if broken is not None else "")
            self._failed(why, mistake=not lost and broken is not None and broken.code == MISTAKE)
            for spot in spots:
                spot.up = False
                spot.signal(signal.SIGKILL)
        elif first.code == 0:
            self._over(spots)
        elif self.saving and now > self.saving:
            self._tell(f"the learner did not end within {SAVE:g} s of the signal to save, and was killed")
            for spot in spots:
                spot.signal(signal.SIGKILL)
        elif self.stopping and not self.saving:
            self._tell("the learner gets a signal to save and end")
            self.saving = now + SAVE
            first.signal(signal.SIGTERM)  # the other ranks end with it
        elif not self.saving:
            self._introduce(first)

    def _over(self, spots: list[Spot]) -> None:
        for spot in spots:
            spot.up = False
        self._end("stopped" if self.stopping else "done", "")

    def _failed(self, why: str, mistake: bool) -> None:
        early = mistake and self.failures == 0 and bool(self.began) and time.monotonic() - self.began < EARLY
        self.saving = 0.0
        self.failures += 1
        self.learners[0].detail = why
        self._tell(why)
        if early:
            self._end("failed", why)
        elif self.stopping:
            self._end("stopped", why)
        elif self.failures > self.plan.restarts:
            self._end("failed", f"{why} (launch.restarts={self.plan.restarts} are used up)")
        # a mistake: engines may still wait for the learner as before
        self.after = time.monotonic() + (FORGET if mistake else backoff(self.failures))

    def _start(self, spots: list[Spot]) -> None:
        """Start all ranks; the learner waits for its engines itself."""
        first = spots[0]
        assert first.seen is not None
        self._introduce(first)
        common: dict[str, str] = {}
        if len(spots) > 1:
            port = self.ray.get(first.host.port.remote(), timeout=GRACE)
            common = {"WORLD_SIZE": str(len(spots)), "MASTER_ADDR": first.seen.ip, "MASTER_PORT": str(port)}
        generation = max(s.generation for s in spots) + 1
        nodes = [spot.seen.node for spot in spots if spot.seen is not None]
        # Ray spreads neighbours over nodes, and tensor parallelism needs neighbouring ranks on one
        pairs = sorted(zip(nodes, spots, strict=True), key=lambda pair: nodes.index(pair[0]))
        nodes = [node for node, _ in pairs]
        for rank, (node, spot) in enumerate(pairs):
            local = 0 if spot.role.gpus else nodes[:rank].count(node)
            place = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(nodes.count(node))}
            self._begin(spot, generation, spot.role.command, "", {**common, **place} if common else {})
        self.began = time.monotonic()

    def _introduce(self, first: Spot) -> None:
        """Register the engines on the learner's node, where the learner finds additions and removals."""
        if self.engines and first.host is not None:
            ready = tuple(s.address for s in self.engines if s.address and not s.leaving)
            self.ray.get(first.host.introduce.remote(self.plan.job.engines, ready), timeout=GRACE)

    def _begin(self, spot: Spot, generation: int, command: tuple[str, ...], name: str, env: dict[str, str]) -> None:
        job = self.plan.job
        own = {"BIRL_JOB": job.name, "BIRL_TOKEN": self.plan.token}
        order = Order(
            command=command, folder=self.plan.folder, log=f"{job.run}/launch/{spot.role.name}-{spot.index}.log",
            generation=generation, name=name, env={**self.plan.env, **own, **env},
        )  # fmt: skip
        spot.begin(order)
        self._tell(f"{spot.role.name} {spot.index} starts on node {spot.where} (start {generation})")

    def _tell(self, what: str) -> None:
        self.events.append(f"{time.strftime('%H:%M:%S')} {what}")

    def _row(self, spot: Spot) -> Status:
        state = {True: "running", False: "restarting" if spot.generation else "waiting"}[spot.up and spot.running]
        if spot.role.name == "engine" and state == "running" and not spot.address:
            state = "restarting" if spot.generation > 1 else "waiting"
        if self.state in ENDED:
            state = self.state
        detail = spot.detail if state != "done" else ""
        if spot.seen is None and not self.verdict:
            detail = f"for a place in the cluster. {detail}"
        more = f" pid {spot.seen.pid}" if spot.seen is not None and spot.seen.pid else ""
        return Status(role=spot.role.name, index=spot.index, state=state, where=spot.where + more, detail=detail)

    def _end(self, state: str, why: str) -> None:
        if not self.verdict:
            self._tell(f"{state}{f': {why}' if why else ''}")
            self.verdict, self.why = state, why

    def _clear(self) -> None:
        """End all processes, keep the ends of their logs, and free the placement group."""
        for spot in self.spots:
            spot.signal(signal.SIGTERM)
        until = time.monotonic() + GRACE
        while any(s.running for s in self.spots) and time.monotonic() < until:
            self._look()
            time.sleep(TICK / 5)
        for spot in self.spots:
            if spot.host is None:
                continue
            try:
                self.tails[spot.role.name, spot.index] = self.ray.get(spot.host.read.remote(-TAIL, TAIL), timeout=5)
                self.ray.get(spot.host.leave.remote(), timeout=5)
            except (self.ray.exceptions.RayError, TimeoutError):
                pass
            self.ray.kill(spot.host)
        if self.group is not None:
            self.ray.util.remove_placement_group(self.group)


def backoff(failures: int) -> float:
    """Seconds before the next restart."""
    return min(2.0 ** (failures - 1), 30.0)


def create(ray: Any, plan: RayPlan) -> Any:
    """Create the supervisor on the head node, which the cluster cannot lose. (A soft NodeAffinity put it elsewhere.)"""
    made = ray.remote(Supervisor).options(
        name=actor_name(plan.job.name), namespace=NAMESPACE, lifetime="detached", max_restarts=-1, num_cpus=0,
        max_concurrency=16, resources={HEAD: 0.001} if HEAD in ray.cluster_resources() else None,
    )  # fmt: skip
    return made.remote(plan)
