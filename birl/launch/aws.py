"""Launcher for AWS: a Ray cluster for each job, of a head and `launch.nodes` workers; checkpoints in a bucket.

    birl launch aws rl recipe.yaml launch.bucket=my-runs launch.ssh_from=203.0.113.7/32 --dry-run

`ray up` makes the machines (`cluster`): a head without processes of the job, workers that may be spot machines, large
encrypted disks, access by ssh only, machine identities that only answer the machine itself (IMDSv2). `aws_access.py`
has roles, bucket, network and secrets. The programs aws and ray call AWS with the user's credentials, which birl never
reads.
"""

import ipaddress
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.launch import aws_access, elsewhere, external
from birl.launch.aws_access import GROUP, Access
from birl.launch.job import Job
from birl.launch.launcher import Handle, Status

PROGRAMS = {"aws": "pip install awscli", "ray": "pip install 'ray[default]' boto3"}


@dataclass(kw_only=True)
class Keys(elsewhere.Keys):
    bucket: str = ""
    """S3 bucket for checkpoints and the run's output; created if it does not exist. Required."""
    prefix: str = "birl"
    """Prefix of everything in the bucket; the machines have no access outside it."""
    ssh_from: str = ""
    """CIDR range that may connect to the machines, such as 203.0.113.7/32 for one address. Required."""
    region: str = "us-west-2"
    """AWS region."""
    instance: str = "g5.2xlarge"
    """Instance type of the workers, which run all processes of the job."""
    head: str = "m6i.large"
    """Instance type of the head node, which only supervises."""
    spot: bool = True
    """Use spot instances as workers: cheaper, but AWS may reclaim them; the job then resumes from its newest
    checkpoint."""
    disk_gb: int = 500
    """Disk of each machine [GB]."""
    image: str = ""
    """AMI with an NVIDIA driver, the AWS CLI and Python. Empty: Ray's default for the region."""
    user: str = "ubuntu"
    """SSH user of this AMI."""
    efs: str = ""
    """Shared file system (EFS) of all machines, such as fs-01ab; required by vLLM and by a learner on several
    machines."""
    keep: bool = False
    """Leave the machines running after birl stop."""


def access(job: Job, keys: Keys) -> Access:
    """Raises `BirlError` for keys that AWS would refuse, or that would allow access from everywhere."""
    elsewhere.check(job, keys)
    if not re.fullmatch(elsewhere.BUCKET, keys.bucket):
        raise BirlError(
            f"launch.bucket={keys.bucket}: name the S3 bucket for checkpoints, as in launch.bucket=my-runs."
        )
    if not re.fullmatch(r"[\w-]+(/[\w-]+)*", keys.prefix):
        raise BirlError(f"launch.prefix={keys.prefix}: must be a part of a path, as in launch.prefix=birl.")
    if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", keys.region):
        raise BirlError(f"launch.region={keys.region}: must be a region of AWS, as in launch.region=us-west-2.")
    if not re.fullmatch(r"|fs-[0-9a-f]+", keys.efs):
        raise BirlError(f"launch.efs={keys.efs}: must be the id of a file system, as in fs-0123456789abcdef0.")
    if not re.fullmatch(r"[a-z_][a-z0-9_-]*", keys.user):
        raise BirlError(f"launch.user={keys.user}: must be a name that logs in, as in launch.user=ubuntu.")
    elsewhere.one_folder(job, keys, keys.efs, "launch.efs=fs-...")
    return Access(
        name=elsewhere.named(job.name),
        region=keys.region,
        bucket=keys.bucket,
        prefix=keys.prefix,
        ssh_from=network(keys.ssh_from),
        secrets=job.env,
    )


def network(text: str) -> str:
    try:
        result = ipaddress.ip_network(text)
    except ValueError:
        result = None
    if result is None or result.version != 4 or result.prefixlen < 8:
        raise BirlError(
            f"launch.ssh_from={text}: name the network that may connect, as in launch.ssh_from=203.0.113.7/32; "
            "the whole internet may not."
        )
    return str(result)


def stored(job: Job, keys: Keys) -> Job:
    """The job with checkpoints in the bucket, unless the configuration sets a store, as disks are lost with the
    machines. For use there; here s3fs may be missing."""
    if job.config.checkpoint.store:
        return job
    return replace(job, words=(*job.words, f"checkpoint.store=s3://{keys.bucket}/{keys.prefix}"))


