"""What a trainer may be given: its parameters, TRL's names and configs, and what is refused at once."""

import copy
import dataclasses
import importlib
import json
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from birl import BirlError, Trainer
from birl.config.file import flatten
from birl.config.load import load
from birl.config.schema import RL
from birl.trl import LOSS_TYPES
from tests.train.trainers import QUIET, ROWS, SMALL, Make, letters, shortness


def test_every_parameter_is_a_key(make: Make) -> None:
    config = make(
        loss_type="grpo",
        beta=0.1,
        epsilon=0.1,
        epsilon_high=0.3,
        scale_rewards="batch",
        num_generations=3,
        batch_size=5,
        max_steps=7,
        max_tokens=9,
        temperature=0.8,
        learning_rate=1e-4,
        mask_truncated_completions=True,
        seed=3,
        output_dir="there",
        reward_weights=[2.0],
        overrides={"optimizer.schedule": "cosine"},
    ).config
    algorithm, rollout = config.algorithm, config.rollout
    assert (algorithm.denominator, algorithm.kl_coef, algorithm.scale_rewards) == ("sequence", 0.1, "rewards")
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.mask_truncated) == (0.1, 0.3, True)
    assert (rollout.group_size, rollout.prompts, rollout.max_tokens, rollout.temperature) == (3, 5, 9, 0.8)
    assert (config.steps, config.seed, config.run, config.reward.weights) == (7, 3, "there", [2.0])
    assert (config.optimizer.lr, config.optimizer.schedule) == (1e-4, "cosine")


@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_loss_types_are_those_of_the_presets(make: Make, loss: str) -> None:
    algorithm, preset = make(loss_type=loss).config.algorithm, load(RL, ["data.train=x", f"algorithm={loss}"]).algorithm
    for key in ("surrogate", "surrogate_args", "clip_low", "clip_high", "denominator"):
        assert getattr(algorithm, key) == getattr(preset, key), key


@pytest.mark.parametrize("loss", ["gspo", "dapo", "dr_grpo"])
def test_a_clip_range_that_is_given_wins_over_the_loss_type(make: Make, loss: str) -> None:
    def clips(**arguments: Any) -> tuple[float, float]:
        algorithm = make(loss_type=loss, **arguments).config.algorithm
        return algorithm.clip_low, algorithm.clip_high

    low, high = clips()
    assert clips(epsilon=0.3) == (0.3, 0.3) and clips(epsilon=0.2) == (0.2, 0.2)
    assert clips(epsilon=0.1, epsilon_high=0.4) == (0.1, 0.4)
    assert clips(epsilon_high=0.5) == (low, 0.5) and clips(overrides={"algorithm.clip_low": 0.05}) == (0.05, high)


def test_the_upper_bound_of_cispo_is_the_ratio_however_it_is_given(make: Make) -> None:
    """TRL clamps the ratio at epsilon_high; 5 is ScaleRL's."""
    both = {"loss_type": "cispo", "epsilon_high": 5.0}
    for names in (both, {"args": both}, {"args": {"loss_type": "cispo"}, "epsilon_high": 5.0}):
        algorithm = make(**names).config.algorithm
        assert (algorithm.clip_low, algorithm.clip_high) == (1.0, 4.0), names
    for names in ({"loss_type": "cispo", "epsilon": 0.3}, {"args": {"loss_type": "cispo", "epsilon": 0.3}}):
        algorithm = make(**names).config.algorithm
        assert (algorithm.clip_low, algorithm.clip_high) == (1.0, 0.3), names  # as in TRL and MRL, no lower bound
    with pytest.raises(BirlError, match=r"epsilon_high=0.28: .* the ratio itself.*; give 1.28"):
        make(loss_type="cispo", epsilon_high=0.28)


SCALES = {True: "group", False: "none", "group": "group", "batch": "rewards", "none": "none"}
CONFIGS = json.loads(Path(__file__).with_name("trl_configs.json").read_text())


def recorded(kind: str, **changes: Any) -> Any:
    """A config object of TRL's: its own class where TRL is installed, else the names and defaults that were recorded of
    the version in the file."""
    names = {**CONFIGS[kind], **changes}
    try:
        trl = importlib.import_module("trl")
    except ImportError:
        fields = [(n, Any, dataclasses.field(default_factory=partial(copy.copy, v))) for n, v in CONFIGS[kind].items()]
        return dataclasses.make_dataclass(kind, fields)(**names)
    return getattr(trl, kind)(**{"output_dir": "out", "bf16": False, "use_cpu": True, **changes})


