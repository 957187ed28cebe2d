"""`birl launch local` with real processes: they are supervised, and survive what happens to processes."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from birl.cli import main
from birl.engines import names
from birl.errors import BirlError
from birl.launch import local
from birl.launch import plan as files
from birl.launch.command import keys_of
from birl.launch.job import derive
from birl.launch.launcher import Handle, changed, find
from birl.launch.plan import LOCK, LaunchPlan, supervised
from birl.launch.supervisor import Supervisor, latest
from birl.rollout.ledger import audit
from tests.full_disk import full_disk
from tests.launch.jobs import ENGINES, SMALL, Launched, alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes end with their supervisor on Linux only")
SECRET = "canary-c0ffee"


@pytest.fixture
def job(
    request: pytest.FixtureRequest, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Launched]:
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("BIRL_TOKEN", SECRET)
    where, command, *words = request.param
    made = Launched(where, command, tiny, tmp_path, *words)
    try:
        yield made
    finally:
        made.end()


#: on a machine with much else to do a process takes half a minute to import torch
PATIENT = pytest.mark.timeout(600)
SFT = ("local", "sft", "batch_size=4", "model.dtype=float32")


@PATIENT
@pytest.mark.parametrize("job", [(*SFT, "steps=100000")], indirect=True)
def test_a_job_goes_on_without_the_terminal_and_saves_when_it_is_stopped(
    job: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "birl", *job.words]
    shell = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert shell.returncode == 0 and f"birl status {job.run}" in shell.stdout, shell.stderr
    job.wait(lambda: job.step > 2)
    assert main(["status", str(job.run)]) == 0
    said = capsys.readouterr().out
    assert "learner 0" in said and "running" in said and f"pid {job.pid('learner')}" in said and "step " in said
    assert main(job.words) == 2 and f"supervised by process {job.state.pid}" in capsys.readouterr().err
    assert main(["stop", str(job.run)]) == 0
    assert job.state.state == "stopped"
    job.wait(lambda: not alive(job.state.pid), 5)
    capsys.readouterr()
    assert main(["logs", str(job.run), "learner"]) == 0
    assert "Saving, then stopping" in capsys.readouterr().out
    saved = job.step
    assert (job.run / "checkpoints" / f"step-{saved:06d}").is_dir()
    assert main(["stop", str(job.run)]) == 2 and "it is stopped" in capsys.readouterr().err
    job.launch(f"steps={saved + 2}")
    assert main(["logs", str(job.run), "--follow"]) == 0  # returns when the job is done
    assert job.state.state == "done" and [row["step"] for row in job.rows()] == [*range(1, saved + 3)]
    assert all(SECRET not in file.read_text(errors="replace") for file in job.run.rglob("*") if file.suffix in TEXTS)


TEXTS = (".json", ".jsonl", ".log", ".yaml", ".wanted")


DRILL = ("local", "rl", *SMALL, *ENGINES, "engine.count=2", "rollout.max_staleness=1", "steps=100000")


@PATIENT
@pytest.mark.parametrize("job", [(*DRILL, "checkpoint.every=5", "checkpoint.keep_last=2")], indirect=True)
def test_engines_learner_and_supervisor_are_killed(job: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of docs/launch_local.md, which `-s` prints."""
    began, seconds = time.monotonic(), {}

    def recovered(what: str, since: float, done: Callable[[], object]) -> None:
        job.wait(done, 200)
        seconds[what] = time.monotonic() - since

    def trains(since: int) -> bool:
        return job.step > since

    job.launch()
    recovered("launched, first step", began, lambda: job.step > 0)
    place = derive("rl", job.words[3:], local.Keys()).engines
    assert len(names.find(place)) == 2

    # an engine
    killed, before = job.pid("engine", 1), job.step
    at = job.kill(killed)
    recovered("kill -9 of an engine: the next step", at, lambda: trains(before + 1))
    recovered("kill -9 of an engine: it samples again", at, lambda: job.log("learner-0").count("engine joined") == 1)
    assert job.pid("engine", 1) not in (0, killed) and len(names.find(place)) == 2

    # more, then fewer
    assert main(["scale", str(job.run), "engines=+1"]) == 0
    recovered(
        "birl scale engines=+1: it has joined", time.monotonic(), lambda: job.log("learner-0").count("joined") == 2
    )
    assert main(["scale", str(job.run), "engines=2"]) == 0
    recovered("birl scale engines=2: it has left", time.monotonic(), lambda: not job.pid("engine", 2))
    job.wait(lambda: job.log("learner-0").count("engine leaves") >= 1)

    # the learner
    engines, lost = [job.pid("engine", i) for i in range(2)], job.pid("learner")
    at, before = job.kill(lost), job.step
    recovered("kill -9 of the learner: the next new step", at, lambda: trains(before))
    assert [job.pid("engine", i) for i in range(2)] == engines and job.pid("learner") != lost

    # the supervisor
    children = job.pids()
    at = job.kill(job.state.pid)
    recovered("kill -9 of the supervisor: nothing runs", at, lambda: not any(map(alive, children)))
    capsys.readouterr()
    assert main(["status", str(job.run)]) == 1
    said = capsys.readouterr().out
    assert said.count("failed") == 3 and "the supervisor is gone" in said
    at, before = time.monotonic(), job.step
    job.launch()
    recovered("launched again: the next new step", at, lambda: trains(before))

    assert main(["stop", str(job.run)]) == 0
    assert main(["ledger", str(job.run)]) == 0
    found, steps = audit(job.run), [row["step"] for row in job.rows()]
    assert not found.problems and found.lives == 3 and steps == [*range(1, len(steps) + 1)]
    assert all(row.get("weights/gap", 0) == 0 for row in job.rows())
    assert not [file for file in job.run.rglob("*.log") if SECRET in file.read_text(errors="replace")]
    with capsys.disabled():
        print()
        for what, value in seconds.items():
            print(f"  {what:<50} {value:5.1f} s")
        print(f"  tokens: {dict(found.tokens)}; load {os.getloadavg()}")


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    words = ["data.train=my.jsonl", "engine.kind=birl", f"run={tmp_path}/run"]

    def plan(*more: str) -> LaunchPlan:
        keys, rest = keys_of(local.Keys, [*words, *more])
        return local.plan_of(derive("rl", rest, keys), keys)

    for more, reason in [
        (("launch.nodes=2",), "this machine alone"),
        (("launch.memory_gb=2",), "share its memory"),
        (("launch.env=[NOBODY_HAS_SET_IT]",), "NOBODY_HAS_SET_IT is not set"),
        (("launch.gpus=1", "engine.count=3"), "needs 4 GPUs, and this machine has 3"),
        (("weights.method=checkpoint",), "not possible with engine.attach"),
    ]:
        with pytest.raises(BirlError, match=reason):
            plan(*more)
    found = plan("launch.gpus=1", "engine.count=2")
    assert [found.of("learner", 0), found.of("engine", 0), found.of("engine", 1)] == [["4"], ["6"], ["7"]]
    assert found.most_engines() == 2
    for variables in (["CUDA_VISIBLE_DEVICES"], ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]):  # ROCm's counts there
        monkeypatch.setenv(variables[-1], "4,6,7")
        assert Supervisor(found).engines[1].env == dict.fromkeys(variables, "7")
    shared = plan("launch.gpus=0.5", "engine.count=4")
    assert [shared.of("engine", i) for i in range(4)] == [["6"], ["6"], ["7"], ["7"]] and shared.of("learner", 0) == [
        "4"
    ]
    thirds = plan("launch.gpus=0.33", "engine.count=6")  # not four on the first, which has room for three
    assert [thirds.of("engine", i) for i in range(6)] == [["6"]] * 3 + [["7"]] * 3 and thirds.most_engines() == 6
    assert plan("launch.gpus=0.6", "engine.count=2").of("engine", 1) == ["7"]
    assert plan("engine.count=2").of("engine", 1) == [] and plan("engine.count=2").most_engines() == 1000


