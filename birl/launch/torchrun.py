"""`birl launch torchrun`: torchrun starts the learner's ranks; detached and supervised as with `local`.

For several machines run the same command on each, with launch.nodes, launch.rendezvous=HOST:PORT of the first, and
launch.node, from 0. They share the run folder.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from birl.errors import BirlError
from birl.launch import local
from birl.launch.job import Job
from birl.launch.launcher import Handle
from birl.launch.local import logs as logs
from birl.launch.local import scale as scale
from birl.launch.local import status as status
from birl.launch.local import stop as stop
from birl.launch.plan import LaunchPlan
from birl.process import free_port

PLACE = "birl"  # id of torchrun's rendezvous


@dataclass(kw_only=True)
class Keys(local.Keys):
    rendezvous: str = ""
    """Rendezvous address of the first machine as HOST:PORT, for ranks on several machines. Empty (one machine only): a
    free local port."""
    node: int = 0
    """Index of this machine among launch.nodes, from 0."""


def render(job: Job, keys: Keys) -> dict[str, str]:
    return local.shown(plan_of(job, keys), Path(sys.executable))


def submit(job: Job, keys: Keys) -> Handle:
    return local.begin("torchrun", plan_of(job, keys))


def command(job: Job, keys: Keys) -> list[str]:
    """torchrun's command line. Raises `BirlError`."""
    ranks, nodes = job.learner.count, keys.nodes
    if ranks % nodes:
        raise BirlError(f"launch.nodes={nodes}: the {ranks} ranks of parallel.* cannot be spread evenly over them")
    if nodes > 1 and not (keys.rendezvous.rpartition(":")[0] and keys.rendezvous.rpartition(":")[2].isdigit()):
        raise BirlError(f"launch.rendezvous={keys.rendezvous}: name HOST:PORT of the first of {nodes} machines")
    if not 0 <= keys.node < nodes:
        raise BirlError(f"launch.node={keys.node}: launch.nodes={nodes} are numbered from 0")
    python, *rest = job.learner.command
    words = [f"--nnodes={nodes}", f"--nproc-per-node={ranks // nodes}", "--max-restarts=0"]
    if nodes == 1:
        words += [f"--rdzv-endpoint={keys.rendezvous or f'127.0.0.1:{free_port()}'}", "--rdzv-backend=c10d"]
        words += [f"--rdzv-id={PLACE}", "--local-addr=127.0.0.1"]
    else:  # torchrun would choose any machine for rank 0, but it must be the one whose supervisor gets the stop
        words += [f"--rdzv-endpoint={keys.rendezvous}", "--rdzv-backend=static", f"--node-rank={keys.node}"]
    return [python, "-m", "torch.distributed.run", *words, *rest]


def plan_of(job: Job, keys: Keys) -> LaunchPlan:
    """The plan for this machine's supervisor. Raises `BirlError`."""
    words = command(job, keys)
    if keys.nodes > 1 and job.engine is not None:
        raise BirlError(
            f"launch.nodes={keys.nodes}: engines of a job over several machines are not started by torchrun. Start "
            "them with `birl serve host=... name=experiment/trial`, and set engine.attach."
        )
    plan = local.supervised_plan(job, keys, words, job.learner.count // keys.nodes)
    return replace(plan, threads=keys.cpus, place=f"node-{keys.node}" if keys.node else "")
