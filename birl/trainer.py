"""`from birl import Trainer`: four lines to train, with the parameter names that TRL and MRL users know.

Every parameter is one key of the configuration; anything else goes into `overrides`, as on the command line.
"""

import asyncio
import contextvars
import difflib
import inspect
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from birl import trl
from birl.errors import BirlError
from birl.given import Given
from birl.track.log import Records
from birl.trl import LOSS_TYPES, SCALES

if TYPE_CHECKING:
    from birl.track.charts import Curves

Reward = Callable[..., Sequence[float]] | str

# Parameters that are a key each.
KEYS = {
    "batch_size": "rollout.prompts",
    "beta": "algorithm.kl_coef",
    "learning_rate": "optimizer.lr",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "max_model_len": "model.max_length",
    "max_tokens": "rollout.max_tokens",
    "num_generations": "rollout.group_size",
    "output_dir": "run",
    "seed": "seed",
    "temperature": "rollout.temperature",
}

# Parameters that a key follows from.
MORE = {"max_completion_length": "rollout.max_tokens", "num_epochs": "epochs", "use_lora": "lora.rank"}

# What trainers of transformers and TRL also have, and where that is here.
ELSEWHERE = {
    "evaluate": "eval_dataset= is asked during training; afterwards: `birl eval RUN data.validation=FILE`",
    "predict": "`birl eval RUN data.validation=FILE output=FILE.json`, or `birl chat RUN`",
    "state": "trainer.metrics has the figures of every step",
    "push_to_hub": "save_model(FOLDER) writes Hugging Face files; upload them with `hf upload`",
    "add_callback": "trainer.metrics has the figures of every step, and log_metric of a reward function adds some",
    "save_state": "the run folder has its checkpoints, and the same call goes on from the newest",
    **dict.fromkeys(("log", "log_metrics", "save_metrics"), "the run folder has metrics.jsonl, and a report"),
    **dict.fromkeys(("model", "processing_class", "tokenizer"), "save_model(FOLDER) writes Hugging Face files"),
    **dict.fromkeys(("args", "accelerator"), "trainer.config has the keys, and train() starts its own processes"),
}


P = ParamSpec("P")


def _remembered(init: Callable[P, None]) -> Callable[P, None]:
    """`_named` of the object: the parameters that were named. One that was set to its default still wins over a preset
    and over `args`."""

    @wraps(init)
    def begin(*own: P.args, **names: P.kwargs) -> None:
        vars(own[0])["_named"] = frozenset(names)
        init(*own, **names)

    return begin


