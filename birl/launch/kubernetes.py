"""A RayJob of KubeRay: the operator makes a Ray cluster for the job, runs it there, and takes the cluster away.

    birl launch kubernetes rl recipe.yaml launch.image=registry/birl:0.1 launch.nodes=2 --dry-run | less

`--dry-run` is for `kubectl apply -f`, or for a repository of manifests; without it kubectl is run here.
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, TypedDict

from birl.errors import BirlError
from birl.launch import elsewhere, external, package
from birl.launch.job import Job
from birl.launch.launcher import Handle, Status

PROGRAMS = {"kubectl": "https://kubernetes.io/docs/tasks/tools"}
WORK = "/birl/work"  # the folder of the job in every container
ENGINE = "/home/ray/birl-vllm"  # the environment of vLLM or SGLang in the image
SMALL = 900_000  # bytes: a ConfigMap takes 1 MiB
STATES = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "done",
    "FAILED": "failed",
    "STOPPED": "stopped",
}


@dataclass(kw_only=True)
class Keys(elsewhere.Keys):
    image: str = ""
    """Container image with Ray and birl, under a name that the cluster can pull. `docker build` makes it from the
    Dockerfile of the job, with a wheel of this installation. Needed."""
    namespace: str = "default"
    """Of Kubernetes."""
    secret: str = ""
    """Kubernetes Secret with a value for each name in env. Empty: the name of the job with -env."""
    claim: str = ""
    """PersistentVolumeClaim for the run folder. A learner on several machines needs one that all of them can mount."""
    account: str = ""
    """ServiceAccount of the machines, such as one that may use the bucket of checkpoint.store. Empty: the default."""
    node_cpus: int = 8
    """CPU cores of each machine."""
    node_memory_gb: float = 32.0
    """Memory of each machine [GiB]."""
    node_gpus: int = 0
    """GPUs of each machine (nvidia.com/gpu). 0: as many as the processes of one machine ask for."""
    group: int = 1000
    """Group id that may write to the volumes; that of the image's user."""
    shared_memory_gb: float = 8.0
    """/dev/shm of each machine [GiB], part of its memory."""


def render(job: Job, keys: Keys) -> dict[str, str]:
    check(job, keys)
    name, launch = elsewhere.named(job.name), job.run / "launch"
    files = elsewhere.sent(job, keys)
    manifest = (carried(job, keys, name, files), ray_job(job, keys, name, files))
    secrets = {"secret.sh": secret(job, keys, name)} if job.env else {}
    steps = ["# the image, where the registry does not have it as it is now"]
    context = ("-f", str(launch / "Dockerfile"), str(job.run / elsewhere.FOLDER))
    steps += map(shlex.join, (("docker", "build", "-t", keys.image, *context), ("docker", "push", keys.image)))
    steps += ["# start", *([f"sh {launch}/secret.sh"] if job.env else [])]
    steps += [shlex.join(("kubectl", "apply", "-n", keys.namespace, "-f", str(launch / "rayjob.yaml")))]
    text = "---\n".join(map(elsewhere.yaml_text, manifest))
    return {
        "rayjob.yaml": text,
        **secrets,
        "Dockerfile": dockerfile(job, keys),
        "commands": elsewhere.block(steps),
    }


def dockerfile(job: Job, keys: Keys) -> str:
    """Of an image that has what the job needs, beside the wheel of this installation."""
    gpu = "-gpu" if gpus_of_one(job, keys) or keys.node_gpus else ""
    wheel, engine = elsewhere.wheel(job, keys), package.engine(job, keys.vllm)
    lines = [f"FROM rayproject/ray:{keys.ray}-py312{gpu}"]
    lines += [f"COPY --chmod=644 {wheel.name} /tmp/"] if wheel else []
    runs = elsewhere.install(job, keys, "/tmp", "pip install --no-cache-dir")
    if engine:
        runs += ["pip install --no-cache-dir uv", *elsewhere.environment(engine, ENGINE, "uv")]
    return elsewhere.block([*lines, *(f"RUN {line}" for line in runs)])


def check(job: Job, keys: Keys) -> None:
    elsewhere.check(job, keys)
    if not keys.image:
        raise BirlError("launch.image=: name an image with Ray and birl, as in launch.image=registry.example/birl:0.1.")
    for key in ("namespace", "secret", "claim", "account"):
        value = getattr(keys, key)
        if value and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", value):
            raise BirlError(f"launch.{key}={value}: must be a name of Kubernetes: small letters, digits, - and dots.")
    elsewhere.one_folder(job, keys, keys.claim, "launch.claim=NAME, of a claim with ReadWriteMany")


