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
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Never

from birl.errors import BirlError
from birl.track.records import Records

# What MRL and TRL call a loss: surrogate, clips and denominator as in our presets.
LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {"denominator": "sequence"},
    "bnpo": {"denominator": "token"},
    "dapo": {"denominator": "token", "clip_high": 0.28},
    "dr_grpo": {"denominator": "constant"},
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "denominator": "token"},
    "sapo": {"surrogate": "sapo", "denominator": "sequence"},
    "gspo": {"surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "denominator": "sequence"},
}
SCALES = {"group": "group", "batch": "rewards", "none": "none", True: "group", False: "none"}
RENAMED = {  # what TRL calls a parameter
    "per_device_train_batch_size": "batch_size",
    "max_completion_length": "max_tokens",
    "num_train_epochs": "num_epochs",
    "reward_fn": "reward_funcs",
}

Reward = Callable[..., Sequence[float]] | str


class Trainer:
    """Group-relative policy optimisation of a language model.

        from birl import Trainer
        trainer = Trainer(reward_funcs=my_reward, train_dataset="train.jsonl", eval_dataset="test.jsonl", max_steps=20)
        summary = trainer.train()
        print(summary["before"]["metrics"], summary["after"]["metrics"])

    model: folder, .gguf file, hub id or "smollm2". reward_funcs: a function, a name (`math`, `file.py:function`), or a
    list of them; each takes (completions, prompts, **columns) and returns one number for each completion (math, unless
    there is an env). env: an environment or agent, as a class, a function or a name (docs/environments.md).
    train_dataset and eval_dataset: a path, a hub name, a `datasets.Dataset` or a list of dicts with a `prompt` (or
    `messages`, `question`) column. num_generations: answers per prompt; batch_size: prompts per step; max_steps: -1
    means num_epochs. beta: weight of the KL to the first weights. loss_type: grpo | bnpo | dapo | dr_grpo | cispo |
    sapo | gspo: surrogate, clips and denominator of the preset of that name. epsilon, epsilon_high: clip range, instead
    of that; epsilon alone is both sides. scale_rewards: group | batch | none. output_dir: the run folder. overrides:
    further keys, such as {"optimizer.schedule": "cosine"}.

    num_rollout_workers: engines in processes of their own (engine.count); 0 samples in the learner's process.
    weight_sync_method: how they get new weights (weights.method).

    launcher: where training runs, as `birl launch` names it: local | slurm | ray | modal | ...; empty: in this process.
    actor_gpu, rollout_gpu: kind of the learner's and of the engines' GPUs, where the launcher chooses them
    (launch.gpu, launch.engine_gpu); launch: its further keys, such as {"gpus": 1}. `train` then submits the job and
    shows what the learner prints; Ctrl-C leaves it running. Functions must be importable elsewhere (of a file, with a
    name); for launcher="modal" reward functions stay in this process, and only GPU work is in the cloud.

    Raises `BirlError` at once for a wrong value.
    """

    def __init__(
        self,
        model: str = "smollm2",
        reward_funcs: Reward | Sequence[Reward] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        env: str | Callable[..., Any] = "single_turn",
        reward_weights: Sequence[float] = (),
        num_generations: int = 8,
        batch_size: int = 8,
        max_steps: int = -1,
        num_epochs: int = 1,
        learning_rate: float = 1e-6,
        loss_type: str = "dr_grpo",
        beta: float = 0.0,
        epsilon: float | None = None,
        epsilon_high: float | None = None,
        scale_rewards: str | bool = "none",
        temperature: float = 1.0,
        max_tokens: int = 256,
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
        **unknown: Never,
    ) -> None:
        from birl.config.help import documentation
        from birl.config.load import load_with_choices
        from birl.config.schema import RL
        from birl.launch.program import engine_keys, launch_words, named
        from birl.loops.build import Given

        if unknown:
            raise BirlError(_unknown(next(iter(unknown))))
        if loss_type not in LOSS_TYPES:
            raise BirlError(f"loss_type={loss_type!r}: choose one of {', '.join(LOSS_TYPES)}.")
        if scale_rewards not in SCALES:
            raise BirlError(f"scale_rewards={scale_rewards!r}: choose group, batch or none.")
        gpus = {"actor_gpu": actor_gpu, "rollout_gpu": rollout_gpu}
        if not launcher and (stray := [name for name, value in {**gpus, "launch": launch}.items() if value]):
            raise BirlError(f'{stray[0]}: says what a launcher is to give; name one, as in launcher="modal".')
        self._launch = launch_words(launcher, gpus, launch or {}) if launcher else ()
        if reward_funcs is None:
            reward_funcs = "math" if env == "single_turn" else []
        sandboxed = reward_funcs == "sandbox"  # MRL's word for unit tests
        rewards = _listed("code" if sandboxed else reward_funcs)
        if not rewards and env == "single_turn":
            raise BirlError("reward_funcs is empty: name a function, such as math, or an env that rewards.")
        keys: dict[str, Any] = {
            "model.path": model,
            "env.kind": env if isinstance(env, str) else f"given:{getattr(env, '__name__', type(env).__name__)}",
            "reward.functions": _names(rewards),
            "reward.weights": list(reward_weights),
            "rollout.group_size": num_generations,
            "rollout.prompts": batch_size,
            "rollout.temperature": temperature,
            "rollout.max_tokens": max_tokens,
            "optimizer.lr": learning_rate,
            "algorithm.kl_coef": beta,
            "algorithm.scale_rewards": SCALES[scale_rewards],
            "algorithm.mask_truncated": mask_truncated_completions,
            "data.train": _source(train_dataset),
            "data.validation": _source(eval_dataset),
            "seed": seed,
            "run": output_dir,
            **({"steps": max_steps} if max_steps > 0 else {"epochs": num_epochs}),
            **{f"algorithm.{name}": value for name, value in LOSS_TYPES[loss_type].items()},
            **({"reward.timeout": 300.0} if sandboxed else {}),  # a call runs the tests of a whole group
            **({"sandbox.kind": "modal"} if sandboxed and launcher == "modal" else {}),
            **engine_keys(num_rollout_workers, weight_sync_method),
        }
        # what is at its default is left out, so that a preset (overrides={"algorithm": "grpo"}) can decide about it
        docs = documentation(RL)
        keys = {k: v for k, v in keys.items() if v != docs[k].default}
        keys |= _clips(epsilon, epsilon_high) | (overrides or {})
        self._keys, self._launcher, self._here = keys, launcher, dict[str, Any]()
        self.config, self.choices = load_with_choices(RL, [f"{k}={_written(v)}" for k, v in keys.items()])
        if launcher:
            self._keys, self._here = named(launcher, keys, rewards, env)
        self._given = Given(
            rewards=rewards,
            env=None if isinstance(env, str) else env,
            train=_rows(train_dataset),
            validation=_rows(eval_dataset),
        )

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

    @property
    def rollouts(self) -> Records:
        """The lines of rollouts.jsonl, one for each episode: `trainer.rollouts.to_pandas()`."""
        return Records(self.run / "rollouts.jsonl")

    def plot(self, *names: str) -> Any:
        """A matplotlib figure of these metrics by step, or of those that say most: `trainer.plot("reward/mean", "kl")`,
        `trainer.plot().savefig("curves.png")`. Needs `pip install "birl[notebook]"`."""
        from birl.track.plots import plot

        return plot(self.run, names)

    def train(self) -> dict[str, Any]:
        """Train to the end, or go on where the run folder's newest checkpoint is. Returns the summary."""
        if self._launcher:
            return self._elsewhere()
        from birl.loops.rl import train
        from birl.loops.signals import interrupt

        if not _in_event_loop():
            return train(self.config, self.choices, given=self._given)
        # A notebook: one thread cannot have two event loops. By the context Jupyter knows whose cell an output is.
        thread, context = ThreadPoolExecutor(1), contextvars.copy_context()
        work = thread.submit(context.run, partial(train, self.config, self.choices, given=self._given))
        try:
            return work.result()
        except KeyboardInterrupt:
            interrupt()
            return work.result()  # once more gives the cell back at once; the run still saves
        finally:
            thread.shutdown(wait=False)

    def save_model(self, output_dir: str | PathLike[str] = "") -> Path:
        """Write the newest checkpoint as a folder of Hugging Face files, as `birl checkpoints RUN export last` does,
        and return it: by default, and where `output_dir` is the run folder, RUN/exported, which is replaced. Of LoRA
        the merged model. Raises `BirlError` before the first checkpoint, and where another `output_dir` exists."""
        return save_model(self.run, Path(output_dir) if output_dir else None)

    def _elsewhere(self) -> dict[str, Any]:
        from birl.launch.program import Program, rows_file

        keys = {**self._keys, "run": str(self.run)}
        for name, rows in (("train", self._given.train), ("validation", self._given.validation)):
            if rows is not None:
                keys[f"data.{name}"] = [rows_file(rows, self.run.with_name(f"{self.run.name}-rows") / f"{name}.jsonl")]
        words = tuple(f"{k}={_written(v)}" for k, v in keys.items())
        return Program(where=self._launcher, words=words, launch=self._launch, here=self._here).train()


