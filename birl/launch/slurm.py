"""Slurm: one batch job, whose steps are the learner with all its ranks, and each engine.

    birl launch slurm sft data.train=texts.jsonl parallel.fsdp=16 launch.nodes=2 launch.gpus=1 launch.time=240

The learner is one step with a task for each rank; each engine is a separate step. The batch script (its last part is
slurm.sh) waits for them. It is controlled by signals: USR1 before the time limit, USR2 from `birl stop`, and TERM from
Slurm, which has signalled the steps already. `slurm_queue.py` queries Slurm.
"""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path

from birl.errors import BirlError
from birl.jobs import job_names, sweep, swept_keys
from birl.launch import job as jobs
from birl.launch import slurm_queue as queue
from birl.launch.job import Job, Role, derive, placed
from birl.launch.launcher import FILE, Handle, find
from birl.launch.slurm_queue import logs as logs
from birl.launch.slurm_queue import status as status
from birl.launch.slurm_queue import stop as stop

SCRIPT = "slurm.sh"
#: variables that are always passed to a job, if set; all others are not
PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF"),
    *("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_NUM_THREADS"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
)


@dataclass(kw_only=True)
class Keys(jobs.Keys):
    partition: str = ""
    """Partition (sbatch --partition). Empty: the cluster's default."""
    account: str = ""
    """Account that is charged (sbatch --account). Empty: your default."""
    qos: str = ""
    """Quality of service (sbatch --qos). Empty: your default."""
    time: int = 0
    """Time limit of the job, after which it is ended or requeued [minutes]. 0: the partition's limit."""
    signal: int = 120
    """Time before the limit at which the learner gets a signal to save and end [s]. 0: never; the job is cut off at the
    limit."""
    requeue: bool = True
    """Requeue the job after a lost node, the time limit or a failed process, and resume from the checkpoint."""
    gres: str = "gpu"
    """Name of a GPU in the cluster, such as gpu or gpu:h200 (--gres). Empty: use --gpus-per-node."""
    array: str = ""
    """Overrides with several values, as for `--multirun`, such as 'seed=1,2 optimizer.lr=1e-5,1e-6': a job array with
    one job per combination."""
    at_once: int = 0
    """Maximum number of concurrent jobs of the array. 0: no limit."""
    extra: list[str] = field(default_factory=list)
    """Further sbatch options, such as --constraint=h200, one per entry. Quote an option with commas:
    ["--exclude=n1,n2"]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Placement of a job's processes. `ranks`: of the learner on each of its nodes, the last may have fewer; `engines`:
    node of each engine; `most`, `gpus`: processes and GPUs of the fullest node.

    Example: Places(nodes=2, ranks=1, engines=(0, 1), most=2, gpus=2) has one rank and one engine on each of two nodes
    """

    nodes: int
    ranks: int
    engines: tuple[int, ...]
    most: int
    gpus: int


def render(job: Job, keys: Keys) -> dict[str, str]:
    """The batch script and the command. Raises `BirlError` for what Slurm cannot provide, without asking it."""
    elements = combinations(job, keys)
    result = places(job, keys.nodes)
    text = script(elements, result, directives(job, keys, result, len(elements)), keys)
    return {str(folder(job.run) / SCRIPT): text, "commands": f"{shlex.join(submission(job))}\n"}


def submission(job: Job) -> list[str]:
    return ["sbatch", "--parsable", str(folder(job.run) / SCRIPT)]


def folder(run: Path) -> Path:
    """Folder of a job's script, logs and state."""
    return run / "launch"


def combinations(job: Job, keys: Keys) -> list[Job]:
    """The jobs of an array, or the single one. Raises `BirlError`."""
    if not keys.array:
        return [job]
    words = shlex.split(keys.array)
    names = job_names(sweep(words), swept_keys(words))
    if "" in names:
        raise BirlError(f"launch.array={keys.array}: has one value only; write it as a word of the run, or KEY=A,B")
    result: list[Job] = []
    for name, more in zip(names, sweep(words), strict=True):
        all_words = placed([*job.words, *more], job.run / name)
        result.append(derive(job.command, all_words, replace(keys, name=name), job.learner.command[0]))
    shapes = {tuple(replace(role, command=()) for role in one.roles) for one in result}
    if shapes != {tuple(replace(role, command=()) for role in job.roles)}:
        raise BirlError(
            f"launch.array={keys.array}: the jobs of an array need the same processes; launch each separately"
        )
    return result


def directives(job: Job, keys: Keys, places: Places, elements: int) -> list[str]:
    """The #SBATCH lines. Raises `BirlError`."""
    if keys.time and keys.signal >= keys.time * 60:
        raise BirlError(
            f"launch.signal={keys.signal} s is not before launch.time={keys.time} min; set a smaller launch.signal"
        )
    for line in keys.extra:
        if not line.startswith("-") or not line.isprintable():
            raise BirlError(
                f"launch.extra: {line!r} is not an option of sbatch, such as --constraint=h200; put one with commas in "
                """quotes: 'launch.extra=["--exclude=n1,n2"]'"""
            )
    log = str(folder(job.run).absolute()).replace("%", "%%") + ("/slurm-%A_%a.out" if keys.array else "/slurm-%j.out")
    limit = f"%{keys.at_once}" if keys.at_once else ""
    named = {
        "job-name": job.name,
        "partition": keys.partition,
        "account": keys.account,
        "qos": keys.qos,
        "time": str(keys.time or ""),
        "signal": f"B:USR1@{keys.signal}" if keys.signal else "",
        "output": log,
        "open-mode": "append",
        "array": f"0-{elements - 1}{limit}" if keys.array else "",
    }
    if bad := next((value for value in named.values() if not value.isprintable()), ""):
        raise BirlError(f"{bad!r}: a line of #SBATCH cannot hold this. Choose another name, or another run=...")
    return [
        *(f"--{name}={shlex.quote(value)}" for name, value in named.items() if value),
        "--requeue" if keys.requeue else "--no-requeue",
        *options(job, places, keys.gres),
        *keys.extra,
    ]


