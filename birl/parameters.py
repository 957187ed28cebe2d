"""Translates the parameters of `birl.Trainer` into keys of the configuration, reward functions, and rows."""

import difflib
import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from numbers import Integral
from os import PathLike
from typing import Any

from birl import trl
from birl.config.file import flat
from birl.config.keys import documentation
from birl.config.nearest import nearest_keys
from birl.config.schema import RL
from birl.errors import BirlError
from birl.trl import LOSS_TYPES, SCALES

Reward = Callable[..., Sequence[float]] | str

# Parameters that map to one key.
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

# Parameters that determine a key.
MORE = {"max_completion_length": "rollout.max_tokens", "num_epochs": "epochs", "use_lora": "lora.rank"}
KEYS_BY_NAME = tuple((KEYS | MORE).items())


def model_path(model: Any) -> str:
    if isinstance(model, str | PathLike):
        return str(model)
    name = getattr(model, "name_or_path", "")
    like = f", as in model={name!r}" if name else ""
    raise BirlError(f"model: a {type(model).__name__}; give the name of a folder, a .gguf file or a hub id{like}.")


def keys_given(overrides: Any) -> dict[str, Any]:
    """Keys of the command, flattened; given with dots or nested. Raises `BirlError`."""
    if not isinstance(overrides, Mapping | None):
        raise BirlError(
            f'overrides: a {type(overrides).__name__}; give a dict of keys, as in overrides={{"optimizer.lr": 1e-5}}.'
        )
    return dict(flat(overrides or {}))


