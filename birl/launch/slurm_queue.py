"""State of our jobs from Slurm's commands, without its accounting, which may be missing. After Slurm has forgotten a
job, its end is in a file that the batch script writes beside the logs."""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from birl.errors import BirlError
from birl.launch.launcher import Handle, Status, log_lines
from birl.regular import read_text

STATE = "state"
DEADLINE = 60.0  # seconds for one command; Slurm retries by itself while its controller is down
PATIENCE = 900.0  # seconds that `stop` waits
ASK = 2.0  # seconds between two queries of the controller, which serves all users
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One job in Slurm's output; `number`: within its array. The last one's own number would be that of the array.

    Example: Seen(job="4711_0", number=0, state="PENDING", reason="Resources", restarts=1)
    """

    job: str
    number: int
    state: str
    reason: str
    restarts: int


def ask(words: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. Raises `BirlError` if it is missing or does not answer."""
    try:
        return subprocess.run(words, capture_output=True, errors="replace", timeout=DEADLINE, env=env, check=False)
    except FileNotFoundError:
        raise BirlError(
            f"{words[0]} is not here: `birl launch slurm` needs Slurm's commands; type it where you would type sbatch"
        ) from None
    except subprocess.TimeoutExpired:
        raise BirlError(f"`{' '.join(words)}` did not answer within {DEADLINE:g} s") from None


def hint(message: str) -> str:
    """The key to set, if Slurm's message is about one of ours."""
    low = message.lower()
    for key in ("partition", "account", "qos"):
        if key in low:
            there = ask(["sinfo", "--noheader", "--format=%R"]).stdout.split() if key == "partition" else []
            return f"\nSet launch.{key}{' to one of ' if there else ''}{', '.join(sorted(set(there)))}."
    if "node configuration is not available" in low or "more processors" in low or "memory" in low:
        return "\nSet launch.nodes, launch.cpus, launch.gpus or launch.memory_gb to what its nodes have (`sinfo -Nel`)."
    return "\nSet launch.time." if "time limit" in low else ""


def seen(handle: Handle) -> list[Seen]:
    """The job in Slurm's queue; empty if Slurm no longer knows it. Raises `BirlError` if Slurm does not answer."""
    words = ["squeue", "--noheader", "--states=all", "--array", f"--jobs={handle.id}"]
    done = ask([*words, "--Format=ArrayTaskID:|,State:|,Reason:|,RestartCnt:"])
    if done.returncode:
        if "invalid job id" in done.stderr.lower():
            return []
        raise BirlError(f"squeue: {done.stderr.strip()}")
    result: list[Seen] = []
    for line in done.stdout.splitlines():
        number, state, reason, restarts = (part.strip() for part in line.split("|"))
        place = int(number) if number.isdigit() else 0
        job = f"{handle.id}_{place}" if handle.more["array"] else handle.id
        result.append(Seen(job=job, number=place, state=state, reason=reason, restarts=int(restarts or 0)))
    return result


def active(handle: Handle) -> bool:
    """Whether the job is queued or running."""
    return any(one.state in (*WAITING, *RUNNING) for one in seen(handle))


def hosts(nodes: str) -> list[str]:
    return ask(["scontrol", "show", "hostnames", nodes]).stdout.split() if nodes else []


def status(handle: Handle) -> list[Status]:
    """Status of each process of each job."""
    jobs = {one.number: one for one in seen(handle)}
    steps = running_steps(handle) if any(one.state == "RUNNING" for one in jobs.values()) else {}
    result: list[Status] = []
    for number, run in enumerate(handle.more["folders"]):
        job = jobs.get(number)
        state, detail = state_of(job, Path(run))
        name = f"{Path(run).name} " if handle.more["array"] else ""
        for role, count in handle.more["roles"].items():
            for index in range(count):
                place, now = "", state
                if job is not None and job.state == "RUNNING":
                    nodes = steps.get((job.job, role if role == "learner" else f"{role}-{index}"))
                    now = "waiting" if nodes is None else state
                    at = index // max(handle.more["ranks"], 1) if role == "learner" else 0
                    place = nodes[min(at, len(nodes) - 1)] if nodes else ""
                result.append(Status(role=name + role, index=index, state=now, where=place, detail=detail))
    return result