def test_who_looks_for_a_supervisor_is_not_taken_for_one(tmp_path: Path) -> None:
    """A pid that is in the file belongs to somebody else by now, who would be told to end."""
    (tmp_path / LOCK).write_text("4711\n")
    with (tmp_path / LOCK).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert supervised(tmp_path) == 0
    with files.lock(tmp_path):
        assert supervised(tmp_path) == os.getpid()
    assert supervised(tmp_path) == 0 and supervised(tmp_path / "nothing") == 0


def test_a_disk_without_locks_has_one_supervisor_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre, say: the supervisor ended with a traceback."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", none)
    with files.lock(tmp_path):
        assert supervised(tmp_path) == os.getpid()
        with pytest.raises(BirlError, match=f"is supervised already by process {os.getpid()}"), files.lock(tmp_path, 2):
            pass
    assert supervised(tmp_path) == 0
    (tmp_path / LOCK).write_text(f"{os.getpid()}\n1\n")  # of an earlier process with our number
    assert supervised(tmp_path) == 0
    with files.lock(tmp_path):
        assert supervised(tmp_path) == os.getpid()


def test_stop_ends_no_process_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run folder is on a disk that both see; the number is that of something else here."""
    (tmp_path / "launch").mkdir()
    told: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append(pid))
    handle = Handle(where="local", id="1", run=str(tmp_path), name="x")
    with files.lock(tmp_path / "launch"):
        lines = (tmp_path / "launch" / LOCK).read_text().splitlines()
        (tmp_path / "launch" / LOCK).write_text("\n".join([*lines[:2], "another", ""]))
        with pytest.raises(BirlError, match=f"runs on another, as process {os.getpid()} there"):
            local.stop(handle)
    assert not told


def test_a_job_that_cannot_be_noted_is_named(tmp_path: Path) -> None:
    """On a full disk: Slurm had it, and nobody knew its number."""
    handle = Handle(where="slurm", id="4711", run=str(tmp_path / "run"), name="x")
    with full_disk(10), pytest.raises(BirlError, match=r"cannot write .*launch.json: .*\n.* do not know of slurm 4711"):
        handle.save()


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    row = {"step": 7, "time": "2026-11-22T09:22:11+00:00"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + '{"step": 8, "ti')
    assert latest(str(tmp_path)) == (7, datetime.fromisoformat(row["time"]).timestamp())
    assert latest(str(tmp_path / "nothing")) == (0, 0.0)


def test_a_number_of_engines() -> None:
    assert [changed(2, "+2"), changed(2, "-1"), changed(2, "7")] == [4, 1, 7]
    for wrong in ("0", "-2", "two", "1.5", "", "+", "99999", "1;ls"):
        with pytest.raises(BirlError, match="engines="):
            changed(2, wrong)


def test_two_jobs_of_one_name_have_engines_of_their_own(tmp_path: Path) -> None:
    one, two = (
        derive("rl", ["data.train=a.jsonl", "engine.kind=birl", f"run={tmp_path}/{n}/my run"], local.Keys())
        for n in "ab"
    )
    assert one.name == two.name == "my run" and one.engines != two.engines
    assert names.folder(one.engines) != names.folder(two.engines)
    assert one.learner.command[-1] == f"engine.attach=[{one.engines}]"


def test_a_folder_that_nothing_was_launched_into(tmp_path: Path) -> None:
    with pytest.raises(BirlError, match="was not started by `birl launch`"):
        find(str(tmp_path))
