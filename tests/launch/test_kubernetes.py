"""The manifest of `birl launch kubernetes`: of the schema, whole in itself, and the job that was typed."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from birl.cli import main
from birl.errors import BirlError
from birl.launch import command, elsewhere, job, kubernetes
from birl.launch.kubernetes import WORK
from birl.launch.launcher import Handle
from tests.launch import places
from tests.launch.api_server import api_server
from tests.launch.rayjob_schema import CONFIG_MAP, RAY_JOB

jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(places.folder(tmp_path))
    return tmp_path


def rendered(*more: str) -> dict[str, str]:
    keys, words = command.keys_of(kubernetes.Keys, places.words("kubernetes", *more)[2:])
    return kubernetes.render(job.derive("rl", words, keys), keys)


def parts(*more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the RayJob."""
    files, ray = places.documents(rendered(*more)["rayjob.yaml"])
    return files, ray


EVERYTHING = (
    *("launch.nodes=3", "launch.gpus=1", "launch.claim=runs", "launch.account=trainer", "launch.namespace=team-a"),
    *("launch.env=HF_TOKEN,WANDB_API_KEY", "launch.name=Some_Name.7"),
)


@pytest.mark.parametrize("more", [(), EVERYTHING], ids=["plain", "everything"])
def test_it_is_of_the_schema(more: tuple[str, ...]) -> None:
    files, ray = parts(*more)
    jsonschema.validate(files, CONFIG_MAP)
    jsonschema.validate(ray, RAY_JOB)


@pytest.mark.parametrize(
    "path",
    ["spec.rayClusterSpec.colour", "spec.entryPoint", "spec.rayClusterSpec.headGroupSpec.template.spec.volume"],
)
def test_the_schema_does_look(path: str) -> None:
    _, ray = parts()
    *way, last = path.split(".")
    place = ray
    for name in way:
        place = place[name]
    place[last] = "x"
    with pytest.raises(jsonschema.ValidationError, match=last):
        jsonschema.validate(ray, RAY_JOB)


def test_every_reference_has_its_end() -> None:
    files, ray = parts(*EVERYTHING)
    cluster = ray["spec"]["rayClusterSpec"]
    specs = [cluster["headGroupSpec"]["template"]["spec"], cluster["workerGroupSpecs"][0]["template"]["spec"]]
    for spec in specs:
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        (container,) = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert volumes["files"]["configMap"]["name"] == files["metadata"]["name"]
        keys = {mount["subPath"] for mount in container["volumeMounts"] if mount["name"] == "files"}
        assert keys == set(files["data"])
    head = specs[0]["containers"][0]["env"]
    assert [env["valueFrom"]["secretKeyRef"]["name"] for env in head] == ["some-name-7-env"] * 2
    assert "env" not in specs[1]["containers"][0]
    assert {part["metadata"]["namespace"] for part in (files, ray)} == {"team-a"}


def test_files_are_where_the_command_names_them(here: Path) -> None:
    (here / "data").mkdir()
    (here / "data" / "more.jsonl").write_text(places.ROW)
    files, ray = parts("data.train=[my.jsonl,data/more.jsonl]")
    mounts = ray["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    found = {m["mountPath"]: files["data"][m["subPath"]] for m in mounts if m["name"] == "files"}
    assert found[f"{WORK}/data/more.jsonl"] == found[f"{WORK}/my.jsonl"] == places.ROW
    assert found[f"{WORK}/recipe.yaml"] == places.RECIPE


def test_the_head_waits_starts_follows_and_fails_with_the_job(here: Path) -> None:
    """run.sh with programs that only say what they were asked."""
    text = parts("launch.nodes=2")[0]["data"]["run.sh"]
    places.is_shell(text)
    assert places.head_words(text)[:2] == ["rl", "recipe.yaml"]
    for answers, code in (({}, 0), ({"status": 1}, 1)):
        log = places.stand_ins(here, ("birl", "python"), answers)
        log.unlink(missing_ok=True)
        env = {**os.environ, "PATH": f"{here}/bin:{os.environ['PATH']}"}
        done = subprocess.run(["sh"], input=text.replace(WORK, str(here)), text=True, env=env, timeout=20, cwd=here)
        asked = [json.loads(line)[:3] for line in log.read_bytes().splitlines()]
        assert done.returncode == code
        follow = [["birl", "logs", "runs/demo"], ["birl", "status", "runs/demo"]]
        assert asked == [["python", "-m", "birl.launch.nodes"], ["birl", "launch", "ray"], *follow]


def test_the_head_runs_the_same_job() -> None:
    words = places.head_words(parts("launch.gpus=1", "launch.cpus=4")[0]["data"]["run.sh"])
    keys, given = command.keys_of(elsewhere.Keys, [word for word in words if word != "launch.address=auto"])
    found = job.derive(given[0], given[1:], keys)
    assert [(r.name, r.count, r.gpus, r.cpus) for r in found.roles] == [("learner", 1, 1, 4), ("engine", 2, 1, 4)]


@pytest.mark.parametrize(
    ("nodes", "words", "gpus"),
    [
        (1, (), "3"),
        (2, (), "2"),
        (3, (), "1"),
        (1, ("launch.gpus=0.5",), "2"),  # 1.5
        (2, ("launch.gpus=2",), "4"),  # one machine has two processes
        (
            2,
            (
                "engine.kind=vllm",
                "engine.tensor_parallel=4",
                "engine.count=1",
                "weights.method=reload",
                "launch.claim=x",
            ),
            "4",
        ),
    ],
)
def test_gpus_of_a_machine(nodes: int, words: tuple[str, ...], gpus: str) -> None:
    _, ray = parts(f"launch.nodes={nodes}", "launch.gpus=1", *words)  # a learner and two engines
    (workers,) = ray["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == nodes
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == gpus


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("launch.image=", "launch.image"),
        ("launch.namespace=a b", "launch.namespace"),
        ("launch.secret=$(id)", "launch.secret"),
        ("launch.env=A=b", "launch.env"),
    ],
)
def test_what_is_refused(word: str, said: str) -> None:
    with pytest.raises(BirlError, match=said):
        rendered(word)


