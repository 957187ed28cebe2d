"""Configuration of the cluster for `ray up`: a head without processes of the job, workers that may be spot machines,
large encrypted disks, access by ssh only, machine identities that only answer the machine itself (IMDSv2)."""

import shlex
from pathlib import Path
from typing import Any

from birl.launch import elsewhere
from birl.launch.aws_access import GROUP, Access
from birl.launch.job import Job

PORT = 6379
HEAD = f"--head --port={PORT} --dashboard-host=127.0.0.1 --autoscaling-config=~/ray_bootstrap_config.yaml"


def folder(user: str, access: Access) -> str:
    """Folder of the job on every machine."""
    return f"/home/{user}/birl/{access.name}"


def cluster(job: Job, keys: Any, access: Access, launch: Path) -> dict[str, Any]:
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
        "head_start_ray_commands": start(keys, place, HEAD),
        "worker_start_ray_commands": start(keys, place, f"--address=$RAY_HEAD_IP:{PORT}"),
    }


def node(kind: str, keys: Any, access: Access, count: int) -> dict[str, Any]:
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


def shared(keys: Any, access: Access) -> list[str]:
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


def start(keys: Any, place: str, options: str) -> list[str]:
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


def collect(job: Job, keys: Any, access: Access) -> str:
    place, run = folder(keys.user, access), shlex.quote(str(job.run))
    return COLLECT.format(name=access.name, place=place, run=run, bucket=access.bucket, prefix=access.prefix)
