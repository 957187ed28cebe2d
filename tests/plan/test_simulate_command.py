"""`birl plan --simulate`: its words, what it prints, and what it advises."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from birl.cli import main
from birl.plan import simulate_command as command
from birl.plan import sweep
from birl.plan.fleet import Draws
from birl.plan.pipeline import Split
from birl.plan.simulate_command import read

ROOT = Path(__file__).parents[2]


def test_the_command_finds_the_best_split(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--simulate", "run.gpus=[4]", "run.prompts=4", "run.group_size=2", "run.max_staleness=[0,1]"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows, (best,) = found["configurations"], found["best"]
    assert {(r["engines"], r["learners"]) for r in rows if not r["max_staleness"]} == {(4, 4), (1, 3), (2, 2), (3, 1)}
    assert best["seconds_per_step"] <= 1.01 * min(r["seconds_per_step"] for r in rows)
    assert found["figures"]["engine.table"]["source"].startswith("measured")
    assert found["figures"]["learner.bandwidth"]["source"] == "assumed"
    assert main(words) == 0
    page = capsys.readouterr().out
    assert "Fastest:" in page and "times as fast as synchronous" in page and best["advice"] in page


def test_assumptions_are_marked() -> None:
    scenario = read(["engine.prefill=5000", "learner.bandwidth=2e9"])
    told = {key: command.source(scenario, key) for key, _ in command.figures(scenario)}
    assert told["engine.prefill"] == "given"
    assert told["learner.constant"].startswith("assumed") and told["sync.bytes"].startswith("computed")


def row(**changes: Any) -> sweep.Row:
    values = dict.fromkeys(sweep.Row.__dataclass_fields__, 0) | {"max_staleness": 1}
    return sweep.Row(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, "Balanced"),
        (
            {"learners_waiting": 0.41, "engines_working_while_learners_wait": 0.9},
            "add engines first: learners wait 41%",
        ),
        ({"learners_waiting": 0.41, "engines_working_while_learners_wait": 0.1}, "10% of that; raise max_staleness"),
        ({"engines_waiting": 0.3}, "add learners first: engines wait 30%"),
        ({"engines_waiting": 0.3, "engines_waiting_for_environments": 0.2}, "mostly for environments"),
        ({"engines_waiting": 0.3, "max_staleness": 0}, "take turns: learners wait 0%, engines 30%"),
    ],
)
def test_advice(changes: dict[str, Any], part: str) -> None:
    """And what would not be faster is not advised."""
    assert part in command.advice(row(**changes), lambda **_: True)
    other = command.advice(row(**changes), lambda **_: False)
    assert not re.search(r"raise|\badd\b", other) and ("no faster" in other or not re.search("raise|add", part))


def test_advice_is_not_what_the_table_shows_to_be_slower(capsys: pytest.CaptureFixture[str]) -> None:
    """A learner more would have to exchange gradients, which costs more than it saves, and its GPU an engine."""
    words = ["run.gpus=[3]", "run.max_staleness=[0,1,2]"]
    assert main(["plan", "--simulate", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (best,) = found["best"]
    slower = [r for r in found["configurations"] if r["max_staleness"] == 2 and r["learners"] > best["learners"]]
    assert (best["engines"], best["learners"]) == (2, 1) and best["engines_waiting"] > 0.05
    assert slower and all(r["seconds_per_step"] > best["seconds_per_step"] for r in slower)
    scenario = read(words)
    draws = Draws(scenario.episodes, 8)
    split = Split(engines=2, learners=2, max_staleness=2, prompts=3)
    more = sweep.simulate(scenario, split, 4, draws).seconds_per_step
    assert ("add learners first" in best["advice"]) == (more < 0.99 * best["seconds_per_step"])
    assert "Add learners" not in best["advice"]


def test_advice_is_right() -> None:
    """Where it says add engines, one more is faster; where it says add learners, one more of those."""
    scenario = read(["engine.max_batch=8", "learner.bytes=0", "sync.bytes=0", "sync.pause=0"])
    for engines, learners, part in ((1, 6, "add engines"), (7, 1, "add learners")):
        draws = Draws(scenario.episodes, 8)
        split = Split(engines=engines, learners=learners, max_staleness=2, prompts=8)
        here = sweep.simulate(scenario, split, 8, draws)
        assert part in command.advice(here, sweep.compared_with(scenario, here, draws))
        more = {"engines": engines + 1} if "engines" in part else {"learners": learners + 1}
        assert sweep.simulate(scenario, replace(split, **more), 9, draws).seconds_per_step < here.seconds_per_step
    slow = replace(scenario, learner=replace(scenario.learner, bytes=2e10))  # two learners would exchange them for 20 s
    assert "more learners are no faster" in command.advice(here, sweep.compared_with(slow, here, draws))


def test_the_measured_file_of_the_page_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    file = tmp_path / "async.json"
    file.write_text(re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0])
    assert main(["plan", "--simulate", "--measured", str(file), "run.gpus=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["measured_seconds_per_step"] == json.loads(file.read_text())["result"]["seconds_per_step"]
    assert abs(found["measured"]["off"]) < 0.1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["engine.batch=3"], "there is no such key"),
        (["engin.base=3"], "Did you mean engine"),
        (["max_batch=3"], "Did you mean engine.max_batch?"),
        (["gpus=3"], "Did you mean engine.gpus or learner.gpus or run.gpus?"),
        (["engine=3"], "keys have a section"),
        (["engine.max_batch=1.5"], "must be a valid integer"),
        (["engine.max_batch=999999"], "no engine has more"),
        (["engine.base=-1"], "must be greater than or equal to 0"),
        (["engine.base=0"], "a step takes no time"),
        (["engine.table={a: 1}"], "must map sequences"),
        (["engine.table={1: 0.1, 2: 0.05}"], "would take no time"),
        (["run.gpus=[]"], "run.gpus is empty"),
        (["run.gpus=1", "run.max_staleness=1"], "run.gpus=1 cannot be split: an engine takes"),
        (["run.gpus=8", "run.engines=[8]"], "run.gpus=8 cannot be split with run.engines=[8]: an engine takes"),
        (["run.gpus=8", "sync.every=3", "run.max_staleness=1"], "needs run.max_staleness of at least 2"),
        (["episodes.wait=[3,1]"], "the least is above the most"),
        (["episodes.tokens=[[]]"], "at least one"),
        (["learner.bandwidth=0"], "must be greater than 0"),
        (["learner.bandwidth='7'"], "must be a number"),
        (["learner.share_prompts=1"], "must be a valid boolean"),
        (["learner.trained=2"], "must be less than or equal to 1"),
        (["run.route=best"], "must be 'episode' or 'group'"),
        (["nowhere.yaml"], "can not be read"),
        (["--measured"], "--measured takes a file"),
        (["--memory=3"], "--memory"),
    ],
)
def test_mistakes(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--simulate", *words]) == 2
    assert part in capsys.readouterr().err


def test_mistakes_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "number.yaml").write_text("7")
    aliases = "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]\n" for i in range(1, 9))
    (tmp_path / "aliases.yaml").write_text(f"k0: &k0 [1]\n{aliases}")
    (tmp_path / "no_result.yaml").write_text("engine: {base: 0.1}\n")
    for words, part in (
        (["empty"], "is no run of birl"),
        (["broken.json"], "broken.json"),
        (["list.yaml"], "must hold sections"),
        (["number.yaml"], "must hold sections"),
        (["aliases.yaml"], "more than 100,000 entries, with its aliases"),
        (["--measured", "no_result.yaml"], "has no result.seconds_per_step"),
    ):
        assert main(["plan", "--simulate", *words[:-1], str(tmp_path / words[-1])]) == 2
        assert part in capsys.readouterr().err


def test_a_mistake_in_a_file_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text('{"engine": {"base": "x"}}')
    assert main(["plan", "--simulate", str(tmp_path / "mine.json")]) == 2
    assert "mine.json: engine.base='x': must be a number" in capsys.readouterr().err


def test_a_file_that_names_a_key_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last one won."""
    for name, text, part in (
        ("twice.json", '{"engine": {"base": 1, "base": 2}}', "line 1: the key 'base' is there twice in one object"),
        ("twice.yaml", "engine: {base: 1, base: 2}", "base is there twice"),
        ("deep.json", "[" * 99999, "maximum recursion depth"),
    ):
        (tmp_path / name).write_text(text)
        assert main(["plan", "--simulate", str(tmp_path / name)]) == 2
        told = capsys.readouterr().err
        assert f"{name}: {part}" in told or f"{name}, {part}" in told
