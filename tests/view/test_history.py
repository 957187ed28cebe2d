"""Axes, exact values and comparison, from files."""

import json
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from birl import regular
from birl.config.file import flatten
from birl.config.load import load
from birl.config.schema import DPO, RL, RM, SFT
from birl.track.algorithm import algorithm
from birl.track.runs import differences
from birl.view.folders import Runs, row
from birl.view.history import History, Index, family, sampled, span
from birl.view.metrics import better, figures
from tests.view.runs import append, config, line, make


def history(folder: Path) -> History:
    (run,) = Runs([folder])
    found = History(run)
    found.update()
    return found


def test_axes(tmp_path: Path) -> None:
    made = history(make(tmp_path / "run", steps=30))
    np.testing.assert_array_equal(made.axis(made.steps, "step"), np.arange(1, 31))
    np.testing.assert_allclose(made.axis(made.steps, "time"), np.cumsum(made.steps["time/step"]))
    np.testing.assert_allclose(made.axis(made.steps, "tokens"), 2400 * np.arange(1, 31))
    np.testing.assert_allclose(made.axis(made.validations, "tokens"), [0, 24000, 48000, 72000])
    assert made.axis(made.validations, "time")[0] == 0


def test_an_axis_grows_with_the_run(tmp_path: Path) -> None:
    made = history(make(tmp_path / "run", steps=10))
    before = made.axis(made.steps, "time").copy()
    version = made.version
    append(made.run.folder, 11, 12)
    made.update()
    after = made.axis(made.steps, "time")
    assert len(after) == 12 and made.version != version
    np.testing.assert_array_equal(after[:10], before)


def test_time_and_tokens_where_the_run_did_not_measure_them(tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=0)
    (run / "metrics.jsonl").write_text("".join(line(step, {"loss": 0.5}) for step in range(1, 4)))
    made = history(run)
    np.testing.assert_allclose(made.axis(made.steps, "time"), [0, 4.5, 9])  # by the time of day
    assert np.isnan(made.axis(made.steps, "tokens")).all() and made.span("tokens") is None


def test_a_run_that_trains_nothing_says_so(tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=0)
    idle, trained = {"updates/done": 0.0, "updates/skipped": 1.0}, {"updates/done": 1.0, "updates/skipped": 0.0}
    unscored = {"updates/done": 0.0, "updates/skipped": 0.0, "tokens/trained": 0.0}
    (run / "metrics.jsonl").write_text(line(1, trained) + line(2, idle) + line(3, unscored))
    made = history(run)
    assert (
        made.about()["warning"] == "nothing was trained: all rewards of a group are equal or missing, in 2 of 3 steps"
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(4, trained))
    made.update()
    assert made.about()["warning"] == "" and history(make(tmp_path / "none", steps=0)).about()["warning"] == ""


def test_values_at_a_step_have_all_digits(tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=0)
    (run / "metrics.jsonl").write_text(line(1, {"kl": 0.12345678901234567}) + line(5, {"kl": 2.0}))
    made = history(run)
    assert made.values("step", 2.9)["values"] == {"kl": 0.12345678901234567}
    assert made.values("step", 3.1)["step"] == 5
    assert history(make(tmp_path / "empty", steps=0)).values("step", 0) == {
        "step": None, "x": None, "values": {}, "validation_step": None,
    }  # fmt: skip


def test_seeds_of_one_configuration_are_a_family() -> None:
    one, two = config(seed=0, run="a"), config(seed=1, run="b", track__tensorboard=False)
    assert family("x", one) == family("y", two) != family("z", config(optimizer__lr=1.0))
    assert family("x", {}) == "x"  # unreadable: alone


@pytest.mark.parametrize(
    ("keys", "name"),
    [({}, "dr_grpo"), ({"algorithm__clip_high": 9.0}, "dr_grpo*"), ({"algorithm__dynamic_sampling": True}, "dr_grpo*")],
)
def test_the_preset_is_named(keys: dict, name: str) -> None:
    assert algorithm(config(**keys)) == name


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "gspo"])
def test_a_preset_is_recognised_by_its_keys(name: str) -> None:
    own = json.loads(json.dumps(flatten(load(RL, ["data.train=x", f"algorithm={name}"]))))
    without = {**own, "algorithm.kl_coef": 0.0, "algorithm.kl": "k3", "algorithm.kl_in": "loss"}
    assert algorithm(without) in (name, f"{name}*")
    assert algorithm({k: v for k, v in own.items() if k != "algorithm.observation_coef"}) == name  # of earlier versions
    assert algorithm(own) == name and algorithm({**own, "algorithm.clip_low": 0.123}) == f"{name}*"