def render(job: Job, keys: Keys) -> dict[str, str]:
    own, launch = access(job, keys), (job.run / "launch").absolute()
    return {
        "cluster.yaml": elsewhere.yaml_text(cluster(job, keys, own, launch)),
        **aws_access.files(own),
        "collect.sh": collect(job, keys, own),
        "start.sh": start(job, keys, own),
        "commands": commands(job, keys, own),
    }


def start(job: Job, keys: Keys, own: Access) -> str:
    """The command on the head. The job is detached: the connection may break."""
    lines = ["#!/bin/sh", "# On the head, in the folder of the job.", "set -eu", *aws_access.fetch(own)]
    return elsewhere.block([*lines, *elsewhere.steps(stored(job, keys), keys, keys.nodes + 1)])


def commands(job: Job, keys: Keys, own: Access) -> str:
    """All commands of a job's life, in order."""
    launch = job.run / "launch"
    steps = ["# start", *map(shlex.join, begin(job, keys, own)[:2]), "# sync, after a file has changed"]
    steps += [shlex.join(("ray", "up", "-y", "--no-restart", str(launch / "cluster.yaml"))), "# run"]
    steps += [*map(shlex.join, begin(job, keys, own)[2:]), "# stop"]
    steps += [*map(shlex.join, end(handle(job, keys, own)))]
    steps += [f"{shlex.join(('sh', str(launch / 'remove.sh')))}  # roles, network, secrets"]
    return elsewhere.block(steps)


def begin(job: Job, keys: Keys, own: Access) -> list[tuple[str, ...]]:
    launch, place = job.run / "launch", folder(keys.user, own)
    file = str(launch / "cluster.yaml")
    return [
        ("sh", str(launch / "prepare.sh")),
        ("ray", "up", "-y", file),
        ("ray", "rsync-up", file, str(launch / "start.sh"), f"{place}/start.sh"),
        ("ray", "exec", file, f"{enter(place)} && sh start.sh"),
    ]


@dataclass
class More:
    cluster: str
    place: str
    bucket: str
    keep: bool
    region: str


def there(handle: Handle, command: str) -> tuple[str, ...]:
    """A command that runs in the job's folder on the head."""
    return ("ray", "exec", handle.more["cluster"], f"{enter(handle.more['place'])} && {command}")


def end(handle: Handle) -> list[tuple[str, ...]]:
    """Commands that stop the job (it saves), fetch its files, and terminate the machines."""
    run, bucket = shlex.quote(handle.run), handle.more["bucket"]
    fetch = ("aws", "s3", "sync", f"{bucket}/machines", f"{handle.run}/machines")
    down = () if handle.more["keep"] else (("ray", "down", "-y", handle.more["cluster"]),)
    return [there(handle, f"birl stop {run}"), fetch, *down]


def handle(job: Job, keys: Keys, own: Access) -> Handle:
    more = More(
        cluster=str(job.run / "launch" / "cluster.yaml"),
        place=folder(keys.user, own),
        bucket=f"s3://{own.bucket}/{own.prefix}/{own.name}",
        keep=keys.keep,
        region=own.region,
    )
    return Handle(where="aws", id=own.name, run=str(job.run), name=job.name, more=asdict(more))


def submit(job: Job, keys: Keys) -> Handle:
    """Start the job. Costs money until `birl stop`. Raises `BirlError`."""
    own, rendered = access(job, keys), render(job, keys)
    launch = job.run / "launch"
    external.write(launch, rendered)
    elsewhere.build(job, keys)
    external.need(PROGRAMS, launch, rendered["commands"])
    return elsewhere.begin(handle(job, keys, own), begin(job, keys, own))


def status(handle: Handle) -> list[Status]:
    # `birl status` fails if a process has failed; its output is still valid
    output = external.run(there(handle, f"birl status {shlex.quote(handle.run)} || true"))
    return elsewhere.statuses(output) or [Status(role="job", index=0, state="unknown", detail=output.strip()[-200:])]


def logs(handle: Handle, role: str, follow: bool) -> Iterator[str]:
    words = ["birl", "logs", handle.run, *([role] if role else []), *(["--follow"] if follow else [])]
    return external.lines(there(handle, shlex.join(words)))


def stop(handle: Handle) -> str:
    """Stop the job. The machines are terminated even if it cannot be reached."""
    hint = f"look into AWS's console whether machines are left, tagged {aws_access.TAG}={handle.id}."
    output = external.run_all(end(handle), hint, {"AWS_DEFAULT_REGION": handle.more["region"]})
    return elsewhere.ended(output)


