"""Which key somebody meant who has written another word. Standard library only."""

import difflib
from pathlib import Path

from birl.config.help import documentation
from birl.config.schema import Eval

# What other systems call our keys: a name that difflib cannot find.
ELSEWHERE = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "batch_size": "rollout.prompts",
    "beta": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "kl_beta": "algorithm.kl_coef",
    "learning_rate": "optimizer.lr",
    "logging_dir": "run",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model.path",
    "n_samples": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "num_train_epochs": "epochs",
    "output_dir": "run",
    "reward_funcs": "reward.functions",
    "save_steps": "checkpoint.every",
    "train_batch_size": "rollout.prompts",
    "train_dataset": "data.train",
    "total_epochs": "epochs",
}


def suggest(key: str, schema: type) -> str:
    """` Did you mean optimizer.lr?`, or nothing where no key is close."""
    found = nearest_keys(key, schema)
    return f" Did you mean {' or '.join(found)}?" if found else ""


def nearest_keys(key: str, schema: type) -> list[str]:
    """At most three keys that `key` may stand for: same last part, its name in another system, similar spelling."""
    key = key.lower().replace("-", "_").strip("+~ ")
    keys = list(documentation(schema))
    last = key.rpartition(".")[2]
    parts = {name: name.rpartition(".")[2] for name in keys}
    found = [name for name in keys if parts[name] == last]
    found += [ELSEWHERE[last]] if ELSEWHERE.get(last) in keys else []
    if not found:
        found += difflib.get_close_matches(key, keys, n=3, cutoff=0.7)
        close = difflib.get_close_matches(last, list(parts.values()), n=3, cutoff=0.7)
        found += [name for part in close for name in keys if parts[name] == part]
    return list(dict.fromkeys(found))[:3]


def meant(word: str, schema: type) -> str:
    """Which key a file or a folder without one belongs to."""
    path, keys = Path(word), documentation(schema)
    if path.is_dir():
        return f" For the model of that folder: model={word}."
    if path.is_file():
        if "data.train" not in keys:
            return f" For a model: model.path={word}."
        return f" For the data in that file: {'data.validation' if schema is Eval else 'data.train'}={word}."
    return ""