@dataclass
class More:
    array: bool
    folders: tuple[str, ...]
    roles: dict[str, int]
    ranks: int


def submit(job: Job, keys: Keys) -> Handle:
    """Submit the job. Raises `BirlError` if the run is in progress, or with Slurm's message."""
    before = find(str(job.run), trusted=True) if (job.run / FILE).exists() else None
    if before and before.where == "slurm" and queue.active(before):
        raise BirlError(f"{job.run} runs already, as the job {before.id}: `birl stop {job.run}` ends it")
    rendered = render(job, keys)
    elements = combinations(job, keys)
    for one in (job, *elements):
        folder(one.run).mkdir(parents=True, exist_ok=True)
        (folder(one.run) / queue.STATE).unlink(missing_ok=True)
    (folder(job.run) / SCRIPT).write_text(rendered[str(folder(job.run) / SCRIPT)], encoding="utf-8")
    done = queue.ask(submission(job), environment(job.env))
    if done.returncode:
        raise BirlError(f"Slurm did not take the job: {done.stderr.strip()}{queue.hint(done.stderr)}")
    # ID;CLUSTER if there are several clusters. Wrappers of sbatch may print further lines.
    ids = re.findall(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)
    if not ids:
        raise BirlError(f"sbatch named no job; `squeue` lists it if there is one. Output: {done.stdout}")
    folders = tuple(str(one.run.absolute()) for one in elements)
    roles, ranks = {role.name: role.count for role in job.roles}, places(job, keys.nodes).ranks
    more = More(array=bool(keys.array), folders=folders, roles=roles, ranks=ranks)
    return Handle(where="slurm", id=ids[-1], run=str(job.run.absolute()), name=job.name, more=asdict(more))


def environment(names: Sequence[str]) -> dict[str, str]:
    """Environment of sbatch, and so of the job: only named variables. Raises `BirlError` for a name that is not set."""
    own = [name for name in os.environ if name in PASSED or name.startswith("SBATCH_")]
    return jobs.given((*own, *names))


# --- the batch script


def places(job: Job, nodes: int) -> Places:
    """Distribute evenly; engines go to the nodes with the fewest GPUs in use. Raises `BirlError`."""
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
        raise BirlError(f"launch.gpus: the {role.name} would have {role.gpus:g} GPUs; Slurm assigns whole ones")
    return int(role.gpus)


def gpus(style: str, count: int) -> list[str]:
    """Options for a number of GPUs on each node."""
    if not count:
        return []
    return [f"--gres={style}:{count}" if style else f"--gpus-per-node={count}"]


def memory(role: Role, processes: int) -> list[str]:
    """Option for the memory on each node."""
    return [f"--mem={ceil(role.memory_gb * 1024) * processes}M"] if role.memory_gb else []


def options(job: Job, places: Places, gres: str) -> list[str]:
    """Options for the resources of the whole job."""
    return [
        f"--nodes={places.nodes}",
        f"--ntasks-per-node={places.most}",
        f"--cpus-per-task={job.learner.cpus}",
        *memory(job.learner, places.most),
        *gpus(gres, places.gpus),
    ]


def step(role: Role, nodes: int, tasks: int, each: int, gres: str) -> list[str]:
    """Options of one step: `tasks` on `nodes`, `each` on one of them. Without --mem a step takes all memory of the job
    on its nodes, and the next step waits forever."""
    return [
        f"--nodes={nodes}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={each}",
        f"--cpus-per-task={role.cpus}",
        *(memory(role, each) or ["--mem=0"]),
        *gpus(gres, each * whole(role)),
    ]


def script(jobs: Sequence[Job], places: Places, directives: Sequence[str], keys: Keys) -> str:
    """The batch script. `jobs`: one, or those of an array, which differ in words and run folders."""
    first = jobs[0]
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in directives), ""]
    lines += ['case "${SLURM_ARRAY_TASK_ID:-0}" in']
    for number, job in enumerate(jobs):
        lines += [f"{number})", f"    run={shlex.quote(str(job.run.absolute()))}"]
        lines += [f"    {role.name}=({shlex.join(role.command)})" for role in job.roles]
        lines += ["    ;;"]
    nodes = ceil(first.learner.count / places.ranks)
    values = {
        "ranks": str(first.learner.count),
        "learner_nodes": str(nodes),
        "learner_step": f"({shlex.join(step(first.learner, nodes, first.learner.count, places.ranks, keys.gres))})",
        "engine_nodes": f"({' '.join(map(str, places.engines))})",
        "engine_step": f"({shlex.join(step(first.engine, 1, 1, 1, keys.gres))})" if first.engine else "()",
        "restarts": str(keys.restarts),
        "signal": str(keys.signal),
        "requeue": "yes" if keys.requeue else "",
        "own_cache": "yes" if first.engine and "BIRL_CACHE" not in first.env else "",
    }
    body = Path(__file__).with_name("slurm.sh").read_text(encoding="utf-8")
    return "\n".join([*lines, "esac", *(f"{name}={value}" for name, value in values.items()), "", body])
