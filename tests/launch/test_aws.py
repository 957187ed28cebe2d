"""The files of `birl launch aws`: read by Ray's own validator, and carried out against a double of AWS."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from birl.cli import main
from birl.errors import BirlError
from birl.launch import aws, command, elsewhere, job
from birl.launch.launcher import Handle
from tests.launch import places

CLOUD = places.ROOT / ".venv-cloud" / "bin"
needs_cloud = pytest.mark.skipif(not (CLOUD / "ray").exists(), reason="make setup-cloud installs Ray, aws and moto")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(places.folder(tmp_path))
    return tmp_path


def rendered(*more: str) -> dict[str, str]:
    keys, words = command.keys_of(aws.Keys, places.words("aws", *more)[2:])
    return aws.render(job.derive("rl", words, keys), keys)


def test_a_dry_run_shows_every_file_and_writes_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *places.words("aws", "--dry-run")]) == 0
    shown = places.files(capsys.readouterr().out)
    assert {"cluster.yaml", "head.json", "worker.json", "prepare.sh", "start.sh", "remove.sh", "commands"} <= set(shown)
    assert shown == rendered() and not (here / "runs").exists()
    for name in ("prepare.sh", "remove.sh", "collect.sh", "start.sh", "commands"):
        places.is_shell(shown[name])


def test_the_machines_are_closed_encrypted_and_big(here: Path) -> None:
    (cluster,) = places.documents(rendered("launch.nodes=3", "launch.disk_gb=1000")["cluster.yaml"])
    kinds = cluster["available_node_types"]
    assert (kinds["worker"]["min_workers"], kinds["worker"]["max_workers"], cluster["max_workers"]) == (3, 3, 3)
    assert kinds["head"]["resources"] == {"CPU": 0} and "InstanceMarketOptions" not in kinds["head"]["node_config"]
    assert kinds["worker"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    for kind in kinds.values():
        config = kind["node_config"]
        assert config["MetadataOptions"]["HttpTokens"] == "required"
        assert config["SecurityGroupIds"] == ["sg-from-prepare"]
        (disk,) = config["BlockDeviceMappings"]
        assert disk["Ebs"]["Encrypted"] and disk["Ebs"]["VolumeSize"] == 1000
    sent = {remote.removeprefix("/home/ubuntu/"): local for remote, local in cluster["file_mounts"].items()}
    assert sent["birl/demo/my.jsonl"] == str(here / "my.jsonl") and "birl/demo/recipe.yaml" in sent


def test_the_head_runs_the_same_job() -> None:
    words = places.head_words(rendered("launch.gpus=1", "launch.cpus=4")["start.sh"])
    assert "checkpoint.store=s3://my-runs/birl" in words and "launch.address=auto" in words
    own = [word for word in words if not word.startswith(("checkpoint.store=", "launch.address="))]
    keys, given = command.keys_of(elsewhere.Keys, own)
    found = job.derive(given[0], given[1:], keys)
    assert (found.name, found.run, [r.name for r in found.roles]) == ("demo", Path("runs/demo"), ["learner", "engine"])
    assert [(r.count, r.gpus, r.cpus) for r in found.roles] == [(1, 1, 4), (2, 1, 4)]
    kept = places.head_words(rendered("checkpoint.store=file:///mnt/x")["start.sh"])
    assert "checkpoint.store=s3://my-runs/birl" not in kept


def test_policies_name_what_they_allow() -> None:
    found = rendered("launch.env=HF_TOKEN")
    head, worker = (json.loads(found[f"{kind}.json"])["Statement"] for kind in ("head", "worker"))
    assert {action.partition(":")[0] for s in worker for action in s["Action"]} == {"s3"}
    for statement in (*head, *worker):
        assert not any("*" in action for action in statement["Action"]), statement
        if "*" in statement["Resource"]:
            assert statement["Action"] == ["ec2:DescribeInstances"]  # AWS knows no narrower resource for it
    ends = next(s for s in head if "ec2:TerminateInstances" in s["Action"])
    assert ends["Condition"] == {"StringEquals": {"aws:ResourceTag/ray-cluster-name": "demo"}}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("launch.bucket=", "launch.bucket"),
        ("launch.bucket=../x", "launch.bucket"),
        ("launch.ssh_from=", "launch.ssh_from"),
        ("launch.ssh_from=0.0.0.0/0", "launch.ssh_from"),
        ("launch.region=us-west-2;reboot", "launch.region"),
        ("launch.prefix=a;b", "launch.prefix"),
        ("launch.efs=fs-1;x", "launch.efs"),
        ("launch.user=$(id)", "launch.user"),
        ("launch.env=HF_TOKEN=hf_123", "launch.env"),
        ("launch.files=../secret", "launch.files"),
        ("launch.nodes=0", "launch.nodes"),
        ("run=/tmp/x", "run="),
    ],
)
def test_what_is_refused(word: str, said: str) -> None:
    with pytest.raises(BirlError, match=said):
        rendered(word)


@pytest.mark.parametrize("word", ["parallel.fsdp=2", "weights.method=reload"])
def test_several_machines_need_a_folder_in_common(word: str) -> None:
    words = ("launch.nodes=2", word)
    with pytest.raises(BirlError, match=r"launch\.efs"):
        rendered(*words)
    (cluster,) = places.documents(rendered(*words, "launch.efs=fs-01ab")["cluster.yaml"])
    (mount,) = cluster["initialization_commands"]
    assert "fs-01ab.efs.us-west-2.amazonaws.com" in mount
    places.is_shell(mount)


def test_without_the_programs_it_says_what_to_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    keys, words = command.keys_of(aws.Keys, places.words("aws")[2:])
    with pytest.raises(BirlError, match=r"(?s)pip install awscli.*\nray up -y runs/demo/launch/cluster.yaml") as error:
        aws.submit(job.derive("rl", words, keys), keys)
    assert "Nothing was started" in str(error.value)
    modes = {path.name: path.stat().st_mode & 0o77 for path in (here / "runs/demo/launch").iterdir()}
    assert modes == dict.fromkeys(rendered(), 0)


def test_its_life_in_order(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """With programs that only say what they were asked: up, run, status, logs, stop, down."""
    status = "demo: ray 17\n  learner 0      running     10.0.0.5        step 3\n  engine 1       failed      -   gone"
    answers: dict[str, str | int] = {"birl status": status, "birl logs": "step 1\nstep 2", "describe-": "x-1"}
    log = places.stand_ins(here, ("ray", "aws"), answers)
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    assert main(["launch", *places.words("aws", "launch.nodes=2")]) == 0
    asked = [json.loads(line) for line in log.read_bytes().splitlines()]
    ray = [words[1] for words in asked if words[0] == "ray"]
    assert ray == ["get-auth-token", "up", "rsync-up", "exec"]
    assert "SecurityGroupIds:\n      - x-1\n" in (here / "runs/demo/launch/cluster.yaml").read_text()
    capfd.readouterr()
    assert main(["status", "runs/demo"]) == 1  # an engine has failed
    said = capfd.readouterr().out
    assert "learner 0      running" in said and "engine 1       failed" in said
    assert main(["logs", "runs/demo", "learner"]) == 0
    assert capfd.readouterr().out == "step 1\nstep 2\n"
    assert main(["stop", "runs/demo"]) == 0
    asked = [json.loads(line) for line in log.read_bytes().splitlines()]
    assert [words[1] for words in asked[-3:]] == ["exec", "s3", "down"] and "birl stop runs/demo" in asked[-3][3]


def test_machines_of_a_start_that_failed_can_be_given_back(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log = places.stand_ins(here, ("ray", "aws"), {"sh start.sh": 1, "describe-": "x-1"})
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    assert main(["launch", *places.words("aws")]) == 2
    assert "`birl stop runs/demo` gives them back" in capfd.readouterr().err
    assert main(["stop", "runs/demo"]) == 0
    assert json.loads(log.read_bytes().splitlines()[-1])[:2] == ["ray", "down"]


def test_machines_are_given_back_although_the_job_does_not_answer(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = places.stand_ins(here, ("ray", "aws"), {"birl stop": 1})
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    more = {"cluster": "c.yaml", "place": "/x", "bucket": "s3://b/birl/demo", "keep": False, "region": "us-west-2"}
    with pytest.raises(BirlError, match="ray-cluster-name=demo"):
        aws.stop(Handle(where="aws", id="demo", run="runs/demo", name="demo", more=more))
    assert json.loads(log.read_bytes().splitlines()[-1]) == ["ray", "down", "-y", "c.yaml"]


@needs_cloud
def test_the_double_of_aws(here: Path) -> None:
    """prepare.sh with the real aws program, Ray's validator, Ray's provider that starts machines, remove.sh."""
    launch = here / "runs" / "demo" / "launch"
    launch.mkdir(parents=True)
    for name, text in rendered("launch.nodes=2", "launch.env=HF_TOKEN", "launch.region=eu-central-1").items():
        (launch / name).write_text(text)
    script = str(Path(__file__).parent / "aws_double.py")
    env = {"PATH": f"{CLOUD}:{os.environ['PATH']}", "HOME": str(here), "HF_TOKEN": "canary-7391"}
    done = subprocess.run(
        [str(CLOUD / "python"), script, str(launch)], capture_output=True, text=True, timeout=400, env=env, cwd=here
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bucket"] == "private" and found["secret"] == "canary-7391"
    group = found["group"]
    assert group["from"] == [["22", "203.0.113.7/32"], ["all", "itself"]]
    assert found["machines"] == {
        kind: {"spot": kind == "worker", "profile": f"birl-demo-{kind}", "groups": [group["id"]], "imds": "required"}
        for kind in ("head", "worker")
    }
    assert found["refused"] == {"unknown key": True, "wrong type": True, "bad head": True}
    below = ["write below", "read below", "list below"]
    assert found["allowed"] == {"worker": below, "head": [*below, "machines"]}
    assert found["left"] == {"roles": [], "groups": [], "profiles": [], "secrets": [], "buckets": ["my-runs"]}
    for path in here.rglob("*"):
        assert not path.is_file() or b"canary-7391" not in path.read_bytes(), path


def test_the_commands_are_those_that_run(here: Path) -> None:
    shown = [shlex.split(line, comments=True) for line in rendered()["commands"].splitlines()]
    keys, words = command.keys_of(aws.Keys, places.words("aws")[2:])
    made = job.derive("rl", words, keys)
    own = aws.access(made, keys)
    ran = [list(step) for step in (*aws.begin(made, keys, own), *aws.end(aws.handle(made, keys, own)))]
    assert [step for step in shown if step in ran] == ran
