"""`from birl import Trainer`: train in four lines, with parameter names of TRL and MRL.

Every parameter is one key of the configuration; all other keys go into `overrides`, as on the command line.
"""

import asyncio
import contextvars
import inspect
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from birl import trl
from birl.config.nearest import suggest
from birl.config.schema import COMMANDS, RL
from birl.errors import BirlError, current_folder
from birl.named import Given
from birl.parameters import (
    KEYS,
    KEYS_BY_NAME,
    Reward,
    answer_tokens,
    changed,
    check_names,
    env_of,
    fitting,
    is_lora,
    keys_given,
    keys_of_engines,
    loss_keys,
    model_path,
    no_rows,
    reward_keys,
    rewards_of,
    rows_of,
    sources_of,
    words_of_launch,
    written,
)
from birl.track.log import Records

if TYPE_CHECKING:
    from birl.track.charts import Curves

# Attributes of the trainers of transformers and TRL, and their equivalents here.
ELSEWHERE = {
    "evaluate": "eval_dataset= is asked during training; afterwards: `birl eval RUN data.validation=FILE`",
    "predict": "`birl eval RUN data.validation=FILE output=FILE.json`, or `birl chat RUN`",
    "state": "trainer.metrics has the figures of every step",
    "push_to_hub": "`birl checkpoints RUN export last hf://USER/NAME` uploads the model",
    "add_callback": "trainer.metrics has the figures of every step, and log_metric of a reward function adds some",
    "save_state": "the run folder has its checkpoints, and the same call goes on from the newest",
    **dict.fromkeys(("log", "log_metrics", "save_metrics"), "the run folder has metrics.jsonl, and a report"),
    **dict.fromkeys(("model", "processing_class", "tokenizer"), "save_model(FOLDER) writes Hugging Face files"),
    **dict.fromkeys(("args", "accelerator"), "trainer.config has the keys, and train() starts its own processes"),
}


P = ParamSpec("P")


def _remembered(init: Callable[P, None]) -> Callable[P, None]:
    """Store the names of the parameters that were passed in `_named`: one that was passed with its default value still
    takes precedence over a preset and over `args`."""

    @wraps(init)
    def begin(*own: P.args, **names: P.kwargs) -> None:
        vars(own[0])["_named"] = frozenset(names)
        init(*own, **names)

    return begin