def carried(job: Job, keys: Keys, name: str, files: list[str]) -> dict[str, Any]:
    """The files that go along, and what the head runs, as a ConfigMap. Raises `BirlError` where they are too large."""
    data = {"run.sh": elsewhere.block(["#!/bin/sh", "set -eu", f"cd {WORK}", *body(job, keys)])}
    for number, path in enumerate(files):
        try:
            data[f"file-{number}"] = Path(path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, IsADirectoryError):
            raise BirlError(
                f"{path}: only files of text go along to Kubernetes. Put it into the image or on the volume, and name "
                "the absolute path that it has there."
            ) from None
    if (size := sum(len(text.encode()) for text in data.values())) > SMALL:
        raise BirlError(
            f"The files that go along have {size} bytes, and Kubernetes takes {SMALL}: put the large ones on the "
            "volume or a bucket, and name the path or URL that they have there."
        )
    metadata = {"name": f"{name}-files", "namespace": keys.namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def body(job: Job, keys: Keys) -> list[str]:
    """The operator starts the job when all machines are there; it ends with the job, and fails with it."""
    return [*elsewhere.steps(job, keys, keys.nodes + 1, f"{ENGINE}/bin/python"), *elsewhere.follow(job)]


def ray_job(job: Job, keys: Keys, name: str, files: list[str]) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "namespace": keys.namespace, "labels": {"app.kubernetes.io/name": "birl"}},
        "spec": {
            "entrypoint": "sh /birl/run.sh",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "backoffLimit": keys.restarts,
            "rayClusterSpec": {
                "rayVersion": keys.ray,
                "authOptions": {"mode": "token"},
                "headGroupSpec": {
                    # the head only watches: no process of the job goes there
                    "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
                    "template": {"spec": pod(job, keys, name, files, "head")},
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": keys.nodes,
                        "minReplicas": keys.nodes,
                        "maxReplicas": keys.nodes,
                        "rayStartParams": {},
                        "template": {"spec": pod(job, keys, name, files, "worker")},
                    }
                ],
            },
        },
    }