class Started:
    """What every trainer has: a checked configuration, and the run folder that `train` fills."""

    config: Any
    choices: dict[str, str]
    _given: Given
    _named: frozenset[str]

    def _load(self, command: str, keys: dict[str, Any]) -> None:
        """Check the configuration that the keys of a command make. Raises `BirlError`."""
        from birl.config.load import load_with_choices

        words = [f"{k}={_written(v)}" for k, v in keys.items()]
        self.config, self.choices = load_with_choices(_schema(command), words)

    def _check_rows(self) -> None:
        from birl.preflight import check_data

        check_data(self.config, self._given)

    def _begin(self) -> dict[str, Any]:
        from birl.preflight import check_engine, check_model

        check_model("model", self.config.model.path)  # before torch is imported
        check_engine(getattr(self.config, "engine", None))
        from birl.train.command import train

        return _started(partial(train, self.config, self.choices, given=self._given))

    def __getattr__(self, name: str) -> Any:
        where = f": {ELSEWHERE[name]}" if name in ELSEWHERE else ""
        raise AttributeError(f"birl's {type(self).__name__} has no {name}{where}.")

    def train(self, resume_from_checkpoint: bool | None = None) -> dict[str, Any]:
        """Train to the end, or go on where the run folder's newest checkpoint is, whatever `resume_from_checkpoint`
        says, which is TRL's. Returns the summary."""
        if isinstance(resume_from_checkpoint, str | PathLike):
            raise BirlError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r}: the newest checkpoint of the run folder is "
                'taken; another one is overrides={"resume": FOLDER}.'
            )
        return self._begin()

    @property
    def run(self) -> Path:
        """The run folder: config.yaml, metrics.jsonl, rollouts.jsonl, checkpoints/, report.html."""
        from birl.config.load import run_folder

        return Path(run_folder(self.config, self.choices))

    @property
    def metrics(self) -> Records:
        """The lines of metrics.jsonl, one for each step: `trainer.metrics[-1]["reward/mean"]`."""
        return Records(self.run / "metrics.jsonl")

    @property
    def validations(self) -> Records:
        """The lines of validation.jsonl, with some answers each."""
        return Records(self.run / "validation.jsonl")

    def plot(self, *names: str) -> "Curves":
        """Charts of these metrics by step, or of those that say most, which a notebook shows:
        `trainer.plot("reward/mean", "kl")`, `trainer.plot().save("curves.html")`."""
        from birl.track.charts import plot

        return plot(self.run, names)

    def save_model(self, output_dir: str | PathLike[str] = "") -> Path:
        """Write the newest checkpoint as a folder of Hugging Face files, as `birl checkpoints RUN export last` does,
        and return it: by default, and where `output_dir` is the run folder, RUN/exported, which is replaced. Of LoRA
        the merged model. Raises `BirlError` before the first checkpoint, and where another `output_dir` exists."""
        return save_model(self.run, Path(output_dir).expanduser() if output_dir else None)


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
    (dr_grpo). epsilon, epsilon_high: clip range, instead of that; epsilon alone is both sides. scale_rewards: group |
    batch | none, instead of that. output_dir: the run folder. overrides: further keys, such as {"optimizer.schedule":
    "cosine"}.

    num_rollout_workers: engines in processes of their own (engine.count); 0 samples in the learner's process.
    weight_sync_method: how they get new weights (weights.method).

    launcher: where training runs, as `birl launch` names it: local | slurm | ray | modal | ...; empty: in this process.
    actor_gpu, rollout_gpu: kind of the learner's and of the engines' GPUs, where the launcher chooses them
    (launch.gpu, launch.engine_gpu); launch: its further keys, such as {"gpus": 1}. `train` then submits the job and
    shows what the learner prints; Ctrl-C leaves it running. Functions must be importable elsewhere (of a file, with a
    name); for launcher="modal" reward functions stay in this process, and only GPU work is in the cloud.

    args: a `GRPOConfig` of TRL's, or a dict of its names; its names are also parameters (`num_train_epochs=1`), and
    parameters win over it (docs/from_trl.md). use_lora: adapters of rank 16; max_model_len: longest sequence
    (model.max_length); max_completion_length: what TRL calls max_tokens.

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
        model = _model(model)
        _known(names)
        both = {"num_generations": num_generations, "loss_type": loss_type}
        more = names | {name: value for name, value in both.items() if value and name in self._named}
        rewards = _judges(reward_funcs, env, train_dataset is not None or "data.train" in (overrides or {}))
        given |= _engines(num_rollout_workers, weight_sync_method, overrides or {}) | {"model.path": model}
        given |= _reward_keys(rewards, reward_weights, reward_funcs == "sandbox", launcher)
        given |= {
            "env.kind": env if isinstance(env, str) else f"given:{getattr(env, '__name__', type(env).__name__)}",
            "rollout.max_tokens": _answer_tokens(max_tokens, max_completion_length, "max_tokens" in self._named),
            "lora.rank": 16 if use_lora else 0,
            "data.train": _source(train_dataset),
            "data.validation": _source(eval_dataset),
            **({"steps": max_steps} if isinstance(max_steps, str) or max_steps > 0 else {"epochs": num_epochs}),
        }
        named = {key for name, key in {**KEYS, **MORE}.items() if name in self._named and key in given}
        keys = _theirs(args, more, model, len(rewards)) | _not_default(given) | {key: given[key] for key in named}
        keys |= _loss(loss_type) | _scale(scale_rewards) | _clips(epsilon, epsilon_high)
        own = None if isinstance(env, str) else env
        self._given = Given(rewards=rewards, env=own, train=_rows(train_dataset), validation=_rows(eval_dataset))
        self._launcher, self._launch = launcher, _launch_words(launcher, actor_gpu, rollout_gpu, launch or {})
        self._configure(_fitting(keys) | (overrides or {}), env)

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
        """The lines of rollouts.jsonl, one for each episode: `trainer.rollouts.to_pandas()`."""
        return Records(self.run / "rollouts.jsonl")

    def _begin(self) -> dict[str, Any]:
        return self._elsewhere() if self._launcher else super()._begin()

    def _elsewhere(self) -> dict[str, Any]:
        from birl.launch.program import Program, rows_file

        keys = {**self._keys, "run": str(self.run)}
        for name, rows in (("train", self._given.train), ("validation", self._given.validation)):
            if rows is not None:
                keys[f"data.{name}"] = [rows_file(rows, self.run.with_name(f"{self.run.name}-rows") / f"{name}.jsonl")]
        words = tuple(f"{k}={_written(v)}" for k, v in keys.items())
        return Program(where=self._launcher, words=words, launch=self._launch, here=self._here).train()


