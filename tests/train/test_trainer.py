"""`from birl import Trainer`: rewards and rows as Python objects, four lines to train."""

import asyncio
import inspect
import json
import multiprocessing
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset, DatasetDict

from birl import BirlError, Trainer
from birl.config.load import load
from birl.config.schema import RL
from birl.types import Feedback, Message, Task
from tests.train.trainers import ROWS, SMALL, Make, letters, metrics, rollouts, shortness


class Indexed:
    """As torch.utils.data.Dataset."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> dict[str, str]:
        return {"prompt": "1", "answer": "1"}


def write(name: str) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return name


def test_the_example_of_the_docstring_runs(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands there, but for a model and sizes that take a second."""
    monkeypatch.chdir(tmp_path)
    write("train.jsonl"), write("test.jsonl")
    lines = [line for line in (inspect.getdoc(Trainer) or "").splitlines() if line.startswith("    ")]
    assert len(lines) == 4
    assert "max_steps=20)" in lines[1]
    lines[1] = lines[1].replace("max_steps=20)", "max_steps=1, max_tokens=8, num_generations=2, **small)")
    names = {"my_reward": letters, "small": {"model": str(tiny), "overrides": SMALL}}
    exec(textwrap.dedent("\n".join(lines)), names)
    assert "'validation/all/score'" in capsys.readouterr().out.splitlines()[-1]
    run = names["trainer"].run
    assert run == Path(names["summary"]["run"]) == Path("runs/model-train-dr_grpo-0")
    assert {"config.yaml", "metrics.jsonl", "rollouts.jsonl", "checkpoints", "report.html"} <= {
        path.name for path in run.iterdir()
    }


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(ROWS),
        Dataset.from_list(ROWS),
        [{"question": r["prompt"], "answer": r["answer"], "level": r["level"]} for r in ROWS],
        [{"messages": [{"role": "user", "content": r["prompt"]}], "level": r["level"]} for r in ROWS],
    ],
    ids=["list", "tuple", "datasets.Dataset", "question", "messages"],
)
def test_rows_as_python_objects(make: Make, rows: Any) -> None:
    summary = make(train_dataset=rows, eval_dataset=rows).train()
    assert summary["finished"] and summary["step"] == 1
    assert summary["after"]["metrics"]["validation/all/n"] == 4
    assert {r["task"].partition(":")[0] for r in rollouts()} == {"train"}


@pytest.mark.parametrize("kind", [str, Path, lambda name: [name, write("more.jsonl")]], ids=["str", "Path", "list"])
def test_rows_in_files(make: Make, kind: Callable[[str], Any]) -> None:
    make(train_dataset=kind(write("mine.jsonl")), batch_size=4, overrides={"data.weights": []}).train()
    assert {r["task"].partition(":")[0] for r in rollouts()} <= {"mine.jsonl", "more.jsonl"}
    assert len(rollouts()) == 8


def test_the_rewards_are_added_with_their_weights(make: Make) -> None:
    make(reward_funcs=[letters, shortness, "length"], reward_weights=[1.0, 0.5, 2.0]).train()
    for record in rollouts():
        parts = record["parts"]
        assert parts.keys() == {"letters", "shortness", "length"}
        expected = parts["letters"] + 0.5 * parts["shortness"] + 2.0 * parts["length"]
        assert record["reward"] == pytest.approx(expected, rel=1e-4)


