"""`birl reproduce` with a tiny model: within the band, outside, stopped and gone on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from birl.cli import main
from birl.recipes import recipe as shelf
from birl.recipes.attempt import Attempt
from birl.recipes.command import reproduce
from birl.track.log import read_jsonl

ROWS = "".join(
    json.dumps({"prompt": f"What is {i} + 2?", "answer": str(i + 2), "response": f"It is {i + 2}."}) + "\n"
    for i in range(8)
)
QUIET = "track: {tensorboard: false, report: false, console: plain}\nthreads: 1\n"
SFT = f"data: {{train: rows.jsonl}}\nbatch_size: 2\nsteps: 1\n{QUIET}"
RL = f"""
data: {{train: rows.jsonl, validation: rows.jsonl, max_validation_samples: 2}}
rollout: {{prompts: 2, group_size: 2, max_tokens: 6, max_failure_rate: 1}}
reward: {{functions: [length], length_target: 8}}
validation.every: 2
checkpoint.every: 1
steps: 2
{QUIET}"""
EXPECTED = """
about: a tiny model
hardware: anything
stages:
  - {command: sft, file: sft.yaml, words: [MODEL]}
  - {command: rl, file: rl.yaml, words: ["model.path={sft}"]}
  - {command: eval, words: ["model.path={sft}", data.validation=rows.jsonl, validation.max_tokens=4, threads=1]}
expect:
  - {stage: sft, metric: loss, values: {0: 6}, tolerance: 5.9}
  - {stage: rl, metric: reward/mean, values: {0: 0.5}, tolerance: 0.5}
  - {stage: rl, metric: validation/all/score, step: first, values: {0: 0.5}, tolerance: 0.5}
  - {metric: validation/all/n, values: {0: 8}, tolerance: 0}
