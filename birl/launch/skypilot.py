"""Launcher for SkyPilot: machines of any cloud, the run folder in a bucket.

    birl launch skypilot rl recipe.yaml launch.accelerators=A10G:1 launch.nodes=2 launch.bucket=my-runs --dry-run

The machines form a Ray cluster beside SkyPilot's own, and the first of them launches the job on it.
"""

import re
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from birl.errors import BirlError
from birl.launch import elsewhere, external
from birl.launch.elsewhere import VENV
from birl.launch.job import Job
from birl.launch.launcher import Handle, Status

PROGRAMS = {"sky": "pip install 'skypilot[aws,kubernetes]'"}
WORK = "~/birl"
VOLUME = "/mnt/birl"  # mount point of launch.volume; it must not begin with ~
PORT = 6399  # SkyPilot's own Ray uses 6380
TOKEN = "RAY_AUTH_TOKEN"  # shared token of the Ray cluster's machines; new for each job
JOB_STATES = {
    "RUNNING": "running",
    "SUCCEEDED": "done",
    "FAILED": "failed",
    "FAILED_SETUP": "failed",
    "FAILED_DRIVER": "failed",
    "CANCELLED": "stopped",
}


@dataclass(kw_only=True)
class Keys(elsewhere.Keys):
    infra: str = ""
    """Cloud and region in SkyPilot's notation, such as aws/us-west-2. Empty: the cheapest."""
    accelerators: str = ""
    """GPUs of each machine, such as H100:8. Empty: none."""
    node_cpus: int = 4
    """Minimum CPU cores of each machine."""
    node_memory_gb: int = 16
    """Minimum memory of each machine [GB]."""
    spot: bool = False
    """Use spot instances. SkyPilot does not restart them; run the same command again to resume from the bucket."""
    disk_gb: int = 256
    """Disk of each machine [GB]."""
    bucket: str = ""
    """S3 bucket that is mounted at the run folder; created if it does not exist. Empty: the machine's disk."""
    volume: str = ""
    """SkyPilot volume (`sky volumes apply`) for the run folder instead of a bucket, such as a persistent volume
    claim."""
    image: str = ""
    """Container image with Python 3 and pip. Empty: SkyPilot's default."""


def render(job: Job, keys: Keys) -> dict[str, str]:
    check(job, keys)
    steps = [f"export {TOKEN}=$(openssl rand -hex 32)", shlex.join(begin(job)), "# stop"]
    steps += map(shlex.join, end(elsewhere.named(job.name), str(job.run)))
    return {"task.yaml": elsewhere.yaml_text(task(job, keys)), "commands": elsewhere.block(steps)}


def check(job: Job, keys: Keys) -> None:
    elsewhere.check(job, keys)
    if keys.bucket and not re.fullmatch(elsewhere.BUCKET, keys.bucket):
        raise BirlError(f"launch.bucket={keys.bucket}: must be a name of an S3 bucket, as in launch.bucket=my-runs.")
    if keys.bucket and keys.volume:
        raise BirlError(f"launch.volume={keys.volume}: launch.bucket has the run folder already; leave one out.")
    if keys.volume and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", keys.volume):
        raise BirlError(f"launch.volume={keys.volume}: must be a name: small letters, digits, - and dots.")
    if not keys.image.isprintable() or " " in keys.image:
        raise BirlError(f"launch.image={keys.image!r}: must be an image, as in launch.image=registry.example/birl:0.1.")
    shared = keys.bucket or keys.volume
    if shared and len(job.run.parts) < 2:
        raise BirlError(f"run={job.run}: {shared} takes the place of its parent folder, as in run=runs/{job.run}.")
    elsewhere.one_folder(job, keys, shared, "launch.bucket=NAME or launch.volume=NAME")