def test_any_callable_is_a_reward(make: Make) -> None:
    class Judge:
        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return letters(completions)

    async def later(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return letters(completions)

    functions = [lambda completions, **_: letters(completions), lambda completions, **_: shortness(completions)]
    trainer = make(reward_funcs=[*functions, partial(letters), Judge(), later])
    names = ["given:lambda", "given:lambda_2", "given:partial", "given:Judge", "given:later"]
    assert trainer.config.reward.functions == names
    trainer.train()
    assert all(len(r["parts"]) == 5 and r["outcome"] in ("ok", "truncated") for r in rollouts())


def test_further_columns_reach_the_reward_by_name(make: Make) -> None:
    calls: list[dict[str, Any]] = []

    def reward(
        completions: list[str], prompts: list[Any], level: list[int], gold: list[str], **rest: Any
    ) -> list[float]:
        calls.append({"n": len(completions), "prompts": prompts, "level": level, "gold": gold, **rest})
        return letters(completions)

    make(reward_funcs=reward, num_generations=3).train()
    assert len(calls) == 2
    for call in calls:
        (level,) = set(call["level"])
        assert call["n"] == len(call["level"]) == 3
        assert call["gold"] == call["answer"] == [str(level + 2)] * 3
        assert call["prompts"] == [[{"role": "user", "content": f"What is {level} + 2?"}]] * 3


def test_a_column_that_does_not_exist_is_named(make: Make) -> None:
    with pytest.raises(BirlError, match=r"'levels'.* no such column. Did you mean level\?"):
        make(reward_funcs=lambda completions, levels: letters(completions)).train()


def test_rows_of_messages_give_messages_to_reward_functions(make: Make) -> None:
    """As in TRL's GRPO page: completion[0]["content"], ids, the trainer's state, and what is logged."""
    states: list[tuple[int, int, float]] = []

    def reward(
        completions: Any, completion_ids: Any, trainer_state: Any, log_extra: Any, log_metric: Any, **_: Any
    ) -> list[float]:
        contents = [completion[0]["content"] for completion in completions]
        log_extra("first", [ids[0] for ids in completion_ids])
        log_metric("length", len(contents[0]))
        states.append((trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch))
        return letters(contents)

    rows = [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in ROWS]
    make(train_dataset=rows, reward_funcs=[reward, "length"], max_steps=2).train()
    assert states == [(0, 2, 0.0)] * 2 + [(1, 2, 0.5)] * 2
    assert all(r["extra"]["first"] in r["samples"][0]["tokens"] for r in rollouts())
    assert all(m["reward/logged/length"] >= 0 for m in metrics())


def test_none_is_no_reward_and_no_failure(make: Make) -> None:
    """A function that judges some rows only, alone: the others are left out, and the run goes on."""

    def even(completions: list[str], level: list[int], **_: Any) -> list[float | None]:
        return [None if level[0] else float(len(c)) for c in completions]

    summary = make(reward_funcs=even, batch_size=4).train()
    assert summary["finished"]
    assert [r["reward"] is None for r in rollouts()].count(True) == 6


def test_the_model_is_saved_where_it_is_wanted(make: Make) -> None:
    trainer = make()
    with pytest.raises(BirlError, match="no checkpoint"):
        trainer.save_model("early")
    trainer.train()
    folder = trainer.save_model("mine")
    assert folder == Path("mine") and (folder / "config.json").exists() and list(folder.glob("*.safetensors"))
    assert trainer.save_model().parent == trainer.run
    Path("empty").mkdir()
    for link, target in (("link", "empty"), ("dangling", "nowhere")):
        Path(link).symlink_to(target)
        with pytest.raises(BirlError, match=f"{link} exists already"):
            trainer.save_model(link)
    assert trainer.save_model("empty") == Path("empty") and (Path("empty") / "config.json").exists()


def test_sizes_are_what_was_asked_for(make: Make) -> None:
    make(num_generations=3, batch_size=2, max_steps=2, max_tokens=5, beta=0.1).train()
    assert [m["outcome/asked"] for m in metrics()] == [6, 6]
    assert max(m["length/max"] for m in metrics()) == 5
    assert all("kl" in m for m in metrics())


def test_without_max_steps_it_goes_through_the_data_once(make: Make) -> None:
    assert make(max_steps=-1).train()["step"] == 2
    assert make(max_steps=-1, num_epochs=2, output_dir="twice").train()["step"] == 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows|empty"),
        (["prompt", 3], "row 1 is a str"),
        ([{"text": "hello"}], "train has no column messages, prompt, question"),
        (DatasetDict(train=Dataset.from_list(ROWS)), "it has the splits train"),  # pyright: ignore
        (Indexed(), r"train: a Indexed; .* Pass \[DATA\[i\] for i in range\(len\(DATA\)\)\]"),
        ([{"prompt": float("nan"), "answer": "1"}], "train, row 1: `prompt` is empty. Remove the row."),
        (42, "train: a int; it takes a path, a datasets.Dataset or a list of dicts"),
        ("missing.jsonl", "missing.jsonl: no such file"),
        ([{"prompt": "Hi"}, {"prompt": 3}], "train, row 2"),
    ],
    ids=["empty", "no dicts", "no prompt", "splits", "map-style", "NaN", "no rows", "no file", "no text"],
)
def test_unusable_rows_are_refused_by_name(make: Make, rows: Any, message: str) -> None:
    with pytest.raises(BirlError, match=message):
        make(train_dataset=rows)  # and not as late as at train()


def test_a_script_without_a_guard_is_not_trained_again_by_its_children(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(BirlError, match='Put what starts the training under `if __name__ == "__main__":`'):
        trainer.train()


def test_the_run_folder_says_what_was_given(make: Make) -> None:
    """Objects cannot be written down: the file names them, and `birl rl` says that it does not have them."""
    trainer = make(train_dataset=Dataset.from_list(ROWS), eval_dataset=ROWS)
    trainer.train()
    written = yaml.safe_load((trainer.run / "config.yaml").read_text())
    assert written["reward"]["functions"] == ["given:letters"]
    assert written["data"]["train"] == written["data"]["validation"] == ["given"]
    assert load(RL, [str(trainer.run / "config.yaml")]) == trainer.config


def test_the_same_trainer_goes_on_where_it_stopped(make: Make) -> None:
    first = make(max_steps=1).train()
    again = make(max_steps=3).train()
    assert (first["step"], again["step"]) == (1, 3)
    assert [m["step"] for m in metrics()] == [1, 2, 3]
    assert make(max_steps=3).train()["step"] == 3


def test_it_trains_in_a_notebook(make: Make) -> None:
    """Where an event loop is running already."""

    async def cell() -> dict[str, Any]:
        return make().train()

    assert asyncio.run(cell())["finished"]


class Echo:
    """Rewards vowels, twice."""

    @dataclass
    class Config:
        turns: int = 1

    def __init__(self, task: Task, config: Config) -> None:
        self.task, self.left = task, config.turns

    async def start(self) -> Any:
        return self.task.prompt

    async def step(self, reply: Message) -> Feedback:
        self.left -= 1
        more = (Message(role="user", content="more"),)
        return Feedback(messages=more, reward=float(sum(map(reply.content.count, "aeiou"))), done=self.left == 0)

    async def close(self) -> None:
        pass


def test_an_environment_is_given_as_a_class(make: Make) -> None:
    stop = {"rollout.stop": "[a,e,i,o,u,n,t]", "env.turns": 2}
    summary = make(reward_funcs=None, env=Echo, max_tokens=60, overrides=stop).train()
    found = rollouts(summary["run"])
    assert {len(r["turns"]) for r in found if r["outcome"] == "ok"} == {2} and not any(r["parts"] for r in found)
    with pytest.raises(BirlError, match=r"Did you mean env\.turns"):
        make(reward_funcs=None, env=Echo, output_dir="other", overrides={"env.turn": 2}).train()
