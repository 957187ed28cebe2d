"""Slurm: one batch job, whose steps are the learner with all its ranks, and each engine.

    birl launch slurm sft data.train=texts.jsonl parallel.fsdp=16 launch.nodes=2 launch.gpus=1 launch.time=240

`slurm_script.py` writes the batch script, `slurm_queue.py` asks Slurm about it.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from birl.config.sweep import job_names, sweep, swept_keys
from birl.errors import BirlError
from birl.launch import job as jobs
from birl.launch import slurm_queue as queue
from birl.launch.job import Job, derive, placed
from birl.launch.launcher import FILE, Handle, find
from birl.launch.slurm_queue import logs as logs
from birl.launch.slurm_queue import status as status
from birl.launch.slurm_queue import stop as stop
from birl.launch.slurm_script import Places, options, places, script

SCRIPT = "slurm.sh"
#: variables that a job gets without being asked for, where they are set; everything else stays here
PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF"),
    *("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_NUM_THREADS"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
)


@dataclass(kw_only=True)
class Keys(jobs.Keys):
    partition: str = ""
    """Where the job waits and runs (sbatch --partition). Empty: the cluster's default."""
    account: str = ""
    """Who pays (sbatch --account). Empty: your default."""
    qos: str = ""
    """Quality of service (sbatch --qos). Empty: your default."""
    time: int = 0
    """Longest that the job runs before it is ended or requeued [minutes]. 0: what the partition allows."""
    signal: int = 120
    """How long before the time limit the learner gets a signal to save and end [s]. 0: never; the job is cut off
    there."""
    requeue: bool = True
    """Start again where a node is lost, the time limit comes or a process fails, and go on from the checkpoint."""
    gres: str = "gpu"
    """What the cluster calls a GPU, such as gpu or gpu:h200 (--gres). Empty: ask with --gpus-per-node."""
    array: str = ""
    """Words with several values, as `--multirun` takes them, such as 'seed=1,2 optimizer.lr=1e-5,1e-6': one job of an
    array for each combination."""
    at_once: int = 0
    """Jobs of the array that run at the same time, at most. 0: as many as there is room for."""
    extra: list[str] = field(default_factory=list)
    """Further options of sbatch, such as --constraint=h200, each in a line of its own."""


def render(job: Job, keys: Keys) -> dict[str, str]:
    """Raises `BirlError` for what Slurm cannot give, without asking it."""
    elements = combinations(job, keys)
    result = places(job, keys.nodes)
    text = script(
        elements,
        result,
        directives(job, keys, result, len(elements)),
        gres=keys.gres,
        restarts=keys.restarts,
        signal=keys.signal,
        requeue=keys.requeue,
    )
    return {str(folder(job.run) / SCRIPT): text, "commands": f"{shlex.join(submission(job))}\n"}


def submission(job: Job) -> list[str]:
    return ["sbatch", "--parsable", str(folder(job.run) / SCRIPT)]


def folder(run: Path) -> Path:
    """Where the script, logs and state of a job are."""
    return run / "launch"


def combinations(job: Job, keys: Keys) -> list[Job]:
    """The jobs of an array, or the one. Raises `BirlError`."""
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
            f"launch.array={keys.array}: the jobs of an array need the same processes; launch each by itself"
        )
    return result


def directives(job: Job, keys: Keys, found: Places, elements: int) -> list[str]:
    """The #SBATCH lines. Raises `BirlError`."""
    if keys.time and keys.signal >= keys.time * 60:
        raise BirlError(
            f"launch.signal={keys.signal} s is not before launch.time={keys.time} min; set a smaller launch.signal"
        )
    for line in keys.extra:
        if not line.startswith("-") or not line.isprintable():
            raise BirlError(f"launch.extra: {line!r} is no option of sbatch, such as --constraint=h200")
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
    return [
        *(f"--{name}={shlex.quote(value)}" for name, value in named.items() if value),
        "--requeue" if keys.requeue else "--no-requeue",
        *options(job, found, keys.gres),
        *keys.extra,
    ]


class More(TypedDict):
    array: bool
    folders: tuple[str, ...]
    roles: dict[str, int]
    ranks: int


def submit(job: Job, keys: Keys) -> Handle:
    """Raises `BirlError` where the run is under way already, or with what Slurm says."""
    if (job.run / FILE).exists() and (before := find(str(job.run))).where == "slurm" and queue.active(before):
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
    return Handle(
        where="slurm",
        id=done.stdout.strip().partition(";")[0],  # ID;CLUSTER where there are several
        run=str(job.run.absolute()),
        name=job.name,
        more=More(
            array=bool(keys.array),
            folders=tuple(str(one.run.absolute()) for one in elements),
            roles={role.name: role.count for role in job.roles},
            ranks=places(job, keys.nodes).ranks,
        ),
    )


def environment(names: Sequence[str]) -> dict[str, str]:
    """What sbatch sees, and so the job: nothing that was not named. Raises `BirlError` for a name that is not set."""
    own = [name for name in os.environ if name in PASSED or name.startswith("SBATCH_")]
    return jobs.given((*own, *names))
