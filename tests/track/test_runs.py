import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from birl.cli import main
from birl.config import schema
from birl.config.file import flatten
from birl.errors import BirlError
from birl.track import listing
from birl.track.log import Growing
from birl.track.runs import about, config, find, last_record, problem, running, state
from tests.track import runs


def made(folder: Path, steps: int = 10, finish: bool = True, **keys: Any) -> Path:
    """A run folder as `birl rl` leaves it."""
    folder.mkdir(parents=True)
    written = {**flatten(schema.RL()), "steps": 10, **keys}
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "config.json").write_text(json.dumps(written))
    with runs.tracker(folder) as tracker:
        tracker.rewind(None, 0)
        runs.train(tracker, 1, steps)
        if finish:
            tracker.finish({"finished": steps == 10, "step": steps, "seconds": 90.0})
    return folder


def test_what_a_finished_run_says(tmp_path: Path) -> None:
    found = about(made(tmp_path / "a"))
    assert (found.command, found.state, found.model, found.algorithm) == ("rl", "done", "smollm2", "dr_grpo")
    assert (found.step, found.total, found.seconds) == (10, 10, 90.0)
    assert found.reward == pytest.approx(0.4) and found.best == pytest.approx(0.4)
    assert found.validation == "all/pass@1" and json.loads(json.dumps(found.as_json()))["path"] == str(tmp_path / "a")


def test_states(tmp_path: Path) -> None:
    assert state(made(tmp_path / "stopped", steps=5)) == "stopped"
    assert state(made(tmp_path / "killed", steps=5, finish=False)) == "failed"
    going = made(tmp_path / "going", steps=5, finish=False)
    with (going / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        assert running(going) and state(going) == "running"
    assert not running(going), "the process lives, but the lock is free: the number was given away again"
    (going / ".lock").write_text("not a number")
    assert state(going) == "failed"


def test_a_done_run_that_went_on_and_died_has_failed(tmp_path: Path) -> None:
    run = made(tmp_path / "a", steps=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":6,"reward/mean":0.5}\n')
    assert state(run) == "failed"


def test_half_written_and_broken_files(tmp_path: Path) -> None:
    run = made(tmp_path / "a", finish=False)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":11,"rew')
    with (run / "validation.jsonl").open("ab") as file:
        file.write(b'\xff\xfe broken\n{"step":12,"val')
    assert about(run).step == 10 and about(run).best == pytest.approx(0.4)
    (run / "config.json").write_text('{"model.path": ')
    assert config(run) == {} and "config.json cannot be read" in problem(run) and about(run).model == "?"
    for name in ("metrics.jsonl", "validation.jsonl", "summary.json"):
        (run / name).write_text("")
    assert about(run).state == "failed" and about(run).reward is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            ("metrics.jsonl", f'{{"step":{step},"reward/mean":{"9" * 400}}}\n')
            for step in ("null", '"x"', "NaN", "[1]")
        ),
        ("metrics.jsonl", "[" * 100_000 + "\n"),
        *(("config.json", f'{{"steps":{steps}}}') for steps in ('"many"', "[1]", "NaN", "true")),
        *(("summary.json", f'{{"step":{step},"steps":"x"}}') for step in ("null", '"x"')),
    ],
)
def test_files_of_another_make_harm_nothing(tmp_path: Path, name: str, text: str) -> None:
    run = made(tmp_path / "a")
    (run / name).write_text(text)
    found = about(run)
    assert found.step in (0, 10) and found.total in (None, 10) and found.state in ("done", "failed")
    assert listing.row(found) and found.as_json()


def test_a_last_validation_without_a_score_is_no_other_figure(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    with (run / "validation.jsonl").open("a") as file:
        file.write('{"step":11,"validation/all/n":64,"validation/all/pass@1":null}\n')
    found = about(run)
    assert (found.validation, found.best, found.best_step) == ("all/pass@1", pytest.approx(0.4), 10)


def test_the_last_record_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i, "x": "y" * 200_000}) + "\n" for i in (1, 2)))
    assert last_record(path)["step"] == 2
    assert last_record(tmp_path / "none") == {}


