"""Where the time went, and what is said about it."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from birl.cli import main
from birl.config.keys import documentation
from birl.config.schema import RL
from birl.track.limit import Limit, limit
from birl.track.runs import config
from birl.track.shares import Intervals, Shares, shares_of, union
from birl.track.timeline import Timeline
from birl.track.trace_command import describe
from tests.track import traces
from tests.track.traces import span


def shares(folder: Path, spans: list[dict[str, Any]]) -> Shares:
    timeline = Timeline(traces.write(folder, spans))
    timeline.read()
    found = shares_of(timeline)
    assert found is not None
    return found


def limited(folder: Path, spans: list[dict[str, Any]], **config: Any) -> Limit:
    keys = {**traces.CONFIG, **{key.replace("__", "."): value for key, value in config.items()}}
    return limit(shares(folder, spans), keys)


def test_intervals_are_what_counting_moments_gives() -> None:
    chance = random.Random(0)

    def some() -> tuple[Intervals, set[int]]:
        pairs = [(a, a + chance.randint(0, 9)) for a in (chance.randint(0, 90) for _ in range(chance.randint(0, 9)))]
        return union([a for a, _ in pairs], [b for _, b in pairs]), {m for a, b in pairs for m in range(a, b)}

    for _ in range(300):
        (one, moments), (other, others) = some(), some()
        assert one.total == len(moments) and one.within(other) == len(moments & others)
        assert one.below([13, 77]).tolist() == [sum(m < 13 for m in moments), sum(m < 77 for m in moments)]
        assert (one.starts[1:] > one.ends[:-1]).all()


def test_shares_are_those_of_the_trace(tmp_path: Path) -> None:
    found = shares(tmp_path, traces.ahead(busy=0.5, reward=1.0))
    assert found.count == 5 and found.steps == (2, 6) and found.seconds == pytest.approx(50)  # the first one warms up
    assert found.learner == pytest.approx(
        {"wait:rollout": 0.6, "train": 0.275, "wait:engines": 0.125, "sync": 0.0, "other": 0.0}, abs=1e-6
    )
    assert sum(found.learner.values()) == pytest.approx(1)
    engine = found.processes["engine 127.0.0.1:8000"]
    assert engine == pytest.approx({"generate": 0.5, "load": 0.01, "idle": 0.49}, abs=1e-6)
    assert found.processes["rollout"] == pytest.approx({"wait:the next training step": 0.6})
    assert found.busy == pytest.approx(0.51) and found.busy_in_wait == pytest.approx(5 / 6)
    assert found.episodes == pytest.approx({"engine": 40 / 48, "rewards": 8 / 48}, abs=0.02)


def test_one_step_is_better_than_none(tmp_path: Path) -> None:
    assert shares(tmp_path, traces.ahead(steps=1)).count == 1
    timeline = Timeline(traces.write(tmp_path, [span("learner", "loop", "started", 0, 0)]))
    timeline.read()
    assert shares_of(timeline) is None and "Cannot tell" in limit(None, {}).sentence


@pytest.mark.parametrize(
    ("made", "config", "side", "says"),
    [
        ({}, {}, "generation", "The learner waits 60% of the time for generation"),
        ({}, {"rollout__max_staleness": 0}, "turns", "rollout.max_staleness=1"),
        ({}, {"engine__kind": "embedded", "rollout__max_staleness": 0}, "generation", "take turns"),
        ({"busy": 0.2, "reward": 4.0}, {}, "rewards", "reward.workers"),
        ({"busy": 0.2, "environment": 8.0}, {}, "environments", "episodes wait for environments"),
        ({"busy": 0.2}, {}, "unknown", "does not say what else"),
        ({"wait": 0.5, "train": 9.0, "sync": 0.5, "busy": 0.4}, {}, "training", "The engines wait 59% of the time"),
        ({"wait": 1.0, "train": 4.0, "sync": 5.0}, {}, "weights", "weights.sync_every"),
        ({"wait": 0.5, "train": 9.0, "sync": 0.5}, {}, "balanced", "Faster needs more of both"),
        ({"steps": 3}, {}, "unknown", "Cannot tell from 2 steps"),
    ],
)
def test_the_side_that_limits_is_named(
    tmp_path: Path, made: dict[str, Any], config: dict[str, Any], side: str, says: str
) -> None:
    found = limited(tmp_path, traces.ahead(**made), **config)
    assert (found.side, says in found.sentence) == (side, True), found
    assert set(found.keys) <= documentation(RL).keys()
    assert all(key in found.sentence for key in found.keys)


def test_a_few_long_answers_are_told_from_many(tmp_path: Path) -> None:
    spans = traces.ahead(requests=1)
    for step in range(6):
        spans += [span("engine 127.0.0.1:8000", "requests", "generate", 10 * step + 0.01 * n, 1.0) for n in range(30)]
    assert limited(tmp_path, spans).side == "stragglers"


def test_what_stops_both_sides_comes_first(tmp_path: Path) -> None:
    for name, side in (("validate", "validation"), ("checkpoint", "checkpoints")):
        spans = traces.ahead(wait=0.5, train=4.0, sync=0.5)
        spans += [span("learner", "loop", name, 5 * step, 3.0, step + 1) for step in range(6)]
        spans = [s for s in spans if s["name"] != "train"]
        spans += [span("learner", "loop", "train", 5 * step + 3, 2.0, step + 1) for step in range(6)]
        assert limited(tmp_path, spans).side == side


def test_a_stage_without_engines(tmp_path: Path) -> None:
    spans = [span("learner", "loop", "train", step, 0.9, step + 1) for step in range(6)]
    assert limited(tmp_path, spans).side == "training"
    spans = [span("learner", "loop", "train", step, 0.2, step + 1) for step in range(6)]
    assert limited(tmp_path, spans).side == "unknown"
    assert config(tmp_path / "nowhere") == {}
    (tmp_path / "config.json").write_text("[1")
    assert config(tmp_path) == {}


def test_the_summary_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = [*traces.ahead(), span("engine \x1b[2J", "requests", "generate", 0, 60)]
    run = traces.write(tmp_path / "demo", spans)
    with (run / "trace.json").open("a") as file:
        file.write("not a span\n")
    lines = len((run / "trace.json").read_text().splitlines())
    assert main(["trace", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == f"warning: trace.json, line {lines} is no span and was passed over"
    assert "demo: steps 2 to 6, 50s in all" in said and "60.0%  ############........  waiting for groups" in said
    assert "\x1b" not in said and "⟪U+001B⟫" in said
    assert said.isprintable() or all(c == "\n" or c.isprintable() for c in said)
    assert "The learner waits 60% of the time for generation" in said


def test_mistakes_in_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces.write(tmp_path / "run", traces.ahead())
    (tmp_path / "empty").mkdir()
    for words, says in {
        ("nowhere",): "There is no folder nowhere",
        (str(tmp_path / "empty"),): "has no trace.json",
        (): "takes one run",
        ("a", "b"): "takes one run",
        (str(tmp_path / "run"), "--output"): "--output takes a file",
        (str(tmp_path / "run"), "--output", str(tmp_path / "no" / "x.json")): "cannot write",
        ("--what",): "`birl trace` has --output FILE",
    }.items():
        assert main(["trace", *words]) == 2
        assert says in capsys.readouterr().err.replace("\nbirl: ", " "), words
    assert main(["trace", "--help"]) == 0 and "Usage: birl trace RUN" in capsys.readouterr().out


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    timeline = Timeline(traces.write(tmp_path, [span("learner", "loop", "started", 0, 0)]))
    timeline.read()
    assert "Cannot tell from 0 steps: 3 are needed." in " ".join(describe(timeline))
    assert np.isfinite(timeline.start).all()