def test_files_that_are_too_large_or_no_text(here: Path) -> None:
    (here / "my.jsonl").write_text(places.ROW * 30_000)
    with pytest.raises(BirlError, match=r"have \d+ bytes"):
        rendered()
    (here / "my.jsonl").write_text(places.ROW)
    (here / "model.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BirlError, match=r"model\.bin: only files of text"):
        rendered("launch.files=model.bin")


def test_its_life_in_order(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """With a kubectl that only says what it was asked."""
    found = {"status": {"jobStatus": "RUNNING", "rayClusterName": "demo-x", "jobDeploymentStatus": "Running"}}
    status = "demo: ray 1\n  learner 0  running  10.0.0.1  step 2"
    answers: dict[str, str | int] = {"get rayjob": json.dumps(found), "get pods": "head", "birl status": status}
    log = places.stand_ins(here, ("kubectl",), answers)
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    assert main(["launch", *places.words("kubernetes")]) == 0
    asked = [json.loads(line)[1:] for line in log.read_bytes().splitlines()]
    assert asked == [["apply", "-n", "default", "-f", "runs/demo/launch/rayjob.yaml"]]
    capfd.readouterr()
    assert main(["status", "runs/demo"]) == 0
    said = capfd.readouterr().out
    assert "job 0          running     demo-x" in said and "learner 0      running" in said
    assert main(["logs", "runs/demo", "--follow"]) == 0
    assert json.loads(log.read_bytes().splitlines()[-1])[1:] == ["logs", "job/demo", "-n", "default", "-f"]
    assert main(["stop", "runs/demo"]) == 0
    last = [json.loads(line)[1:] for line in log.read_bytes().splitlines()[-2:]]
    assert "birl stop runs/demo" in last[0][-1] and last[1][:3] == ["delete", "rayjob", "demo"]


def test_machines_are_given_back_although_the_job_does_not_answer(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"status": {"jobStatus": "RUNNING", "rayClusterName": "demo-x"}}
    log = places.stand_ins(here, ("kubectl",), {"birl stop": 1, "get rayjob": json.dumps(found), "get pods": "head"})
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    with pytest.raises(BirlError, match="birl stop"):
        kubernetes.stop(Handle(where="kubernetes", id="demo", run="runs/demo", name="demo", more={"namespace": "a"}))
    assert json.loads(log.read_bytes().splitlines()[-1])[1:4] == ["delete", "rayjob", "demo"]


def test_secrets_go_through_a_pipe(here: Path) -> None:
    """secret.sh with a kubectl that keeps what it reads and was asked."""
    (here / "bin").mkdir()
    (here / "bin" / "kubectl").write_text(f'#!/bin/sh\necho "$@" >>{here}/asked\ncat >>{here}/read\n')
    (here / "bin" / "kubectl").chmod(0o755)
    env = {"PATH": f"{here}/bin:{os.environ['PATH']}", "HF_TOKEN": "canary 'x' $y"}
    text = rendered("launch.env=HF_TOKEN")["secret.sh"]
    assert subprocess.run(["sh"], input=text, text=True, env=env, timeout=20).returncode == 0
    assert (here / "read").read_text() == "HF_TOKEN=canary 'x' $y\n" and "canary" not in (here / "asked").read_text()
    del env["HF_TOKEN"]
    done = subprocess.run(["sh"], input=text, text=True, env=env, timeout=20, capture_output=True)
    assert "HF_TOKEN" in done.stderr


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="apt-get install kubernetes-client")
def test_the_real_kubectl(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Against a double of the API server: the Secret, the files, the job, its status, its end."""
    monkeypatch.setenv("HF_TOKEN", "canary 'x' $y")
    monkeypatch.setenv("HOME", str(here))  # kubectl caches there what a server can do
    with api_server(here) as (config, objects):
        monkeypatch.setenv("KUBECONFIG", str(config))
        assert main(["launch", *places.words("kubernetes", "launch.env=HF_TOKEN")]) == 0
        where = "namespaces/default"
        assert set(objects) == {
            f"/api/v1/{where}/secrets/demo-env",
            f"/api/v1/{where}/configmaps/demo-files",
            f"/apis/ray.io/v1/{where}/rayjobs/demo",
        }
        secret = objects[f"/api/v1/{where}/secrets/demo-env"]["data"]
        assert base64.b64decode(secret.pop("HF_TOKEN")).decode() == "canary 'x' $y" and not secret
        kept = objects[f"/apis/ray.io/v1/{where}/rayjobs/demo"]
        assert kept["spec"] == parts("launch.env=HF_TOKEN")[1]["spec"]
        assert main(["launch", *places.words("kubernetes", "launch.env=HF_TOKEN")]) == 0  # once more changes nothing
        capfd.readouterr()
        assert main(["status", "runs/demo"]) == 0 and "running     demo-abcde" in capfd.readouterr().out
        kept["status"] = {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "message": "no machines"}
        assert main(["status", "runs/demo"]) == 1 and "no machines" in capfd.readouterr().out
        assert main(["stop", "runs/demo"]) == 0
        assert f"/apis/ray.io/v1/{where}/rayjobs/demo" not in objects