def save_model(run: Path, target: Path | None) -> Path:
    from birl.learner.checkpoint_cli import find
    from birl.learner.export import export

    source, own = find(run / "checkpoints", "last"), run / "exported"
    if target is None or target.resolve() in (run.resolve(), own.resolve()):
        shutil.rmtree(own, ignore_errors=True)
        target = own
    elif target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    export(source, run, target)
    return target


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
    from birl.config.nearest import ELSEWHERE, nearest_keys
    from birl.config.schema import RL

    known = [p for p in inspect.signature(Trainer).parameters if p != "unknown"]
    near = [RENAMED[name]] if name in RENAMED else difflib.get_close_matches(name, known, n=1)
    key = next(iter(nearest_keys(name, RL)), "")
    if name not in RENAMED and key and (not near or name in ELSEWHERE or key.endswith(f".{name}")):
        hint = f' Did you mean overrides={{"{key}": ...}}?'
    else:
        hint = f" Did you mean {near[0]}?" if near else ""
    return f"Trainer has no parameter {name}.{hint} It has: {', '.join(known)}."


def _listed(rewards: Any) -> list[Reward]:
    found: Any = [rewards] if isinstance(rewards, str) or callable(rewards) else rewards
    if not isinstance(found, list | tuple) or not all(isinstance(f, str) or callable(f) for f in found):
        raise BirlError(f"reward_funcs={rewards!r}: give a function, a name, or a list of them.")
    return list(found)


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
    return dataset if _source(dataset) == ["given"] else None


def _written(value: Any) -> str:
    """As one types it behind `key=`; None as null, which no key takes: not as a folder of the name None."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(repr(v) if isinstance(v, str) else str(v) for v in value) + "]"
    return str(value)
