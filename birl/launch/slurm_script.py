"""The batch script of a job on Slurm: what it asks for, where each process goes, and how it lives.

The learner is one step with a task for each rank; each engine is a step of its own beside it. The script (the end of it
is slurm.sh) waits for them. It is controlled by signals alone: USR1 comes before the time limit,
USR2 from `birl stop`, and TERM from Slurm, which has told the steps already.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from birl.errors import BirlError
from birl.launch.job import Job, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the processes of a job go. `ranks`: those of the learner on each node that has any, the last may have
    fewer; `engines`: the node of each engine; `most`, `gpus`: processes and GPUs of the fullest node.

    Example: Places(nodes=2, ranks=1, engines=(0, 1), most=2, gpus=2) has one rank and one engine on each of two nodes
    """

    nodes: int
    ranks: int
    engines: tuple[int, ...]
    most: int
    gpus: int


def places(job: Job, nodes: int) -> Places:
    """Spread evenly; engines go where there are fewest GPUs in use. Raises `BirlError`."""
    roles = job.roles
    processes = sum(role.count for role in roles)
    if not 1 <= nodes <= processes:
        raise BirlError(f"launch.nodes={nodes}: the job has {processes} processes; give it 1 to {processes} nodes")
    each = {role.name: whole(role) for role in roles}
    learner, engine = job.learner, job.engine
    ranks = ceil(learner.count / nodes)
    count = [min(ranks, max(0, learner.count - node * ranks)) for node in range(nodes)]
    gpus = [n * each["learner"] for n in count]
    engines: list[int] = []
    for _ in range(engine.count if engine else 0):
        node = min(range(nodes), key=lambda n: (gpus[n], count[n]))
        engines.append(node)
        count[node] += 1
        gpus[node] += each["engine"]
    return Places(nodes=nodes, ranks=ranks, engines=tuple(engines), most=max(count), gpus=max(gpus))


def whole(role: Role) -> int:
    if role.gpus != int(role.gpus):
        raise BirlError(f"launch.gpus: the {role.name} would have {role.gpus:g} GPUs; Slurm gives whole ones")
    return int(role.gpus)


def gpus(style: str, count: int) -> list[str]:
    """How a number of GPUs on each node is asked for."""
    if not count:
        return []
    return [f"--gres={style}:{count}" if style else f"--gpus-per-node={count}"]


def memory(role: Role, processes: int) -> list[str]:
    """On each node."""
    return [f"--mem={ceil(role.memory_gb * 1024) * processes}M"] if role.memory_gb else []


def options(job: Job, found: Places, gres: str) -> list[str]:
    """What the whole job needs."""
    return [
        f"--nodes={found.nodes}",
        f"--ntasks-per-node={found.most}",
        f"--cpus-per-task={job.learner.cpus}",
        *memory(job.learner, found.most),
        *gpus(gres, found.gpus),
    ]


def step(role: Role, nodes: int, tasks: int, each: int, gres: str) -> list[str]:
    """What one step needs: `tasks` on `nodes`, `each` on one of them. Without --mem a step takes all memory of the job
    on its nodes, and the next step waits for ever."""
    return [
        f"--nodes={nodes}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={each}",
        f"--cpus-per-task={role.cpus}",
        *(memory(role, each) or ["--mem=0"]),
        *gpus(gres, each * whole(role)),
    ]


def script(
    jobs: Sequence[Job],
    found: Places,
    directives: Sequence[str],
    *,
    gres: str,
    restarts: int,
    signal: int,
    requeue: bool,
) -> str:
    """`jobs`: one, or those of an array, which differ in their words and run folders. `signal` [s]: how long before the
    time limit the learner gets a signal."""
    first = jobs[0]
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in directives), ""]
    lines += ['case "${SLURM_ARRAY_TASK_ID:-0}" in']
    for number, job in enumerate(jobs):
        lines += [f"{number})", f"    run={shlex.quote(str(job.run.absolute()))}"]
        lines += [f"    {role.name}=({shlex.join(role.command)})" for role in job.roles]
        lines += ["    ;;"]
    nodes = ceil(first.learner.count / found.ranks)
    values = {
        "ranks": str(first.learner.count),
        "learner_nodes": str(nodes),
        "learner_step": f"({shlex.join(step(first.learner, nodes, first.learner.count, found.ranks, gres))})",
        "engine_nodes": f"({' '.join(map(str, found.engines))})",
        "engine_step": f"({shlex.join(step(first.engine, 1, 1, 1, gres))})" if first.engine else "()",
        "restarts": str(restarts),
        "signal": str(signal),
        "requeue": "yes" if requeue else "",
        "own_cache": "yes" if first.engine and "BIRL_CACHE" not in first.env else "",
    }
    body = Path(__file__).with_name("slurm.sh").read_text(encoding="utf-8")
    return "\n".join([*lines, "esac", *(f"{name}={value}" for name, value in values.items()), "", body])
