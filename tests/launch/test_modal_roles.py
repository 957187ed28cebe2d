"""What runs in Modal's containers, without Modal: real processes, and a dict for the notes that containers share."""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from birl.cache import cache_folder
from birl.engines import names
from birl.errors import BirlError
from birl.launch import modal_checks
from birl.launch.modal import learner_status
from birl.launch.modal_container import ContainerWork, Directory, Ended, learn, serve


class Notes(dict[str, Any]):
    def put(self, key: str, value: Any) -> None:
        self[key] = value


@dataclass
class Job:
    """A learner's container of this test, whose command is a Python program."""

    folder: Path
    notes: Notes = field(default_factory=Notes)
    commits: int = 0
    spawned: list[int] = field(default_factory=list)

    def commit(self) -> None:
        self.commits += 1

    def learn(self, program: str, **about: Any) -> int:
        command = (sys.executable, "-c", program)
        work = ContainerWork(command=command, run="runs/demo", place=str(self.folder / "volume" / "demo"), **about)
        return learn(work, self.notes, spawn=self.spawned.append, commit=self.commit, beat=0.1, start=0.5)

    @property
    def log(self) -> str:
        return (self.folder / "volume" / "demo" / "launch" / "learner-0.log").read_text()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_folder("kernels"))  # compiling them takes half a minute
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BIRL_TOKEN", secrets.token_hex(8))
    return Job(tmp_path)


def test_the_run_folder_is_on_the_volume_and_what_is_printed_is_kept(job: Job, capfd: pytest.CaptureFixture) -> None:
    assert job.learn("open('runs/demo/metrics.jsonl', 'w').write('{}'); print('step 1')") == 0
    assert (job.folder / "volume" / "demo" / "metrics.jsonl").read_text() == "{}"
    assert job.log == "step 1\n" and "[learner 0] step 1\n" in capfd.readouterr().out
    assert job.notes["learner"]["state"] == "done" and job.notes["over"] is True
    assert job.commits == 1


def test_a_learner_that_fails_is_started_again(job: Job) -> None:
    program = "import os, sys; sys.exit(0 if os.path.exists('runs/demo/there') else open('runs/demo/there', 'w') and 1)"
    with pytest.raises(Ended, match="exit code 1"):
        job.learn(program)
    assert job.notes["learner"]["state"] == "restarting" and "over" not in job.notes and job.commits == 1
    assert job.learn(program) == 0
    assert job.notes["learner"]["state"] == "done" and job.notes["learner"]["starts"] == 2


def test_a_mistake_in_the_input_is_not_tried_again(job: Job) -> None:
    assert job.learn("raise SystemExit(2)") == 2
    assert job.notes["learner"]["state"] == "failed" and job.notes["over"] is True


SAVES = """
import signal, sys, time
def save(*_):
    open('runs/demo/saved', 'w')
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print('ready')
time.sleep(60)
"""


def test_it_is_stopped_and_saves(job: Job) -> None:
    def stop() -> None:
        while not (log := job.folder / "volume" / "demo" / "launch" / "learner-0.log").is_file() or not log.read_text():
            time.sleep(0.05)
        job.notes["stop"] = True

    threading.Thread(target=stop, daemon=True).start()
    assert job.learn(SAVES) == 143
    assert (job.folder / "volume" / "demo" / "saved").exists() and job.notes["learner"]["state"] == "stopped"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_learner_that_was_signalled_is_not_started_again(job: Job, number: int) -> None:
    code = 128 + number
    assert job.learn(f"raise SystemExit({code})") == code
    assert job.notes["learner"] | {"time": 0} == {**job.notes["learner"], "state": "stopped", "detail": "", "time": 0}
    assert learner_status(job.notes["learner"], code).state == "stopped"


def test_at_its_time_limit_it_saves_and_is_started_again(job: Job) -> None:
    with pytest.raises(Ended, match="is started again"):
        job.learn(SAVES, seconds=1.5)
    assert (job.folder / "volume" / "demo" / "saved").exists() and "over" not in job.notes


def test_engines_that_do_not_come_end_the_job(job: Job) -> None:
    """An exception would have Modal start the learner again, and that one starts engines which end at once."""
    assert job.learn("print('never')", engines="birl-launch/demo", count=2) == 2
    assert job.spawned == [0, 1] and job.notes["learner"]["state"] == "failed" and job.notes["over"] is True
    assert "engines 0, 1 did not come within 0.5 s" in job.notes["learner"]["detail"]


def test_engines_of_an_earlier_start_are_used_again(job: Job) -> None:
    def beats() -> None:
        for beat in range(100):
            job.notes["engine/0"] = {"state": "running", "url": "https://one.example", "beat": beat}
            time.sleep(0.05)

    job.notes["learner"] = {"starts": 1}
    job.notes["engine/1"] = {"state": "running", "url": "https://gone.example", "beat": 7}  # its last word
    threading.Thread(target=beats, daemon=True).start()
    assert job.learn("print('never')", engines="birl-launch/demo", count=2) == 2
    assert job.spawned == [1] and "engines 1 did not come" in job.notes["learner"]["detail"]