def save_model(run: Path, target: Path | None) -> Path:
    from birl.learner import step_folders
    from birl.learner.export import export

    source, own = step_folders.find(run / "checkpoints", "last"), run / "exported"
    if target is None or target.resolve() in (run.resolve(), own.resolve()):
        shutil.rmtree(own, ignore_errors=True)
        target = own
    elif target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    export(source, run, target)
    return target


def _started(train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run to the end; in a notebook, whose thread has an event loop already, in a thread of its own."""
    from birl.signals import interrupt

    if not _in_event_loop():
        return train()
    # By the context Jupyter knows whose cell an output is.
    thread, context = ThreadPoolExecutor(1), contextvars.copy_context()
    work = thread.submit(context.run, train)
    try:
        return work.result()
    except KeyboardInterrupt:
        interrupt()
        return work.result()  # once more gives the cell back at once; the run still saves
    finally:
        thread.shutdown(wait=False)


def _model(model: Any) -> str:
    if isinstance(model, str | PathLike):
        return str(model)
    name = getattr(model, "name_or_path", "")
    like = f", as in model={name!r}" if name else ""
    raise BirlError(f"model: a {type(model).__name__}; give the name of a folder, a .gguf file or a hub id{like}.")


def _fitting(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys, with micro-batches that hold the longest sequence."""
    key = "learner.tokens_per_microbatch"
    longest = keys.get("model.max_length") or 0
    return {**({key: longest} if longest > _docs()[key].default else {}), **keys}


def _judges(reward_funcs: Any, env: Any, rows: bool) -> list[Reward]:
    """The reward functions, with what stands for them where none is given. `rows`: there are some to train on."""
    if reward_funcs is None:
        reward_funcs = "math" if env == "single_turn" else []
    rewards = _listed("code" if reward_funcs == "sandbox" else reward_funcs)  # MRL's word for unit tests
    if not rewards and env == "single_turn":
        raise BirlError("reward_funcs is empty: name a function, such as math, or an env that rewards.")
    if not rows and env == "single_turn":
        raise BirlError(_no_rows(reward_funcs == "math"))
    return rewards


def _reward_keys(rewards: list[Reward], weights: Sequence[float] | None, tests: bool, launcher: str) -> dict[str, Any]:
    given = [] if weights is None else list(weights)
    keys: dict[str, Any] = {"reward.functions": _names(rewards), "reward.weights": given}
    if tests:
        keys["reward.timeout"] = 300.0  # a call runs the tests of a whole group
        keys |= {"sandbox.kind": "modal"} if launcher == "modal" else {}
    return keys


def _answer_tokens(max_tokens: int, max_completion_length: int | None, both: bool) -> int:
    """MRL has both names."""
    if max_completion_length is None:
        return max_tokens
    return min(max_tokens, max_completion_length) if both else max_completion_length


def _known(names: dict[str, Any]) -> None:
    if unknown := [name for name in names if not trl.knows(name)]:
        raise BirlError(_unknown(unknown[0]))


def _theirs(args: Any, names: dict[str, Any], model: str, rewards: int) -> dict[str, Any]:
    """The keys that TRL's names stand for, of a config object and of parameters."""
    return trl.keys_of(trl.Names.of(args, trl.without_tokenizer(names, model)), _schema("rl"), "GRPO", rewards)


def _loss(loss_type: str) -> dict[str, Any]:
    if loss_type and loss_type not in LOSS_TYPES:
        raise BirlError(f"loss_type={loss_type!r}: choose one of {', '.join(LOSS_TYPES)}.")
    return {f"algorithm.{name}": value for name, value in LOSS_TYPES.get(loss_type, {}).items()}


def _scale(scale_rewards: str | bool | None) -> dict[str, Any]:
    if scale_rewards is None:
        return {}
    if scale_rewards not in SCALES:
        raise BirlError(f"scale_rewards={scale_rewards!r}: choose group, batch or none.")
    return {"algorithm.scale_rewards": SCALES[scale_rewards]}


def _engines(workers: int, method: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """An engine in the learner's process has the learner's own weights: there is nothing to synchronise."""
    from birl.launch.program import engine_keys

    if method and method not in (methods := _docs()["weights.method"].choices):
        raise BirlError(f"weight_sync_method={method!r}: choose one of {', '.join(methods)}.")
    elsewhere = workers != 0 or {"engine.kind", "engine.count", "engine.attach"} & overrides.keys()
    return engine_keys(workers, method if elsewhere else "")


def _launch_words(launcher: str, actor_gpu: str, rollout_gpu: str, launch: dict[str, Any]) -> tuple[str, ...]:
    from birl.launch.program import launch_words

    gpus = {"actor_gpu": actor_gpu, "rollout_gpu": rollout_gpu}
    if not launcher and (stray := [name for name, value in {**gpus, "launch": launch}.items() if value]):
        raise BirlError(f'{stray[0]}: says what a launcher is to give; name one, as in launcher="modal".')
    return launch_words(launcher, gpus, launch) if launcher else ()


def _not_default(keys: dict[str, Any]) -> dict[str, Any]:
    """Without what is at its default, so that a preset (overrides={"algorithm": "grpo"}) can decide about it."""
    docs = _docs()
    return {k: v for k, v in keys.items() if v != docs[k].default}


def _docs() -> dict[str, Any]:
    """What the schema of `birl rl` says of each key."""
    from birl.config.keys import documentation

    return documentation(_schema("rl"))


def _schema(command: str) -> Any:
    from birl.config.schema import COMMANDS

    return COMMANDS[command]


def _clips(low: float | None, high: float | None) -> dict[str, Any]:
    """What was given; the lower bound alone is meant for both sides."""
    given = {"algorithm.clip_low": low, "algorithm.clip_high": low if high is None else high}
    return {key: value for key, value in given.items() if value is not None}


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _unknown(name: str) -> str:
    """The message about a parameter that does not exist, with what it may stand for."""
    from birl.config.nearest import nearest_keys
    from birl.config.schema import RL

    known = [p for p in inspect.signature(Trainer).parameters if p != "names"]
    near = ["reward_funcs"] if name == "reward_fn" else difflib.get_close_matches(name, known, n=1)
    section = [key for key in _docs() if key.startswith(f"{name}.")]
    key = next(iter(section or nearest_keys(name, RL)), "")
    if key and (not near or section or key.endswith(f".{name}") or key == name):
        hint = f' Did you mean overrides={{"{key}": ...}}?'
    else:
        hint = f" Did you mean {near[0]}?" if near else ""
    return f"Trainer has no parameter {name}.{hint} It has: {', '.join(known)}."


def _no_rows(math: bool) -> str:
    """The message about a Trainer without rows."""
    reward = ' Without reward_funcs the reward is math, which compares with a column such as "answer".' if math else ""
    return (
        'train_dataset is None, and data.train is empty: say what to train on, as in train_dataset="my.jsonl", a hub '
        f'name, a datasets.Dataset or a list of rows such as {{"prompt": "What is 3 + 4?", "answer": "7"}}.{reward}'
    )


def _listed(rewards: Any) -> list[Reward]:
    result: Any = [rewards] if isinstance(rewards, str) or callable(rewards) else rewards
    if not isinstance(result, list | tuple) or not all(isinstance(f, str) or callable(f) for f in result):
        raise BirlError(f"reward_funcs={rewards!r}: give a function, a name, or a list of them.")
    for one in result:
        path = one if isinstance(one, str) and "/" in one and ":" not in one else getattr(one, "name_or_path", "FOLDER")
        if hasattr(one, "state_dict") or path == one:
            raise BirlError(
                "reward_funcs: a reward model is named, not handed over: "
                f'reward_funcs="model", overrides={{"reward.model": "{path}"}}.'
            )
    return list(result)


def _names(rewards: Sequence[Reward]) -> list[str]:
    """What the configuration says about each: its own name, or given:NAME for a Python object."""
    names = [
        r if isinstance(r, str) else "given:" + re.sub(r"\W", "", getattr(r, "__name__", type(r).__name__))
        for r in rewards
    ]
    return [
        f"{name}_{names[:i].count(name) + 1}" if name.startswith("given:") and name in names[:i] else name
        for i, name in enumerate(names)
    ]


def _source(dataset: Any) -> list[str]:
    if dataset is None:
        return []
    if isinstance(dataset, str | PathLike):
        return [str(dataset)]
    if isinstance(dataset, list | tuple) and dataset and all(isinstance(d, str | PathLike) for d in dataset):
        return [str(d) for d in dataset]
    return ["given"]


def _rows(dataset: Any) -> Any:
    """The rows of a Python object, those of a data frame (polars, pandas) as a list of dicts."""
    if hasattr(dataset, "to_dicts"):
        return dataset.to_dicts()
    if hasattr(dataset, "columns") and hasattr(dataset, "to_dict"):
        return dataset.to_dict("records")
    return dataset if _source(dataset) == ["given"] else None


def _written(value: Any) -> str:
    """As one types it behind `key=`; None as null, which no key takes: not as a folder of the name None."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(repr(v) if isinstance(v, str) else str(v) for v in value) + "]"
    return str(value)


class _Offline(Started):
    """A run of `birl sft`, `birl dpo` or `birl rm` on rows of a Python program.

    model, train_dataset, eval_dataset: as for `Trainer`. args: a config object of TRL's, or a dict of its names; its
    names are also parameters, which win (`num_train_epochs=1`, `per_device_train_batch_size=8`, `learning_rate=1e-5`).
    overrides: keys of the command. Raises `BirlError` at once for a wrong value.
    """

    command = ""
    prefix = ""  # of TRL's config

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
        from birl.config.nearest import suggest

        schema = _schema(self.command)
        for name in names:
            if not trl.knows(name):
                hint = suggest(name, schema)
                raise BirlError(
                    f"{type(self).__name__} has no parameter {name}.{hint} "
                    f"Keys of `birl {self.command}` go into overrides."
                )
        model = _model(model)
        if train_dataset is None and "data.train" not in (overrides or {}):
            raise BirlError(_no_rows(False))
        sources = {"data.train": _source(train_dataset), "data.validation": _source(eval_dataset)}
        theirs = trl.keys_of(trl.Names.of(args, trl.without_tokenizer(names, model)), schema, self.prefix)
        keys = {"model.path": model, **{k: v for k, v in sources.items() if v}, **_fitting(theirs), **(overrides or {})}
        self._load(self.command, keys)
        self._given = Given(train=_rows(train_dataset), validation=_rows(eval_dataset))
        self._check_rows()


class SFTTrainer(_Offline):
    """Supervised fine-tuning, as `birl sft`: SFTTrainer(model, rows, learning_rate=1e-5).train()."""

    command, prefix = "sft", "SFT"


class DPOTrainer(_Offline):
    """Preference losses, as `birl dpo`: DPOTrainer(model, pairs, beta=0.1, loss_type="sigmoid").train()."""

    command, prefix = "dpo", "DPO"


class RewardTrainer(_Offline):
    """A reward model, as `birl rm`: RewardTrainer(model, pairs).train()."""

    command, prefix = "rm", "Reward"


GRPOTrainer = Trainer
"""TRL's name, so that a script changes its import alone."""
