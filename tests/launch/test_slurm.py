"""`birl launch slurm` on a real Slurm of three nodes. Where only a job's life matters, its processes are stand-ins."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from birl.cli import main
from birl.errors import BirlError
from birl.launch import slurm
from birl.launch.job import Job, Role, derive
from birl.launch.launcher import Handle, find
from birl.launch.slurm import Keys, Places, places
from birl.launch.slurm_queue import ask
from tests.launch.slurm_cluster import Cluster, cluster, missing, until
from tests.train import test_offline as offline

needs_slurm = pytest.mark.skipif(missing(), reason="no Slurm: make setup-slurm")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def idle(nodes: Cluster) -> Cluster:
    """Nothing is left of the test before."""
    until(nodes.free, "the nodes are free")
    return nodes


# A process of a job, without a model. It says where it is; TERM makes it save and end, as it does a run.
STAND_IN = """
import atexit, hashlib, os, signal, subprocess, sys, time
from pathlib import Path
role, run = sys.argv[1], Path(sys.argv[2])
start = os.environ.get("SLURM_RESTART_COUNT", "0")
def term(*_):
    print("saved" if rank == "0" else "told", flush=True)
    (run / "saved").touch()
    sys.exit(143)
rank = os.environ.get("RANK", "0")
if role == "learner" and rank == "0" and "early" not in sys.argv:  # as a run: its number, and a worker
    (run / ".lock").write_text(f"{os.getpid()}\\n")
    code = "import signal, time; signal.signal(15, lambda *_: print('worker told', flush=True)); time.sleep(60)"
    worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    atexit.register(worker.kill)
signal.signal(signal.SIGTERM, term if rank == "0" else signal.SIG_IGN)
digest = hashlib.sha256(os.environ.get("BIRL_TOKEN", "").encode()).hexdigest()
names = ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "BIRL_HOST",
         "LOCAL_WORLD_SIZE")
print(start, *(f"{n}={os.environ.get(n, '-')}" for n in names), f"TOKEN={digest}", f"SEEN={os.environ.get('CANARY')}",
      f"OTHER={os.environ.get('OTHER_CANARY')}", f"CACHE={os.environ.get('BIRL_CACHE')}", sep="|", flush=True)
with (run / "metrics.jsonl").open("a") as file:
    if role == "learner" and rank == "0" and "silent" not in sys.argv:
        file.write(start + "\\n")
for word in sys.argv[3:]:
    what, _, value = word.partition("=")
    if what == "wait" and start == "0":  # until told; later starts go on
        time.sleep(60)
    if what == "until":
        end = time.time() + 30
        while not Path(value).exists() and time.time() < end:
            time.sleep(0.05)
    if what == "exit":
        sys.exit(int(value))
    if what == "first_exit" and start == "0":
        time.sleep(0.5)
        sys.exit(int(value))
"""


def stand_ins(
    folder: Path, *words: str, engines: tuple[str, ...] | None = None, ranks: int = 1, count: int = 1, **more: Any
) -> Job:
    """`words` of the learner and of each of `count` engines: what it does (see above)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stand_in.py").write_text(STAND_IN)
    run = folder / "a run"  # a place whose name needs quotes
    command = (sys.executable, str(folder / "stand_in.py"))
    needs = {"gpus": more.pop("gpus", 0.0), "memory_gb": more.pop("memory_gb", 0.0)}
    roles = [Role(name="learner", count=ranks, command=(*command, "learner", str(run), *words), **needs)]
    if engines is not None:
        own = needs | {"gpus": 2 * needs["gpus"]}
        roles.append(Role(name="engine", count=count, command=(*command, "engine", str(run), *engines), **own))
    return Job(name="demo", command="rl", words=(), run=run, roles=tuple(roles), **more)


def submitted(job: Job, **keys: Any) -> Handle:
    handle = slurm.submit(job, Keys(**keys))
    handle.save()
    return handle


def states(handle: Handle) -> list[str]:
    return [one.state for one in slurm.status(handle)]