def task(job: Job, keys: Keys) -> dict[str, Any]:
    resources = {
        "infra": keys.infra,
        "accelerators": keys.accelerators,
        "cpus": f"{keys.node_cpus}+",
        "memory": f"{keys.node_memory_gb}+",
        "disk_size": keys.disk_gb,
        "use_spot": keys.spot,
        "image_id": f"docker:{keys.image}" if keys.image else "",
    }
    mounts: dict[str, Any] = {f"{WORK}/{name}": f"./{name}" for name in elsewhere.sent(job, keys)}
    if wheel := elsewhere.wheel(job, keys):
        mounts[f"{WORK}/{wheel.name}"] = f"./{wheel}"
    if keys.bucket:
        # cached: files that are appended to, such as metrics, need it
        mounts[f"{WORK}/{job.run.parent}"] = {"name": keys.bucket, "store": "s3", "mode": "MOUNT_CACHED"}
    return {
        "name": elsewhere.named(job.name),
        "num_nodes": keys.nodes,
        "resources": {name: value for name, value in resources.items() if value != ""},
        "secrets": dict.fromkeys([TOKEN, *job.env]),  # values are passed by `sky launch --secret NAME`
        **({"file_mounts": mounts} if mounts else {}),
        **({"volumes": {VOLUME: keys.volume}} if keys.volume else {}),
        "setup": elsewhere.block(setup(job, keys)),
        "run": elsewhere.block(body(job, keys)),
    }


def setup(job: Job, keys: Keys) -> list[str]:
    runs = f"{WORK}/{shlex.quote(str(job.run.parent))}"
    linked = [f"mkdir -p $(dirname {runs}) && ln -sfn {VOLUME} {runs}"] if keys.volume else []
    return ["set -e", *linked, *elsewhere.setup(job, keys, WORK.replace("~", "$HOME"), "")]


def body(job: Job, keys: Keys) -> list[str]:
    """Script for every machine. `ray stop` would end SkyPilot's own Ray, so the started cluster is ended by its pid."""
    return [
        "set -e",
        f"mkdir -p {WORK} && cd {WORK}",
        f"export PATH=$(echo {VENV}/bin):$PATH RAY_AUTH_MODE=token",
        'head="$(echo "$SKYPILOT_NODE_IPS" | head -n1)"',
        'if [ "$SKYPILOT_NODE_RANK" != 0 ]; then',
        f'  until ray health-check --address "$head:{PORT}"; do sleep 5; done',
        f'  ray start --address="$head:{PORT}" --disable-usage-stats --block || true  # until the head goes',
        "  exit 0",
        "fi",
        f"ray start --head --port={PORT} --include-dashboard=false --disable-usage-stats --block &",
        "ray=$!",
        "trap 'kill $ray || true' EXIT",
        f"export RAY_ADDRESS=127.0.0.1:{PORT}",
        f"until ray health-check --address 127.0.0.1:{PORT}; do sleep 1; done",
        *elsewhere.steps(job, keys, keys.nodes),
        *elsewhere.follow(job),
    ]


def begin(job: Job) -> tuple[str, ...]:
    """Command that starts the task; `sky` reads secrets from its environment."""
    file, name = str(job.run / "launch" / "task.yaml"), elsewhere.named(job.name)
    given = [word for variable in (TOKEN, *job.env) for word in ("--secret", variable)]
    return ("sky", "launch", "-y", "-d", "-c", name, *given, file)


def end(name: str, run: str) -> list[tuple[str, ...]]:
    return [("ssh", name, f"cd {WORK} && {VENV}/bin/birl stop {shlex.quote(run)}"), ("sky", "down", "-y", name)]


def submit(job: Job, keys: Keys, where: str = "skypilot") -> Handle:
    """Start the job. Costs money until `birl stop`. Raises `BirlError`."""
    rendered, launch = render(job, keys), job.run / "launch"
    external.write(launch, rendered)
    elsewhere.build(job, keys)
    external.need(PROGRAMS, launch, rendered["commands"])
    handle = Handle(where=where, id=elsewhere.named(job.name), run=str(job.run), name=job.name)
    return elsewhere.begin(handle, [begin(job)], {TOKEN: secrets.token_hex(32)})


def status(handle: Handle) -> list[Status]:
    output = external.run(("sky", "queue", handle.id))
    words = {word for line in output.splitlines() for word in line.split()}
    state = next((state for name, state in JOB_STATES.items() if name in words), "waiting")
    return [Status(role="job", index=0, state=state, where=handle.id)]


def logs(handle: Handle, role: str, follow: bool) -> Iterator[str]:
    if role:
        words = [f"{VENV}/bin/birl", "logs", shlex.quote(handle.run), role, *(["--follow"] if follow else [])]
        return external.lines(("ssh", handle.id, f"cd {WORK} && {' '.join(words)}"))
    return external.lines(("sky", "logs", handle.id, *([] if follow else ["--no-follow"])))


def stop(handle: Handle) -> str:
    """Stop the job. The machines are terminated even if it cannot be reached."""
    output = external.run_all(end(handle.id, handle.run), "`sky status` shows whether machines are left.")
    return elsewhere.ended(output)