def test_other_commands_are_named() -> None:
    assert [algorithm(flatten(kind())) for kind in (SFT, RM, DPO)] == ["sft", "rm", "dpo"]


def test_only_keys_that_differ(tmp_path: Path) -> None:
    make(tmp_path / "a", optimizer__lr=1e-5)
    make(tmp_path / "b", optimizer__lr=2e-5, seed=1)
    make(tmp_path / "c", more=None)
    make(tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text("{")
    runs = list(Runs([tmp_path]))
    found = {row["key"]: row for row in differences([run.config for run in runs])}
    assert set(found) == {"optimizer.lr", "seed", "more"}
    assert found["optimizer.lr"]["values"][:2] == [1e-5, 2e-5] and found["seed"]["values"] == [0, 1, 0, None]
    assert found["more"]["set"] == [False, False, True, False]
    assert differences([runs[0].config]) == [] == differences([runs[0].config, runs[3].config])


def test_last_and_best(tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=0)
    rows = [
        {"reward/mean": 0.5, "time/step": 3.0},
        {"reward/mean": 0.9, "time/step": 1.0},
        {"time/step": 2.0, "loss": 1.0},
    ]
    (run / "metrics.jsonl").write_text("".join(line(step, row) for step, row in enumerate(rows, 1)))
    found = {row["name"]: row["values"][0] for row in figures([history(run)])}
    assert found["reward/mean"] == {"last": 0.9, "last_step": 2, "best": 0.9, "best_step": 2}
    assert found["time/step"] == {"last": 2.0, "last_step": 3, "best": 1.0, "best_step": 2}
    assert "best" not in found["loss"]
    names = ("validation/all/pass@1", "validation/nll", "validation/all/length", "entropy", "reward/std", "time/step")
    assert [better(name) for name in names] == ["high", "low", "", "", "", "low"]


def test_the_list_says_what_a_run_came_to(tmp_path: Path) -> None:
    make(tmp_path / "run", steps=30, algorithm__clip_high=9.0)
    (run,) = Runs([tmp_path])
    found = row(run)
    assert (found["step"], found["total"], found["model"], found["algorithm"]) == (30, 30, "models/tiny", "dr_grpo*")
    assert (found["best"], found["best_step"]) == (pytest.approx(0.9), 30)
    assert found["seconds"] == 135 and found["reward"] == history(run.folder).steps["reward/mean"][-1]


def test_the_list_of_runs_that_hold_little(tmp_path: Path) -> None:
    make(tmp_path / "empty", steps=0, ended=False)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "metrics.jsonl").write_text('{"step":1,"loss":0.25}\nrubbish\n[]\n{"step":2,"lo')
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "metrics.jsonl").write_text("")
    (tmp_path / "zero" / "validation.jsonl").write_text('{"step":0,"validation/all/pass@1":0.0}\n{"step"')
    found = {run.name: row(run) for run in Runs([tmp_path])}
    assert (found["empty"]["step"], found["empty"]["reward"], found["empty"]["best"]) == (0, None, None)
    assert (found["torn"]["step"], found["torn"]["reward"], found["torn"]["headline"]) == (1, 0.25, "loss")
    assert found["zero"]["best"] == 0.0


def test_an_index_reads_a_file_once(tmp_path: Path) -> None:
    make(tmp_path / "run")
    runs = Runs([tmp_path])
    index, (run,) = Index(runs), runs
    first = index.of(run)
    assert index.of(run) is first and first.steps.rows == 30
    append(run.folder, 31, 31)
    assert index.of(run).steps.rows == 31 and first.steps.generation == 0


def test_names_wait_for_whoever_is_reading_on(tmp_path: Path) -> None:
    made, found = history(make(tmp_path / "run", steps=3)), list[str]()
    asked = threading.Thread(target=lambda: found.extend(made.names))
    with made.lock:
        asked.start()
        asked.join(0.1)
        assert asked.is_alive() and not found
    asked.join()
    assert found == [*made.steps.names, *made.validations.names]


