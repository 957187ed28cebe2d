"""`birl launch local`: a run as processes of this machine, which continue when the terminal is closed.

A supervisor (`supervisor.py`) starts the engines and the learner, and restarts those that fail. It writes into the
folder `launch` of the run: state.json, supervisor.log, and a log for each process.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from birl.allocator import cores
from birl.errors import BirlError
from birl.launch import job as jobs
from birl.launch import plan as files
from birl.launch.job import Job
from birl.launch.launcher import Handle, Status, changed, log_lines
from birl.launch.plan import FOLDER, LOG, PLAN, WANTED, LaunchPlan, State, read_state, supervised
from birl.launch.supervisor import latest
from birl.regular import check_target

STARTS = 30.0  # s that the supervisor may take to start
SAVES = 600.0  # s that the learner may take to save and end
POLL = 0.1


@dataclass(kw_only=True)
class Keys(jobs.Keys):
    cpus: int = 0
    """CPU threads of the learner. 0: half of the cores if engines use the others, else all."""


def render(job: Job, keys: Keys) -> dict[str, str]:
    return shown(plan_of(job, keys), Path(sys.executable))


def submit(job: Job, keys: Keys) -> Handle:
    return begin("local", plan_of(job, keys))


def plan_of(job: Job, keys: Keys) -> LaunchPlan:
    """The plan; further ranks of the learner are its children. Raises `BirlError`."""
    if keys.nodes != 1:
        raise BirlError(f"launch.nodes={keys.nodes}: local is this machine alone; torchrun, slurm and ray take several")
    return supervised_plan(job, keys, job.learner.command, job.learner.count)


def supervised_plan(job: Job, keys: jobs.Keys, learner: Sequence[str], ranks: int) -> LaunchPlan:
    """Raises `BirlError` if this machine lacks resources."""
    if keys.memory_gb:
        raise BirlError(
            f"launch.memory_gb={keys.memory_gb:g}: the processes of this machine share its memory; leave it out"
        )
    jobs.given(job.env)  # processes inherit them
    engine = job.engine
    plan = LaunchPlan(
        name=job.name,
        run=str(job.run.resolve()),
        learner=tuple(learner),
        engine=engine.command if engine else (),
        count=engine.count if engine else 0,
        engines=job.engines,
        restarts=keys.restarts,
        threads=keys.cpus or (max(cores() // 2, 1) if engine and not keys.gpus else 0),
        devices=tuple(gpus()) if keys.gpus else (),
        learner_gpus=keys.gpus * ranks,
        engine_gpus=engine.gpus if engine else 0.0,
    )
    if plan.devices_needed > len(plan.devices):
        raise BirlError(
            f"launch.gpus={keys.gpus:g}: the job needs {plan.devices_needed} GPUs, and this machine has "
            f"{len(plan.devices)}"
        )
    return plan


def gpus() -> list[str]:
    """GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [word.strip() for word in given.split(",") if word.strip()]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, errors="replace", timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number, line in enumerate(line for line in listed.splitlines() if line.startswith("GPU"))]


def shown(plan: LaunchPlan, python: Path) -> dict[str, str]:
    commands = [f"{python} -m birl.launch.supervisor {shlex.quote(str(plan.folder / PLAN))}"]
    commands += [f"# which starts, engine {index}: {shlex.join(plan.engine)}" for index in range(plan.count)]
    commands += [f"# which starts, learner: {shlex.join(plan.learner)}"]
    return {f"{FOLDER}/{PLAN}": files.text(asdict(plan)), "commands": "\n".join(commands)}


def begin(where: str, plan: LaunchPlan) -> Handle:
    """Start a supervisor that outlives this process. Raises `BirlError` if one is running."""
    if pid := supervised(plan.folder):
        raise BirlError(
            f"{plan.home} runs already, supervised by process {pid}. `birl status {plan.home}` shows it, `birl stop "
            f"{plan.home}` lets it save and end."
        )
    try:
        file = files.save(plan)
        check_target(plan.folder / LOG)
        log = (plan.folder / LOG).open("ab")
    except OSError as error:
        raise BirlError(
            f"{plan.folder} cannot be written: {error.strerror}. Choose another folder with run=..."
        ) from None
    with log:
        start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "birl.launch.supervisor", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C and the end of the terminal do not reach it
        )
    until = time.monotonic() + STARTS
    while (state := read_state(plan.folder)) is None or state.pid != process.pid:
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            output = (plan.folder / LOG).read_bytes()[start:].decode(errors="replace").strip()
            raise BirlError(f"The supervisor did not start: {output or 'it printed nothing'}")
        time.sleep(POLL)
    return Handle(where=where, id=str(process.pid), run=str(plan.home), name=plan.name)


def status(handle: Handle) -> Sequence[Status]:
    folder = Path(handle.run) / FOLDER
    job = read_state(folder)
    if job is None:
        return [Status(role="supervisor", index=0, state="unknown", detail=f"{folder} has no state.json")]
    gone = job.state == "running" and supervised(folder) != job.pid
    result = []
    for part in job.parts:
        where, detail = f"pid {part.pid}" if part.pid and not gone else "", part.detail
        if part.role == "learner" and (step := latest(handle.run)[0]):
            detail = f"step {step}" + (f"; {detail}" if detail else "")
        if part.restarts:
            detail += f"{'; ' if detail else ''}started again {part.restarts} time{'s' * (part.restarts > 1)}"
        state, detail = ("failed", "the supervisor is gone") if gone else (part.state, detail)
        result.append(Status(role=part.role, index=part.index, state=state, where=where, detail=detail))
    return result


def logs(handle: Handle, role: str, follow: bool) -> Iterator[str]:
    """`role`: learner, engine, engine-1, supervisor."""
    folder = Path(handle.run) / FOLDER

    def named() -> dict[str, Path]:
        everything = {file.stem: file for file in sorted(folder.glob("*.log"))}
        return {n: f for n, f in everything.items() if not role or n == role or n.startswith(f"{role}-")}

    if not named():
        raise BirlError(f"There is no log of {role or 'anything'} in {folder}")
    return log_lines(named, follow, over=lambda: not supervised(folder))


def stop(handle: Handle) -> str:
    folder = Path(handle.run) / FOLDER
    pid = supervised(folder)
    if pid <= 0:
        raise BirlError(f"{handle.run} does not run{ended(read_state(folder))}")
    if host := files.elsewhere(folder):  # then the pid is of another machine
        raise BirlError(f"{handle.run} runs on {host}, as process {pid} there: call `birl stop` on that machine.")
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + SAVES
    while supervised(folder) == pid:
        if time.monotonic() > until:
            raise BirlError(f"{handle.run} still saves after {SAVES:g} s. `birl stop` once more ends it at once.")
        time.sleep(POLL)
    return ""


def ended(state: State | None) -> str:
    if state is None or state.state == "running":
        return ": the supervisor has ended; the same `birl launch` resumes from the newest checkpoint"
    return f": it is {state.state}"


def scale(handle: Handle, change: str) -> int:
    """Set the number of engines; returns it. Raises `BirlError`."""
    folder = Path(handle.run) / FOLDER
    state, plan = read_state(folder), files.load(folder / PLAN)
    if state is None or not supervised(folder):
        raise BirlError(f"{handle.run} does not run{ended(state)}")
    if not plan.engine:
        raise BirlError(f"{handle.run} has no engines of its own: it samples in the learner; set engine.kind=birl")
    most = plan.most_engines()
    number = changed(files.wanted(folder, most) or state.engines, change)
    if number > most:
        raise BirlError(f"engines={change}: there are GPUs for {most}")
    files.write(folder / WANTED, number)
    return number