def fitting(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys, with micro-batches large enough for the longest sequence."""
    key = "learner.tokens_per_microbatch"
    longest = keys.get("model.max_length") or 0
    return {**({key: longest} if longest > documentation(RL)[key].default else {}), **keys}


def rewards_of(reward_funcs: Any, env: Any, rows: bool) -> list[Reward]:
    """The reward functions, or the default if none is given. `rows`: there are rows to train on."""
    if env is None:
        raise BirlError("env=None: leave it out, or give a class, a function or a name.")
    if reward_funcs is None:
        reward_funcs = "math" if env == "single_turn" else []
    rewards = listed("code" if reward_funcs == "sandbox" else reward_funcs)  # MRL's name for unit tests
    if not rewards and env == "single_turn":
        raise BirlError("reward_funcs is empty: name a function, such as math, or an env that rewards.")
    if not rows and env == "single_turn":
        raise BirlError(no_rows(reward_funcs == "math"))
    return rewards


def env_of(env: Any, names: dict[str, Any], reward_funcs: Any) -> Any:
    """`env`, or the agent for TRL's `tools` and `environment_factory`, which are removed from `names`. As in TRL, one
    object of each factory is made for checks. Raises `BirlError`."""
    tools, factory = (names.pop(name, None) for name in ("tools", "environment_factory"))
    if not tools and factory is None:
        return env
    from birl.envs.functions import ToolAgent, methods
    from birl.text.schema import tool

    if env != "single_turn":
        raise BirlError("env: has its own tools; leave out tools and environment_factory, or env.")
    tools, rewards = list(tools or ()), [] if reward_funcs is None else listed(reward_funcs)
    factories = factory if isinstance(factory, Mapping) else {} if factory is None else {None: factory}
    if not all(map(callable, (*tools, *factories.values()))):
        raise BirlError("tools and environment_factory: give functions, and a class or a dict of them by name.")
    made = {name: one() for name, one in factories.items()}
    if wrong := [type(one).__name__ for one in made.values() if not callable(getattr(one, "reset", None))]:
        raise BirlError(f"environment_factory: {wrong[0]} has no method reset.")
    if not rewards and not (made and all(hasattr(one, "get_reward") for one in made.values())):
        raise BirlError("tools without a reward: give reward_funcs, or an environment_factory with get_reward.")
    if any("environments" in inspect.signature(one).parameters for one in rewards if callable(one)):
        raise BirlError("reward_funcs get no `environments`: write the environment's get_reward(), as TRL has it.")
    schemas = {name: [tool(f) for f in (*tools, *methods(one))] for name, one in (made or {None: None}).items()}
    return type("ToolAgent", (ToolAgent,), {"tools": tools, "factories": factories, "schemas": schemas})


def reward_keys(rewards: list[Reward], weights: Sequence[float] | None, tests: bool, launcher: str) -> dict[str, Any]:
    given = [] if weights is None else list(weights) if isinstance(weights, Iterable) else [weights]
    keys: dict[str, Any] = {"reward.functions": reward_names(rewards), "reward.weights": given}
    if tests:
        keys["reward.timeout"] = 300.0  # one call runs the tests of a whole group
        keys |= {"sandbox.kind": "modal"} if launcher == "modal" else {}
    return keys


def is_lora(use_lora: Any) -> bool:
    if not isinstance(use_lora, Hashable) or use_lora not in (True, False):
        raise BirlError(f'use_lora={use_lora!r}: True or False; a rank is overrides={{"lora.rank": 8}}.')
    return bool(use_lora)


def answer_tokens(max_tokens: int, max_completion_length: int | None, both: bool) -> int:
    """Longest answer [tokens]; MRL has both parameters."""
    if max_completion_length is None:
        return max_tokens
    return min(max_tokens, max_completion_length) if both else max_completion_length


def loss_keys(
    keys: dict[str, Any], loss_type: str, scale_rewards: str | bool | None, low: float | None, high: float | None
) -> dict[str, Any]:
    """Keys of the loss, then of what takes precedence over it: scale and clip range. `keys`: those so far."""
    result = {f"algorithm.{name}": value for name, value in LOSS_TYPES.get(loss_type, {}).items()}
    clips = trl.clip_keys(low, high, (keys | result).get("algorithm.surrogate"))
    return result | scale_keys(scale_rewards) | clips


def scale_keys(scale_rewards: str | bool | None) -> dict[str, Any]:
    if scale_rewards is None:
        return {}
    if not isinstance(scale_rewards, Hashable) or scale_rewards not in SCALES:
        raise BirlError(f"scale_rewards={scale_rewards!r}: choose group, batch or none.")
    return {"algorithm.scale_rewards": SCALES[scale_rewards]}


def keys_of_engines(workers: int, method: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Keys of the engines. An engine in the learner's process shares the learner's weights: nothing is synchronised."""
    from birl.launch.program import engine_keys

    if not isinstance(workers, Integral):
        raise BirlError(f"num_rollout_workers={workers!r}: it needs to be a whole number.")
    if method and method not in (methods := documentation(RL)["weights.method"].choices):
        raise BirlError(f"weight_sync_method={method!r}: choose one of {', '.join(methods)}.")
    elsewhere = workers != 0 or {"engine.kind", "engine.count", "engine.attach"} & overrides.keys()
    return engine_keys(workers, method if elsewhere else "")


def words_of_launch(launcher: str, actor_gpu: str, rollout_gpu: str, launch: dict[str, Any]) -> tuple[str, ...]:
    from birl.launch.program import launch_words

    gpus = {"actor_gpu": actor_gpu, "rollout_gpu": rollout_gpu}
    if not launcher and (stray := [name for name, value in {**gpus, "launch": launch}.items() if value]):
        raise BirlError(f'{stray[0]}: says what a launcher is to give; name one, as in launcher="modal".')
    return launch_words(launcher, gpus, launch) if launcher else ()


def changed(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys without those at their defaults, so that a preset (overrides={"algorithm": "grpo"}) can set them."""
    return {k: v for k, v in keys.items() if v != documentation(RL)[k].default}


def check_names(names: Iterable[str], known: list[str]) -> None:
    """Raises `BirlError` for the first name that neither TRL nor `Trainer` has, with suggestions."""
    name = next((name for name in names if not trl.knows(name)), "")
    if not name:
        return
    near = ["reward_funcs"] if name == "reward_fn" else difflib.get_close_matches(name, known, n=1)
    section = [key for key in documentation(RL) if key.startswith(f"{name}.")]
    key = next(iter(section or nearest_keys(name, RL)), "")
    if key and (not near or section or key.endswith(f".{name}") or key == name):
        hint = f' Did you mean overrides={{"{key}": ...}}?'
    else:
        hint = f" Did you mean {near[0]}?" if near else ""
    raise BirlError(f"Trainer has no parameter {name}.{hint} It has: {', '.join(known)}.")


def no_rows(math: bool, example: str = '{"prompt": "What is 3 + 4?", "answer": "7"}') -> str:
    """Error message for a Trainer without rows. `example`: a row."""
    reward = ' Without reward_funcs the reward is math, which compares with a column such as "answer".' if math else ""
    return (
        'train_dataset is None, and data.train is empty: say what to train on, as in train_dataset="my.jsonl", a hub '
        f"name, a datasets.Dataset or a list of rows such as {example}.{reward}"
    )


def listed(rewards: Any) -> list[Reward]:
    result: Any = [rewards] if isinstance(rewards, str) or callable(rewards) else rewards
    if not isinstance(result, list | tuple) or not all(isinstance(f, str) or callable(f) for f in result):
        raise BirlError(f"reward_funcs={rewards!r}: give a function, a name, or a list of them.")
    for one in result:
        if isinstance(one, type):
            raise BirlError(f"reward_funcs: {one.__name__} is a class; give a function, or an object of it.")
        path = one if isinstance(one, str) and "/" in one and ":" not in one else getattr(one, "name_or_path", "FOLDER")
        if hasattr(one, "state_dict") or path == one:
            raise BirlError(
                "reward_funcs: a reward model is named, not handed over: "
                f'reward_funcs="model", overrides={{"reward.model": "{path}"}}.'
            )
    return list(result)


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """Name of each reward in the configuration: its own, or given:NAME for a Python object."""
    names = [
        r if isinstance(r, str) else "given:" + re.sub(r"\W", "", getattr(r, "__name__", type(r).__name__))
        for r in rewards
    ]
    return [
        f"{name}_{names[:i].count(name) + 1}" if name.startswith("given:") and name in names[:i] else name
        for i, name in enumerate(names)
    ]


def sources_of(dataset: Any) -> list[str]:
    if dataset is None:
        return []
    if isinstance(dataset, str | PathLike):
        return [str(dataset)]
    if isinstance(dataset, list | tuple) and dataset and all(isinstance(d, str | PathLike) for d in dataset):
        return [str(d) for d in dataset]
    return ["given"]


def rows_of(dataset: Any) -> Any:
    """The rows of a Python object; data frames (polars, pandas) as a list of dicts."""
    if hasattr(dataset, "to_dicts"):
        return dataset.to_dicts()
    if hasattr(dataset, "columns") and hasattr(dataset, "to_dict"):
        return dataset.to_dict("records")
    return dataset if sources_of(dataset) == ["given"] else None


def written(value: Any) -> str:
    """The value as typed after `key=`, quoted such that a text is kept as it is; None as null, which no key accepts, so
    that it is not taken for a folder of the name None."""
    from birl.config.load import NULL

    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written_element, value)) + "]"
    text = str(value)
    if isinstance(value, str) and (text in NULL or (text[:1] in ("'", '"') and text[:1] == text[-1:])):
        return written_element(text)
    return text


def written_element(value: Any) -> str:
    """An element of a list, quoted such that Hydra's grammar parses it to the same value."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(str(value), Quote.single).with_quotes() if isinstance(value, str | PathLike) else str(value)
