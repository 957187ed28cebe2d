"""The input of a supervisor on a Ray cluster: the job, where it may run, and what its actors are called."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from birl.launch.job import Job, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPlan:
    """What the supervisor is to do. `folder`: where the processes run; times in seconds.

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
    """What each process needs, in the order of the roles."""
    return [needs(role) for role in job.roles for _ in range(role.count)]


def needs(role: Role) -> dict[str, float]:
    """In Ray's words."""
    return {k: v for k, v in {"CPU": role.cpus, "GPU": role.gpus, "memory": role.memory_gb * 2**30}.items() if v}


def strategy(nodes: int) -> str:
    """One machine is one machine: engines listen on its loopback alone then."""
    return "STRICT_PACK" if nodes == 1 else "SPREAD"