def test_the_config_object_of_trl_is_taken_whole(make: Make) -> None:
    """TRL's defaults are meant too: two sides of the clip, the scale of the group, a linear schedule, three epochs."""
    given = recorded("GRPOConfig", learning_rate=2e-5, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                     num_generations=4, max_completion_length=9, num_iterations=2, save_steps=3, seed=5,
                     steps_per_generation=4, generation_batch_size=None if "trl" in sys.modules else 16)  # fmt: skip
    args = {"model": "x", "reward_funcs": [letters, shortness], "train_dataset": ROWS}
    config = Trainer(**args, args=given).config
    algorithm, rollout = config.algorithm, config.rollout
    assert (rollout.prompts, rollout.group_size, rollout.max_tokens) == (4, 4, 9)
    assert (algorithm.updates_per_batch, algorithm.passes, config.epochs) == (2, 2, 3)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.scale_rewards) == (0.2, 0.2, "group")
    assert (algorithm.denominator, algorithm.surrogate, algorithm.kl_coef) == ("token", "clip", 0.0)
    assert (config.optimizer.lr, config.optimizer.schedule, config.optimizer.beta2) == (2e-5, "linear", 0.999)
    assert (config.checkpoint.every, config.seed, config.reward.weights) == (3, 5, [1.0, 1.0])
    mine = Trainer(**args, args=given, learning_rate=3e-5, overrides={"optimizer.schedule": "cosine"}).config.optimizer
    assert (mine.lr, mine.schedule) == (3e-5, "cosine")


@pytest.mark.parametrize(
    ("name", "value", "key", "theirs"),
    [
        ("beta", 0.0, "algorithm.kl_coef", {"beta": 0.1}),
        ("learning_rate", 1e-6, "optimizer.lr", {"learning_rate": 3e-5}),
        ("temperature", 1.0, "rollout.temperature", {"temperature": 0.7}),
        ("seed", 0, "seed", {"seed": 5}),
        ("num_generations", 8, "rollout.group_size", {"num_generations": 4}),
        ("max_tokens", 256, "rollout.max_tokens", {"max_completion_length": 9}),
        ("max_completion_length", 256, "rollout.max_tokens", {"max_completion_length": 9}),
        ("num_epochs", 1, "epochs", {"num_train_epochs": 3}),
        ("mask_truncated_completions", False, "algorithm.mask_truncated", {"mask_truncated_completions": True}),
        ("loss_type", "dr_grpo", "algorithm.denominator", {"loss_type": "bnpo"}),
    ],
)
def test_a_parameter_at_its_default_wins_where_it_was_given(name: str, value: Any, key: str, theirs: Any) -> None:
    """Zeros and False too, over `args`; one that was not given leaves the choice to `args` or a preset."""
    rows = {"reward_funcs": letters, "train_dataset": ROWS}
    both = Trainer("x", **rows, args=theirs, **{name: value})
    expected = "constant" if name == "loss_type" else value
    assert flatten(both.config)[key] == expected != flatten(Trainer("x", **rows, args=theirs).config)[key]