def test_the_row_of_a_run_reads_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "run")
    (run,) = Runs([tmp_path])
    asked, own = Counter[str](), regular.open_regular
    monkeypatch.setattr(regular, "open_regular", lambda path: asked.update([path.name]) or own(path))
    assert row(run)["step"] == 30
    assert (asked["config.json"], asked["summary.json"]) == (1, 1)


def test_a_long_file_is_shown_at_once_and_read_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from birl.view import history as module

    run = make(tmp_path / "run", steps=3000)
    whole = history(run)
    expected = {kind: whole.axis(whole.steps, kind) for kind in ("time", "tokens")}
    monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr(module, "GLIMPSE", 300)
    with module._READER:  # nothing is read yet
        made = history(run)
        assert made.read == 0.0 and "~" in made.version and 300 <= made.steps.rows < 600
        assert made.about()["read"] == 0.0 and made.values("step", 3000)["step"] == 3000
        for kind, axis in expected.items():  # a row stands for those before it
            assert made.axis(made.steps, kind)[-1] == pytest.approx(axis[-1], rel=0.02)
        made.update()
        assert made.steps.rows < 600
    for _ in range(200):
        if made.read == 1:
            break
        time.sleep(0.02)
    assert made.steps.rows == 3000 and "~" not in made.version
    np.testing.assert_array_equal(made.axis(made.steps, "time"), expected["time"])
    monkeypatch.undo()
    append(run, 3001, 3003)
    made.update()
    assert made.steps.rows == 3003 and made.read == 1


def test_a_short_curve_is_sent_as_it_is() -> None:
    x, y = np.arange(5.0), np.array([1, np.nan, 3, 4, 123456.789])
    found = sampled(x, y, low=0, high=4, width=10)
    np.testing.assert_array_equal(found["x"], [0, 2, 3, 4])
    np.testing.assert_array_equal(found["y"], [1, 3, 4, 123457])
    assert set(found) == {"x", "y"}


def test_a_long_curve_keeps_every_peak() -> None:
    x, y = np.arange(100_000.0), np.zeros(100_000)
    y[77_777], y[12] = 5, -3
    found = sampled(x, y, low=0, high=99_999, width=600)
    assert len(found["x"]) == 600 and found["n"].sum() == 100_000
    assert found["max"].max() == 5 and found["min"].min() == -3
    assert np.all(np.diff(found["x"]) > 0)
    np.testing.assert_allclose((found["y"] * found["n"]).sum(), y.sum(), atol=1e-3)


def test_a_zoom_has_a_neighbour_at_each_side() -> None:
    x = np.arange(0, 100, 10.0)
    found = sampled(x, x, low=25, high=55, width=100)
    np.testing.assert_array_equal(found["x"], [20, 30, 40, 50, 60])
    assert sampled(x, x, low=200, high=300, width=100)["x"].tolist() == [90]


def test_the_neighbours_of_a_long_curve_are_points_of_their_own() -> None:
    x = np.append(np.arange(1000.0), 5000)
    found = sampled(x, x, low=100, high=1000, width=100)
    assert (found["x"][0], found["n"][0], found["x"][-1], found["n"][-1]) == (99, 1, 5000, 1)
    assert found["max"][-2] == 999 and found["n"].sum() == 902


@pytest.mark.parametrize("y", [[], [np.nan], [np.inf, -np.inf]])
def test_nothing_to_draw(y: list[float]) -> None:
    assert len(sampled(np.arange(len(y)), np.array(y), low=0, high=1, width=10)["x"]) == 0
    assert span(np.array(y)) is None


def test_an_x_that_falls_is_put_in_order() -> None:
    found = sampled(np.array([3.0, 1, 2]), np.array([30.0, 10, 20]), low=0, high=9, width=10)
    np.testing.assert_array_equal(found["y"], [10, 20, 30])


def test_tiny_and_huge_values_keep_their_digits() -> None:
    y = np.array([1.23456789e-300, 1.23456789e300, 0.0, -9.87654321e-9])
    found = sampled(np.arange(4.0), y, low=0, high=3, width=10)
    np.testing.assert_allclose(found["y"], y, rtol=1e-5)
