"""Values and combinations that cannot work, found before anything is loaded. Standard library only.

`CHOICES` and `RANGES` hold what each key allows; every number in the schema has a range. The functions below hold the
rules that involve several keys. All problems are reported at once, each with the key, its value and the fix.
"""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from birl.config.help import documentation, written
from birl.config.schema import DPO, RL, SFT, Config, Eval, Model, Serve, Stage

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("bfloat16", "float32"),
    "model.device": ("auto", "cpu", "cuda"),
    "algorithm.baseline": ("group", "leave_one_out", "batch", "optimal", "greedy", "none"),
    "algorithm.scale_rewards": ("none", "group", "batch", "rewards", "mean"),
    "algorithm.denominator": ("token", "sequence", "group", "constant"),
    "algorithm.kl": ("k1", "k2", "k3", "abs"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.entropy_control": ("none", "top_entropy", "clip_cov", "kl_cov"),
    "algorithm.proximal": ("auto", "behaviour", "recompute", "interpolate"),
    "algorithm.correction": ("auto", "none", "truncate", "mask"),
    "algorithm.correction_level": ("token", "geometric", "sequence"),
    "algorithm.reject": ("none", "divergence", "off_policy"),
    "data.too_long": ("drop", "truncate"),
    "denominator": ("token", "sequence"),
    "preference.loss": ("dpo", "ipo", "hinge", "robust", "simpo", "orpo", "kto"),
    "preference.reference": ("live", "precomputed", "none"),
    "rollout.failed": ("drop", "drop_group"),
    "rollout.truncated": ("keep", "drop"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "optimizer.offload": ("none", "cpu"),
    "track.console": ("live", "plain", "off", "auto"),
    "track.wandb": ("off", "offline", "online"),
}

REWARDS = ("math", "format", "length", "model")
RESUME = ("auto", "never")


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers a key allows; `open_low` and `open_high` leave the bound itself out."""

    low: float = 0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = f"{'more than' if self.open_low else 'at least'} {self.low:g}"
        high = f" and {'less than' if self.open_high else 'at most'} {self.high:g}" if math.isfinite(self.high) else ""
        return low + high


COUNT = Range(1)
ANY = Range(0)
SHARE = Range(0, 1)
POSITIVE = Range(0, open_low=True)
DECAY = Range(0, 1, open_high=True)

RANGES: dict[str, Range] = {
    "model.max_length": ANY,
    "data.weights": ANY,
    "data.validation_split": DECAY,
    "data.max_samples": ANY,
    "data.max_validation_samples": ANY,
    "data.max_prompt_tokens": ANY,
    "algorithm.clip_low": ANY,
    "algorithm.clip_high": ANY,
    "algorithm.kl_coef": ANY,
    "algorithm.kl_target": ANY,
    "algorithm.kl_horizon": COUNT,
    "algorithm.dual_clip": ANY,
    "algorithm.pass_k": COUNT,
    "algorithm.entropy_coef": ANY,
    "algorithm.entropy_share": SHARE,
    "algorithm.covariance_low": Range(-math.inf),
    "algorithm.covariance_high": Range(-math.inf),
    "algorithm.held_coef": ANY,
    "algorithm.correction_low": ANY,
    "algorithm.correction_high": POSITIVE,
    "algorithm.second_moment": ANY,
    "algorithm.reject_limit": ANY,
    "algorithm.teacher_coef": ANY,
    "algorithm.length_penalty": ANY,
    "critic.lr": SHARE,
    "critic.coef": ANY,
    "critic.clip": ANY,
    "critic.gamma": SHARE,
    "critic.lam": SHARE,
    "critic.freeze_steps": ANY,
    "algorithm.max_refill": ANY,
    "algorithm.overlong_buffer": ANY,
    "algorithm.overlong_penalty": ANY,
    "algorithm.updates_per_batch": COUNT,
    "algorithm.passes": COUNT,
    "rollout.prompts": COUNT,
    "rollout.group_size": COUNT,
    "rollout.max_tokens": COUNT,
    "rollout.max_turns": COUNT,
    "rollout.temperature": ANY,
    "rollout.top_p": Range(0, 1, open_low=True),
    "rollout.top_k": ANY,
    "rollout.min_p": SHARE,
    "rollout.timeout": POSITIVE,
    "rollout.max_failure_rate": SHARE,
    "rollout.max_staleness": ANY,
    "preference.beta": POSITIVE,
    "preference.label_smoothing": Range(0, 0.5, open_high=True),
    "preference.margin": ANY,
    "preference.nll_coef": ANY,
    "preference.desirable_weight": ANY,
    "preference.undesirable_weight": ANY,
    "ranking.centering": ANY,
    "batch_size": COUNT,
    "validation.every": ANY,
    "validation.samples": COUNT,
    "validation.k": COUNT,
    "validation.temperature": ANY,
    "validation.top_p": Range(0, 1, open_low=True),
    "validation.top_k": ANY,
    "validation.max_tokens": ANY,
    "reward.weights": Range(-math.inf),
    "reward.timeout": POSITIVE,
    "reward.workers": COUNT,
    "reward.length_target": COUNT,
    "engine.max_batch": COUNT,
    "engine.draft_rows": ANY,
    "engine.kv_cache_gb": ANY,
    "optimizer.lr": SHARE,
    "optimizer.warmup_steps": ANY,
    "optimizer.min_lr_ratio": SHARE,
    "optimizer.beta1": DECAY,
    "optimizer.beta2": DECAY,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": ANY,
    "optimizer.max_grad_norm": ANY,
    "lora.rank": ANY,
    "lora.alpha": POSITIVE,
    "learner.tokens_per_microbatch": COUNT,
    "learner.max_logprob_gap": POSITIVE,
    "checkpoint.every": ANY,
    "checkpoint.keep_last": ANY,
    "steps": ANY,
    "epochs": COUNT,
    "seed": Range(0, 2**32 - 1),
    "threads": ANY,
    "port": Range(0, 65535),
    "max_request_mb": POSITIVE,
    "max_waiting": ANY,
    "request_timeout": POSITIVE,
    "drain_timeout": ANY,
}

# What `birl eval` shares with training but has no use for.
ONLY_TRAINING = (
    "data.train",
    "data.weights",
    "data.validation_split",
    "data.split",
    "data.max_samples",
    "data.max_prompt_tokens",
    "data.shuffle",
    "validation.every",
    "validation.at_start",
)


def command(config: Config | type) -> str:
    """What `birl` calls the command of a configuration."""
    return (config if isinstance(config, type) else type(config)).__name__.lower()


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """` Did you mean grpo?`, or nothing where no option is close."""
    found = difflib.get_close_matches(word.lower(), list(options), n=1, cutoff=0.5)
    return f" Did you mean {found[0]}?" if found else ""


def problems(config: Config) -> list[str]:
    """Every reason why this configuration cannot run; empty when it can."""
    found = [*_choices(config), *_ranges(config), *_files(config.model)]
    if isinstance(config, Serve):
        return found + ["host is empty: name an address, as in host=127.0.0.1."] * (not config.host.strip())
    found += _model(config)
    if isinstance(config, Stage):
        return [*found, *_data(config), *_stage(config), *_optimizer(config, 1), *_lora(config), *_run(config)]
    found += [*_rewards(config), *_validation(config)]
    if isinstance(config, Eval):
        return found + _eval(config)
    return [
        *found,
        *_data(config),
        *_sampling(config),
        *_algorithm(config),
        *_sizes(config),
        *_optimizer(config, config.algorithm.updates_per_batch * config.algorithm.passes),
        *_lora(config),
        *_run(config),
    ]


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _said(config: Config, key: str) -> str:
    return f"{key}={written(_value(config, key))}"


def _changed(config: Config, key: str) -> bool:
    return _value(config, key) != documentation(type(config))[key].default


def _choices(config: Config) -> list[str]:
    found = []
    for key, allowed in CHOICES.items():
        if key in documentation(type(config)) and (value := _value(config, key)) not in allowed:
            hint = " To run once for each value, add --multirun." if "," in value else did_you_mean(value, allowed)
            found.append(f"{key}={value}: must be {' | '.join(allowed)}.{hint}")
    return found


def _ranges(config: Config) -> list[str]:
    found = []
    for key, allowed in RANGES.items():
        if key not in documentation(type(config)):
            continue
        value = _value(config, key)
        if any(not allowed.holds(item) for item in (value if isinstance(value, list) else [value])):
            found.append(f"{_said(config, key)}: must be {'a finite number' if allowed.low == -math.inf else allowed}.")
    return found


def _without_effect(config: Config, key: str, reason: str) -> list[str]:
    """A key that was set and that nothing would read: the user believes in it, so it is refused."""
    return [f"{_said(config, key)}: has no effect because {reason}."] if _changed(config, key) else []


def _files(model: Model) -> list[str]:
    found = []
    if not model.path.strip():
        found.append("model.path is empty: name a folder, a .gguf file, a hub id, or smollm2.")
    if model.path.endswith(".gguf") and not Path(model.path).is_file():
        found.append(f"model.path={model.path}: there is no such file.")
    if model.chat_template and not Path(model.chat_template).is_file():
        found.append(f"model.chat_template={model.chat_template}: there is no such file; it must be a Jinja template.")
    return found


def _model(config: RL | Stage | Eval) -> list[str]:
    model, data, found = config.model, config.data, []
    if data.system_prompt and not data.apply_chat_template:
        found.append(
            "data.system_prompt is set, but data.apply_chat_template=false continues the raw text, which has "
            "no system message; "
            "drop one of the two."
        )
    if isinstance(config, RL | Eval) and model.max_length and config.data.max_prompt_tokens >= model.max_length:
        found.append(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens}: leaves no room for an answer in "
            f"model.max_length={model.max_length}; lower it."
        )
    return found


def _rewards(config: RL | Eval) -> list[str]:
    reward, found = config.reward, []
    if not reward.functions:
        found.append(
            "reward.functions is empty: name at least one of math | format | length | model | my_file.py:my_function."
        )
    for name in reward.functions:
        found += _reward_name(name)
    for name in {name for name in reward.functions if reward.functions.count(name) > 1}:
        found.append(f"reward.functions names {name} twice; give it a higher weight in reward.weights instead.")
    if reward.weights and len(reward.weights) != len(reward.functions):
        found.append(
            f"{_said(config, 'reward.weights')}: {len(reward.weights)} weights for {len(reward.functions)} functions "
            f"({', '.join(reward.functions)}); give one for each."
        )
    if reward.weights and not any(reward.weights):
        found.append(f"{_said(config, 'reward.weights')}: all weights are 0, so every reward would be 0.")
    if "format" not in reward.functions:
        found += _without_effect(config, "reward.format_pattern", "reward.functions does not name format; add it")
    if "model" not in reward.functions:
        found += _without_effect(config, "reward.model", "reward.functions does not name model; add it")
    elif not reward.model:
        found.append("reward.functions=model: say which, as in reward.model=FOLDER (`birl checkpoints RUN export`).")
    if "length" not in reward.functions:
        found += _without_effect(config, "reward.length_target", "reward.functions does not name length; add it")
    try:
        re.compile(reward.format_pattern)
    except re.error as error:
        found.append(f"reward.format_pattern={reward.format_pattern}: is not a regular expression: {error}.")
    return found


def _reward_name(name: str) -> list[str]:
    place, colon, function = name.rpartition(":")
    if name in REWARDS:
        return []
    if not colon:
        file = (
            " A function of a file is my_file.py:my_function." if name.endswith(".py") else did_you_mean(name, REWARDS)
        )
        return [
            f"reward.functions={name}: must be {' | '.join(REWARDS)}, file.py:function or "
            f"package.module:function.{file}"
        ]
    if not place or not function.isidentifier():
        return [f"reward.functions={name}: expected file.py:function or package.module:function."]
    if place.endswith(".py") and not Path(place).is_file():
        return [f"reward.functions={name}: there is no file {place} in {Path.cwd()}."]
    return []


def _validation(config: RL | Eval) -> list[str]:
    validation, found = config.validation, []
    if not validation.k:
        found.append("validation.k is empty: name at least one k, as in validation.k=[1].")
    if any(k > validation.samples for k in validation.k):
        found.append(
            f"{_said(config, 'validation.k')}: pass@{max(validation.k)} needs at least {max(validation.k)} "
            "answers per prompt; "
            f"set validation.samples={max(validation.k)} or more (it is {validation.samples})."
        )
    if validation.temperature == 0:
        if validation.samples > 1:
            found.append(
                f"validation.samples={validation.samples}: greedy decoding (validation.temperature=0) gives the "
                "same answer "
                "each time; set validation.temperature=1, or validation.samples=1."
            )
        for key in ("validation.top_p", "validation.top_k"):
            found += _without_effect(config, key, "validation.temperature=0 is greedy; set a temperature")
    if config.model.max_length and validation.max_tokens >= config.model.max_length:
        found.append(
            f"validation.max_tokens={validation.max_tokens}: leaves no room for a prompt in "
            f"model.max_length={config.model.max_length}."
        )
    return found


def _eval(config: Eval) -> list[str]:
    found = []
    if not config.data.validation:
        instead = written(config.data.train) if config.data.train else "my.jsonl"
        found.append(f"data.validation is empty: say what to measure on, as in `birl eval data.validation={instead}`.")
    for key in ONLY_TRAINING:
        found += _without_effect(config, key, "`birl eval` does not train; it reads data.validation and samples once")
    if config.output and Path(config.output).is_dir():
        found.append(f"output={config.output}: is a folder; name a JSON file.")
    return found


def _data(config: RL | Stage) -> list[str]:
    data, found = config.data, []
    if not data.train:
        found.append(
            f"data.train is empty: say what to train on, as in `birl {command(config)} data.train=my.jsonl` (.json "
            ".jsonl .csv .parquet .arrow, a folder or a hub name), or start from a recipe, as in "
            f"`birl {command(config)} recipes/NAME.yaml`."
        )
    if data.weights and len(data.weights) != len(data.train):
        found.append(
            f"{_said(config, 'data.weights')}: {len(data.weights)} weights for {len(data.train)} training sets; "
            "give one for each."
        )
    if data.weights and not any(data.weights):
        found.append(f"{_said(config, 'data.weights')}: all weights are 0, so nothing would be drawn.")
    if data.validation_split and data.validation:
        found.append(
            f"data.validation_split={data.validation_split:g}: data.validation names a held-out set already; "
            "drop one of the two."
        )
    if not data.validation:
        found += _without_effect(config, "data.validation_data_split", "data.validation is empty; name a held-out set")
        if not data.validation_split:
            reason = "there is no held-out data; set data.validation or data.validation_split"
            found += _without_effect(config, "data.max_validation_samples", reason)
    return found


def _stage(config: Stage) -> list[str]:
    found = []
    if config.validation.every and not (config.data.validation or config.data.validation_split):
        reason = "there is no held-out data; set data.validation or data.validation_split"
        found += _without_effect(config, "validation.every", reason)
    if isinstance(config, SFT):
        found += _texts(config)
    if isinstance(config, DPO):
        found += _preference(config)
    return found


def _texts(config: SFT) -> list[str]:
    roles = config.data.train_on
    if not roles:
        return ["data.train_on is empty: name roles, as in data.train_on=[assistant], or data.train_on=[all]."]
    if "all" in roles and len(roles) > 1:
        return [f"{_said(config, 'data.train_on')}: all includes every role; use data.train_on=[all]."]
    return []


# Keys of `preference` that only some losses read.
READ_BY = {
    "preference.label_smoothing": ("dpo", "robust"),
    "preference.margin": ("simpo",),
    "preference.nll_coef": ("dpo", "ipo", "hinge", "robust", "simpo"),
    "preference.desirable_weight": ("kto",),
    "preference.undesirable_weight": ("kto",),
    "preference.reference": ("dpo", "ipo", "hinge", "robust", "kto"),
    "data.label_column": ("kto",),
}


def _preference(config: DPO) -> list[str]:
    loss, found = config.preference.loss, []
    for key, losses in READ_BY.items():
        if loss not in losses:
            found += _without_effect(config, key, f"preference.loss={loss} does not read it")
    if loss == "robust" and config.preference.label_smoothing == 0:
        found.append("preference.loss=robust: is dpo while preference.label_smoothing=0; set that, to 0.1 say.")
    if loss == "kto" and config.batch_size == 1:
        found.append("batch_size=1: preference.loss=kto compares rows of a batch with one another; set 2 or more.")
    if loss == "kto" and config.preference.reference == "precomputed":
        found.append(
            "preference.reference=precomputed: preference.loss=kto needs the reference on answers that are put "
            "together anew in every step; set preference.reference=live."
        )
    if config.data.label_column:
        reason = "with data.label_column a row has one answer, in data.chosen_column"
        found += _without_effect(config, "data.rejected_column", reason)
    return found


def _sampling(config: RL) -> list[str]:
    rollout, found = config.rollout, []
    for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(rollout, key) != off:
            found.append(
                f"rollout.{key}={getattr(rollout, key):g}: training samples from the whole distribution; the "
                "learner's log-probs "
                f"would belong to another one, and the importance ratios would be wrong. Set rollout.{key}={off:g}."
            )
    if rollout.temperature == 0:
        found.append(
            "rollout.temperature=0: greedy answers are all the same, so there is nothing to compare; use 1 "
            "(validation.temperature may be 0)."
        )
    if rollout.max_staleness > 0:
        found.append(
            f"rollout.max_staleness={rollout.max_staleness}: asynchronous engines are not part of this version; "
            "set rollout.max_staleness=0."
        )
    found += _without_effect(config, "rollout.max_turns", "every task of this version is answered in one turn")
    for key, values in (("rollout.stop", rollout.stop),):
        if "" in values:
            found.append(f"{key}: an empty string would end every answer at once; remove it.")
        if any(value in ("\\n", "\\n\\n", "\\t") for value in values):
            found.append(f"{key}: a backslash and a letter is not a line break; in bash write {key}=$'\\n'.")
    return found


def proximal(config: RL) -> str:
    """algorithm.proximal, with auto decided: answers of older weights are corrected unless somebody says otherwise."""
    if config.algorithm.proximal != "auto":
        return config.algorithm.proximal
    return "recompute" if config.rollout.max_staleness > 0 else "behaviour"


def corrects(config: RL) -> bool:
    """Is there an importance weight of the proximal policy against the one that sampled?"""
    return proximal(config) != "behaviour" and config.algorithm.correction != "none"


CRITIC = ("gae", "turn_gae")  # advantages that need one
UNCLIPPED = ("reinforce", "importance")

#: key of `algorithm` that was set -> (key that must have one of these values, or nothing reads it)
NEEDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "baseline": ("advantage", ("relative",)),
    "scale_rewards": ("advantage", ("relative",)),
    "pass_k": ("advantage", ("pass_at_k",)),
    "entropy_share": ("entropy_control", ("top_entropy", "clip_cov", "kl_cov")),
    "covariance_low": ("entropy_control", ("clip_cov",)),
    "covariance_high": ("entropy_control", ("clip_cov",)),
    "held_coef": ("entropy_control", ("kl_cov",)),
    "correction": ("proximal", ("recompute", "interpolate")),
    "correction_level": ("proximal", ("recompute", "interpolate")),
    "correction_low": ("correction", ("mask",)),
    "correction_high": ("proximal", ("recompute", "interpolate")),
    "reject_limit": ("reject", ("divergence", "off_policy")),
    "dual_clip": ("surrogate", ("clip",)),
    "clip_low": ("surrogate", ("clip", "gspo", "gmpo", "cispo")),
    "clip_high": ("surrogate", ("clip", "gspo", "gmpo", "cispo")),
    "kl_corrected": ("kl_in", ("loss",)),
}


def _algorithm(config: RL) -> list[str]:
    algorithm, size, found = config.algorithm, config.rollout.group_size, []
    for key, (other, values) in NEEDS.items():
        value = proximal(config) if other == "proximal" else getattr(algorithm, other)
        if value not in values and ":" not in str(value):
            reason = f"algorithm.{other}={value} does not read it ({' or '.join(values)} does)"
            found += _without_effect(config, f"algorithm.{key}", reason)
    found += _group_of_one(config) if size == 1 else []
    if algorithm.dynamic_sampling:
        found += _dynamic_sampling(config)
    else:
        found += _without_effect(config, "algorithm.max_refill", "algorithm.dynamic_sampling is false")
    found += _kl(config)
    if not algorithm.teacher:
        found += _without_effect(config, "algorithm.teacher_coef", "algorithm.teacher is empty; name a model")
    if algorithm.advantage == "pass_at_k" and algorithm.pass_k >= size:
        found.append(
            f"algorithm.pass_k={algorithm.pass_k}: with rollout.group_size={size} there is one set of answers, so "
            "nothing to compare; set a smaller algorithm.pass_k or a larger rollout.group_size."
        )
    if algorithm.advantage == "zero" and not algorithm.teacher:
        found.append("algorithm.advantage=zero: nothing would be learned without algorithm.teacher; name a model.")
    if algorithm.overlong_buffer == 0:
        found += _without_effect(
            config, "algorithm.overlong_penalty", "algorithm.overlong_buffer=0; set a number of tokens"
        )
    if algorithm.overlong_buffer >= config.rollout.max_tokens > 0:
        found.append(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer}: must be less than rollout.max_tokens="
            f"{config.rollout.max_tokens}, or every answer is overlong; a fifth of it is "
            f"{config.rollout.max_tokens // 5}."
        )
    if algorithm.mask_truncated and config.rollout.truncated == "drop":
        found.append(
            "algorithm.mask_truncated=true: has no effect because rollout.truncated=drop drops those answers; use one."
        )
    return found + _surrogate(config) + _critic(config)


def _group_of_one(config: RL) -> list[str]:
    algorithm, found = config.algorithm, []
    if algorithm.advantage == "relative" and algorithm.baseline in ("group", "leave_one_out", "optimal"):
        found.append(
            "rollout.group_size=1: the mean of one reward is that reward, so every advantage would be 0; "
            "set rollout.group_size=8, or algorithm.baseline=none."
        )
    if algorithm.advantage == "relative" and algorithm.scale_rewards == "group":
        found.append(
            "rollout.group_size=1: algorithm.scale_rewards=group divides by the standard deviation of a group "
            "of one, which does not exist; set rollout.group_size=8, or algorithm.scale_rewards=none."
        )
    if algorithm.advantage in ("gdpo", "best_and_worst"):
        found.append(
            f"rollout.group_size=1: algorithm.advantage={algorithm.advantage} compares the answers to a prompt; set "
            "rollout.group_size=8."
        )
    return found


def _kl(config: RL) -> list[str]:
    algorithm, found = config.algorithm, []
    if algorithm.kl_coef == 0:
        for key in ("kl_corrected", "kl_target"):  # kl and kl_in come with presets
            reason = "algorithm.kl_coef=0 leaves the KL term out; set algorithm.kl_coef=0.04"
            found += _without_effect(config, f"algorithm.{key}", reason)
    elif algorithm.kl_target > 0 and algorithm.kl_in == "loss":
        found.append("algorithm.kl_target: steers the KL in the reward; set algorithm.kl_in=reward, or kl_target=0.")
    if algorithm.kl_target == 0:
        found += _without_effect(config, "algorithm.kl_horizon", "algorithm.kl_target=0 keeps kl_coef fixed")
    episodes = config.rollout.prompts * config.rollout.group_size
    if algorithm.kl_target > 0 and algorithm.kl_horizon <= 0.2 * episodes:
        found.append(
            f"algorithm.kl_horizon={algorithm.kl_horizon}: too short for {episodes} episodes a step; set "
            f"{episodes} or more."
        )
    return found


def _surrogate(config: RL) -> list[str]:
    algorithm, found = config.algorithm, []
    name = algorithm.surrogate
    if name == "reinforce" and algorithm.updates_per_batch * algorithm.passes > 1:
        found.append(
            "algorithm.surrogate=reinforce: has no importance ratio, so only the first update of a batch would be "
            "right; set algorithm.updates_per_batch=1 and algorithm.passes=1, or another surrogate."
        )
    if name in UNCLIPPED and config.rollout.max_staleness > 0:
        found.append(
            f"algorithm.surrogate={name}: is not bounded, and rollout.max_staleness={config.rollout.max_staleness} "
            "trains on answers of older weights; set algorithm.surrogate=clip or another bounded one."
        )
    if 0 < algorithm.dual_clip <= 1:
        found.append(f"algorithm.dual_clip={algorithm.dual_clip:g}: must be above 1, as in 3, or 0 for none.")
    if algorithm.correction_low > algorithm.correction_high:
        found.append("algorithm.correction_low is above algorithm.correction_high, so nothing would be left.")
    if (name == "online_dpo") != (algorithm.advantage == "best_and_worst"):
        found.append(
            "algorithm.surrogate=online_dpo and algorithm.advantage=best_and_worst belong together: set both, or "
            "algorithm=online_dpo."
        )
    if name == "online_dpo" and algorithm.denominator != "sequence":
        found.append("algorithm.surrogate=online_dpo: has one loss a pair; set algorithm.denominator=sequence.")
    return found


def _critic(config: RL) -> list[str]:
    critic, found = config.critic, []
    if config.algorithm.advantage not in CRITIC:
        reason = f"algorithm.advantage={config.algorithm.advantage} has no critic; set gae"
        for key in (k for k in documentation(RL) if k.startswith("critic.")):
            found += _without_effect(config, key, reason)
    elif critic.shared:
        for key in ("critic.path", "critic.lr", "critic.freeze_steps"):
            found += _without_effect(config, key, "critic.shared=true has no model of its own")
    else:
        found += _without_effect(config, "critic.coef", "critic.shared=false; the critic has its own optimizer")
    return found


def _dynamic_sampling(config: RL) -> list[str]:
    found = []
    if config.algorithm.advantage == "relative" and config.algorithm.baseline == "none":
        found.append(
            "algorithm.dynamic_sampling=true: drops groups whose rewards are all the same, but with "
            "algorithm.baseline=none those "
            "do train; set algorithm.baseline=group or algorithm.dynamic_sampling=false."
        )
    elif config.rollout.group_size == 1:
        found.append(
            "algorithm.dynamic_sampling=true: a group of one always has equal rewards; set rollout.group_size=8."
        )
    if config.algorithm.max_refill == 0:
        found.append(
            "algorithm.max_refill=0: algorithm.dynamic_sampling=true may then replace nothing; set "
            "algorithm.max_refill=4."
        )
    return found


def _sizes(config: RL) -> list[str]:
    budget, longest, answer, found = (
        config.learner.tokens_per_microbatch,
        config.model.max_length,
        config.rollout.max_tokens,
        [],
    )
    if config.algorithm.updates_per_batch > config.rollout.prompts:
        found.append(
            f"algorithm.updates_per_batch={config.algorithm.updates_per_batch}: a batch of rollout.prompts="
            f"{config.rollout.prompts} groups cannot be split into more parts than groups; lower it to "
            f"{config.rollout.prompts}."
        )
    if longest and answer >= longest:
        found.append(
            f"rollout.max_tokens={answer}: leaves no room for a prompt in model.max_length={longest}; lower it."
        )
    elif longest and config.data.max_prompt_tokens + answer > longest:
        found.append(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens}: with rollout.max_tokens={answer} that is "
            "more than "
            f"model.max_length={longest}; lower it to {longest - answer}."
        )
    needed = longest or config.data.max_prompt_tokens + answer
    if budget < needed:
        why = f"model.max_length={longest}" if longest else f"data.max_prompt_tokens + rollout.max_tokens = {needed}"
        found.append(
            f"learner.tokens_per_microbatch={budget}: the longest sequence ({why}) does not fit into one micro-batch; "
            f"set learner.tokens_per_microbatch={needed} or more."
        )
    return found


def _optimizer(config: RL | Stage, updates_per_step: int) -> list[str]:
    found, updates = [], config.steps * updates_per_step
    if config.optimizer.schedule == "constant":
        reason = "optimizer.schedule=constant stays at the peak; set linear or cosine"
        found += _without_effect(config, "optimizer.min_lr_ratio", reason)
    if config.steps and config.optimizer.warmup_steps >= updates:
        found.append(
            f"optimizer.warmup_steps={config.optimizer.warmup_steps}: the run has only {updates} optimizer "
            "steps, so it would end "
            "before reaching optimizer.lr; lower it."
        )
    if config.steps:
        found += _without_effect(
            config, "epochs", f"steps={config.steps} decides the length of the run; drop one of the two"
        )
    return found


def _lora(config: RL | Stage) -> list[str]:
    found = []
    if config.lora.rank == 0:
        for key in ("lora.alpha", "lora.targets", "lora.dora"):
            found += _without_effect(config, key, "lora.rank=0 trains all weights; set lora.rank=16")
    elif not config.lora.targets:
        found.append("lora.targets is empty, so nothing would be trained; set lora.targets=[all-linear].")
    return found


def _run(config: RL | Stage) -> list[str]:
    found = []
    if config.run and Path(config.run).exists() and not Path(config.run).is_dir():
        found.append(f"run={config.run}: is a file; name a folder.")
    if config.resume not in RESUME and not Path(config.resume).is_dir():
        found.append(
            f"resume={config.resume}: there is no such checkpoint folder; use auto, never or an existing one "
            f"(`birl checkpoints RUN` lists them).{did_you_mean(config.resume, RESUME)}"
        )
    if config.track.wandb in ("offline", "online") and find_spec("wandb") is None:
        found.append(
            f"track.wandb={config.track.wandb}: wandb is not installed; pip install 'birl[wandb]', or track.wandb=off."
        )
    return found