def pod(job: Job, keys: Keys, name: str, files: list[str], kind: str) -> dict[str, Any]:
    small = kind == "head"
    needs: dict[str, Any] = {"cpu": "2" if small else str(keys.node_cpus)}
    needs["memory"] = "8Gi" if small else f"{round(keys.node_memory_gb * 1024)}Mi"
    if not small and (gpus := keys.node_gpus or gpus_of_one(job, keys)):
        needs["nvidia.com/gpu"] = str(gpus)
    secret = keys.secret or f"{name}-env"
    # the head hands them on through memory
    given = [{"name": n, "valueFrom": {"secretKeyRef": {"name": secret, "key": n}}} for n in job.env] if small else []
    mounts, volumes = storage(job, keys, name, files)
    return {
        **({"serviceAccountName": keys.account} if keys.account else {}),
        "restartPolicy": "Never",
        "securityContext": {"fsGroup": keys.group},
        # a machine that is taken away has so long to save [s]
        "terminationGracePeriodSeconds": 120,
        "containers": [
            {
                "name": f"ray-{kind}",
                "image": keys.image,
                "workingDir": WORK,
                **({"env": given} if given else {}),
                "resources": {"requests": needs, "limits": needs},
                "securityContext": {"allowPrivilegeEscalation": False},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def gpus_of_one(job: Job, keys: Keys) -> int:
    """GPUs of the machine that has most, when the processes are shared out evenly; none is divided."""
    machines = [0.0] * keys.nodes
    for gpus in sorted((role.gpus for role in job.roles for _ in range(role.count)), reverse=True):
        machines[machines.index(min(machines))] += gpus
    return ceil(max(machines) - 1e-9)


def storage(job: Job, keys: Keys, name: str, files: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Mounts and volumes: the working folder, the files below it, the run folder, shared memory."""
    mounts: list[dict[str, Any]] = [
        {"name": "work", "mountPath": WORK},
        {"name": "files", "mountPath": "/birl/run.sh", "subPath": "run.sh", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for number, path in enumerate(files):
        mounts.append({"name": "files", "mountPath": f"{WORK}/{path}", "subPath": f"file-{number}", "readOnly": True})
    volumes: list[dict[str, Any]] = [
        {"name": "work", "emptyDir": {}},
        {"name": "files", "configMap": {"name": f"{name}-files"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{round(keys.shared_memory_gb * 1024)}Mi"}},
    ]
    if keys.claim:
        mounts.append({"name": "runs", "mountPath": f"{WORK}/{job.run}", "subPath": name})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": keys.claim}})
    return mounts, volumes


SECRET = """#!/bin/sh
# The values go from the environment through a pipe: they are in no file, and in no command line.
set -eu
{{
{lines}
}} | kubectl create secret generic {name} -n {namespace} --from-env-file=/dev/stdin --dry-run=client -o yaml |
  kubectl apply -n {namespace} -f -
"""


def secret(job: Job, keys: Keys, name: str) -> str:
    missing = "has no value in this environment, and launch.env names it"
    lines = [f"  printf '%s=%s\\n' {n} \"${{{n}:?{missing}}}\"" for n in job.env]
    return SECRET.format(lines="\n".join(lines), name=keys.secret or f"{name}-env", namespace=keys.namespace)


class More(TypedDict):
    namespace: str


def submit(job: Job, keys: Keys) -> Handle:
    rendered, launch = render(job, keys), job.run / "launch"
    external.write(launch, rendered)
    elsewhere.build(job, keys)
    external.need(PROGRAMS, launch, rendered["commands"])
    name = elsewhere.named(job.name)
    if job.env:
        external.run(("sh", str(launch / "secret.sh")))
    external.run(("kubectl", "apply", "-n", keys.namespace, "-f", str(launch / "rayjob.yaml")))
    more = More(namespace=keys.namespace)
    return Handle(where="kubernetes", id=name, run=str(job.run), name=job.name, more=more)


def asked(handle: Handle) -> dict[str, Any]:
    said = external.run(("kubectl", "get", "rayjob", handle.id, "-n", handle.more["namespace"], "-o", "json"))
    return json.loads(said).get("status") or {}


def status(handle: Handle) -> list[Status]:
    result = asked(handle)
    phase = result.get("jobDeploymentStatus", "")
    state = STATES.get(result.get("jobStatus", ""), "failed" if phase == "Failed" else "waiting")
    place, detail = result.get("rayClusterName", ""), result.get("message") or phase
    job = Status(role="job", index=0, state=state, where=place, detail=detail)
    if state != "running":
        return [job]
    try:
        said = external.run(head(handle, result, f"birl status {shlex.quote(handle.run)} || true"))
    except BirlError as error:
        return [job, Status(role="head", index=0, state="unknown", detail=str(error)[-200:])]
    return [job, *elsewhere.statuses(said)]


def head(handle: Handle, found: dict[str, Any], command: str) -> tuple[str, ...]:
    """A command in the head's container."""
    where = ("-n", handle.more["namespace"])
    label = f"ray.io/cluster={found.get('rayClusterName', '')},ray.io/node-type=head"
    name = "jsonpath={.items[0].metadata.name}"
    pod = external.run(("kubectl", "get", "pods", *where, "-l", label, "-o", name)).strip()
    return ("kubectl", "exec", *where, pod, "-c", "ray-head", "--", "sh", "-c", f"cd {WORK} && {command}")


def logs(handle: Handle, role: str, follow: bool) -> Iterator[str]:
    """Of a role: from the head, while the cluster is there. Of all: what the submitter has printed, also afterwards."""
    if role:
        words = ["birl", "logs", handle.run, role, *(["--follow"] if follow else [])]
        return external.lines(head(handle, asked(handle), shlex.join(words)))
    more = ("-f",) if follow else ()
    return external.lines(("kubectl", "logs", f"job/{handle.id}", "-n", handle.more["namespace"], *more))


def stop(handle: Handle) -> str:
    """The machines are given back even where the job cannot be reached any more."""
    try:
        result = asked(handle)
        state = STATES.get(result.get("jobStatus", ""), "")
        if state == "running":
            state = elsewhere.ended(
                external.run(head(handle, result, f"birl stop {shlex.quote(handle.run)}"), external.LONG)
            )
    finally:
        external.run(("kubectl", "delete", "rayjob", handle.id, "-n", handle.more["namespace"], "--ignore-not-found"))
    return "" if state == "waiting" else state
