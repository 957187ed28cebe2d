"""Rules for the model, the data, rewards, environments and the run itself. Standard library only."""

import re
from importlib.util import find_spec
from pathlib import Path

from birl.config.keys import documentation, written
from birl.config.rules_sandbox import sandbox_problems
from birl.config.schema import RL, Config, Eval, Model, Stage, reward_functions
from birl.config.words import command, said, said_capacity, said_needed, value_of, without_effect
from birl.errors import did_you_mean
from birl.named import TEMPLATES, template_file

RESUME = ("auto", "never")
ADDRESSES = {  # where a tracker's address stands, with track.NAME=online
    "wandb": "export WANDB_BASE_URL=..., then track.wandb=online",
    "mlflow": "export MLFLOW_TRACKING_URI=..., then track.mlflow=online",
    "trackio": "export TRACKIO_SERVER_URL=..., then track.trackio=online",
    "swanlab": "swanlab login --host ..., then track.swanlab=online",
}
ONLY_TRAINING = (  # what `birl eval` shares with training but has no use for
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


def _files(model: Model) -> list[str]:
    found = []
    if not model.path.strip():
        found.append("model.path is empty: name a folder, a .gguf file, a hub id, or smollm2.")
    if model.path.endswith(".gguf") and not Path(model.path).is_file():
        found.append(f"model.path={model.path}: there is no such file.")
    if model.chat_template and not template_file(model.chat_template).is_file():
        found.append(
            f"model.chat_template={model.chat_template}: there is no such file; it must be a Jinja template, or one of "
            f"{', '.join(TEMPLATES)}."
        )
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
    reward, functions, found = config.reward, reward_functions(config), []
    for name in {name for name in functions if functions.count(name) > 1}:
        found.append(f"reward.functions names {name} twice; give it a higher weight in reward.weights instead.")
    if reward.weights and len(reward.weights) != len(functions):
        found.append(
            f"{said(config, 'reward.weights')}: {len(reward.weights)} weights for {len(functions)} functions "
            f"({', '.join(functions)}); give one for each."
        )
    if reward.weights and not any(reward.weights):
        found.append(f"{said(config, 'reward.weights')}: all weights are 0, so every reward would be 0.")
    if "format" not in functions:
        found += without_effect(config, "reward.format_pattern", "reward.functions does not name format; add it")
    if "model" not in functions:
        found += without_effect(config, "reward.model", "reward.functions does not name model; add it")
    elif not reward.model:
        found.append("reward.functions=model: say which, as in reward.model=FOLDER (`birl checkpoints RUN export`).")
    found += _judge(config, functions)
    if "length" not in functions:
        found += without_effect(config, "reward.length_target", "reward.functions does not name length; add it")
    found += sandbox_problems(config)
    try:
        re.compile(reward.format_pattern)
    except re.error as error:
        found.append(f"reward.format_pattern={reward.format_pattern}: is not a regular expression: {error}.")
    return found


def _judge(config: RL | Eval, functions: list[str]) -> list[str]:
    reward, found = config.reward, []
    web = ("http://", "https://")
    if "judge" not in functions:
        for key in ("reward.judge", "reward.judge_prompt", "reward.judge_tokens", "reward.judge_cache"):
            found += without_effect(config, key, "reward.functions does not name judge; add it")
        if not ("model" in functions and reward.model.startswith(web)):
            found += without_effect(config, "reward.concurrency", "no reward is asked for over HTTP")
        return found
    if not reward.judge.startswith(web):
        key = f"reward.judge={reward.judge}" if reward.judge else "reward.functions=judge"
        found.append(f"{key}: say where the judge is, as in reward.judge=http://localhost:8000/v1#MODEL.")
    if reward.judge_prompt and not Path(reward.judge_prompt).expanduser().is_file():
        found.append(f"reward.judge_prompt={reward.judge_prompt}: there is no such file.")
    return found


def _environment(config: RL | Eval) -> list[str]:
    env, found = config.env, []
    if not env.kind:
        return ["env.kind is empty: name an environment, or single_turn."]
    found += _place("env.kind", env.kind, "MyEnv")
    if env.sampling == "agent" and isinstance(config, RL):
        found.append(
            "env.sampling=agent: the log-probs that are trained are those of rollout.temperature, top_p, top_k and "
            "min_p, so answers must be drawn with them. Leave env.sampling=run; `birl eval` can use agent."
        )
    if env.kind == "single_turn":
        reason = "env.kind=single_turn answers nothing; name an environment"
        found += without_effect(config, "env.max_turns", reason)
        found += without_effect(config, "env.sampling", reason)
        if env.options:
            found.append(f"env.{next(iter(env.options))}: there is no such key, and {reason}.")
    return found


def _own(config: Config) -> list[str]:
    """What is wrong with the user's own parts, as far as is known without an import."""
    found = []
    for key, doc in documentation(type(config)).items():
        if doc.example:
            value = value_of(config, key)
            for name in value if isinstance(value, list) else [value]:
                found += _place(key, name, doc.example.rpartition(":")[2])
    return found


def _place(key: str, name: str, example: str) -> list[str]:
    """What is wrong with my_file.py:NAME or package.module:NAME."""
    place, colon, attribute = name.rpartition(":")
    if name.endswith(".py"):
        return [f"{key}={name}: say what of it, as in {key}={name}:{example}."]
    if colon and (not place or not attribute.isidentifier()):
        return [f"{key}={name}: expected my_file.py:NAME or package.module:NAME."]
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        return [f"{key}={name}: there is no file {place} in {Path.cwd()}."]
    return []


def _validation(config: RL | Eval) -> list[str]:
    validation, found = config.validation, []
    if not validation.k:
        found.append("validation.k is empty: name at least one k, as in validation.k=[1].")
    if any(k > validation.samples for k in validation.k):
        found.append(
            f"{said(config, 'validation.k')}: pass@{max(validation.k)} needs at least {max(validation.k)} "
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
            found += without_effect(config, key, "validation.temperature=0 is greedy; set a temperature")
    if config.model.max_length and validation.max_tokens >= config.model.max_length:
        found.append(
            f"validation.max_tokens={validation.max_tokens}: leaves no room for a prompt in "
            f"model.max_length={config.model.max_length}."
        )
    return found


def _eval(config: Eval) -> list[str]:
    found = []
    if not config.data.validation and config.env.kind == "single_turn":
        instead = written(config.data.train) if config.data.train else "my.jsonl"
        found.append(f"data.validation is empty: say what to measure on, as in `birl eval data.validation={instead}`.")
    for key in ONLY_TRAINING:
        found += without_effect(config, key, "`birl eval` does not train; it reads data.validation and samples once")
    if config.output and Path(config.output).is_dir():
        found.append(f"output={config.output}: is a folder; name a JSON file.")
    return found


def _data(config: RL | Stage) -> list[str]:
    data, found = config.data, []
    own = isinstance(config, RL) and config.env.kind != "single_turn"  # an environment may bring its tasks along
    if not data.train and not own:
        found.append(
            f"data.train is empty: say what to train on, as in `birl {command(config)} data.train=my.jsonl` (.json "
            ".jsonl .csv .parquet .arrow, a folder or a hub name), or start from a recipe, as in "
            f"`birl {command(config)} recipes/NAME.yaml`."
        )
    if data.weights and len(data.weights) != len(data.train):
        found.append(
            f"{said(config, 'data.weights')}: {len(data.weights)} weights for {len(data.train)} training sets; "
            "give one for each."
        )
    if data.weights and not any(data.weights):
        found.append(f"{said(config, 'data.weights')}: all weights are 0, so nothing would be drawn.")
    if data.validation_split and data.validation:
        found.append(
            f"data.validation_split={data.validation_split:g}: data.validation names a held-out set already; "
            "drop one of the two."
        )
    if not data.validation:
        found += without_effect(config, "data.validation_data_split", "data.validation is empty; name a held-out set")
        if not data.validation_split and not own:
            reason = "there is no held-out data; set data.validation or data.validation_split"
            found += without_effect(config, "data.max_validation_samples", reason)
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
    if "" in rollout.stop:
        found.append("rollout.stop: an empty string would end every answer at once; remove it.")
    if any(text in ("\\n", "\\n\\n", "\\t") for text in rollout.stop):
        found.append("rollout.stop: a backslash and a letter is not a line break; in bash write rollout.stop=$'\\n'.")
    return found


def _sizes(config: RL) -> list[str]:
    budget, longest, answer, found = (
        config.capacity,
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
            f"{said_capacity(config)}: the longest sequence ({why}) does not fit into one micro-batch; "
            f"set {said_needed(config, needed)} or more."
        )
    return found


def _optimizer(config: RL | Stage, updates_per_step: int) -> list[str]:
    found, updates = [], config.steps * updates_per_step
    if config.optimizer.schedule == "constant":
        reason = "optimizer.schedule=constant stays at the peak; set linear or cosine"
        found += without_effect(config, "optimizer.min_lr_ratio", reason)
    if config.steps > 0 and config.optimizer.warmup_steps >= updates:
        found.append(
            f"optimizer.warmup_steps={config.optimizer.warmup_steps}: the run has only {updates} optimizer "
            "steps, so it would end "
            "before reaching optimizer.lr; lower it."
        )
    if config.steps:
        found += without_effect(
            config, "epochs", f"steps={config.steps} decides the length of the run; drop one of the two"
        )
    return found


def _lora(config: RL | Stage) -> list[str]:
    found = []
    if config.lora.rank == 0:
        for key in ("lora.alpha", "lora.targets", "lora.dora"):
            found += without_effect(config, key, "lora.rank=0 trains all weights; set lora.rank=16")
    elif not config.lora.targets:
        found.append("lora.targets is empty, so nothing would be trained; set lora.targets=[all-linear].")
    return found


def _run(config: RL | Stage) -> list[str]:
    found = []
    if config.run and (not config.run.strip() or "\0" in config.run):
        found.append(f"run={config.run!r}: is no name of a folder; leave it out, and one is made up.")
    if not config.resume:
        found.append("resume is empty: use auto, never, or the folder of a checkpoint or run.")
    if config.run and Path(config.run).exists() and not Path(config.run).is_dir():
        found.append(f"run={config.run}: is a file; name a folder.")
    if config.checkpoint.store and "://" not in config.checkpoint.store:
        found.append(f"checkpoint.store={config.checkpoint.store}: expected a URL, as in s3://bucket/prefix.")
    for key, url in (("checkpoint.store", config.checkpoint.store), ("resume", config.resume)):
        if url.startswith("s3://") and find_spec("s3fs") is None:
            found.append(f"{key}={url}: s3fs is not installed; pip install 'birl[s3]'.")
        if key == "resume" and url.startswith("file://") and not Path(url.removeprefix("file://")).is_dir():
            found.append(f"{key}={url}: there is no such folder.")
    if config.resume not in RESUME and "://" not in config.resume and not Path(config.resume).is_dir():
        found.append(
            f"resume={config.resume}: there is no such checkpoint folder; use auto, never or an existing one "
            f"(`birl checkpoints RUN` lists them).{did_you_mean(config.resume, RESUME)}"
        )
    for name in ADDRESSES:
        mode = getattr(config.track, name)
        if "://" in mode:
            found.append(f"track.{name}={mode}: an address belongs into the environment: {ADDRESSES[name]}.")
        if mode in ("offline", "online") and find_spec(name) is None:
            found.append(
                f"track.{name}={mode}: {name} is not installed; pip install 'birl[{name}]', or track.{name}=off."
            )
    return found
