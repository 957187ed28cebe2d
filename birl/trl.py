"""Translate TRL's names (a `GRPOConfig`, or some of its fields) into keys of birl. One-to-one names are in
`birl/config/peers/trl.toml`; keys that depend on several names are computed here."""

import math
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from birl.config import peers
from birl.config.check import command
from birl.config.keys import documentation
from birl.config.nearest import suggest
from birl.config.schema import DPO
from birl.errors import BirlError

# Names of losses in MRL and TRL: surrogate, clips, denominator and scale as in birl's presets.
LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {"denominator": "sequence", "scale_rewards": "group"},
    "bnpo": {"denominator": "token", "scale_rewards": "group"},
    "dapo": {"denominator": "token", "clip_high": 0.28, "scale_rewards": "group"},
    "dr_grpo": {"denominator": "constant"},
    "cispo": {
        "surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "denominator": "token", "scale_rewards": "group",
    },
    "sapo": {"surrogate": "sapo", "denominator": "sequence", "scale_rewards": "group"},
    "gspo": {
        "surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "denominator": "sequence", "scale_rewards": "group",
    },
}  # fmt: skip
SCALES = {"group": "group", "batch": "rewards", "none": "none", True: "group", False: "none"}
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")
COUNTS = (*BATCH, "num_iterations", "num_generations")
AMOUNTS = (
    *("max_steps", "num_train_epochs", "warmup_steps", "warmup_ratio", "save_steps", "eval_steps"),
    "max_tool_calling_iterations",
)
PEFT = {  # fields of a LoraConfig that are read, and those without an effect here
    *("r", "lora_alpha", "target_modules", "lora_dropout", "use_dora"),
    *("task_type", "peft_type", "base_model_name_or_path", "revision", "inference_mode", "runtime_config"),
    *("auto_mapping", "peft_version", "fan_in_fan_out", "megatron_core"),
}


@dataclass(slots=True)
class Names:
    """Names of TRL with their values. `whole`: they come from a config object of TRL, which has a value for every name;
    only those in `changed` were set by the user."""

    values: dict[str, Any]
    changed: set[str] = field(default_factory=set[str])
    whole: bool = False

    @classmethod
    def of(cls, args: Any, more: Mapping[str, Any]) -> "Names":
        """Build from `Trainer(args=...)`, a `GRPOConfig` or a dict, and further parameters, which take precedence."""
        more = {n: v for n, v in more.items() if not (isinstance(v, tuple) and v == (None, None))}
        given = _numbers({n: _plain(v) for n, v in more.items() if v is not None})
        if args is None or isinstance(args, Mapping):
            values = {**_numbers({str(k): _plain(v) for k, v in (args or {}).items() if v is not None}), **given}
            return cls(values, set(values))
        if is_dataclass(args):
            defaults = {f.name: _default(f) for f in fields(args)}
        elif hasattr(args, "__dict__"):
            defaults = dict.fromkeys(vars(args))
        else:
            raise BirlError(f"args: a {type(args).__name__}; give a GRPOConfig of TRL, or a dict of its names.")
        values = {name: _plain(getattr(args, name)) for name in defaults}
        changed = {name for name, value in values.items() if value != defaults[name]} | set(given)
        values = _numbers({name: value for name, value in values.items() if value is not None})
        return cls({**values, **given}, changed, whole=is_dataclass(args))

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def meant(self, name: str) -> bool:
        return name in self.changed


def _default(one: Any) -> Any:
    if one.default is not MISSING:
        return _plain(one.default)
    return _plain(one.default_factory()) if one.default_factory is not MISSING else None