PORT = 6379
HEAD = f"--head --port={PORT} --dashboard-host=127.0.0.1 --autoscaling-config=~/ray_bootstrap_config.yaml"


def folder(user: str, access: Access) -> str:
    """Folder of the job on every machine."""
    return f"/home/{user}/birl/{access.name}"


def cluster(job: Job, keys: Keys, access: Access, launch: Path) -> dict[str, Any]:
    """The cluster's configuration. `launch`: absolute path of the rendered files on this machine."""
    home, place = f"/home/{keys.user}", folder(keys.user, access)
    workers = {"head": 0, "worker": keys.nodes}
    wheel = elsewhere.wheel(job, keys)
    return {
        "cluster_name": access.name,
        "max_workers": keys.nodes,
        "idle_timeout_minutes": 15,
        "provider": {"type": "aws", "region": access.region, "cache_stopped_nodes": False},
        "auth": {"ssh_user": keys.user},
        "available_node_types": {kind: node(kind, keys, access, count) for kind, count in workers.items()},
        "head_node_type": "head",
        "file_mounts": {
            f"{home}/.ray/auth_token": "~/.ray/auth_token",
            f"{place}/collect.sh": str(launch / "collect.sh"),
            **{f"{place}/{name}": str(Path(name).absolute()) for name in elsewhere.sent(job, keys)},
            **({f"{place}/{wheel.name}": str(wheel.absolute())} if wheel else {}),
        },
        "rsync_exclude": ["**/.git", "**/.git/**", "**/.env", "**/__pycache__"],
        "initialization_commands": shared(keys, access),
        "setup_commands": elsewhere.setup(job, keys, place, "--user ", "boto3"),
        "head_start_ray_commands": join(keys, place, HEAD),
        "worker_start_ray_commands": join(keys, place, f"--address=$RAY_HEAD_IP:{PORT}"),
    }


def node(kind: str, keys: Keys, access: Access, count: int) -> dict[str, Any]:
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}} if kind == "worker" and keys.spot else {}
    image = {"ImageId": keys.image} if keys.image else {}  # otherwise Ray uses its default for the region
    disk = {"VolumeSize": keys.disk_gb, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    return {
        # no process of the job runs on the head, which must live until the end
        **({"resources": {"CPU": 0}} if kind == "head" else {}),
        "min_workers": count,
        "max_workers": count,
        "node_config": {
            "InstanceType": keys.head if kind == "head" else keys.instance,
            **image,
            **spot,
            "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1},
            "IamInstanceProfile": {"Name": access.role(kind)},
            "SecurityGroupIds": [GROUP],
        },
    }


def shared(keys: Keys, access: Access) -> list[str]:
    """Commands that mount the shared file system; without one each machine has its own folder."""
    if not keys.efs:
        return []
    server = f"{keys.efs}.efs.{access.region}.amazonaws.com:/"
    options = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport"
    place = f"/home/{keys.user}/birl"
    return [
        f"mkdir -p {place} && {{ mountpoint -q {place} || sudo mount -t nfs4 -o {options} {server} {place}; }} && "
        f"sudo chown {keys.user} {place}"
    ]


def enter(place: str) -> str:
    """Prefix of every command on a machine."""
    venv = elsewhere.VENV.replace("~", "$HOME")
    return f"export PATH={venv}/bin:$PATH RAY_AUTH_MODE=token; mkdir -p {place} && cd {place}"


def join(keys: Keys, place: str, options: str) -> list[str]:
    copies = not keys.efs or options is HEAD  # one is enough if all share the folder
    alone = f"setsid sh {place}/collect.sh >/dev/null 2>&1 </dev/null & " if copies else ""
    return [
        f"{enter(place)} && ray stop",
        f"{enter(place)} && ulimit -n 65536; {alone}ray start {options} --disable-usage-stats",
    ]


COLLECT = """#!/bin/sh
# On a machine of the job: what the run writes is copied to the bucket every minute. Checkpoints go there by themselves.
exec 9>/tmp/birl-{name}.lock
flock -n 9 || exit 0
cd {place}
while sleep 60; do
  [ -d {run} ] && aws s3 sync --only-show-errors --exclude 'checkpoints/*' --exclude 'weights/*' --exclude 'launch*' \\
    {run} "s3://{bucket}/{prefix}/{name}/machines/$(hostname)"
done
"""


def collect(job: Job, keys: Keys, access: Access) -> str:
    place, run = folder(keys.user, access), shlex.quote(str(job.run))
    return COLLECT.format(name=access.name, place=place, run=run, bucket=access.bucket, prefix=access.prefix)