class Started:
    """Base class of the trainers: a checked configuration, and the run folder that `train` fills."""

    config: Any
    choices: dict[str, str]
    _given: Given
    _named: frozenset[str]

    def _load(self, command: str, keys: dict[str, Any]) -> None:
        """Build and check the configuration from the keys of a command. Raises `BirlError`."""
        from birl.config.load import load_with_choices

        current_folder()
        if not isinstance(run := keys.get("run"), str | PathLike | None):
            raise BirlError(f"output_dir={run!r}: a {type(run).__name__}; give the name of a folder.")
        words = [f"{k}={written(v)}" for k, v in keys.items()]
        self.config, self.choices = load_with_choices(COMMANDS[command], words)

    def _check_rows(self) -> None:
        from birl.envs.open import check_world
        from birl.preflight import check_data, check_function

        if isinstance(self.config, RL):
            check_world(self.config.env, self._given.env)
            for place, _, name in (one.rpartition(":") for one in self.config.reward.functions):
                if place not in ("", "given"):
                    check_function("reward.functions", place, name)
        check_data(self.config, self._given)

    def _begin(self) -> dict[str, Any]:
        from birl.preflight import check_engine, check_model

        check_model("model", self.config.model.path)  # before the slow import of torch
        check_engine(getattr(self.config, "engine", None))
        from birl.train.command import train

        return _started(partial(train, self.config, self.choices, given=self._given))

    def __getattr__(self, name: str) -> Any:
        where = f": {ELSEWHERE[name]}" if name in ELSEWHERE else ""
        raise AttributeError(f"birl's {type(self).__name__} has no {name}{where}.")

    def train(self, resume_from_checkpoint: bool | None = None) -> dict[str, Any]:
        """Train, or continue from the newest checkpoint in the run folder. Returns the summary.
        `resume_from_checkpoint` exists for compatibility with TRL: True, False and None make no difference."""
        if isinstance(resume_from_checkpoint, str | PathLike):
            raise BirlError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r}: the newest checkpoint of the run folder is "
                'taken; another one is overrides={"resume": FOLDER}.'
            )
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise BirlError(
                "train() was called in a child process of multiprocessing, which imports the script again. Put what "
                'starts the training under `if __name__ == "__main__":`.'
            )
        return self._begin()

    @property
    def run(self) -> Path:
        """The run folder: config.yaml, metrics.jsonl, rollouts.jsonl, checkpoints/, report.html."""
        from birl.config.load import run_folder

        return Path(run_folder(self.config, self.choices))

    @property
    def metrics(self) -> Records:
        """Records of metrics.jsonl, one for each step: `trainer.metrics[-1]["reward/mean"]`."""
        return Records(self.run / "metrics.jsonl")

    @property
    def validations(self) -> Records:
        """Records of validation.jsonl, each with some answers."""
        return Records(self.run / "validation.jsonl")

    def plot(self, *names: str) -> "Curves":
        """Plot these metrics by step, by default the most informative ones; notebooks display the result:
        `trainer.plot("reward/mean", "kl")`, `trainer.plot().save("curves.html")`."""
        from birl.track.charts import plot

        return plot(self.run, names)

    def save_model(self, output_dir: str | PathLike[str] = "") -> Path:
        """Export the newest checkpoint as a folder of Hugging Face files, as `birl checkpoints RUN export last` does,
        and return the folder: by default, and if `output_dir` is the run folder, RUN/exported, which is replaced. LoRA
        is merged into the model. Raises `BirlError` before the first checkpoint, and if another `output_dir` exists."""
        from birl.learner import step_folders
        from birl.learner.export import export

        run, own = self.run, self.run / "exported"
        source = step_folders.find(run / "checkpoints", "last")
        target = Path(output_dir).expanduser() if output_dir else own
        if target.resolve() in (run.resolve(), own.resolve()):
            export(source, run, own, there="replaced")
            return own
        if target.is_dir() and not any(target.iterdir()):
            with suppress(OSError):  # of a link or a mount point, which `export` refuses
                target.rmdir()
        export(source, run, target)
        return target