def _plain(value: Any) -> Any:
    """The value with enums of transformers as text, and scalars of numpy and torch as numbers."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    return value.value if hasattr(value, "value") and isinstance(getattr(value, "value", None), str) else value


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """The values, with those of `COUNTS` and `AMOUNTS` as numbers. Raises `BirlError`."""
    for name in (name for name in (*COUNTS, *AMOUNTS) if name in values):
        try:
            number = float(values[name])
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or (name in COUNTS and (number < 1 or number % 1)):
            what = "a whole number of at least 1" if name in COUNTS else "a number"
            raise BirlError(f"{name}={values[name]!r}: it needs to be {what}.")
        values[name] = int(number) if number % 1 == 0 else number
    return values


def knows(name: str) -> bool:
    """Whether it is a name in TRL or MRL, or a parameter of their trainers."""
    return any(row.peer in ("TRL", "MRL") for row, _ in peers.named(name))


def without_tokenizer(names: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The names without a tokenizer that is the model's own. Raises `BirlError` if it was changed after loading."""
    own = {n: v for n, v in names.items() if n in ("processing_class", "tokenizer")}
    own = {n: v for n, v in own.items() if getattr(v, "name_or_path", "") == model}
    for name, tokenizer in own.items():
        read: Any = getattr(tokenizer, "init_kwargs", {})
        for what in ("chat_template", "eos_token") if read else ():
            known = what in read or what == "chat_template"
            if known and str(read.get(what)) != str(getattr(tokenizer, what)):
                raise BirlError(
                    f"{name}: its {what} is another than that in {model}, whose tokenizer is used: save the two with "
                    'save_pretrained(FOLDER), and give model=FOLDER. A template alone: overrides={"model.chat_template"'
                    ": FILE.jinja}."
                )
    return {n: v for n, v in names.items() if n not in own}


def keys_of(
    args: Any, more: Mapping[str, Any], model: str, schema: type, prefix: str, rewards: int = 0
) -> dict[str, Any]:
    """Keys of the configuration for a config object and parameters of TRL. `prefix`: GRPO, SFT, DPO or Reward;
    `rewards`: the number of reward functions. Raises `BirlError` for a name without a translation; for a whole config
    object it warns."""
    names = Names.of(args, without_tokenizer(more, model))
    result = _steps(names, schema) | _saving(names, schema) | _lora(names)
    done = {*BATCH, "max_steps", "num_train_epochs", "warmup_steps", "warmup_ratio", "do_eval", "report_to"}
    done |= {"peft_config", "output_dir", "remove_unused_columns"}
    done |= {name for name in ("save_strategy", "eval_strategy") if names.get(name) in ("no", "steps")}
    done |= {name for name in ("save_steps", "eval_steps") if not 0 < names.get(name, 0) < 1}
    if prefix == "GRPO":
        result |= _loss(names) | _engine(names)
        done |= {"loss_type", "scale_rewards", "epsilon", "epsilon_high", "delta", "importance_sampling_level"}
        done |= {"use_vllm", "top_p", "top_k", "min_p", "max_tool_calling_iterations"}
        done |= {name for name in names.values if name.startswith("sapo_temperature")}
        if names.get("use_vllm"):
            done |= {"vllm_mode", "vllm_server_base_url"}
        else:
            done |= {name for name in names.values if name.startswith("vllm_") and names.whole}
        if not names.get("beta"):
            done.add("use_bias_correction_kl")
        if "max_tool_calling_iterations" in names.values:  # the answer after the last call is one more
            result["env.max_turns"] = names.get("max_tool_calling_iterations") + 1
        if names.whole and rewards > 1 and not names.get("reward_weights"):
            result["reward.weights"] = [1.0] * rewards
    if prefix == "DPO":
        result |= _preference(names)
        done |= {"loss_type", "loss_weights"}
    if names.meant("output_dir") or (names.get("output_dir") and not names.whole):
        result["run"] = names.get("output_dir")
    stray = []
    for name, value in names.values.items():
        if name in done:
            continue
        if any(row.take == "-" for row, _ in _rows(name, prefix)):
            continue  # nothing to do: the table says why
        key, ours = _taken(name, value, schema, prefix)
        if key:
            result[key] = ours
        elif names.meant(name):
            stray.append(name)
    _answer(stray, names, schema)
    known = documentation(schema)
    return {key: value for key, value in result.items() if key in known}


def _taken(name: str, value: Any, schema: type, prefix: str) -> tuple[str, Any]:
    """The key and its value as the table translates them; an empty key if it does not."""
    for row, key in _rows(name, prefix):
        ours = key or (row.keys[0] if row.keys else "")
        if row.take and not ours and str(value) == row.take.removesuffix("="):
            return "nothing", None
        if not row.take or ours not in documentation(schema):
            continue
        if row.take == "=":
            return ours, value
        pairs = dict(pair.split("=") for pair in row.take.split(", "))
        if str(value) in pairs:
            return (ours, pairs[str(value)]) if pairs[str(value)] else (ours, documentation(schema)[ours].default)
    return "", None


