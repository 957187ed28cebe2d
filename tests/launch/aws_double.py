# pyright: reportMissingImports=false
"""In an environment with Ray, boto3, aws and moto: `python aws_double.py FOLDER` carries out the files of a job against
a double of AWS, and prints as JSON what it found there."""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml


def start() -> subprocess.Popen[bytes]:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "double", "AWS_SECRET_ACCESS_KEY": "double"}
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, 9, 0, 0, 0),  # it ends when this process is killed
    )  # fmt: skip
    for _ in range(900):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/moto-api/", timeout=1).read()
            return server
        time.sleep(0.1)
    sys.exit("moto did not start")


def script(launch: Path, name: str) -> None:
    done = subprocess.run(["sh", str(launch / name)], capture_output=True, text=True, timeout=200)
    if done.returncode:
        sys.exit(f"{name}: {done.stdout}{done.stderr}")


def read(config: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` does: completed, validated, with subnets and keys of the account."""
    from ray.autoscaler._private.commands import _bootstrap_config

    return _bootstrap_config(config, no_config_cache=True)


def refused(launch: Path) -> dict[str, bool]:
    """That the validator does look."""

    def does(change: dict[str, Any]) -> bool:
        try:
            read({**yaml.safe_load((launch / "cluster.yaml").read_text()), **change})
        except Exception:
            return True
        return False

    wrong = {
        "unknown key": {"colour": "red"},
        "wrong type": {"max_workers": "many"},
        "bad head": {"head_node_type": "x"},
    }
    return {name: does(change) for name, change in wrong.items()}


def machines(config: dict[str, Any], ec2: Any) -> dict[str, Any]:
    """Start one of each kind as Ray does, and look at it."""
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    found = {}
    for kind, node in config["available_node_types"].items():
        made = provider.create_node(node["node_config"], {"ray-node-type": kind, "ray-user-node-type": kind}, 1)
        (one,) = ec2.describe_instances(InstanceIds=list(made))["Reservations"][0]["Instances"]
        assert {"Key": "ray-cluster-name", "Value": config["cluster_name"]} in one["Tags"]
        found[kind] = {
            "spot": one.get("InstanceLifecycle") == "spot",
            "profile": one["IamInstanceProfile"]["Arn"].rpartition("/")[2],
            "groups": [group["GroupId"] for group in one["SecurityGroups"]],
            "imds": one.get("MetadataOptions", {}).get("HttpTokens", "unknown"),
        }
    provider.terminate_nodes(provider.non_terminated_nodes({}))
    return found


def allowed(launch: Path, region: str) -> dict[str, list[str]]:
    """What somebody with each policy is let do, once the double looks at policies. It knows
    actions, and resources of S3, but no conditions."""
    import boto3
    from botocore.exceptions import ClientError

    iam, keys = boto3.client("iam"), {}
    for kind in ("head", "worker"):
        iam.create_user(UserName=kind)
        iam.put_user_policy(UserName=kind, PolicyName="birl", PolicyDocument=(launch / f"{kind}.json").read_text())
        key = iam.create_access_key(UserName=kind)["AccessKey"]
        keys[kind] = {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}
    policing("0")
    found = {}
    for kind, key in keys.items():
        names = ("s3", "ec2", "secretsmanager", "iam")
        s3, ec2, vault, own = (boto3.client(name, region_name=region, **key) for name in names)
        attempts = {
            "write below": lambda s3=s3: s3.put_object(Bucket="my-runs", Key="birl/demo/x", Body=b"x"),
            "read below": lambda s3=s3: s3.get_object(Bucket="my-runs", Key="birl/demo/x"),
            "list below": lambda s3=s3: s3.list_objects_v2(Bucket="my-runs", Prefix="birl/demo/"),
            "write elsewhere": lambda s3=s3: s3.put_object(Bucket="my-runs", Key="other/x", Body=b"x"),
            "another bucket": lambda s3=s3: s3.create_bucket(Bucket="another"),
            "open the bucket": lambda s3=s3: s3.delete_public_access_block(Bucket="my-runs"),
            "machines": lambda ec2=ec2: ec2.describe_instances(),
            "open the network": lambda ec2=ec2: ec2.create_security_group(GroupName="x", Description="x"),
            "all secrets": lambda vault=vault: vault.list_secrets(),
            "new roles": lambda own=own: own.create_role(RoleName="x", AssumeRolePolicyDocument="{}"),
        }
        found[kind] = []
        for name, attempt in attempts.items():
            with contextlib.suppress(ClientError):
                attempt()
                found[kind].append(name)
    policing("inf")
    return found


def policing(after: str) -> None:
    """Policies count from so many requests on."""
    url = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    asked = urllib.request.Request(url, after.encode(), {"content-type": "text/plain"}, method="POST")
    urllib.request.urlopen(asked, timeout=10).read()


def network(ec2: Any) -> dict[str, Any]:
    named = [{"Name": "group-name", "Values": ["birl-demo-group"]}]
    (group,) = ec2.describe_security_groups(Filters=named)["SecurityGroups"]
    opened = []
    for rule in group["IpPermissions"]:
        port = "all" if rule["IpProtocol"] == "-1" else str(rule["FromPort"])
        opened += [[port, r["CidrIp"]] for r in rule["IpRanges"]]
        pairs = [pair["GroupId"] for pair in rule["UserIdGroupPairs"]]
        opened += [[port, "itself" if pair == group["GroupId"] else "?"] for pair in pairs]
    return {"id": group["GroupId"], "from": sorted(opened)}


def main() -> None:
    launch = Path(sys.argv[1])
    config = yaml.safe_load((launch / "cluster.yaml").read_text())
    region = os.environ["AWS_DEFAULT_REGION"] = config["provider"]["region"]
    server = start()
    try:
        import boto3

        s3, ec2, iam = (boto3.client(name, region_name=region) for name in ("s3", "ec2", "iam"))
        vault = boto3.client("secretsmanager", region_name=region)
        script(launch, "prepare.sh")
        script(launch, "prepare.sh")  # it can be run again
        closed = s3.get_public_access_block(Bucket="my-runs")["PublicAccessBlockConfiguration"]
        found: dict[str, Any] = {
            "bucket": "private" if all(closed.values()) else "public",
            "secret": vault.get_secret_value(SecretId="birl/demo/HF_TOKEN")["SecretString"],
            "group": network(ec2),
            "refused": refused(launch),
            "machines": machines(read(yaml.safe_load((launch / "cluster.yaml").read_text())), ec2),
        }
        found["allowed"] = allowed(launch, region)
        script(launch, "remove.sh")
        groups = ec2.describe_security_groups()["SecurityGroups"]
        found["left"] = {
            "roles": [r["RoleName"] for r in iam.list_roles()["Roles"] if r["RoleName"].startswith("birl")],
            "groups": [g["GroupName"] for g in groups if g["GroupName"].startswith("birl")],
            "profiles": [p["InstanceProfileName"] for p in iam.list_instance_profiles()["InstanceProfiles"]],
            "secrets": [s["Name"] for s in vault.list_secrets()["SecretList"]],
            "buckets": [b["Name"] for b in s3.list_buckets()["Buckets"]],
        }
        print(json.dumps(found))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