@pytest.mark.parametrize(
    ("names", "key", "value"),
    [
        ({"max_completion_length": 9}, "rollout.max_tokens", 9),
        ({"num_train_epochs": 3.0, "max_steps": -1}, "epochs", 3),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}, "rollout.prompts", 8),
        ({"num_iterations": 2}, "algorithm.passes", 2),
        ({"lr_scheduler_type": "cosine"}, "optimizer.schedule", "cosine"),
        ({"warmup_steps": 3, "max_steps": 9}, "optimizer.warmup_steps", 3),
        ({"args": {"max_steps": 10, "warmup_ratio": 0.1}, "max_steps": -1}, "optimizer.warmup_steps", 1),
        ({"args": {"max_steps": 12, "warmup_ratio": 0.1}, "max_steps": -1}, "optimizer.warmup_steps", 2),  # rounded up
        ({"save_steps": 4}, "checkpoint.every", 4),
        ({"save_strategy": "no", "overrides": {}}, "checkpoint.every", 0),
        ({"eval_steps": 4, "eval_strategy": "steps", "eval_dataset": ROWS}, "validation.every", 4),
        ({"adam_beta2": 0.99}, "optimizer.beta2", 0.99),
        ({"max_grad_norm": 0.2}, "optimizer.max_grad_norm", 0.2),
        ({"weight_decay": 0.1}, "optimizer.weight_decay", 0.1),
        ({"gradient_checkpointing": True}, "learner.gradient_checkpointing", True),
        ({"save_total_limit": 5}, "checkpoint.keep_last", 5),
        ({"report_to": "none"}, "track.tensorboard", False),
        ({"use_vllm": True}, "engine.kind", "vllm"),
        ({"delta": 4.0}, "algorithm.dual_clip", 4.0),
        ({"importance_sampling_level": "sequence"}, "algorithm.surrogate", "gspo"),
        ({"eval_on_start": True, "load_best_model_at_end": False}, "validation.at_start", True),
        ({"peft_config": {"r": 4, "lora_alpha": 8}}, "lora.rank", 4),
        ({"logging_steps": 1, "log_completions": True, "remove_unused_columns": False}, "seed", 0),
        ({"use_lora": True}, "lora.rank", 16),
        ({"overrides": {"lora.rank": 4, "lora.targets": ("q_proj", "v_proj")}}, "lora.targets", ["q_proj", "v_proj"]),
        ({"max_steps": "3"}, "steps", 3),
        ({"max_model_len": 600}, "model.max_length", 600),
        ({"max_tokens": 50, "max_completion_length": 20}, "rollout.max_tokens", 20),
        ({"weight_sync_method": "reload"}, "weights.method", "auto"),
        ({"loss_type": "grpo"}, "algorithm.scale_rewards", "group"),
        *(({"scale_rewards": a}, "algorithm.scale_rewards", b) for a, b in SCALES.items()),
        ({"reward_weights": None}, "reward.weights", []),
        ({"loss_type": "grpo", "scale_rewards": "none"}, "algorithm.scale_rewards", "none"),
        ({"use_lora": True, "peft_config": {"r": 4}}, "lora.rank", 4),
        ({"per_device_train_batch_size": np.int64(4)}, "rollout.prompts", 2),
        ({"args": {"per_device_train_batch_size": "4"}}, "rollout.prompts", 2),
        ({"eval_dataset": ROWS, "eval_strategy": "no"}, "validation.every", 0),
        ({"reward_funcs": letters, "reward_weights": 0.5}, "reward.weights", [0.5]),
        ({"overrides": {"optimizer": {"lr": 1e-3}}}, "optimizer.lr", 1e-3),
        ({"overrides": {"data.system_prompt": '"Hi"'}}, "data.system_prompt", '"Hi"'),
        (
            {"overrides": {"rollout.stop": ["\n\n", "\\boxed", "it's", "a,b"]}},
            "rollout.stop",
            ["\n\n", "\\boxed", "it's", "a,b"],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_names_of_trl_and_mrl_are_parameters(names: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    config = Trainer(**{"train_dataset": ROWS, "num_generations": 2, **names}).config
    assert getattr(getattr(config, section) if section else config, name) == value


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"use_lora": 8}, 'use_lora=8: True or False; a rank is overrides={"lora.rank": 8}.'),
        ({"peft_config": {"r": 4, "use_rslora": True}}, "peft_config: use_rslora=True is not taken"),
        ({"peft_config": {"r": 4, "modules_to_save": ["lm_head"]}}, "peft_config: modules_to_save="),
        (
            {"peft_config": {"r": 4, "init_lora_weights": "pissa"}},
            "peft_config: init_lora_weights='pissa' is not taken",
        ),
        ({"peft_config": "lora"}, "peft_config: a str; give a LoraConfig of PEFT"),
        ({"save_strategy": "epoch"}, "save_strategy='epoch' is not taken"),
        ({"save_steps": 0.1}, "save_steps=0.1 is not taken"),
        ({"report_to": "comet_ml"}, "report_to='comet_ml': there are tensorboard, wandb"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0: it needs to be a whole number of at"),
        ({"num_train_epochs": float("nan")}, "num_train_epochs=nan: it needs to be a number"),
        ({"overrides": ["optimizer.lr=1"]}, "overrides: a list; give a dict of keys"),
        ({"scale_rewards": ["group"]}, "scale_rewards=['group']: choose group"),
        ({"loss_type": ["grpo"]}, "loss_type=['grpo']: choose one of grpo"),
        ({"env": "gues_number"}, "env.kind=gues_number: must be single_turn"),
        ({"env": 5}, "env.kind=given:int: a int; give a class or a function, or the name of one"),
        ({"env": None}, "env=None: leave it out"),
        ({"reward_funcs": [dict]}, "reward_funcs: dict is a class; give a function, or an object of it"),
        ({"overrides": {"env.kind": "given:MyEnv"}}, "env.kind=given:MyEnv: was handed over by a Python program"),
        ({"num_rollout_workers": "two"}, "num_rollout_workers='two': it needs to be a whole number"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_parameter_cannot_take_is_one_line(names: dict[str, Any], told: str) -> None:
    """None of it has no effect, or ends in a traceback."""
    with pytest.raises(BirlError, match=re.escape(told)):
        Trainer(**{"train_dataset": ROWS, "num_generations": 2, **names})


QUICKSTART = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""


def test_the_quickstart_of_trl_runs_with_another_import(
    make: Make, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model's name changed too, rows and function from here, and a config so that it takes a second."""

    def accuracy_reward(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float | None]:
        contents = [completion[0]["content"] for completion in completions]
        return [None if not right else float(right in c) for c, right in zip(contents, solution, strict=True)]

    rows = [{"prompt": [{"role": "user", "content": r["prompt"]}], "solution": r["answer"]} for r in ROWS]
    text = QUICKSTART.replace("from trl import GRPOTrainer", "from birl import GRPOTrainer")
    text = text.replace("from trl.rewards import accuracy_reward\n", "").replace("Qwen/Qwen2-0.5B-Instruct", str(tiny))
    text = text.replace("train_dataset=dataset,", "train_dataset=dataset, args=config, overrides=small,")
    args = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 8}
    names = {"accuracy_reward": accuracy_reward, "config": args, "small": {**SMALL, **QUIET}}
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: Dataset.from_list(rows))
    exec(text, names)
    assert names["trainer"].metrics[-1]["step"] == 1


def test_what_a_script_of_trl_does_with_a_trainer(make: Make) -> None:
    """A switched-off optimizer, resuming by its word; what is not here says where it is."""
    trainer = make(optimizers=(None, None), max_samples=2, max_model_len=8000)
    assert (trainer.config.data.max_samples, trainer.config.learner.tokens_per_microbatch) == (2, 8000)
    with pytest.raises(AttributeError, match=r"Trainer has no evaluate: .*`birl eval RUN"):
        trainer.evaluate()
    with pytest.raises(BirlError, match=r"overrides=\{\"resume\": FOLDER\}"):
        trainer.train(resume_from_checkpoint="out/checkpoint-5")


def test_a_preset_decides_where_no_parameter_does(make: Make) -> None:
    preset = {"algorithm": "grpo"}
    algorithm = make(overrides=preset).config.algorithm
    assert (algorithm.kl_coef, algorithm.scale_rewards, algorithm.denominator) == (0.04, "group", "sequence")
    assert [make(beta=b, overrides=preset).config.algorithm.kl_coef for b in (0.2, 0.0)] == [0.2, 0.0]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_that_is_not_installed_is_told_before_torch(make: Make) -> None:
    with pytest.raises(BirlError, match=r"engine.kind=vllm: vllm is not installed.* -m pip install vllm"):
        make(use_vllm=True).train()


def test_a_model_that_is_not_there_is_told_before_torch(make: Make) -> None:
    with pytest.raises(BirlError, match=r"^model=no/such/folder: "):
        make(model="no/such/folder").train()


def test_a_data_frame_is_its_rows(make: Make) -> None:
    """Of pandas, or of polars, which is not installed here: only the name of its method differs."""

    class Polars:
        def to_dicts(self) -> list[dict[str, Any]]:
            return ROWS

    for frame in (Dataset.from_list(ROWS).to_pandas(), Polars()):
        assert make(train_dataset=frame)._given.train == ROWS


class Loaded:
    """A module of transformers, as far as its name goes."""

    name_or_path = "org/name"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def __call__(self, **_: Any) -> list[float]:
        return []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_generation": 4}, r"no parameter num_generation\. Did you mean num_generations\?"),
        ({"train_datasets": ROWS}, r"no parameter train_datasets\. Did you mean train_dataset\?"),
        ({"reward_fn": letters}, r"Did you mean reward_funcs\?"),
        ({"rollout.prompts": 3}, r'Did you mean overrides=\{"rollout\.prompts": \.\.\.\}\?'),
        ({"rollout": {"prompts": 3}}, r'Did you mean overrides=\{"rollout\.'),
        ({"clip_ratio": 3}, r'Did you mean overrides=\{"algorithm\.clip_low": \.\.\.\}\?'),
        ({"per_device_train_batch_size": 9}, r"9 answers .* is no multiple of num_generations=2; birl counts prompts"),
        ({"callbacks": [print]}, r"callbacks=.* is not taken\. TRL's word, without a key here: .*trainer\.metrics"),
        ({"tools": [print]}, r"The tool print takes"),
        ({"tools": [letters], "env": "countdown"}, r"env: has its own tools; leave out tools"),
        ({"processing_class": object()}, r"processing_class=.* is not taken.*the tokenizer in the model's folder"),
        ({"max_steps": "many"}, r"steps takes a whole number"),
        ({"vllm_mode": "colocate"}, r"vllm_mode='colocate' is not taken\. Did you mean engine\.attach\?"),
        ({"args": {"optim": "adafactor"}}, r"optim='adafactor' is not taken\. Did you mean optimizer\.kind\?"),
        ({"args": 3}, r"args: a int; give a GRPOConfig"),
        ({"model": Loaded()}, r"model: a Loaded; give the name of a folder.*, as in model='org/name'"),
        ({"reward_funcs": "org/RM-2B"}, r'reward_funcs="model", overrides=\{"reward\.model": "org/RM-2B"\}'),
        ({"reward_funcs": [letters, Loaded()]}, r'overrides=\{"reward\.model": "org/name"\}'),
        ({"processing_class": "x" * 500}, r"processing_class='x{1,20}\.\.\.x{1,20}' is not taken"),
        ({"neftune_noise_alpha": 5}, r"neftune_noise_alpha=5 is not taken\..* neither noise"),
        ({"weight_sync_method": "relod"}, r"weight_sync_method='relod': choose one of auto, memory, reload"),
        ({"overrides": {"optimizer.shedule": "cosine"}}, r"Did you mean optimizer\.schedule"),
        ({"loss_type": "luspo"}, r"loss_type='luspo': choose one of grpo, bnpo, dapo, dr_grpo, cispo, sapo, gspo"),
        ({"importance_sampling_level": "seq"}, r"importance_sampling_level='seq': choose token or sequence"),
        ({"load_best_model_at_end": True}, r"load_best_model_at_end=True is not taken.*export best"),
        ({"scale_rewards": "std"}, r"scale_rewards='std': choose group, batch or none"),
        ({"num_generations": 1}, r"rollout\.group_size=1: the mean of one reward is that reward"),
        ({"learning_rate": "fast"}, r"optimizer\.lr takes a number"),
        ({"reward_weights": [1.0, 2.0]}, r"2 weights for 1 functions"),
        ({"reward_funcs": []}, r"reward_funcs is empty"),
        ({"reward_funcs": 3}, r"reward_funcs=3: give a function"),
        ({"reward_funcs": [letters, None]}, r"reward_funcs=.*None\]: give a function"),
        ({"reward_funcs": "maths"}, r"Did you mean math\?"),
        ({"train_dataset": None}, r"data\.train is empty"),
        ({"reward_funcs": "no_file.py:score"}, r"reward\.functions=no_file\.py:score: there is no file no_file\.py"),
        ({"output_dir": 5}, r"output_dir=5: a int; give the name of a folder"),
        ({"output_dir": None}, r"run=null: no key can be null"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_at_once(make: Make, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BirlError, match=message):
        make(**arguments)
    assert not Path("run").exists()


@pytest.mark.parametrize("name", ["chat_template", "eos_token"])
def test_a_tokenizer_that_was_changed_is_not_left_out_in_silence(make: Make, tiny: Path, name: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny)
    assert make(processing_class=tokenizer).config.model.path == str(tiny)
    setattr(tokenizer, name, "<|endoftext|>")
    with pytest.raises(BirlError, match=f"processing_class: its {name} is another than that in .*save_pretrained"):
        make(processing_class=tokenizer)