def running_steps(handle: Handle) -> dict[tuple[str, str], list[str]]:
    """Nodes of each step, by (Slurm job id: 4711, or 4711_0 in an array; step name)."""
    words = ["squeue", "--noheader", "--steps", f"--jobs={handle.id}", "--format=%i|%j|%N"]
    result: dict[tuple[str, str], list[str]] = {}
    for line in ask(words).stdout.splitlines():
        number, name, nodes = (part.strip() for part in line.split("|"))
        result[number.partition(".")[0], name] = hosts(nodes)
    return result


def state_of(job: Seen | None, run: Path) -> tuple[str, str]:
    """Our state of a job, and the reason. After the job's end the script's file decides."""
    written, detail = last_word(run)
    if job is None:
        if written in ("", "running", "restarting"):
            return "unknown", "Slurm no longer lists this job; its logs are in the run folder"
        return written, detail
    if job.state in WAITING:
        again = "restarting" if job.restarts else "waiting"
        return again, "; ".join(part for part in (job.reason, detail) if part not in ("", "None"))
    if job.state in RUNNING:
        return "running", f"started again {job.restarts} times" if job.restarts else ""
    if job.state == "COMPLETED":
        return (written if written in ("done", "stopped") else "done"), detail
    if job.state == "CANCELLED":
        return "stopped", detail
    if written in ("stopped", "failed"):
        return written, detail
    return "failed", f"{job.state}, {job.reason}"


def last_word(run: Path) -> tuple[str, str]:
    with suppress(OSError, ValueError):
        _, state, *detail = read_text(run / "launch" / STATE).split(maxsplit=2)
        return state, " ".join(detail).strip()
    return "", ""


def logs(handle: Handle, role: str, follow: bool) -> Iterator[str]:
    """Log lines, each with its process if there are several. Raises `BirlError` for an unknown role."""
    roles = handle.more["roles"]
    if role and role not in (*roles, "slurm"):
        raise BirlError(f"There is no role {role}; there are {', '.join((*roles, 'slurm'))}")
    folders = [*dict.fromkeys([Path(handle.run), *map(Path, handle.more["folders"])])]
    asked, alive = 0.0, True

    def files() -> dict[str, Path]:
        result = (f for run in folders for f in sorted((run / "launch").glob(f"{role or '*'}-*.*")))
        array = handle.more["array"]
        return {f"{f.parents[1].name} {f.stem}" if array else f.stem: f for f in result if f.suffix in (".log", ".out")}

    def over() -> bool:
        nonlocal asked, alive
        if time.monotonic() - asked > ASK:
            asked, alive = time.monotonic(), active(handle)
        return not alive

    return log_lines(files, follow, over)


def stop(handle: Handle) -> str:
    """Cancel waiting jobs; running ones save and end. If there are none of either, returns how the job had ended, else
    empty. Raises `BirlError` if it takes longer than `PATIENCE`."""
    ended = [last_word(Path(run))[0] for run in handle.more["folders"]]
    any_left = False
    told: set[str] = set()
    until = time.monotonic() + PATIENCE
    while jobs := [one for one in seen(handle) if one.state in (*WAITING, *RUNNING)]:
        any_left = True
        for job in jobs:
            if job.state in WAITING:
                ask(["scancel", job.job])
            elif job.state == "RUNNING" and job.job not in told:
                ask(["scancel", "--batch", "--signal=USR2", job.job])
                told.add(job.job)
        if time.monotonic() > until:
            raise BirlError(
                f"The job {handle.id} still saves after {PATIENCE:g} s; `scancel {handle.id}` ends it at once"
            )
        time.sleep(1.0)
    for run in handle.more["folders"]:
        if last_word(Path(run))[0] in ("", "running", "restarting"):
            (Path(run) / "launch" / STATE).write_text(f"{handle.id} stopped\n", encoding="utf-8")
    return "" if any_left else next((state for state in ended if state not in ("", "running", "restarting")), "")
