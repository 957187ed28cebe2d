"""A run folder belongs to one process, also where the disk has no locks, and where the lock file is deleted."""

import errno
import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

from birl import run_folder
from birl.cli import main
from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.preflight import ended
from birl.run_folder import chosen_checkpoint
from birl.text import tools
from birl.track import folder_lock, runs
from birl.track.folder_lock import held
from birl.track.summary import facts, lines


@pytest.fixture(params=["locks", "no locks"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no locks":

        def refused(handle: int, how: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(folder_lock.fcntl, "flock", refused)
    return request.param


def test_a_second_process_is_refused(tmp_path: Path, disk: str) -> None:
    run = tmp_path / "run"
    with held(run):
        with pytest.raises(BirlError, match=f"in use by another birl process .pid {os.getpid()}"), held(run):
            pass
        assert runs.running(run)
    assert not run.exists()
    with held(run):
        (run / "metrics.jsonl").write_text("")
    assert [f.name for f in run.iterdir()] == ["metrics.jsonl"]


def test_what_a_killed_process_left_is_no_obstacle(tmp_path: Path, disk: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, timeout=60)
    gone = int(done.stdout)
    for left in ("", f"{gone}\n", f"{gone}\n17\n{folder_lock.HOST}\n", f"{os.getpid()}\n17\n", "x"):
        (run / ".lock").write_text(left)
        assert not runs.running(run)
        with held(run):
            assert (run / ".lock").read_text().startswith(f"{os.getpid()}\n")
        assert [f.name for f in run.iterdir()] == ["metrics.jsonl"]


def test_a_deleted_lock_file_lets_no_second_run_in(tmp_path: Path) -> None:
    with held(tmp_path):
        (tmp_path / ".lock").unlink()
        with pytest.raises(BirlError, match="in use by another birl process"), held(tmp_path):
            pass


def test_a_process_of_another_machine_counts_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock.fcntl, "flock", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSYS, "none")))
    (tmp_path / ".lock").write_text("1\n5\nelsewhere\n")
    with pytest.raises(BirlError, match=r"runs on elsewhere; if it has ended there, delete .*\.lock"), held(tmp_path):
        pass


def test_a_circle_of_links_is_no_reason_to_stop(tmp_path: Path) -> None:
    chosen, newest = tmp_path / "step-000001", tmp_path / "step-000002"
    chosen.mkdir()
    (chosen / "manifest.json").write_text("{}")
    newest.symlink_to(newest.name)
    with pytest.raises(BirlError, match="has gone on to step-000002"):
        chosen_checkpoint(chosen, tmp_path, newest)


def test_a_run_without_a_checkpoint_lists_none_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table without rows said nothing."""
    (tmp_path / "checkpoints" / "step-000003.part").mkdir(parents=True)
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"There is no complete checkpoint in {tmp_path}/checkpoints yet.\n"


def test_a_finished_run_is_told_and_listed_without_torch(tmp_path: Path, tiny: Path) -> None:
    """The same command again loaded torch, the model and the data before it said that the run was done; so did a list
    of its checkpoints."""
    run, data = tmp_path / "run", tmp_path / "data.jsonl"
    data.write_text('{"prompt": "What is 3 + 4?", "answer": "7"}\n')
    Path(f"{data}.gguf").touch()
    words = [f"model.path={tiny}", f"data.train={data}", f"run={run}", "steps=2", "track.tensorboard=false"]
    config = load(schema.RL, words)
    checkpoint.save(run / "checkpoints", 2, {"model.a": torch.zeros(2)}, {"best_step": None})
    (run / "config.json").write_text(json.dumps(folder_lock.plain(config)))
    (run / "metrics.jsonl").write_text('{"step": 2, "reward/mean": 0.5}\n')
    (run / "summary.json").write_text('{"title": "mine", "finished": true, "step": 2, "next": ["birl view run"]}')
    code = "import sys; from birl.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    checkpoints = ["checkpoints", str(run)]
    for argv, number, shown in (
        (["rl", *words], 0, "mine: done"),
        (checkpoints, 0, "\u2502 2 "),
        ([*checkpoints, "export", "9", "new"], 2, "There is no checkpoint 9"),
        ([*checkpoints, "export", "last", str(data)], 2, "data.jsonl exists already"),
        ([*checkpoints, "export", "last", f"{data}.gguf"], 2, "data.jsonl.gguf exists already"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
        assert shown in done.stdout + done.stderr and done.stdout.endswith(f"{number} False\n"), done.stderr
    assert ended(run, config)
    assert not ended(run, load(schema.RL, [*words, "steps=3"]))
    os.utime(data, (2**31, 2**31))  # more rows may be in it
    assert not ended(run, config)
    os.utime(data, (1, 1))
    (run / "checkpoints" / "step-000002" / "state.json").write_text("{}")
    assert not ended(run, config)  # it is repaired as far as that goes


def test_a_comparison_says_why_a_configuration_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason was cut at its first colon, with its bracket open."""
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").write_text("{,")
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert "line 1 column 2 (char 1)); without it there is nothing to compare" in capsys.readouterr().err


def test_a_checkpoint_before_the_first_one_is_no_list_of_none(tmp_path: Path) -> None:
    with pytest.raises(BirlError, match=r"There is no checkpoint in .*run yet: train first\."):
        step_folders.find(tmp_path / "run", "last")


def test_the_end_of_a_run_counts_failed_episodes(tmp_path: Path) -> None:
    """Half of them may have failed, and a run was just `done`."""
    records = [{"step": i, "outcome/env_error": 3, "outcome/timeout": 1} for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert dict(lines(facts(tmp_path)))["failed"].startswith("8 episodes, without a reward")


def test_a_run_that_resumes_on_another_day_keeps_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates with the date gave the resumed run other prompts; what is damaged has no date."""
    monkeypatch.setattr(tools, "now", None)
    monkeypatch.setattr(run_folder, "_chosen", lambda config, run: run)
    state = tmp_path / "state.json"
    for given in ({"given": {"time": "2030-12-31 23:59:59.500000"}}, {"given": {"time": "x"}}, {"given": []}, {}):
        state.write_text(json.dumps({"step": 2, **given}))
        assert run_folder.find_checkpoint(load(schema.RL, ["data.train=x"]), tmp_path) == tmp_path
        right = datetime(2030, 12, 31, 23, 59, 59, 500000)
        assert tools.now == right if "2030" in str(given) else datetime.now() - tools.now < timedelta(days=1)
