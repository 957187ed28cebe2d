import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from birl.errors import BirlError
from birl.view.folders import Runs
from tests.view.runs import HOSTILE, going_on, make


def names(*roots: Path) -> list[str]:
    return sorted(run.name for run in Runs(roots))


def test_runs_are_found_below_a_folder_and_not_inside_runs(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "demo")
    make(tmp_path / "runs" / "sweep" / "lr=1e-5")
    (tmp_path / "runs" / "demo" / "checkpoints").mkdir()
    make(tmp_path / "runs" / "demo" / "checkpoints" / "inner")
    (tmp_path / "runs" / "empty").mkdir()
    assert names(tmp_path / "runs") == ["demo", "sweep/lr=1e-5"]
    assert names(tmp_path / "runs" / "demo") == ["demo"]
    assert names(tmp_path / "runs", tmp_path / "runs" / "demo") == ["demo", "sweep/lr=1e-5"]


def test_runs_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    for place in ("a", "b"):
        make(tmp_path / place / "demo")
    paths = [str(tmp_path / place / "demo") for place in ("a", "b")]
    assert names(tmp_path / "a", tmp_path / "b") == paths
    assert names(*map(Path, paths)) == paths


def test_an_id_is_the_same_next_time_and_safe_in_an_address(tmp_path: Path) -> None:
    for name in ("demo", "Ünï côde &run=x", HOSTILE.replace("/", "").replace("\ud83d", ""), "x" * 200):
        make(tmp_path / name)
    ids = {run.id for run in Runs([tmp_path])}
    assert ids == {run.id for run in Runs([tmp_path])} and len(ids) == 4
    assert all(one.isascii() and one.replace("-", "").isalnum() and len(one) <= 32 for one in ids)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    make(tmp_path / "demo")
    with pytest.raises(BirlError, match=r"There is no folder .*dmeo.*demo"):
        Runs([tmp_path / "dmeo"])
    with pytest.raises(BirlError, match="is a file"):
        Runs([tmp_path / "demo" / "config.json"])
    with pytest.raises(BirlError, match="no run 'nothing'"):
        Runs([tmp_path])["nothing"]


def test_a_run_that_begins_later_is_found(tmp_path: Path) -> None:
    runs = Runs([tmp_path])
    assert not list(runs)
    make(tmp_path / "late")
    later = next(iter(Runs([tmp_path])))
    assert runs[later.id].name == "late"


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", '{"a":' * 5000])
def test_a_broken_configuration_is_said_and_harms_nothing(tmp_path: Path, text: str) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(text)
    (run,) = Runs([tmp_path])
    assert run.config == {} and "config.json cannot be read" in run.problem and run.state == "done"


def test_nested_keys_are_dotted(tmp_path: Path) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"optimizer": {"lr": 1, "more": {}}, "seed": 0}))
    (run,) = Runs([tmp_path])
    assert run.config == {"optimizer.lr": 1, "optimizer.more": {}, "seed": 0} and run.problem == ""


def test_states(tmp_path: Path) -> None:
    make(tmp_path / "run", ended=False)
    (run,) = Runs([tmp_path])
    assert run.state == "failed" and not run.running
    with going_on(run.folder):
        assert run.running and run.state == "running"
    (run.folder / "summary.json").write_text('{"finished": false}')
    assert run.state == "stopped"


def test_the_lock_of_a_process_that_was_killed_is_no_running_run(tmp_path: Path) -> None:
    make(tmp_path / "run", ended=False)
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (run,) = Runs([tmp_path])
    for text in (done.stdout, "", "0", "-1", "words", "9" * 30):
        (run.folder / ".lock").write_text(text)
        assert not run.running, text


@pytest.mark.skipif(sys.platform == "win32", reason="links")
def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    make(tmp_path / "run")
    os.symlink(tmp_path, tmp_path / "again")
    assert names(tmp_path) == ["run"]