def test_an_engine_with_a_new_address_is_found_under_it(job: Job) -> None:
    directory = Directory(job.notes, "birl-launch/demo", 1, beat=0.1)
    for beat, url in enumerate(["https://one.example", "https://one.example", "https://two.example"]):
        job.notes["engine/0"] = {"state": "running", "url": url, "beat": beat}
        directory.look()
        found = names.find("birl-launch/demo")
        assert found == ([url] if beat else []) and directory.missing() == ([] if beat else [0])
    time.sleep(0.7)  # LIFE beats
    directory.look()
    assert names.find("birl-launch/demo") == [] and directory.missing() == [0]


@dataclass
class Port:
    url: str


@contextmanager
def forward(port: int) -> Iterator[Port]:
    yield Port(f"http://127.0.0.1:{port}")


def engine(tiny: Path, folder: Path, **about: Any) -> ContainerWork:
    words = [f"model.path={tiny}", "name=birl-launch/demo", "host=0.0.0.0", "threads=1", "engine.kv_cache_gb=0.05"]
    command = (sys.executable, "-m", "birl", "serve", *words)
    return ContainerWork(command=command, run="runs/demo", place=str(folder), engines="birl-launch/demo", **about)


def test_an_engine_that_nobody_asks_ends(job: Job, tiny: Path) -> None:
    assert serve(engine(tiny, job.folder, idle=1.0), 0, job.notes, forward=forward, beat=0.2) == 0
    assert job.notes["engine/0"]["state"] == "stopped"
    assert "birl serve: " in (job.folder / "launch" / "engine-0.log").read_text()


class Unreachable(Notes):
    """Three notes are lost on the way; the job is over after ten."""

    asked = 0

    def put(self, key: str, value: Any) -> None:
        super().put(key, value)
        self.asked += 1
        self["over"] = self.asked > 10
        if self.asked in (2, 3, 4):
            raise ConnectionError("out of reach")


WAITS = """
import os, time
from birl.engines import names
names.register('birl-launch/demo', 'http://127.0.0.1:9', os.getpid(), 'x')
print('birl serve')
time.sleep(60)
"""


def test_an_engine_bears_that_its_notes_are_out_of_reach(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    work = ContainerWork(
        command=(sys.executable, "-c", WAITS), run="", place=str(job.folder), engines="birl-launch/demo"
    )
    notes = Unreachable()
    assert serve(work, 0, notes, forward=forward, beat=0.05) == -signal.SIGTERM
    assert notes.asked == 12 and capsys.readouterr().out.count("no word from outside: out of reach") == 3


def test_an_engine_that_is_killed_is_started_again_by_modal(job: Job) -> None:
    def kill() -> None:
        while "engine/0" not in job.notes:
            time.sleep(0.05)
        mine = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "birl serve"], capture_output=True, text=True)
        os.kill(int(mine.stdout.split()[0]), signal.SIGKILL)

    work = ContainerWork(
        command=(sys.executable, "-c", WAITS), run="", place=str(job.folder), engines="birl-launch/demo"
    )
    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(Ended, match="exit code -9"):
        serve(work, 0, job.notes, forward=forward, beat=0.2)


def test_an_engine_without_a_token_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    monkeypatch.delenv("BIRL_TOKEN")
    with pytest.raises(BirlError, match="BIRL_TOKEN"):
        serve(engine(tiny, job.folder), 0, job.notes, forward=forward)


def test_checkpoints_on_the_volume_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run, step in (("b", 2), ("a", 10), ("a", 9)):
        folder = tmp_path / "runs" / run / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (tmp_path / "runs" / "a" / "checkpoints" / "step-11.part").mkdir()
    found = modal_checks.checkpoints(tmp_path)
    assert [(one["run"], one["step"]) for one in found] == [("a", 9), ("a", 10), ("b", 2)]
    assert capsys.readouterr().out.startswith("a  step 9  0.00 GiB  ")
    assert len(modal_checks.checkpoints(tmp_path, "b")) == 1


def test_downloaded_models_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("models--Qwen--Qwen2.5-0.5B", "models--other--one"):
        (tmp_path / "models" / "hub" / name).mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    assert modal_checks.clear(tmp_path, "Qwen/Qwen2.5-0.5B") == ["Qwen/Qwen2.5-0.5B"]
    for wrong in ("..", "a/../b", "/"):
        with pytest.raises(BirlError, match="is not a model's name"):
            modal_checks.clear(tmp_path, wrong)
    assert modal_checks.clear(tmp_path) == ["other/one"] and (tmp_path / "runs").is_dir()


def test_an_engine_is_tried(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIRL_CACHE", "")
    found = modal_checks.rollout(str(tiny), "What is 3 + 4?", 5, ("threads=1", "engine.kv_cache_gb=0.05"))
    assert 1 <= found["tokens"] <= 5 and isinstance(found["text"], str)
    with pytest.raises(BirlError, match="no engine started"):
        modal_checks.rollout(str(tiny), "x", 5, ("nonsense=1",))


def test_a_reward_is_tried() -> None:
    assert modal_checks.reward("math", "3 + 4 = 7", "7")["value"] == 1.0
    assert modal_checks.reward("math", "3 + 4 = 8", "7")["value"] == 0.0
