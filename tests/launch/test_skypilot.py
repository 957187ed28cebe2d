"""The task of `birl launch skypilot`: as SkyPilot itself reads it where it is installed, and carried out by sh."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from birl.cli import main
from birl.errors import BirlError
from birl.launch import command, job, kubernetes, skypilot
from tests.launch import places

RAY = places.ROOT / ".venv-cloud" / "bin" / "ray"
SKY = places.ROOT / ".venv-skypilot" / "bin" / "python"
EVERYTHING = (
    *("launch.nodes=2", "launch.infra=aws/us-west-2", "launch.accelerators=A10G:1", "launch.spot=true"),
    *("launch.bucket=my-runs", "launch.env=HF_TOKEN"),
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(places.folder(tmp_path))
    return tmp_path


def rendered(*more: str, place: Any = skypilot) -> dict[str, str]:
    keys, words = command.keys_of(place.Keys, places.words("skypilot", *more)[2:])
    return skypilot.render(job.derive("rl", words, keys), keys)


def task(*more: str, place: Any = skypilot) -> dict:
    (found,) = places.documents(rendered(*more, place=place)["task.yaml"])
    return found


def test_the_task() -> None:
    found = task(*EVERYTHING)
    assert (found["name"], found["num_nodes"]) == ("demo", 2)
    assert found["resources"]["infra"] == "aws/us-west-2" and found["resources"]["use_spot"] is True
    assert found["file_mounts"]["~/birl/runs"] == {"name": "my-runs", "store": "s3", "mode": "MOUNT_CACHED"}
    assert found["file_mounts"]["~/birl/my.jsonl"] == "./my.jsonl"
    assert found["secrets"] == {"RAY_AUTH_TOKEN": None, "HF_TOKEN": None}
    assert "infra" not in task()["resources"]
    for name in ("setup", "run"):
        places.is_shell(found[name])


PODS = (
    "launch.nodes=2",
    "launch.accelerators=H100:8",
    "launch.volume=runs-1",
    "launch.image=registry.example/birl:0.1",
)


def test_pods_are_machines_of_the_same_task(here: Path) -> None:
    """Of the current context; the run folder is on a volume, whose mount path is absolute."""
    found, other = task(*PODS, place=kubernetes), task(*PODS)
    assert found["resources"].pop("infra") == "k8s" and found == other
    assert found["volumes"] == {"/mnt/birl": "runs-1"} and found["resources"]["image_id"].startswith("docker:registry.")
    assert task("launch.infra=k8s/prod", place=kubernetes)["resources"]["infra"] == "k8s/prod"
    (line,) = [line for line in found["setup"].splitlines() if "/mnt/birl" in line]
    env = {"HOME": str(here), "PATH": os.environ["PATH"]}
    for _ in range(2):  # it can be run again
        subprocess.run(["bash", "-euc", line], env=env, check=True, timeout=10)
    assert (here / "birl" / "runs").readlink() == Path("/mnt/birl")


CHECK = """
import json, sys, yaml
import sky
config = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(dict(config), secrets_overrides=[(name, "x") for name in config["secrets"]])
resources = next(iter(task.resources))
refused = []
for change in ({"colour": "red"}, {"num_nodes": "many"}):
    try:
        sky.Task.from_yaml_config({**yaml.safe_load(open(sys.argv[1])), **change})
    except Exception:
        refused.append(list(change)[0])
