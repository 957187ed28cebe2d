"""`birl launch ray`: engines and learner ranks as processes of named actors in a placement group of a Ray cluster, and
a supervisor actor. The job continues when the client ends."""

import json
import os
import secrets
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from birl.errors import BirlError
from birl.launch import job as jobs
from birl.launch.job import Job
from birl.launch.launcher import Handle, Status, changed
from birl.launch.ray_cluster import OPEN, connect, end, find_actor, keep
from birl.launch.ray_host import RayPlan, actor_name, bundles, strategy
from birl.launch.ray_supervisor import ENDED, SAVE, create

ANSWER = 60.0  # seconds to wait for the supervisor's answer; Ray restarts a lost one in about 20
LOOK = 0.5  # seconds between two polls
STOP = SAVE + 120.0  # seconds that a job may take to save and end
OWN = ("BIRL_CACHE",)  # variables that are always passed to the processes, if set


@dataclass(kw_only=True)
class Keys(jobs.Keys):
    """Keys of the ray launcher."""

    address: str = ""
    """Address of the Ray cluster, as host:port. Empty: RAY_ADDRESS, else a cluster on this machine, else a new one here
    that listens on 127.0.0.1 only."""
    folder: str = ""
    """Working directory of the processes, which must exist on all nodes; a relative run folder is in it. Empty: the
    current one."""
    start_timeout: float = 600.0
    """Timeout of a process waiting for resources of the cluster [s]; then the job fails."""
    keep: float = 3600.0
    """Time for which birl status and birl logs still work after the job ended [s]; then nothing of it is left in the
    cluster."""
    without_token: bool = False
    """Allow a cluster without token authentication, which is open to anybody."""


def render(job: Job, keys: Keys) -> dict[str, str]:
    lines = ",\n".join(f"  {json.dumps(bundle)}" for bundle in bundles(job))
    name, spread = actor_name(job.name), strategy(keys.nodes)
    placement = f'{{"name": "{name}", "strategy": "{spread}", "bundles": [\n{lines}\n]}}'
    actors = [f"{actor_name(job.name)}  (supervisor, {keys.restarts} restarts)"]
    commands: list[str] = []
    for role in job.roles:
        actors += [actor_name(job.name, role.name, index) for index in range(role.count)]
        commands.append(f"# {role.count} x {role.name}\n{shlex.join(role.command)}")
    return {"placement group": placement, "actors": "\n".join(actors), "commands": "\n".join(commands)}


@dataclass
class More:
    address: str
    without_token: bool


def submit(job: Job, keys: Keys) -> Handle:
    """Start the job. Raises `BirlError` if there is no cluster, or a job of this name is running on it."""
    env = jobs.given((*job.env, *(name for name in OWN if name in os.environ)))
    folder = os.path.abspath(os.path.expanduser(keys.folder or "."))
    ray = connect(keys.address, start=True, without_token=keys.without_token)
    try:
        address = _hand_over(ray, job, keys, folder, env)
    except BaseException:  # a cluster that was started for this job is removed
        end()
        raise
    keep()
    more = More(address=address, without_token=keys.without_token)
    return Handle(where="ray", id=actor_name(job.name), run=str(job.run), name=job.name, more=asdict(more))


def _hand_over(ray: Any, job: Job, keys: Keys, folder: str, env: dict[str, str]) -> str:
    """Start the job's supervisor; returns the cluster's address. Raises `BirlError`."""
    old = find_actor(ray, actor_name(job.name))
    if old is not None:
        state = ray.get(old.status.remote(), timeout=ANSWER)[0]
        if state not in ENDED:
            raise BirlError(
                f"{job.name} is {state} in this cluster. `birl stop {job.run}` ends it; launch.name=ANOTHER is another."
            )
        ray.kill(old)
        until = time.monotonic() + ANSWER
        while find_actor(ray, actor_name(job.name)) is not None and time.monotonic() < until:
            time.sleep(LOOK / 5)
    plan = RayPlan(
        job=job, folder=folder, nodes=keys.nodes, restarts=keys.restarts, start_timeout=keys.start_timeout,
        keep=keys.keep, env=env, token=env.get("BIRL_TOKEN") or secrets.token_hex(16),
    )  # fmt: skip
    made = create(ray, plan)
    try:
        guarded = ray.get(made.guarded.remote(), timeout=ANSWER)
    except ray.exceptions.RayError as error:
        ray.kill(made)
        raise BirlError(
            f"The supervisor did not start in the cluster; birl must be installed on its nodes. {error}"
        ) from error
    if not guarded and not keys.without_token:
        ray.kill(made)
        raise BirlError(f"The cluster at {ray.get_runtime_context().gcs_address} requires no token: {OPEN}")
    return ray.get_runtime_context().gcs_address