def _rows(name: str, prefix: str) -> list[tuple[peers.Row, str]]:
    """TRL's rows of this name; those of the trainer's own config class come first."""
    own = f"{prefix}Config.{name}"
    result = [(r, key) for r, key in peers.named(name) if r.peer in ("TRL", "MRL") and name in "".join(r.names)]
    wanted = [pair for pair in result if own in pair[0].names]
    return wanted + [pair for pair in result if name in pair[0].names]


def _answer(stray: list[str], names: Names, schema: type) -> None:
    """Raise or warn about names without a translation."""
    told = []
    for name in stray:
        hint = suggest(name, schema)
        told.append(f"{name}={reprlib.repr(names.get(name))} is not taken.{hint or ' birl does not know it.'}")
    if told and names.whole:
        warnings.warn(
            "\n".join([*told, 'Keys go into overrides, as in overrides={"optimizer.lr": 1e-6}.']), stacklevel=4
        )
    elif told:
        raise BirlError("\n".join([*told, f"Keys go into overrides; `birl {command(schema)} --help all` lists them."]))


def _steps(names: Names, schema: type) -> dict[str, Any]:
    """Keys of batch size and length. TRL counts optimizer steps, and a batch in answers of one process."""
    result, updates = dict[str, Any](), names.get("num_iterations", 1)
    each, waits = names.get(BATCH[0], 8), names.get(BATCH[1], 1)
    if any(name in names.values for name in BATCH):
        if "rollout.prompts" not in documentation(schema):
            result["batch_size"] = each * waits
        else:
            per = names.get("steps_per_generation") or max(names.get("generation_batch_size", 0) // each, 0) or waits
            answers, group = names.get("generation_batch_size") or each * per, names.get("num_generations", 8)
            if answers % group:
                raise BirlError(
                    f"A batch of {answers} answers ({BATCH[0]} x {BATCH[1]}, or {BATCH[2]}) is no multiple of "
                    f"num_generations={group}; birl counts prompts: rollout.prompts."
                )
            result["rollout.prompts"] = answers // group
            if per % waits == 0 and per // waits > 1:
                result["algorithm.updates_per_batch"] = per // waits
                updates *= per // waits
    if names.get("max_steps", -1) > 0:
        result["steps"] = math.ceil(names.get("max_steps") / updates)
    elif (epochs := names.get("num_train_epochs")) is not None:
        if epochs != int(epochs) or epochs < 1:
            raise BirlError(f"num_train_epochs={epochs}: epochs is a whole number of at least 1; or give max_steps.")
        result["epochs"] = int(epochs)
    warm = names.get("warmup_steps") or names.get("warmup_ratio") or 0
    if 0 < warm < 1:
        if names.get("max_steps", -1) <= 0:
            raise BirlError(
                f"warmup_ratio={warm}: optimizer.warmup_steps counts steps; give warmup_steps, or max_steps."
            )
        warm = math.ceil(warm * names.get("max_steps"))
    return result | ({"optimizer.warmup_steps": int(warm)} if warm else {})


def _saving(names: Names, schema: type) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if names.get("save_strategy") == "no":
        result["checkpoint.every"] = 0
    elif (every := names.get("save_steps")) and every >= 1:
        result["checkpoint.every"] = int(every)
    if (every := names.get("eval_steps")) and every >= 1:
        result["validation.every"] = int(every)
    if any(names.meant(name) and names.get(name) == off for name, off in (("do_eval", False), ("eval_strategy", "no"))):
        result["validation.every"] = 0
    where = names.get("report_to")
    if where is not None and names.meant("report_to"):
        listed = [where] if isinstance(where, str) else list(where)
        result["track.tensorboard"] = "tensorboard" in listed or "all" in listed
        for one in (one for one in listed if one not in ("tensorboard", "all", "none")):
            if f"track.{one}" not in documentation(schema):
                raise BirlError(f"report_to={one!r}: there are tensorboard, wandb, mlflow, trackio and swanlab.")
            result[f"track.{one}"] = "online"
    return result


def _lora(names: Names) -> dict[str, Any]:
    peft = names.get("peft_config")
    if peft is None:
        return {}
    if not isinstance(peft, Mapping) and not hasattr(peft, "lora_alpha"):
        raise BirlError(f"peft_config: a {type(peft).__name__}; give a LoraConfig of PEFT, or a dict of its names.")
    options = peft if isinstance(peft, Mapping) else vars(peft)
    for name, value in options.items():
        if name not in PEFT and value and (name, value) not in (("bias", "none"), ("init_lora_weights", True)):
            raise BirlError(
                f"peft_config: {name}={reprlib.repr(value)} is not taken: LoRA here has rank, alpha and modules, and "
                "scales by alpha / rank."
            )
    result = {"lora.rank": options.get("r", 8), "lora.alpha": options.get("lora_alpha", 8)}
    if targets := options.get("target_modules"):
        result["lora.targets"] = [targets] if isinstance(targets, str) else sorted(targets)
    if options.get("lora_dropout"):
        warnings.warn(f"peft_config.lora_dropout={options['lora_dropout']}: there is no dropout here.", stacklevel=5)
    return result | ({"lora.dora": True} if options.get("use_dora") else {})


def _loss(names: Names) -> dict[str, Any]:
    """Keys of surrogate, clips, denominator and scale."""
    result: dict[str, Any] = {}
    loss = names.get("loss_type")
    if loss is not None:
        if not isinstance(loss, str) or loss not in LOSS_TYPES:
            raise BirlError(f"loss_type={loss!r}: choose one of {', '.join(LOSS_TYPES)}.")
        result |= {f"algorithm.{name}": value for name, value in LOSS_TYPES[loss].items()}
    if (level := names.get("importance_sampling_level", "token")) not in ("token", "sequence"):
        raise BirlError(f"importance_sampling_level={level!r}: choose token or sequence.")
    if level == "sequence":
        result["algorithm.surrogate"] = "gspo"
    own = loss in ("cispo", "sapo", "gspo")  # their clips are of another kind
    low = names.get("epsilon") if not own or names.meant("epsilon") else None
    result |= clip_keys(low, names.get("epsilon_high"), loss)
    if names.get("delta") is not None:
        result["algorithm.dual_clip"] = names.get("delta")
    if (scale := names.get("scale_rewards")) is not None:
        if scale not in SCALES:
            raise BirlError(f"scale_rewards={scale!r}: choose group, batch or none.")
        result["algorithm.scale_rewards"] = SCALES[scale]
    if loss == "sapo" and any(n.startswith("sapo_temperature") for n in names.changed):
        pos, neg = names.get("sapo_temperature_pos", 1.0), names.get("sapo_temperature_neg", 1.05)
        result["algorithm.surrogate_args"] = [f"tau_positive={pos}", f"tau_negative={neg}"]
    return result


def clip_keys(low: float | None, high: float | None, surrogate: str | None) -> dict[str, Any]:
    """Keys of the clip range; `low` alone sets both bounds. CISPO has no lower one, and its `high` bounds the ratio, as
    in TRL. Raises `BirlError`."""
    if surrogate == "cispo" and high is not None and high < 1:
        raise BirlError(f"epsilon_high={high:g}: of cispo it bounds the ratio itself, as in TRL; give {1 + high:g}.")
    upper = low if high is None else high - (surrogate == "cispo")
    given = {"algorithm.clip_low": None if surrogate == "cispo" else low, "algorithm.clip_high": upper}
    return {key: value for key, value in given.items() if value is not None}


def _preference(names: Names) -> dict[str, Any]:
    """Keys of the loss of DPO. TRL sums several losses; here only `sft` can be added to another."""
    losses = names.get("loss_type", [])
    losses = [losses] if isinstance(losses, str) else list(losses)
    given = names.get("loss_weights") or 1.0
    weights = dict(zip(losses, given if isinstance(given, Sequence) else [given] * len(losses), strict=False))
    beside, one = weights.pop("sft", 0.0), next(iter(weights), "")
    key, loss = _taken("loss_type", one, DPO, "DPO") if one else ("", "")
    if len(weights) > 1 or (one and not key):
        known = ", ".join(pair.partition("=")[0] for pair in _rows("loss_type", "DPO")[0][0].take.split(", "))
        raise BirlError(f"loss_type={losses}: choose one of {known}, with or without sft beside it.")
    return ({key: loss} if one else {}) | ({"preference.nll_coef": beside / weights[one]} if beside and one else {})


def _engine(names: Names) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if names.get("use_vllm"):
        result["engine.kind"] = "vllm"
        if names.get("vllm_mode") == "server" and names.get("vllm_server_base_url"):
            result["engine.attach"] = [names.get("vllm_server_base_url")]
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if names.get(name, off) not in (off, -1):
            result[f"rollout.{name}"] = names.get(name)
    return result