"""


@pytest.fixture
def place(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one recipe, which is where we are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    folder = tmp_path / "recipes"
    folder.mkdir()
    for name, text in {"sft.yaml": SFT, "rl.yaml": RL, "small.expected.yaml": EXPECTED}.items():
        (folder / name).write_text(text.replace("MODEL", f"model.path={tiny}"))
    return tmp_path


def attempt(place: Path) -> Attempt:
    recipe, _ = shelf.find("small")
    return Attempt(recipe=recipe, seed=0, folder=place / "runs" / "reproduce" / "small" / "seed-0", below=place)


def test_stages_run_one_after_the_other_and_only_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[str] = []

    def start(command: Sequence[str]) -> int:
        started.append(command[0])
        return main(list(command))

    one = attempt(place)
    assert reproduce(one, start) == 0
    assert started == ["sft", "checkpoints", "rl", "eval"]
    said = capsys.readouterr().out
    assert "small, seed 0: within the band" in said and "OUTSIDE" not in said
    assert (
        json.loads((one.folder / "rl" / "config.json").read_text())["model.path"]
        == "runs/reproduce/small/seed-0/sft-model"
    )
    assert reproduce(one, start) == 0 and len(started) == 4
    other = replace(one, words=("validation.max_tokens=5",))  # an evaluation of other words is another one
    assert not other.done(one.recipe.stages[2], other.command(one.recipe.stages[2]))
    one.result(one.recipe.stages[2]).write_text("")  # it was killed
    assert not one.done(one.recipe.stages[2], one.command(one.recipe.stages[2]))
    assert reproduce(one, start) == 0 and started[4:] == ["eval"]

    file = place / "recipes" / "small.expected.yaml"  # a figure that did not come, and one that is not there
    file.write_text(file.read_text().replace("0.5}, tolerance: 0.5", "7}, tolerance: 0.5", 1).replace("/n,", "/m,"))
    assert reproduce(attempt(place), start) == 1
    said = capsys.readouterr().out
    assert "small, seed 0: OUTSIDE the band: 2 of 4 figures" in said and " none " in said

    (one.folder / "rl" / "summary.json").write_text('{"finished": tr')  # torn: the stage is not taken for done
    assert not one.done(one.recipe.stages[1], one.command(one.recipe.stages[1]))
    config = one.folder / "sft" / "config.json"
    config.write_text(config.read_text().replace('"batch_size": 2', '"batch_size": 4'))
    assert not one.done(one.recipe.stages[0], one.command(one.recipe.stages[0]))  # another run: birl will refuse it
    capsys.readouterr()
    assert reproduce(one, start) == 2
    assert "batch_size" in capsys.readouterr().err


def test_a_stage_that_fails_ends_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(attempt(place), lambda command: 3) == 3
    assert "a stage ended with exit code 3" in capsys.readouterr().err
    assert reproduce(attempt(place), lambda command: None) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_stopped_in_the_middle_it_goes_on(place: Path) -> None:
    """A real process: Ctrl-C while the second stage trains, then the same command again."""
    (place / "recipes" / "rl.yaml").write_text(RL.replace("steps: 2", "steps: 400"))
    assert reproduce(attempt(place), lambda command: None if command[0] == "rl" else main(list(command))) == 130
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "birl", "reproduce", "small"]
    process = subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    run = place / "runs" / "reproduce" / "small" / "seed-0" / "rl"
    try:
        while process.poll() is None and not ((run / "metrics.jsonl").exists() and len(steps(run)) > 2):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1].decode()
    finally:
        process.kill()
    assert process.returncode == 130 and "the same command goes on from here" in said, said
    before = steps(run)
    assert 2 < len(before) < 400
    trained = (run.parent / "sft" / "metrics.jsonl").stat().st_mtime_ns

    (place / "recipes" / "rl.yaml").write_text(RL.replace("steps: 2", f"steps: {len(before) + 2}"))
    assert reproduce(attempt(place), lambda command: main(list(command))) == 0
    assert steps(run) == list(range(1, len(before) + 3))
    assert (run.parent / "sft" / "metrics.jsonl").stat().st_mtime_ns == trained


def steps(run: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(run / "metrics.jsonl")]  # its last line may be half-written


def test_a_dry_run_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "small", "--seed", "3", "--dry-run", "seed=3"]) == 2
    assert "write --seed 3" in capsys.readouterr().err
    assert main(["reproduce", "small", "--dry-run", "run=mine"]) == 2  # it was ignored
    assert "run=mine: leave it out; results are in runs/reproduce" in capsys.readouterr().err
    assert main(["reproduce", "small", "--seed=3", "--dry-run", "model.max_length=256"]) == 0
    said = capsys.readouterr().out
    assert not (place / "runs").exists()
    assert "small, seed 3: a tiny model" in said and "reward/mean 0.500 (seed 0; +-0.5)" in said
    lines = [line.split() for line in said.splitlines() if line.startswith("  birl ")]
    assert [line[1] for line in lines] == ["sft", "checkpoints", "rl", "eval"]
    assert "seed=3" in lines[2] and "model.max_length=256" in lines[2] and lines[2][-1].endswith("small/seed-3/rl")
    assert main(["reproduce", "recipes/small.expected.yaml", "--dry-run"]) == 0


def test_the_recipes_are_listed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "recipes" / "broken.expected.yaml").write_text("about: [")
    (place / "recipes" / "deep").mkdir()
    (place / "recipes" / "deep" / "later.expected.yaml").write_text("about: x\nhardware: y\nnot_run: no GPU\n")
    (place / "recipes" / "deep" / "later.yaml").touch()
    assert main(["reproduce"]) == 0
    said = capsys.readouterr().out
    assert "small\n  a tiny model\n  sft -> rl -> eval; anything\n  expected: loss 6.000" in said
    assert "broken\n  " in said and "is not valid YAML" in said
    assert "deep/later\n  x\n  rl; y\n  NOT RUN: no GPU" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["smal"], "There is no recipe smal. Did you mean small?"),
        (["small", "other"], "takes one recipe at a time"),
        (["small", "--sed", "1"], "Did you mean --seed?"),
        (["small", "--seed", "one"], "--seed takes a whole number, as in --seed 1, not 'one'"),
        (["--dry-run"], "Name a recipe"),
        (["nothing.yaml"], "there is no nothing.expected.yaml"),
        (["small", "stepz=1"], "small, stage sft:"),
    ],
)
def test_mistakes_are_told(place: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words]) == 2
    streams = capsys.readouterr()
    assert told in streams.err and not (place / "runs").exists()


def test_elsewhere_the_recipes_of_the_repository_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shelf.root() == shelf.OWN
    monkeypatch.setattr(shelf, "OWN", tmp_path)
    assert main(["reproduce"]) == 2