def test_finds_runs_below_and_none_within_a_run(tmp_path: Path) -> None:
    made(tmp_path / "a")
    made(tmp_path / "sweep" / "seed=1")
    (tmp_path / "a" / "inner").mkdir()
    (tmp_path / "a" / "inner" / "metrics.jsonl").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "round").symlink_to(tmp_path)
    assert list(find(tmp_path)) == [tmp_path / "a", tmp_path / "sweep" / "seed=1"]
    assert list(find(tmp_path / "a")) == [tmp_path / "a"]


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "runs" / "old")
    made(tmp_path / "runs" / "new", steps=5)
    os.utime(tmp_path / "runs" / "old" / "summary.json", (1e9, 1e9))
    for name in ("metrics.jsonl", "config.json"):
        os.utime(tmp_path / "runs" / "old" / name, (1e9, 1e9))
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "reward", "best", "val", "time", "changed", "model", "algorithm"]
    assert first.split()[:4] == ["runs/new", "stopped", "5/10", "0.300"]
    assert second.split()[:3] == ["runs/old", "done", "10/10"] and "2001-09-0" in second and "1m30s" in second
    assert main(["runs", "runs", "--json"]) == 0
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == ["stopped", "done"]


@pytest.mark.parametrize("width", [30, 60, 80, 120, 200])
def test_the_table_fits_the_terminal(tmp_path: Path, width: int) -> None:
    one = about(made(tmp_path / ("SmolLM2-135M-Instruct-arithmetic-dr_grpo-" + "x" * 60 + "-seed17"), steps=5))
    lines = listing.table([listing.row(one)] * 2, width)
    assert all(len(line) <= width for line in lines), lines
    assert "seed17" in lines[1] or width < 60
    assert "stopped" in lines[1] and len({line.index("stopped") for line in lines[1:]}) == 1


def test_a_folder_without_runs_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert "birl rl data.train=my.jsonl" in capsys.readouterr().out
    with pytest.raises(BirlError, match="no such folder"):
        listing.run([str(tmp_path / "nowhere")])
    (tmp_path / "file").write_text("")
    with pytest.raises(BirlError, match="is a file"):
        listing.run([str(tmp_path / "file")])
    with pytest.raises(BirlError, match="--jsn"):
        listing.run(["--jsn"])


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = made(tmp_path / "a", **{"optimizer.lr": 1e-5})
    other = made(tmp_path / "b", steps=5, **{"optimizer.lr": 1e-6, "env.own": "x"})
    assert main(["diff", str(one), str(other)]) == 0
    text = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines() if line}
    assert rows["optimizer.lr"] == ["1e-05", "1e-06"] and rows["env.own"] == ["-", "x"]
    assert rows["steps"] == ["10", "5"] and rows["all/pass@1 best"] == ["0.400", "0.300"]
    assert rows["reward/mean last 10"] == ["0.310", "0.260"]
    assert main(["diff", str(one), str(one), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["keys"] == {} and told["figures"]["steps"] == [10, 10]


def test_diff_shows_names_of_figures_and_does_not_obey_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source is a column of the data."""
    run = made(tmp_path / "a")
    (run / "validation.jsonl").write_text(
        json.dumps({"step": 0, "validation/s\x1b[7m/score": 0.5, "samples": []}) + "\n"
    )
    assert main(["diff", str(run), str(run)]) == 0
    assert "s⟪U+001B⟫[7m/score best" in capsys.readouterr().out


def test_diff_of_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "runs" / "a")
    for words, said in (
        ([], "two run folders"),
        ([str(run)], "two run folders"),
        ([str(run), str(tmp_path / "none")], "not there"),
        ([str(run), str(tmp_path / "runs")], "is one"),
        ([str(run), str(run / "config.json")], "is a file"),
    ):
        assert main(["diff", *words]) == 2
        assert said in capsys.readouterr().err
    (run / "config.json").write_text("{")
    assert main(["diff", str(run), str(run)]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err


def test_pipes_in_a_run_folder_hang_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")
    for name in ("metrics.jsonl", "validation.jsonl", "config.json", "summary.json", ".lock", "rollouts.jsonl"):
        os.mkfifo(run / name)
    found = about(run)
    assert found.step == 0 and "a named pipe" in found.problem
    assert not list(Growing(run / "metrics.jsonl").new())