def ended(nodes: Cluster, handle: Handle, state: str) -> None:
    """All processes are, in the end."""

    def over() -> bool:
        nodes.hurry()
        return set(states(handle)) <= {"done", "failed", "stopped"}

    until(over, f"{slurm.status(handle)} {list(slurm.logs(handle, '', False))}")
    assert set(states(handle)) == {state}, (slurm.status(handle), list(slurm.logs(handle, "", False)))


def log(job: Job, name: str) -> str:
    file = job.run / "launch" / name
    return file.read_text() if file.exists() else ""


def files(folder: Path) -> str:
    return "\n".join(file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())


def test_processes_are_spread_over_the_nodes() -> None:
    learner, engine = (Role(name=name, count=4, command=("x",), gpus=1) for name in ("learner", "engine"))
    job = Job(name="x", command="rl", words=(), run=Path("x"), roles=(learner, engine))
    assert places(job, 1) == Places(nodes=1, ranks=4, engines=(0, 0, 0, 0), most=8, gpus=8)
    assert places(job, 2) == Places(nodes=2, ranks=2, engines=(0, 1, 0, 1), most=4, gpus=4)
    assert places(job, 3) == Places(nodes=3, ranks=2, engines=(2, 2, 0, 1), most=3, gpus=3)
    assert places(job, 8) == Places(nodes=8, ranks=1, engines=(4, 5, 6, 7), most=1, gpus=1)
    alone = Job(name="x", command="sft", words=(), run=Path("x"), roles=(learner,))
    assert places(alone, 2) == Places(nodes=2, ranks=2, engines=(), most=2, gpus=2)


