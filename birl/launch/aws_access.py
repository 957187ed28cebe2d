"""AWS permissions: policies of the machines, and the scripts that create and remove their resources. None contains a
key: machines have roles, and secrets go from the environment to AWS Secrets Manager through a pipe."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: placeholder in cluster.yaml for the security group, until prepare.sh has created it
GROUP = "sg-from-prepare"
TRUST = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
TAG = "ray-cluster-name"  # Ray tags every machine of a cluster with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """`name`: of the cluster, `prefix`: of all keys that the machines may access in the bucket, `ssh_from`: the only
    network that may connect, `secrets`: names of environment variables.

    Example: Access(name="demo", region="eu-central-1", bucket="my-runs", prefix="birl", ssh_from="203.0.113.7/32")
    """

    name: str
    region: str
    bucket: str
    prefix: str
    ssh_from: str
    secrets: tuple[str, ...] = ()

    def role(self, kind: str) -> str:
        return f"birl-{self.name}-{kind}"

    def secret(self, name: str) -> str:
        return f"birl/{self.name}/{name}"


def files(access: Access) -> dict[str, str]:
    worker = storage(access)
    return {
        "trust.json": _json([TRUST]),
        "worker.json": _json(worker),
        "head.json": _json([*worker, *secrets(access), *machines(access)]),
        "prepare.sh": prepare(access),
        "remove.sh": remove(access),
    }


def storage(access: Access) -> list[dict[str, object]]:
    """Statements for the bucket. Checkpoints are written by workers."""
    bucket = f"arn:aws:s3:::{access.bucket}"
    below = {"StringLike": {"s3:prefix": [access.prefix, f"{access.prefix}/*"]}}
    return [
        _allow("List", ["s3:ListBucket"], [bucket], below),
        _allow(
            "Objects",
            ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            [f"{bucket}/{access.prefix}/*"],
        ),
    ]


def secrets(access: Access) -> list[dict[str, object]]:
    if not access.secrets:
        return []
    # AWS adds six characters to the name of each secret
    names = [f"arn:aws:secretsmanager:{access.region}:*:secret:{access.secret(name)}-??????" for name in access.secrets]
    return [_allow("Secrets", ["secretsmanager:GetSecretValue"], names)]


def machines(access: Access) -> list[dict[str, object]]:
    """Statements for the head, which starts and ends workers: of this cluster and region, with the workers' role."""
    ec2 = f"arn:aws:ec2:{access.region}:*"
    around = [f"{ec2}:{kind}/*" for kind in ("network-interface", "security-group", "subnet", "volume", "key-pair")]
    new = {"StringEquals": {f"aws:RequestTag/{TAG}": access.name}}
    ours = {"StringEquals": {f"aws:ResourceTag/{TAG}": access.name}}
    return [
        _allow("See", ["ec2:DescribeInstances"], ["*"]),
        _allow("Start", ["ec2:RunInstances"], [f"{ec2}:instance/*"], new),
        _allow("StartWith", ["ec2:RunInstances"], [f"arn:aws:ec2:{access.region}::image/*", *around]),
        _allow("TagNew", ["ec2:CreateTags"], [f"{ec2}:*/*"], {"StringEquals": {"ec2:CreateAction": "RunInstances"}}),
        _allow("TagOurs", ["ec2:CreateTags"], [f"{ec2}:instance/*"], ours),
        _allow("End", ["ec2:TerminateInstances"], [f"{ec2}:instance/*"], ours),
        _allow(
            "PassRole",
            ["iam:PassRole"],
            [f"arn:aws:iam::*:role/{access.role('worker')}"],
            {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
        ),
    ]


def _allow(
    sid: str, actions: list[str], resources: Sequence[str], condition: Mapping[str, object] | None = None
) -> dict[str, object]:
    result: dict[str, object] = {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": list(resources)}
    return {**result, "Condition": condition} if condition else result


def _json(statements: Sequence[Mapping[str, object]]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=1) + "\n"


HEAD = """#!/bin/sh
# {what}
# It can be run again.
set -eu
cd "$(dirname "$0")"
export AWS_DEFAULT_REGION={region} AWS_PAGER=
"""

BUCKET = """
# the bucket: one owner, never public
aws s3api head-bucket --bucket {bucket} >/dev/null 2>&1 || aws s3api create-bucket --bucket {bucket}{where} >/dev/null
aws s3api put-public-access-block --bucket {bucket} --public-access-block-configuration \\
  BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true
"""

ROLE = """
# what a {kind} may do
aws iam get-role --role-name {role} >/dev/null 2>&1 ||
  aws iam create-role --role-name {role} --assume-role-policy-document file://trust.json >/dev/null
aws iam put-role-policy --role-name {role} --policy-name birl --policy-document file://{kind}.json
aws iam get-instance-profile --instance-profile-name {role} >/dev/null 2>&1 || {{
  aws iam create-instance-profile --instance-profile-name {role} >/dev/null
  aws iam add-role-to-instance-profile --instance-profile-name {role} --role-name {role}
}}
"""

# Ray's own group would open ssh to all addresses. So the group is created here; Ray does not change a given one.
NETWORK = """
# who may connect: the machines among themselves, and ssh from {ssh_from}
vpc=$(aws ec2 describe-vpcs --filters Name=is-default,Values=true --query 'Vpcs[0].VpcId' --output text)
group=$(aws ec2 describe-security-groups --filters Name=group-name,Values={name} Name=vpc-id,Values="$vpc" \\
  --query 'SecurityGroups[0].GroupId' --output text)
if [ "$group" = None ]; then
  group=$(aws ec2 create-security-group --group-name {name} --description "birl launch aws" --vpc-id "$vpc" \\
    --query GroupId --output text)
  aws ec2 authorize-security-group-ingress --group-id "$group" --protocol all --source-group "$group" >/dev/null
  aws ec2 authorize-security-group-ingress --group-id "$group" --protocol tcp --port 22 --cidr {ssh_from} >/dev/null
fi
sed "s/{placeholder}/$group/" cluster.yaml >cluster.yaml.part
mv cluster.yaml.part cluster.yaml
"""

# printf is a builtin of the shell: the value is in no command line.
SECRET = """
: "${{{name}:?has no value in this environment, and launch.env names it}}"
if aws secretsmanager describe-secret --secret-id {secret} >/dev/null 2>&1; then verb='put-secret-value --secret-id'
else verb='create-secret --name'; fi
printf %s "${name}" | aws secretsmanager $verb {secret} --secret-string file:///dev/stdin >/dev/null
"""

SPOT = """
# AWS wants this role once per account for spot machines
aws iam create-service-linked-role --aws-service-name spot.amazonaws.com >/dev/null 2>&1 || true
"""

# Shared token of the cluster's machines; Ray generates it in your home folder.
TOKEN = """
ray get-auth-token --generate >/dev/null
"""


def prepare(access: Access) -> str:
    bucket, region = shlex.quote(access.bucket), access.region
    where = "" if region == "us-east-1" else f" --create-bucket-configuration LocationConstraint={region}"
    parts = [
        HEAD.format(what="Creates what the machines need, once, by a user who may create roles.", region=region),
        BUCKET.format(bucket=bucket, where=where),
        *(ROLE.format(kind=kind, role=access.role(kind)) for kind in ("head", "worker")),
        SPOT,
        NETWORK.format(name=access.role("group"), ssh_from=access.ssh_from, placeholder=GROUP),
        *(SECRET.format(name=name, secret=access.secret(name)) for name in access.secrets),
        TOKEN,
    ]
    return "".join(parts)


REMOVE_ROLE = """
aws iam remove-role-from-instance-profile --instance-profile-name {role} --role-name {role}
aws iam delete-instance-profile --instance-profile-name {role}
aws iam delete-role-policy --role-name {role} --policy-name birl
aws iam delete-role --role-name {role}
"""

REMOVE_GROUP = """
group=$(aws ec2 describe-security-groups --filters Name=group-name,Values={name} \\
  --query 'SecurityGroups[0].GroupId' --output text)
[ "$group" = None ] || aws ec2 delete-security-group --group-id "$group"
"""

REMOVE_SECRET = """
aws secretsmanager delete-secret --secret-id {secret} --force-delete-without-recovery >/dev/null
"""


def remove(access: Access) -> str:
    """The script that removes everything but the bucket."""
    parts = [
        HEAD.format(what="Removes what prepare.sh made, but not the bucket; after `birl stop`.", region=access.region)
        .replace("It can be run again.", "What is gone already is no reason to stop.")
        .replace("set -eu", "set -u"),
        *(REMOVE_SECRET.format(secret=access.secret(name)) for name in access.secrets),
        *(REMOVE_ROLE.format(role=access.role(kind)) for kind in ("head", "worker")),
        REMOVE_GROUP.format(name=access.role("group")),
    ]
    return "".join(parts)


def fetch(access: Access) -> list[str]:
    """Shell lines of the head that read the secrets into variables of the next command; they are written nowhere."""
    get = f"aws secretsmanager get-secret-value --region {access.region} --query SecretString --output text --secret-id"
    # `export X=$(...)` would succeed if its command fails
    return [f'{name}="$({get} {access.secret(name)})"; export {name}' for name in access.secrets]