print(json.dumps([task.name, task.num_nodes, str(resources.accelerators), resources.use_spot, refused]))
"""


@pytest.mark.skipif(not SKY.exists(), reason="make setup-skypilot installs SkyPilot")
@pytest.mark.parametrize(
    ("place", "words", "read"),
    [(skypilot, EVERYTHING, [2, "{'A10G': 1}", True]), (kubernetes, PODS, [2, "{'H100': 8}", False])],
)
def test_skypilot_reads_it(place: Any, words: tuple[str, ...], read: list[Any], here: Path) -> None:
    (here / "task.yaml").write_text(rendered(*words, place=place)["task.yaml"])
    env = {"PATH": os.environ["PATH"], "HOME": str(here), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [str(SKY), "-c", CHECK, "task.yaml"], capture_output=True, text=True, timeout=110, env=env, cwd=here
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["demo", *read, ["colour", "num_nodes"]]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_each_machine_does(here: Path, rank: int) -> None:
    """With programs that only say what they were asked."""
    log = places.stand_ins(here, ("ray", "birl", "python"))
    text = task(*EVERYTHING)["run"].replace("$(echo ~/birl-venv/bin)", f"{here}/bin").replace("~/birl", str(here))
    env = {**os.environ, "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "HOME": str(here)}
    done = subprocess.run(["bash"], input=text, text=True, env=env, timeout=20, cwd=here, capture_output=True)
    assert done.returncode == 0, done.stderr
    asked = [json.loads(line) for line in log.read_bytes().splitlines()]
    if rank:
        assert asked[-1][:3] == ["ray", "start", "--address=10.0.0.1:6399"] and len(asked) == 2
        return
    assert sorted(words[1] for words in asked if words[0] == "ray") == ["health-check", "start"]
    birl = [words[1:] for words in asked if words[0] == "birl"]
    assert [words[0] for words in birl] == ["launch", "logs", "status"]
    assert birl[0][1:4] == ["ray", "rl", "recipe.yaml"] and "launch.env=[HF_TOKEN]" in birl[0]
    assert not any(words[:2] == ["ray", "stop"] for words in asked)  # it would end SkyPilot's own


@pytest.mark.skipif(not RAY.exists(), reason="make setup-cloud installs Ray")
def test_two_machines_become_a_cluster_and_end_with_the_job(here: Path) -> None:
    """The task's script twice on this machine, with the real Ray: they find each other, the job runs once, all ends."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    text = task(*EVERYTHING, "launch.wait=100")["run"].replace(str(skypilot.PORT), port)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short:  # Ray's sockets have long names
        machines = [machine(here, rank, text, short) for rank in (0, 1)]
        try:
            codes = [child.wait(110) for child in machines]
        finally:
            for child in machines:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
    said = [(here / f"{rank}.log").read_text() for rank in (0, 1)]
    assert codes == [0, 0], said[0][-2000:]
    assert [line.split()[:2] for line in said[0].splitlines() if line.startswith("birl ")] == [
        ["birl", "launch"], ["birl", "logs"], ["birl", "status"],
    ]  # fmt: skip
    assert "birl launch" not in said[1]


def machine(here: Path, rank: int, text: str, temporary: str) -> subprocess.Popen[bytes]:
    bin = here / str(rank) / "birl-venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "birl").write_text('#!/bin/sh\necho "birl $@"\n')
    for name in ("python", "ray"):
        (bin / name).write_text(f'#!/bin/sh\nexec {RAY.parent}/{name} "$@"\n')
    for file in bin.iterdir():
        file.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "HOME": str(here / str(rank)), "PYTHONPATH": str(places.ROOT)}
    env |= {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "RAY_AUTH_TOKEN": "a" * 64}
    env |= {"RAY_TMPDIR": temporary, "RAY_gcs_rpc_server_reconnect_timeout_s": "3"}
    with (here / f"{rank}.log").open("w") as log:
        return subprocess.Popen(["bash", "-c", text], env=env, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.parametrize("where", ["skypilot", "kubernetes"])
def test_its_life_in_order(
    where: str, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log = places.stand_ins(here, ("sky", "ssh"), {"queue": "ID NAME STATUS\n1 demo RUNNING", "logs": "step 1"})
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "canary-5")
    assert main(["launch", *places.words(where, "launch.env=HF_TOKEN")]) == 0
    (asked,) = [json.loads(line) for line in log.read_bytes().splitlines()]
    secrets = ["--secret", "RAY_AUTH_TOKEN", "--secret", "HF_TOKEN"]
    assert asked == ["sky", "launch", "-y", "-d", "-c", "demo", *secrets, "runs/demo/launch/task.yaml"]
    capfd.readouterr()
    assert main(["status", "runs/demo"]) == 0 and "running" in capfd.readouterr().out
    assert main(["logs", "runs/demo"]) == 0 and capfd.readouterr().out == "step 1\n"
    assert main(["stop", "runs/demo"]) == 0
    assert [json.loads(line)[:2] for line in log.read_bytes().splitlines()[-2:]] == [["ssh", "demo"], ["sky", "down"]]


def test_machines_of_a_start_that_failed_can_be_given_back(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = places.stand_ins(here, ("sky", "ssh"), {"launch": 1})
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    assert main(["launch", *places.words("skypilot")]) == 2
    assert main(["stop", "runs/demo"]) == 0
    assert json.loads(log.read_bytes().splitlines()[-1])[:2] == ["sky", "down"]


@pytest.mark.parametrize(
    "word",
    ["launch.bucket=My_Runs", "launch.env=A=b", "run=../x", "launch.nodes=0", "launch.volume=R_1", "launch.image=a b"],
)
def test_what_is_refused(word: str) -> None:
    with pytest.raises(BirlError, match=word.partition("=")[0]):
        rendered(word)