def test_what_slurm_cannot_give_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = stand_ins(tmp_path)
    for keys, part in (
        (Keys(nodes=2), "launch.nodes=2: the job has 1 processes"),
        (Keys(time=2), "launch.signal=120 s is not before launch.time=2 min"),
        (Keys(extra=["--constraint=x\nrm"]), "launch.extra"),
        (Keys(extra=["rm -rf"]), "launch.extra"),
        (Keys(extra=["n2"]), """put one with commas in quotes: 'launch.extra=["--exclude=n1,n2"]'"""),
        (Keys(account="a\nrm"), r"'a\nrm': a line of #SBATCH cannot hold this"),
        (Keys(array="seed=1"), "launch.array=seed=1: has one value only"),
    ):
        with pytest.raises(BirlError, match=re.escape(part)):
            slurm.render(job, keys)
    with pytest.raises(BirlError, match=r"launch.gpus: the learner would have 0.5 GPUs"):
        slurm.render(stand_ins(tmp_path, gpus=0.5), Keys())
    with pytest.raises(BirlError, match=r"launch.env: NOT_THERE is not set here"):
        slurm.submit(stand_ins(tmp_path, env=("NOT_THERE",)), Keys())
    sweep = derive("sft", ["data.train=x.jsonl", f"run={tmp_path}/run"], Keys())
    with pytest.raises(BirlError, match=r"launch.array=parallel.fsdp=1,2: the jobs of an array need the same"):
        slurm.render(sweep, Keys(array="parallel.fsdp=1,2"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BirlError, match="sbatch is not here"):
        slurm.submit(job, Keys())


def test_a_site_whose_sbatch_prints_more_than_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id was all that was printed, which no command of Slurm knows."""
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    for lines, job in (("--> Verifying access (default)... OK", "4711;main"), ("", ""), ("4", "12")):
        sbatch.write_text(f"#!/bin/sh\necho '{lines}'\necho '{job}'\n")
        sbatch.chmod(0o755)
        if job:
            assert slurm.submit(stand_ins(tmp_path), Keys()).id == job.partition(";")[0]
        else:
            with pytest.raises(BirlError, match="sbatch named no job"):
                slurm.submit(stand_ins(tmp_path), Keys())


def test_the_script_can_be_read_before_it_is_handed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "sft",
        "data.train=it's.jsonl",
        "parallel.fsdp=4",
        f"run={tmp_path}/run",
        "launch.nodes=2",
        "launch.gpus=2",
    ]
    words += ["launch.time=90", "launch.gres=gpu:h200", "launch.extra=[--exclusive,--constraint=fast]"]
    assert main(["launch", "slurm", *words, "launch.memory_gb=1.5", "launch.cpus=3", "--dry-run"]) == 0
    text = capsys.readouterr().out
    for line in (
        "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=3", "--gres=gpu:h200:4", "--mem=3072M", "--time=90",
        "--signal=B:USR1@120", "--requeue", "--exclusive", "--constraint=fast",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    assert "sbatch --parsable" in text and not (tmp_path / "run").exists()
    script = text.partition("slurm.sh\n")[2].partition("# --- commands")[0]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    said = subprocess.run(
        ["bash"], input=script.partition("# What follows")[0] + 'printf "%s\\n" "${learner[@]}"', text=True,
        check=True, capture_output=True,
    ).stdout.splitlines()  # fmt: skip
    assert "data.train=it's.jsonl" in said and f"run={tmp_path}/run" in said


@needs_slurm
def test_what_slurm_says_is_told(idle: Cluster, tmp_path: Path) -> None:
    job = stand_ins(tmp_path)
    with pytest.raises(BirlError, match=r"(?s)nvalid partition.*Set launch.partition to one of debug, short\."):
        slurm.submit(job, Keys(partition="nope"))
    with pytest.raises(BirlError, match=r"(?s)not available.*Set launch.nodes, launch.cpus, launch.gpus"):
        slurm.submit(stand_ins(tmp_path, gpus=9), Keys())
    with pytest.raises(BirlError, match="was not started by `birl launch`"):
        find(str(job.run))


@needs_slurm
def test_steps_share_the_allocation_and_no_gpu(idle: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "s3cret-canary")
    monkeypatch.setenv("OTHER_CANARY", "s3cret-canary")
    gate = tmp_path / "gate"
    job = stand_ins(
        tmp_path, f"until={gate}", engines=(f"until={gate}x",), ranks=2, count=2, gpus=1, memory_gb=1, env=("CANARY",)
    )
    handle = submitted(job, nodes=2)
    until(lambda: states(handle) == ["running"] * 4 and log(job, "engine-1.log"), "all run")
    assert [one.where for one in slurm.status(handle)] == ["n1", "n2", "n1", "n2"]
    with pytest.raises(BirlError, match=r"runs already, as the job \d+"):
        slurm.submit(job, Keys())
    gate.touch()
    ended(idle, handle, "done")
    said = {
        name: dict(word.split("=", 1) for word in log(job, f"{name}.log").splitlines()[0].split("|")[1:])
        for name in ("learner-0", "learner-1", "engine-0", "engine-1")
    }
    for node in ("0", "1"):
        learner, engine = said[f"learner-{node}"], said[f"engine-{node}"]
        assert learner["SLURMD_NODENAME"] == engine["SLURMD_NODENAME"] == f"n{int(node) + 1}"
        own, other = (one["CUDA_VISIBLE_DEVICES"].split(",") for one in (learner, engine))
        assert (len(own), len(other)) == (1, 2) and not {*own} & {*other}
        assert (learner["RANK"], learner["LOCAL_RANK"], learner["WORLD_SIZE"]) == (node, "0", "2")
        assert learner["LOCAL_WORLD_SIZE"] == "1"  # of which `threads=0` is a share
        assert learner["MASTER_ADDR"] == "127.0.0.1" and engine["RANK"] == "-"
    tokens = {one["TOKEN"] for one in said.values()}
    assert len(tokens) == 1 and {one["BIRL_HOST"] for one in said.values()} == {"0.0.0.0"}
    assert {one["SEEN"] for one in said.values()} == {"s3cret-canary"} and {one["OTHER"] for one in said.values()} == {
        "None"
    }
    assert {one["CACHE"] for one in said.values()} == {f"{job.run}/launch/cache"}
    own = files(job.run).replace("SEEN=s3cret-canary", "")
    assert "s3cret-canary" not in own and "CANARY" not in log(job, "slurm.sh")
    assert "told" not in log(job, "learner-1.log") and "saved" in log(job, "engine-0.log")  # engines end with it


@needs_slurm
def test_an_engine_that_ends_starts_the_job_again(idle: Cluster, tmp_path: Path) -> None:
    job = stand_ins(tmp_path, "wait", engines=("first_exit=3", f"until={tmp_path}/never"))
    handle = submitted(job)
    followed: list[str] = []
    follower = Thread(target=lambda: followed.extend(slurm.logs(handle, "", follow=True)), daemon=True)
    follower.start()
    ended(idle, handle, "done")
    follower.join(10)
    assert idle.job(handle.id)["Restarts"] == "1" and (job.run / "metrics.jsonl").read_text() == "0\n1\n"
    assert "learner-0 | saved" in followed and "learner-0 | worker told" not in followed
    assert sum(line.startswith("engine-0 | ") for line in followed) >= 2
    assert "engine-0 ended with 3 (failure 1 of 3)" in log(job, f"slurm-{handle.id}.out")
    own = [f"learner-0 | {line}" for line in slurm.logs(handle, "learner", False)]
    assert own == [line for line in followed if line.startswith("learner-0")]


@needs_slurm
def test_the_time_limit_saves_and_requeues(idle: Cluster, tmp_path: Path) -> None:
    """The signal comes from here; that Slurm sends it before the limit is in docs/launch_slurm.md."""
    job = stand_ins(tmp_path, "wait")
    handle = submitted(job, time=10, signal=60)
    until(lambda: log(job, "learner-0.log"), "it runs")
    idle.do("scancel", "--batch", "--signal=USR1", handle.id)
    until(lambda: "restarting" in states(handle), "it is requeued")
    assert any("time limit" in one.detail for one in slurm.status(handle))
    ended(idle, handle, "done")
    assert idle.job(handle.id)["Restarts"] == "1" and log(job, "learner-0.log").count("saved") == 1
    assert not (job.run / "launch" / "failures").exists() and "worker" not in log(job, "learner-0.log")


@needs_slurm
def test_stop_lets_it_save_and_nothing_starts_again(idle: Cluster, tmp_path: Path) -> None:
    job = stand_ins(tmp_path, "wait", "early", engines=(f"until={tmp_path}/never",))
    handle = submitted(job)
    waiting = submitted(stand_ins(tmp_path / "waiting"), partition="short", time=1, signal=1, extra=["--begin=now+60"])
    assert states(waiting) == ["waiting"]
    until(lambda: log(job, "learner-0.log"), "it runs")
    slurm.stop(handle)
    assert set(states(handle)) == {"stopped"} and log(job, "learner-0.log").count("saved") == 1
    slurm.stop(waiting)
    assert states(waiting) == ["stopped"]
    assert idle.job(handle.id)["Restarts"] == idle.job(waiting.id)["Restarts"] == "0"


@needs_slurm
def test_scancel_does_not_requeue(idle: Cluster, tmp_path: Path) -> None:
    job = stand_ins(tmp_path, "wait")
    handle = submitted(job)
    until(lambda: log(job, "learner-0.log"), "it runs")
    idle.do("scancel", handle.id)
    ended(idle, handle, "stopped")
    assert idle.job(handle.id)["Restarts"] == "0" and log(job, "learner-0.log").count("saved") == 1


@needs_slurm
def test_failures_are_counted_and_mistakes_are_not_repeated(idle: Cluster, tmp_path: Path) -> None:
    mistake = stand_ins(tmp_path / "mistake", "silent", "exit=2")
    failing = stand_ins(tmp_path / "failing", "exit=2")  # after a step: no mistake of the user's
    handles = submitted(mistake), submitted(failing, restarts=1)
    ended(idle, handles[0], "failed")
    assert idle.job(handles[0].id)["Restarts"] == "0" and slurm.status(handles[0])[0].detail == "learner ended with 2"
    ended(idle, handles[1], "failed")
    assert idle.job(handles[1].id)["Restarts"] == "1" and (failing.run / "metrics.jsonl").read_text() == "0\n1\n"


@needs_slurm
def test_an_array_has_a_run_for_each_combination(idle: Cluster, tmp_path: Path) -> None:
    """And what happens to one, the last of all, whose number is that of the array, is no matter of the others."""
    python, gate = tmp_path / "python", tmp_path / "gate"  # in its place: says what it was told to run
    python.write_text(
        f'#!/bin/bash\n[ "$1" = -c ] && exec {sys.executable} "$@"\n[ "$SLURM_RESTART_COUNT" ] && exit 0\necho "$@"\n'
        f'trap "exit 0" TERM\nwhile [ ! -e {gate} ]; do sleep 0.1; done\n'
    )
    python.chmod(0o755)
    job = derive("sft", ["data.train=x.jsonl", f"run={tmp_path}/runs"], Keys(), str(python))
    handle = submitted(job, array="optimizer.lr=1e-5,1e-6 seed=7", at_once=2)
    until(
        lambda: all(log(replace(job, run=job.run / n), "learner-0.log") for n in ("lr=1e-05", "lr=1e-06")), "both run"
    )
    idle.do("scancel", "--batch", "--signal=USR1", f"{handle.id}_1")
    until(lambda: states(handle) == ["running", "restarting"], "the second is requeued, and not the first")
    gate.touch()
    ended(idle, handle, "done")
    assert [idle.job(f"{handle.id}_{number}")["Restarts"] for number in (0, 1)] == ["0", "1"]
    for name in ("lr=1e-05", "lr=1e-06"):
        run = tmp_path / "runs" / name
        text = (run / "launch" / "learner-0.log").read_text().splitlines()[0]
        own = f"optimizer.{name} seed=7 run={run}"
        assert text == f"-m birl sft data.train=x.jsonl {own}"
        assert f"{name} learner-0 | {text}" in [*slurm.logs(handle, "learner", False)]
    assert [one.role for one in slurm.status(handle)] == ["lr=1e-05 learner", "lr=1e-06 learner"]


@needs_slurm
def test_two_ranks_lose_a_node_and_end_where_they_would_have(idle: Cluster, tiny: Path, tmp_path: Path) -> None:
    """Two nodes, one of which goes down: on the third and from the checkpoint, with the metrics of a run that nothing
    happened to."""
    steps = "steps=40"
    (tmp_path / "one").mkdir()
    offline.run(tiny, tmp_path / "one", "sft", steps, "parallel.fsdp=2")
    whole = offline.log(tmp_path / "one")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in offline.TEXTS))
    run = tmp_path / "two" / "run"
    words = [
        f"data.train={tmp_path}/texts.jsonl", f"model.path={tiny}", "model.dtype=float32", "batch_size=4",
        "optimizer.lr=3e-3", "track.console=off", "track.tensorboard=false", "track.report=false", "threads=1",
        "checkpoint.every=5", "parallel.fsdp=2", steps, f"run={run}",
    ]  # fmt: skip
    assert main(["launch", "slurm", "sft", *words, "launch.nodes=2"]) == 0
    handle = find(str(run))
    metrics = run / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 7, f"seven steps: {files(run / 'launch')}")
    idle.lose("n2")
    try:
        ended(idle, handle, "done")
    finally:
        idle.node("n2")
    assert idle.job(handle.id)["Restarts"] == "1" and idle.job(handle.id)["NodeList"] == "n[1,3]"
    found = offline.log(tmp_path / "two")
    assert [one["step"] for one in found] == list(range(1, 41)) == [one["step"] for one in whole]
    for name in ("loss", "grad_norm"):
        assert [one[name] for one in found] == pytest.approx([one[name] for one in whole], rel=1e-4)


def test_what_slurm_prints_in_another_encoding_is_shown() -> None:
    assert ask([sys.executable, "-c", r"import os; os.write(1, b'gr\xfcn')"]).stdout == "gr\ufffdn"
