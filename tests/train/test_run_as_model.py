"""What names a model may name a run, wherever a model is named."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from birl.cli import chat, main
from birl.cli.configured import RUNS
from birl.config import schema
from birl.config.load import load
from birl.learner.export import resolved
from birl.run_folder import chosen_checkpoint

QUIET = ["threads=1", "track.console=off", "track.tensorboard=false", "track.report=false", "track.trace=false"]
ROWS = {
    "texts": {"prompt": "What is 1 + 2?", "answer": "3"},
    "pairs": {"prompt": "What is 1 + 2?", "chosen": "3", "rejected": "4 5"},
}


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step each of SFT, with and without LoRA on it, and of a reward model."""
    folder = tmp_path_factory.mktemp("runs")
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 4)
    for words in (
        f"sft model={tiny} data.train={folder}/texts.jsonl run={folder}/sft",
        f"sft model={folder}/sft data.train={folder}/texts.jsonl run={folder}/lora lora.rank=2",
        f"rm model={tiny} data.train={folder}/pairs.jsonl run={folder}/rm",
    ):
        assert main([*words.split(), "steps=1", "batch_size=2", *QUIET]) == 0
    shutil.copytree(folder / "sft/model", folder / "begun/model")
    shutil.copy(folder / "sft/config.json", folder / "begun")
    shutil.copytree(folder / "sft/checkpoints/step-000001", folder / "alone")
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("eval NAME data.validation=texts.jsonl validation.max_tokens=4 threads=1", "sft"),
        ("eval model=NAME data.validation=texts.jsonl --validate", "sft/checkpoints/step-000001"),
        ("chat NAME max_tokens=1", "lora"),
        ("plan NAME", "sft"),
        ("plan model=NAME --json", "begun"),
        ("plan --cluster NAME", "sft/checkpoints/step-000001"),
        ("rl model=NAME data.train=texts.jsonl --dry-run", "lora"),
        ("dpo model=NAME data.train=pairs.jsonl steps=1 batch_size=2", "sft"),
        ("rl model=NAME data.train=texts.jsonl algorithm=distill algorithm.teacher=NAME RL", "lora"),
        ("rl model=sft data.train=texts.jsonl algorithm=ppo critic.path=NAME RL", "lora/checkpoints/step-000001"),
        ("rl model=sft data.train=texts.jsonl algorithm=ppo critic.path=NAME RL", "rm"),
        ("rl model=sft data.train=texts.jsonl reward=model reward.model=NAME RL", "rm"),
    ],
)
def test_a_run_is_a_model(
    name: str,
    words: str,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(runs)
    monkeypatch.setattr(chat, "_ask", lambda: None)
    words = words.replace("NAME", name).replace(
        "RL", "steps=1 rollout.prompts=1 rollout.group_size=2 rollout.max_tokens=2"
    )
    trains = words.split()[0] in ("rl", "dpo")
    assert main([*words.split(), *(QUIET if trains else []), *([f"run={tmp_path}/run"] if trains else [])]) == 0
    assert not list(runs.glob("*/export/*.part-*"))
    if words.startswith("eval") and "--validate" not in words:  # what is slow says first what it does
        assert "answers of at most 4 tokens ..." in capsys.readouterr().err


@pytest.mark.parametrize("word", ["{}", "model={}", "model.path={}"])
def test_a_run_is_served(word: str, runs: Path) -> None:
    assert load(schema.Serve, [word.format(runs / "sft")]).model.path == str(runs / "sft")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rl data.train=texts.jsonl reward=model reward.model=sft", "name a run of `birl rm`"),
        ("rl data.train=texts.jsonl reward=model reward.model=lora/checkpoints/step-000001", "run of `birl rm`"),
        ("rl data.train=texts.jsonl model=rm", "it can judge: reward=model reward.model=rm"),
        ("rl data.train=texts.jsonl algorithm=distill algorithm.teacher=rm", "the run has trained a reward model"),
        *[
            (f"{words} model.path=rm", "reward.model=rm")
            for words in ("serve", "eval data.validation=texts.jsonl", "plan")
        ],
        ("chat rm", "reward.model=rm"),
        ("chat begun", "model=begun: the run has no checkpoint yet."),
        ("rl data.train=texts.jsonl reward=model reward.model=begun", "reward.model=begun: the run has no checkpoint"),
        ("serve alone", "It is a checkpoint away from its run"),
        ("serve adapter", "It is an adapter alone"),
        ("eval sft/config.yaml", "birl eval sft data.validation="),
        ("serve sft/config.yaml", "birl serve sft"),
        ("rl sft data.train=texts.jsonl", "For the model of that folder: model=sft."),
    ],
)
def test_what_is_no_model_is_told_at_once(
    words: str, said: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    for name in [*RUNS.values(), "birl.plan.run"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1, error


def test_its_export_is_made_once_and_anew_after_another_training(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "sft", run, ignore=shutil.ignore_patterns("export"))
    goal = run / "export" / "step-000001"
    newest = run / "checkpoints" / "step-000001"
    said: list[str] = []
    for name in (run, newest):
        assert resolved(str(name), say=said.append) == goal
    assert said == [f"Exporting {newest} ..."] and resolved(str(run), weights=False) == run / "model"
    template = run / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# mine #}")
    assert resolved(str(run), say=said.append) == goal and len(said) == 2
    assert (goal / template.name).read_text() == template.read_text()
    later = time.time() + 10
    os.utime(newest / "manifest.json", (later, later))
    assert resolved(str(run), say=said.append) == goal and len(said) == 3
    assert chosen_checkpoint(run, run, None) == newest


def test_two_that_export_at_once(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one takes what the faster one has made."""
    run = tmp_path / "run"
    shutil.copytree(runs / "sft", run, ignore=shutil.ignore_patterns("export"))
    rename: Callable[[Path, Path], Path] = Path.rename

    def later(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        assert resolved(str(run)) == target
        return rename(part, target)

    monkeypatch.setattr(Path, "rename", later)
    assert (resolved(str(run)) / "model.safetensors").is_file()
    assert [p.name for p in (run / "export").iterdir()] == ["step-000001"]