class Trainer(Started):
    """Group-relative policy optimisation of a language model.

        from birl import Trainer
        trainer = Trainer(reward_funcs=my_reward, train_dataset="train.jsonl", eval_dataset="test.jsonl", max_steps=20)
        summary = trainer.train()
        print(summary["before"]["metrics"], summary["after"]["metrics"])

    model: folder, .gguf file, hub id or "smollm2". reward_funcs: a function, a name (`math`, `file.py:function`), or a
    list of them; each takes (completions, prompts, **columns) and returns one number for each completion (math, unless
    there is an env). env: an environment or agent, as a class, a function or a name (docs/environments.md).
    train_dataset and eval_dataset: a path, a hub name, a `datasets.Dataset`, a data frame of pandas or polars, or a
    list of dicts, with a `prompt` (or `messages`, `question`) column. num_generations: answers per prompt; batch_size:
    prompts per step; max_steps: -1 means num_epochs. beta: weight of the KL to the first weights. loss_type: grpo |
    bnpo | dapo | dr_grpo | cispo | sapo | gspo: surrogate, clips, denominator and scale of the preset of that name
    (dr_grpo). epsilon, epsilon_high: clip range, instead of that; epsilon alone is both sides; of cispo, epsilon_high
    bounds the ratio itself, as in TRL. scale_rewards: group | batch | none, instead of that. output_dir: the run
    folder. overrides: further keys, such as {"optimizer.schedule": "cosine"}.

    num_rollout_workers: engines in separate processes (engine.count); 0: sample in the learner's process.
    weight_sync_method: how weights are synchronised (weights.method).

    launcher: where training runs, as `birl launch` names it: local | slurm | ray | modal | ...; empty: in this process.
    actor_gpu, rollout_gpu: kind of the learner's and of the engines' GPUs, if the launcher chooses them (launch.gpu,
    launch.engine_gpu); launch: its other keys, such as {"gpus": 1}. `train` then submits the job and shows the
    learner's output; Ctrl-C leaves it running. Functions must be importable elsewhere (of a file, with a name); for
    launcher="modal" reward functions stay in this process, and only GPU work is in the cloud.

    args: a `GRPOConfig` of TRL, or a dict of its fields; its fields are also parameters (`num_train_epochs=1`), which
    take precedence; tools, environment_factory: as in TRL (docs/from_trl.md). use_lora: adapters of rank 16;
    max_model_len: longest sequence (model.max_length); max_completion_length: TRL's name of max_tokens.

    Raises `BirlError` at once for a wrong value.
    """

    @_remembered
    def __init__(
        self,
        model: str = "smollm2",
        reward_funcs: Reward | Sequence[Reward] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        env: str | Callable[..., Any] = "single_turn",
        reward_weights: Sequence[float] | None = (),
        num_generations: int = 8,
        batch_size: int = 8,
        max_steps: int = -1,
        num_epochs: int = 1,
        learning_rate: float = 1e-6,
        loss_type: str = "",
        beta: float = 0.0,
        epsilon: float | None = None,
        epsilon_high: float | None = None,
        scale_rewards: str | bool | None = None,
        temperature: float = 1.0,
        max_tokens: int = 256,
        max_completion_length: int | None = None,
        max_model_len: int = 0,
        use_lora: bool = False,
        mask_truncated_completions: bool = False,
        seed: int = 0,
        output_dir: str = "",
        overrides: dict[str, Any] | None = None,
        launcher: str = "",
        actor_gpu: str = "",
        rollout_gpu: str = "",
        num_rollout_workers: int = 0,
        weight_sync_method: str = "",
        launch: dict[str, Any] | None = None,
        args: Any = None,
        **names: Any,
    ) -> None:
        given = {key: value for name, value in locals().items() if (key := KEYS.get(name))}
        model, overrides, env = model_path(model), keys_given(overrides), env_of(env, names, reward_funcs)
        check_names(names, [p for p in inspect.signature(Trainer).parameters if p != "names"])
        both = {"num_generations": num_generations, "loss_type": loss_type}
        more = names | {name: value for name, value in both.items() if value and name in self._named}
        rewards = rewards_of(reward_funcs, env, train_dataset is not None or "data.train" in overrides)
        given |= keys_of_engines(num_rollout_workers, weight_sync_method, overrides) | {"model.path": model}
        given |= reward_keys(rewards, reward_weights, reward_funcs == "sandbox", launcher)
        theirs = trl.keys_of(args, more, model, RL, "GRPO", len(rewards))
        given |= {
            "lora.rank": theirs.get("lora.rank", 16) if is_lora(use_lora) else 0,
            "env.kind": env if isinstance(env, str) else f"given:{getattr(env, '__name__', type(env).__name__)}",
            "rollout.max_tokens": answer_tokens(max_tokens, max_completion_length, "max_tokens" in self._named),
            "data.train": sources_of(train_dataset),
            "data.validation": sources_of(eval_dataset),
            **({"steps": max_steps} if isinstance(max_steps, str) or (max_steps or 0) > 0 else {"epochs": num_epochs}),
        }
        keys = theirs | changed(given) | {k: given[k] for n, k in KEYS_BY_NAME if n in self._named and k in given}
        keys |= loss_keys(keys, loss_type, scale_rewards, epsilon, epsilon_high)
        rows = {"train": rows_of(train_dataset), "validation": rows_of(eval_dataset)}
        self._given = Given(rewards=rewards, env=None if isinstance(env, str) else env, **rows)
        self._launcher, self._launch = launcher, words_of_launch(launcher, actor_gpu, rollout_gpu, launch or {})
        self._configure(fitting(keys) | overrides, env)

    def _configure(self, keys: dict[str, Any], env: Any) -> None:
        from birl.launch.program import named

        self._keys, self._here = keys, dict[str, Any]()
        self._load("rl", keys)
        if self._launcher:
            self._keys, self._here = named(self._launcher, keys, list(self._given.rewards), env)
        else:
            self._check_rows()

    @property
    def rollouts(self) -> Records:
        """Records of rollouts.jsonl, one for each episode: `trainer.rollouts.to_pandas()`."""
        return Records(self.run / "rollouts.jsonl")

    def _begin(self) -> dict[str, Any]:
        if not self._launcher:
            return super()._begin()
        from birl.launch.program import Program, rows_file

        keys = {**self._keys, "run": str(self.run)}
        for name, rows in (("train", self._given.train), ("validation", self._given.validation)):
            if rows is not None:
                keys[f"data.{name}"] = [rows_file(rows, self.run.with_name(f"{self.run.name}-rows") / f"{name}.jsonl")]
        words = tuple(f"{k}={written(v)}" for k, v in keys.items())
        return Program(where=self._launcher, words=words, launch=self._launch, here=self._here).train()