class Asked:
    """Client of a job's supervisor; retries while Ray restarts it on another node."""

    def __init__(self, handle: Handle) -> None:
        """Raises `BirlError` if the cluster does not answer, or does not have the job any more."""
        self.handle = handle
        self.ray = connect(handle.more["address"], without_token=handle.more["without_token"])
        self.actor = find_actor(self.ray, actor_name(handle.name))
        if self.actor is None:
            raise BirlError(
                f"The cluster at {handle.more['address']} has no job {handle.name} any more: it ended longer ago than "
                f"launch.keep. What it wrote is in {handle.run}."
            )

    def __call__(self, method: str, *arguments: Any) -> Any:
        until = time.monotonic() + ANSWER
        while True:
            try:
                return self.ray.get(getattr(self.actor, method).remote(*arguments), timeout=ANSWER)
            except self.ray.exceptions.RayActorError as error:
                if time.monotonic() > until:
                    raise BirlError(f"The supervisor of {self.handle.name} does not answer: {error}") from error
                time.sleep(LOOK)
            except self.ray.exceptions.GetTimeoutError as error:
                raise BirlError(f"The supervisor of {self.handle.name} did not answer within {ANSWER:g} s.") from error


def status(handle: Handle) -> list[Status]:
    asked = Asked(handle)
    state, why, rows = asked("status")
    now, detail = state if state in ENDED else "running", why.splitlines()[-1] if why else ""
    return [Status(role="supervisor", index=0, state=now, detail=detail), *rows]


def logs(handle: Handle, role: str, follow: bool) -> Iterator[str]:
    asked = Asked(handle)
    if role == "supervisor":
        yield from asked("told")
        return
    places: dict[tuple[str, int], int] = {}
    rests: dict[tuple[str, int], str] = {}
    while True:
        state, _, rows = asked("status")
        chosen = [(r.role, r.index) for r in rows if role in ("", r.role, f"{r.role}-{r.index}")]
        if role and rows and not chosen:
            raise BirlError(
                f"birl logs: there is no role {role!r}; there are supervisor, {', '.join({r.role for r in rows})}."
            )
        moved = False
        for where in chosen:
            text, after = asked("read", *where, places.get(where, 0))
            moved |= bool(text)
            places[where] = after
            *lines, rests[where] = (rests.get(where, "") + text).split("\n")
            prefix = f"{where[0]} {where[1]}| " if len(chosen) > 1 else ""
            yield from (f"{prefix}{line}\n" for line in lines)
        if moved:
            continue
        if not follow or state in ENDED:
            yield from (f"{text}\n" for text in rests.values() if text)
            return
        time.sleep(LOOK)


def scale(handle: Handle, change: str) -> int:
    """Set the number of engines; returns it. Raises `BirlError`."""
    asked = Asked(handle)
    state, now = asked("status")[0], asked("scale")
    if state in ENDED:
        raise BirlError(f"{handle.run} is {state}: it has no engines any more")
    if not now:
        raise BirlError(f"{handle.run} has no engines of its own: it samples in the learner; set engine.kind=birl")
    return asked("scale", changed(now, change))


def stop(handle: Handle) -> str:
    asked = Asked(handle)
    if (state := asked("status")[0]) in ENDED:
        return state
    asked("stop")
    until = time.monotonic() + STOP
    while asked("status")[0] not in ENDED:
        if time.monotonic() > until:
            raise BirlError(
                f"{handle.run} has not ended within {STOP:g} s; `birl logs {handle.run} supervisor` shows why"
            )
        time.sleep(LOOK)
    return ""
