"""SFT, reward models and DPO as Python calls, with TRL's names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import birl
from birl import BirlError
from tests.train.test_trainer_names import recorded
from tests.train.trainers import QUIET, ROWS

CHAT = [{"role": "user", "content": "Hi"}]


SAID = {"completion": [{"role": "assistant", "content": "Hello"}]}


PAIR = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}


@pytest.mark.parametrize(
    ("kind", "rows", "names", "key", "value"),
    [
        (birl.SFTTrainer, [{"prompt": CHAT, **SAID}] * 2, {"learning_rate": 1e-3}, "optimizer.lr", 1e-3),
        (birl.DPOTrainer, [PAIR] * 2, {"beta": 0.3, "loss_type": "sigmoid"}, "preference.beta", 0.3),
        (birl.RewardTrainer, [PAIR] * 2, {"center_rewards_coefficient": 0.01}, "ranking.centering", 0.01),
    ],
    ids=["sft", "dpo", "rm"],
)
def test_every_command_is_a_python_call(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    rows: Any,
    names: Any,
    key: str,
    value: float,
) -> None:
    monkeypatch.chdir(tmp_path)
    args = recorded(f"{kind.prefix}Config", num_train_epochs=1, per_device_train_batch_size=2)
    trainer = kind(str(tiny), rows, args=args, output_dir="run", **names, overrides={"threads": 1, **QUIET})
    section, _, name = key.rpartition(".")
    assert getattr(getattr(trainer.config, section), name) == value and trainer.config.batch_size == 2
    assert trainer.train()["finished"] and trainer.metrics[-1]["step"] == 1
    assert (trainer.save_model("saved") / "config.json").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: birl.SFTTrainer("x"), r'train_dataset is None.* "completion": "7"}'),
        (lambda: birl.DPOTrainer("x"), r'train_dataset is None.* "chosen": "7"'),
        (lambda: birl.SFTTrainer("x", ROWS, num_generations=2), r"rollout\.group_size of `birl rl`"),
        (lambda: birl.SFTTrainer("x", ROWS, dataset_text_field="body"), "dataset_text_field='body' is not taken.*name"),
        (lambda: birl.SFTTrainer("x", ROWS, callbacks=[1]), r"callbacks=\[1\] is not taken"),
        (
            lambda: birl.DPOTrainer("x", ROWS, learning_rte=1),
            r"DPOTrainer has no parameter learning_rte.*optimizer\.lr",
        ),
        (lambda: birl.SFTTrainer("x", ROWS, args={"output_dir": True}), "output_dir=True: a bool; give the name of a"),
        (lambda: birl.DPOTrainer(object(), ROWS), "give the name of a folder"),
        (lambda: birl.DPOTrainer("x", ROWS, loss_type=["sigmoid", "hinge"]), "choose one of sigmoid, dpo, ipo"),
    ],
)
def test_a_wrong_call_of_a_command_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(BirlError, match=message):
        call()


def test_a_loss_on_the_completion_alone_is_the_default_and_an_end_token_is_the_models() -> None:
    rows = [{"prompt": "a", "completion": "b"}]
    keys = birl.SFTTrainer("x", rows, completion_only_loss=True, local_rank=-1).config
    assert keys.data.train_on == birl.SFTTrainer("x", rows, args={"assistant_only_loss": True}).config.data.train_on
    assert keys.data.train_on == ["assistant"]
    with pytest.raises(BirlError, match=r"eos_token='<e>' is not taken.*that of the model's tokenizer"):
        birl.SFTTrainer("x", rows, eos_token="<e>")


def test_losses_of_dpo_that_trl_adds_up() -> None:
    rows = [{"prompt": "Hi", "chosen": "Hello", "rejected": "No"}]
    both = birl.DPOTrainer("x", rows, loss_type=["sigmoid", "sft"], loss_weights=[2.0, 1.0]).config.preference
    assert (both.loss, both.nll_coef) == ("dpo", 0.5)
    assert birl.DPOTrainer("x", rows, loss_type=["ipo"]).config.preference.loss == "ipo"


@pytest.mark.parametrize(
    "name",
    [
        *("PPOTrainer", "KTOTrainer", "RLOOTrainer", "GRPOConfig", "MRLTrainer", "XPOTrainer"),
        *("ModelConfig", "ScriptArguments"),
    ],
)
def test_names_that_are_elsewhere_say_where(name: str) -> None:
    with pytest.raises(ImportError, match=f"birl has no {name}: .*[Tt]rainer.*from_trl.md"):
        getattr(birl, name)


VOTES = [{"prompt": "Hi", "completion": text, "label": good} for text, good in (("Hello", True), ("Go away", False))]


def test_rows_with_a_label_train_with_kto_alone(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = {"threads": 1, "batch_size": 2, **QUIET}
    names = {"output_dir": "run", "max_steps": 1, "overrides": quiet}
    assert birl.DPOTrainer(str(tiny), VOTES, loss_type="kto", **names).train()["finished"]
    with pytest.raises(BirlError, match=r"have one and a `label`: set preference\.loss=kto"):
        birl.DPOTrainer(str(tiny), VOTES, output_dir="other", max_steps=1, overrides=quiet).train()