def _started(train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `train`; in a notebook, whose thread already runs an event loop, in a separate thread."""
    from birl.signals import interrupt

    if not _in_event_loop():
        return train()
    # Jupyter assigns output to a cell by the context.
    thread, context = ThreadPoolExecutor(1), contextvars.copy_context()
    work = thread.submit(context.run, train)
    try:
        return work.result()
    except KeyboardInterrupt:
        interrupt()
        return work.result()  # a second interrupt returns at once; the run still saves
    finally:
        thread.shutdown(wait=False)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Offline(Started):
    """Base class of `birl sft`, `birl dpo` and `birl rm` with rows of a Python program.

    model, train_dataset, eval_dataset: as for `Trainer`. args: a config object of TRL, or a dict of its fields; its
    fields are also parameters, which take precedence (`num_train_epochs=1`, `per_device_train_batch_size=8`,
    `learning_rate=1e-5`). overrides: keys of the command. Raises `BirlError` at once for a wrong value.
    """

    command = ""
    prefix = ""  # of TRL's config class
    example = '{"prompt": "What is 3 + 4?", "chosen": "7", "rejected": "8"}'

    def __init__(
        self,
        model: str = "smollm2",
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        args: Any = None,
        overrides: dict[str, Any] | None = None,
        **names: Any,
    ) -> None:
        schema = COMMANDS[self.command]
        for name in names:
            if not trl.knows(name):
                hint = suggest(name, schema)
                raise BirlError(
                    f"{type(self).__name__} has no parameter {name}.{hint} "
                    f"Keys of `birl {self.command}` go into overrides."
                )
        model, overrides = model_path(model), keys_given(overrides)
        if train_dataset is None and "data.train" not in overrides:
            raise BirlError(no_rows(False, self.example))
        sources = {"data.train": sources_of(train_dataset), "data.validation": sources_of(eval_dataset)}
        theirs = trl.keys_of(args, names, model, schema, self.prefix)
        keys = {"model.path": model, **{k: v for k, v in sources.items() if v}, **fitting(theirs), **overrides}
        self._load(self.command, keys)
        self._given = Given(train=rows_of(train_dataset), validation=rows_of(eval_dataset))
        self._check_rows()


class SFTTrainer(_Offline):
    """Supervised fine-tuning, as `birl sft`: SFTTrainer(model, rows, learning_rate=1e-5).train()."""

    command, prefix = "sft", "SFT"
    example = '{"prompt": "What is 3 + 4?", "completion": "7"}'


class DPOTrainer(_Offline):
    """Preference losses, as `birl dpo`: DPOTrainer(model, pairs, beta=0.1, loss_type="sigmoid").train()."""

    command, prefix = "dpo", "DPO"


class RewardTrainer(_Offline):
    """A reward model, as `birl rm`: RewardTrainer(model, pairs).train()."""

    command, prefix = "rm", "Reward"


GRPOTrainer = Trainer
"""TRL's name: a script only has to change its import."""
