"""Several environments in one run: each plays, scores and fails its own tasks."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from birl.cli import main
from birl.config.schema import Env as Keys
from birl.envs.mixture import Parts
from birl.envs.open import World, check_world, open_world
from birl.envs.single_turn import SingleTurn
from birl.envs.tasks.countdown import Countdown
from birl.envs.tasks.guess_number import GuessNumber
from birl.errors import BirlError
from birl.rollout.session import Limits
from birl.rollout.tasks import limits_in
from birl.types import Message, Task

OWN = """
from dataclasses import dataclass
from birl.types import Feedback

class Broken:
    closed = 0
    @dataclass
    class Config:
        fail: bool = False
    @staticmethod
    def tasks(config, split): return [{"prompt": f"Say {i}.", "data_source": "other"} for i in range(4)]
    @classmethod
    def shared(cls, config):
        if config.fail:
            raise OSError("no place")
        class Place:
            def close(self): cls.closed += 1
        return Place()
    def start(self): raise RuntimeError("cannot begin")
    def step(self, reply): raise AssertionError

def bare(task, model): return 1.0
"""


def world(*parts: str, **keys: Any) -> World:
    config = Keys(kind="mixture", options={"parts": list(parts)}, **keys)
    return asyncio.run(open_world(config, lambda prompt: "<text>"))


def task(**columns: Any) -> Task:
    return Task(id="a.jsonl:2", prompt=(Message(role="user", content="?"),), answer="7", columns=columns)


def test_each_part_has_its_own_tasks_and_keys() -> None:
    made = world("countdown rows=3", "guess_number high=20 rows=2", "guess_number")
    assert made.rows is not None
    sets: Any = made.rows("train")
    assert {name: len(rows) for name, rows in sets.items()} == {
        "countdown": 3,
        "guess_number": 2,
        "guess_number-2": 240,
    }
    assert all(row["env"] == row["data_source"] == name for name, rows in sets.items() for row in rows)
    played = {name: made.open(task(**rows[0])) for name, rows in sets.items()}
    assert isinstance(played["countdown"], Countdown) and isinstance(played["guess_number"], GuessNumber)
    assert [played[name].config.high for name in ("guess_number", "guess_number-2")] == [20, 16]  # pyright: ignore
    assert not made.agent


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], r"env.parts is empty"),
        (["mixture"], r"'mixture' is not an environment"),
        (["countdown", "guess_number 20"], r"'guess_number 20' is not an environment, followed by its keys"),
        (["countdwn"], r"env.kind=countdwn: .*countdown"),
        (["countdown", "guess_number hgh=20"], r"^env.parts: guess_number: env.hgh=20: .* mean env.high"),
        (["guess_number 'high=20"], r"env.parts: .*No closing quotation"),
    ],
)
def test_a_wrong_part_is_refused(parts: list[str], said: str) -> None:
    with pytest.raises(BirlError, match=said):
        world(*parts)
    with pytest.raises(BirlError, match=said):
        check_world(Keys(kind="mixture", options={"parts": parts}))


def test_a_task_for_none_of_the_parts_is_refused() -> None:
    made = world("countdown", "guess_number")
    said = r"a.jsonl, row 3: its column `env` is ('(code)?'|None|\['code'\]); env.parts has countdown, guess_number"
    for columns in ({}, {"env": "code"}, {"env": None}, {"env": ["code"]}):
        with pytest.raises(BirlError, match=said):
            made.open(task(**columns))


def test_what_was_opened_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_mixture.py").write_text(OWN)
    made = world("own_mixture.py:Broken", "countdown", "own_mixture.py:bare")
    with pytest.raises(BirlError, match=r"env.parts: own_mixture.py:bare has no tasks of its own. Name data.train"):
        made.rows and made.rows("train")
    kind: Any = type(made.open(task(env="own_mixture.py:Broken")))
    asyncio.run(made.close())
    assert kind.closed == 1
    with pytest.raises(BirlError, match="no place"):
        world("own_mixture.py:Broken", "own_mixture.py:Broken fail=true")
    assert kind.closed == 2


def test_a_part_fails_alone(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_mixture.py").write_text(OWN)
    words = [
        "env.parts=[guess_number rows=8 validation_rows=2,arithmetic,own_mixture.py:Broken]",
        "data.weights=[2,1,1]",
    ]
    words += [f"model={tiny}", "steps=2", "rollout.prompts=8", "rollout.group_size=2", "rollout.max_tokens=4"]
    words += [
        "rollout.max_failure_rate=1",
        "model.max_length=512",
        "env.max_turns=2",
        "validation.every=2",
        "threads=1",
    ]
    words += ["data.max_validation_samples=2", "track.console=off", "track.report=false", "run=run"]
    assert main(["rl", "env=mixture", *words]) == 0
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert sum(s["outcome/env_error"] for s in steps) > 0 and all(
        s["outcome/ok"] + s["outcome/truncated"] for s in steps
    )
    assert {"score/guess_number", "score/arithmetic"} <= {name for s in steps for name in s}
    assert not any("Broken" in name for s in steps for name in s)
    held_out = json.loads(Path("run/validation.jsonl").read_text().splitlines()[-1])
    assert {"validation/guess_number/score", "validation/arithmetic/score", "validation/all/score"} <= set(held_out)


def test_a_part_has_limits_of_its_own(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world("countdown rows=1", "guess_number rows=1 max_turns=3 timeout=7 cut_turn=continue", max_turns=5)
    limits: Any = limits_in(made, Keys(), 99)
    assert limits(task(env="countdown")) == Limits(timeout=600.0, turns=5, tokens=99, cut_ends=True)
    assert limits(task(env="guess_number")) == Limits(timeout=7.0, turns=3, tokens=99, cut_ends=False)
    for part, said in (("max_turns=0", "max_turns"), ("timeout=soon", "timeout"), ("cut_turn=never", "cut_turn")):
        with pytest.raises(BirlError, match=said):
            world(f"countdown {part}")
    monkeypatch.chdir(tmp_path)
    words = ["env.parts=['guess_number rows=2 max_turns=1','guess_number rows=2 max_turns=3']", f"model={tiny}"]
    words += ["steps=1", "rollout.prompts=4", "rollout.group_size=2", "rollout.max_tokens=4", "env.cut_turn=continue"]
    words += ["rollout.max_failure_rate=1", "model.max_length=512", "validation.every=0", "threads=1", "run=run"]
    assert main(["rl", "env=mixture", *words, "track.console=off", "track.report=false"]) == 0
    played = [json.loads(line) for line in Path("run/rollouts.jsonl").read_text().splitlines()]
    turns = {name: {len(r.get("turns") or [0]) for r in played if r["source"] == name} for name in made_names(played)}
    assert turns == {"guess_number": {1}, "guess_number-2": {3}}


def made_names(played: list[dict[str, Any]]) -> set[str]:
    return {r["source"] for r in played}


@pytest.mark.parametrize("name", ["", "code", None])
def test_a_row_for_none_of_the_parts_ends_the_run_before_it_begins(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None
) -> None:
    """Its episodes failed one by one."""
    for which, other in (("train", "validation"), ("validation", "train")):
        rows = [{"prompt": "Hi", "answer": "1", "env": env} for env in ("arithmetic", name, "arithmetic")]
        (tmp_path / f"{which}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{other}.jsonl").write_text(json.dumps(rows[0]) + "\n")
        words = [f"data.{key}={tmp_path}/{key}.jsonl" for key in ("train", "validation")]
        words += [f"model={tiny}", f"run={tmp_path}/run", "threads=1", "rollout.max_tokens=4", "reward=math"]
        assert main(["rl", "env=mixture", "env.parts=[arithmetic,countdown]", *words]) == 2
        said = capsys.readouterr().err
        assert f"{which}.jsonl, row 2: its column `env` is {name!r}; env.parts has arithmetic, countdown." in said


def test_what_cannot_be_closed_keeps_no_other_open() -> None:
    closed: list[str] = []

    class Shared:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "b":
                raise OSError("stuck")

    worlds = {name: World(kind=name, open=SingleTurn, shared=Shared(name)) for name in "abc"}
    with pytest.raises(OSError, match="stuck"):
        asyncio.run(Parts(worlds, {}).close())
    assert sorted(closed) == ["a", "b", "c"]


def test_one_prompt_and_one_answer_may_be_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tasks come from data, and reward functions judge it."""
    made = world("guess_number rows=2", "single_turn")
    assert isinstance(made.open(task(env="single_turn")), SingleTurn)
    with pytest.raises(BirlError, match=r"env.parts: single_turn has no tasks of its own. Name data.train; a column"):
        made.rows and made.rows("train")
    words = ["rl", "env=mixture", "env.parts=[guess_number,single_turn]", f"data.train={tmp_path}/a.jsonl"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hi", "env": "single_turn", "answer": "7"}\n')
    assert main([*words, "--print-config"]) == 2
    assert "single_turn in env.parts has no reward of its own; name a function" in capsys.readouterr().err
    assert main([*words, "reward=math", "--print-config"]) == 0


def test_rows_of_a_file_are_scored_by_the_environment_that_they_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scores were one figure, that of the file."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "Hi", "answer": "1", "env": env} for env in ("single_turn", "arithmetic") * 4]
    rows += [{"prompt": "Ho", "answer": "1", "env": "arithmetic", "data_source": "own"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["env=mixture", "env.parts=[single_turn,arithmetic]", "reward=math", "validation.every=1", "steps=1"]
    words += ["data.train=rows.jsonl", "data.validation=rows.jsonl", f"model={tiny}", "rollout.max_tokens=4"]
    words += ["rollout.prompts=9", "rollout.group_size=2", "threads=1", "track.console=off", "track.report=false"]
    assert main(["rl", *words, "run=run"]) == 0
    (step,) = (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert {"score/single_turn", "score/arithmetic", "score/own"} <= set(step)
    held_out = json.loads(Path("run/validation.jsonl").read_text().splitlines()[-1])
    assert [held_out[f"validation/{name}/n"] for name in ("single_turn", "arithmetic", "own")] == [4, 4, 1]
