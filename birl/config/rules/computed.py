"""Rules whose message has a computed number, or one of several items."""

import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from birl.config.check import capacity_setting, command, needed_setting, setting, value_of
from birl.config.decided import (
    CRITIC,
    ENGINES,
    NAME,
    at_once,
    check_warmup,
    kind_of,
    most_answers,
    proximal,
    teachers_of,
    tests_seconds,
    weights_method,
)
from birl.config.keys import documentation, written
from birl.config.schema import RL, SFT, Config, Eval, Serve, Stage, reward_functions
from birl.errors import BirlError, did_you_mean, no_file
from birl.hub import addressed, is_address
from birl.samples import LISTED, MOST

ADDRESSES = {  # how to set a tracker's address, with track.NAME=online
    "wandb": "export WANDB_BASE_URL=..., then track.wandb=online",
    "mlflow": "export MLFLOW_TRACKING_URI=..., then track.mlflow=online",
    "trackio": "export TRACKIO_SERVER_URL=..., then track.trackio=online",
    "swanlab": "swanlab login --host ..., then track.swanlab=online",
}
POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

#: message after the key, with {c} as the configuration -> condition
REFUSED_POLICIES: dict[str, Callable[[RL], object]] = {
    "requires LoRA, as each policy is a LoRA over model.path; set lora.rank=16": lambda c: c.lora.rank == 0,
    "does not support lora.dora=true, as policies are not merged into the base; set lora.dora=false": lambda c: (
        c.lora.dora
    ),
    "does not support a quantised base (lora.quantize={c.lora.quantize}); set lora.quantize=none": lambda c: (
        c.lora.quantize != "none"
    ),
    "engine.kind={c.engine.kind} does not sample from several adapters; set engine.kind=embedded": lambda c: (
        c.engine.kind != "embedded"
    ),
    "does not support several learner processes; remove parallel.* keys": lambda c: (
        max(c.parallel.ddp, c.parallel.fsdp, c.parallel.cp, c.parallel.tp) > 1
    ),
    "does not support rollout.max_staleness={c.rollout.max_staleness}, as older versions of the weights are not kept; "
    "set rollout.max_staleness=0": lambda c: c.rollout.max_staleness > 0,
    "does not support a critic (algorithm.advantage={c.algorithm.advantage}), which all policies would share; set "
    "algorithm.advantage=relative": lambda c: c.algorithm.advantage in CRITIC,
    "does not support algorithm.baseline=greedy; set algorithm.baseline=group": lambda c: (
        c.algorithm.baseline == "greedy"
    ),
    "does not support algorithm.kl_target={c.algorithm.kl_target}, as all policies would share one coefficient; set "
    "algorithm.kl_target=0": lambda c: c.algorithm.kl_target > 0,
    "does not support algorithm.teacher=self; name a teacher model, or remove algorithm.teacher": lambda c: (
        c.algorithm.teacher == "self"
    ),
    "does not support algorithm.router_replay; set algorithm.router_replay=none": lambda c: (
        c.algorithm.router_replay != "none"
    ),
    "does not support debug.resample=true, which samples with the base only; set debug.resample=false": lambda c: (
        c.debug.resample
    ),
    "does not support optimizer.offload={c.optimizer.offload}; set optimizer.offload=none": lambda c: (
        c.optimizer.offload != "none"
    ),
}


def _policies(c: RL) -> Iterator[str]:
    """A single policy without a league is the ordinary policy of the run, with a name."""
    for name in c.policies:
        if not POLICY.fullmatch(name):
            yield f"policies: {name!r} is not a valid name; use letters and digits, then also . _ -"
    if len(set(c.policies)) < len(c.policies):
        yield f"{setting(c, 'policies')}: two policies have the same name; give each its own."
    if len(c.policies) > 1 or (c.policies and c.league.every):
        key = "policies" if len(c.policies) > 1 else "league.every"
        yield from (f"{setting(c, key)}: {why.format(c=c)}." for why, holds in REFUSED_POLICIES.items() if holds(c))


#: of RL, message after engine.weights=int8 -> condition
REFUSED_INT8: dict[str, Callable[[RL], object]] = {
    "needs unsharded weights, of one process or with parallel.ddp only; remove other parallel.* keys": lambda c: (
        max(c.parallel.fsdp, c.parallel.cp, c.parallel.tp, c.parallel.ep) > 1
    ),
    "does not support weights that are already quantised by lora.quantize={c.lora.quantize}; set "
    "lora.quantize=none": lambda c: c.lora.quantize != "none",
    "does not support several policies or a league; remove policies": lambda c: (
        len(c.policies) > 1 or c.league.every > 0
    ),
    "sampled and trained policy differ slightly, which algorithm.correction=none ignores; set auto": lambda c: (
        c.algorithm.correction == "none" and proximal(c) != "behaviour"
    ),
    "sampled and trained policy differ slightly, and algorithm.surrogate=reinforce has no ratio that corrects it with "
    "algorithm.proximal=behaviour; set "
    "algorithm.proximal=auto": lambda c: c.algorithm.surrogate == "reinforce" and proximal(c) == "behaviour",
}


def _int8(c: RL | Eval | Serve) -> Iterator[str]:
    if c.engine.weights != "int8":
        return
    if c.model.dtype != "bfloat16":
        yield f"engine.weights=int8: needs weights in bfloat16, not model.dtype={c.model.dtype}; set only one of them."
    if isinstance(c, Serve) and c.volume:
        yield "engine.weights=int8: the server cannot load new weights, so volume has no effect; set only one of them."
    if isinstance(c, RL):
        yield from (f"engine.weights=int8: {why.format(c=c)}." for why, holds in REFUSED_INT8.items() if holds(c))


def _own_parts(c: Config) -> Iterator[str]:
    """Check my_file.py:NAME and package.module:NAME, as far as possible without an import."""
    names = [
        (key, name, doc.example.rpartition(":")[2])
        for key, doc in documentation(type(c)).items()
        if ".py:" in doc.example
        for name in (value_of(c, key) if doc.several else [value_of(c, key)])
    ]
    for key, name, example in [*names, ("env.kind", c.env.kind, "MyEnv")] if isinstance(c, RL | Eval) else names:
        place, colon, attribute = name.rpartition(":")
        if name.endswith(".py"):
            yield f"{key}={name}: name an object in this file, as in {key}={name}:{example}."
        elif colon and (not place or not attribute.isidentifier()):
            yield f"{key}={name}: expected my_file.py:NAME or package.module:NAME."
        elif place.endswith(".py") and not Path(place).expanduser().is_file():
            yield f"{key}={name}: {no_file(place)}"


def _options(c: RL | Eval) -> Iterator[str]:
    if c.env.kind == "single_turn" and c.env.options:
        yield f"env.{next(iter(c.env.options))}: env.kind=single_turn has no such key; set env.kind."


def _weights(c: Config, key: str, number: int, of: str, zero: str) -> Iterator[str]:
    weights = value_of(c, key)
    if weights and len(weights) != number:
        yield f"{setting(c, key)}: {len(weights)} weights for {number} {of}; give one for each."
    if weights and not any(weights):
        yield f"{setting(c, key)}: all weights are 0, so {zero}."


def _data(c: RL | Stage) -> Iterator[str]:
    if not c.data.train and not (isinstance(c, RL) and c.env.kind != "single_turn"):
        yield (
            f"data.train is empty: name the training data, as in `birl {command(c)} data.train=my.jsonl` (.json .jsonl "
            ".csv .parquet .arrow, a folder or a hub name), or start from a recipe, as in "
            f"`birl {command(c)} recipes/NAME.yaml`."
        )
    if c.data.train or not (isinstance(c, RL) and c.env.kind == "mixture"):  # its tasks are several data sets
        yield from _weights(c, "data.weights", len(c.data.train), "training sets", "nothing would be drawn")


def _eval(c: Eval) -> Iterator[str]:
    if not c.data.validation and c.env.kind == "single_turn":
        instead = written(c.data.train) if c.data.train else "my.jsonl"
        yield f"data.validation is empty: name the data, as in `birl eval data.validation={instead}`."


def _roles(c: SFT) -> Iterator[str]:
    if "all" in c.data.train_on and len(c.data.train_on) > 1:
        yield f"{setting(c, 'data.train_on')}: all includes every role; use data.train_on=[all]."


def _rewards(c: RL | Eval) -> Iterator[str]:
    functions = reward_functions(c)
    for name in {name for name in functions if functions.count(name) > 1}:
        yield f"reward.functions names {name} twice; raise its weight in reward.weights instead."
    names = f"functions ({', '.join(functions)})"
    yield from _weights(c, "reward.weights", len(functions), names, "every reward would be 0")
    try:
        re.compile(c.reward.format_pattern)
    except re.error as error:
        yield f"reward.format_pattern={c.reward.format_pattern}: is not a regular expression: {error}."
    if "code" in functions and 0 < c.reward.timeout < (needed := tests_seconds(c)):
        yield (
            f"{setting(c, 'reward.timeout')}: the tests of {most_answers(c)} answers, {at_once(c)} at once, can take "
            f"{needed:g} s with sandbox.total_seconds={c.sandbox.total_seconds:g}; set "
            f"reward.timeout={needed:g} or more, or 0."
        )
    if (most := max(c.validation.k, default=1)) > c.validation.samples:
        yield (
            f"{setting(c, 'validation.k')}: pass@{most} needs at least {most} answers per prompt; set "
            f"validation.samples={most} or more (it is {c.validation.samples})."
        )


def _sampling(c: RL) -> Iterator[str]:
    kind, served = kind_of(c.engine), [path for path in teachers_of(c).values() if addressed(path)]
    for key, off in (("rollout.top_p", 1), ("rollout.top_k", 0), ("rollout.min_p", 0)):
        if value_of(c, key) != off and (kind == "sglang" or (kind == "vllm" and not 0 < c.rollout.top_k <= LISTED)):
            less = f"set rollout.top_k, at most {LISTED}, or " if kind == "vllm" else "set "
            yield (
                f"{setting(c, key)}: the learner's log-probs must be over the tokens that the engine kept, but "
                f"engine.kind={kind} does not report them; {less}engine.kind=embedded or birl, or {key}={off}."
            )
        if value_of(c, key) != off and served and c.algorithm.teacher_divergence == "sampled":
            yield (
                f"{setting(c, key)}: the teacher at {served[0]} returns log-probs over all tokens, but "
                f"the policy's are over the kept tokens; name a model's folder, or set {key}={off}."
            )
    if c.rollout.top_k > MOST:
        yield f"{setting(c, 'rollout.top_k')}: engines report at most {MOST} kept tokens per token; set that, or 0."
    buffer, answer, longest, prompt = (
        *(c.algorithm.overlong_buffer, c.rollout.max_tokens),
        *(c.model.max_length, c.data.max_prompt_tokens),
    )
    if buffer >= answer:
        yield (
            f"algorithm.overlong_buffer={buffer}: must be less than rollout.max_tokens={answer}, or every answer would "
            f"be overlong; DAPO's share is a fifth, {answer // 5}."
        )
    if answer < longest < prompt + answer:
        yield (
            f"data.max_prompt_tokens={prompt}: with rollout.max_tokens={answer} that is more than "
            f"model.max_length={longest}; lower it to {longest - answer}."
        )
    if c.capacity < (needed := longest or prompt + answer):
        why = f"model.max_length={longest}" if longest else f"data.max_prompt_tokens + rollout.max_tokens = {needed}"
        yield (
            f"{capacity_setting(c)}: the longest sequence ({why}) does not fit into one micro-batch; set "
            f"{needed_setting(c, needed)} or more."
        )


def _engines(c: RL | Eval) -> Iterator[str]:
    for address in c.engine.attach:
        if not NAME.fullmatch(address) and not is_address(address):
            yield f"engine.attach: {address!r} is neither an address (http://host:port) nor a name (experiment/trial)."
    rows = {"reward.model": [c.reward.model], "reward.judge": c.reward.judge, "env.mcp": c.env.mcp}
    if isinstance(c, RL):
        rows["algorithm.teachers" if c.algorithm.teachers else "algorithm.teacher"] = list(teachers_of(c).values())
    for key, values in rows.items():
        for value in values:
            if addressed(value) and not is_address(value):
                yield f"{key}: {value!r} is not an address; write http://host:8000, for example."


def _new_weights(c: RL) -> Iterator[str]:
    method, allowed = weights_method(c), ENGINES[kind_of(c.engine)].methods if kind_of(c.engine) in ENGINES else ()
    if allowed and method not in allowed:
        yield f"weights.method={method}: engine.kind={c.engine.kind} supports {' | '.join(allowed)}."
    old, every, window = c.rollout.max_staleness, c.weights.sync_every, c.rollout.order_window
    most = (old - every + 1) * c.rollout.prompts
    if every > old + 1:
        yield (
            f"weights.sync_every={every}: the weights would be older than rollout.max_staleness={old} allows; set "
            f"weights.sync_every={old + 1} or less."
        )
    elif window > most:
        yield (
            f"rollout.order_window={window}: no step could be complete; set at most (max_staleness - sync_every + 1) x "
            f"prompts = {most}. Lower it, or raise rollout.max_staleness."
        )


def _whole_rows(c: RL | Stage) -> Iterator[str]:
    keys = ["learner.router_aux_coef"] * (c.learner.router_aux_coef > 0)
    keys += ["algorithm.router_replay"] * (isinstance(c, RL) and c.algorithm.router_replay != "none")
    for key in keys:
        for axis, n in (("cp", c.parallel.cp), ("tp", c.parallel.tp)):
            if n > 1:
                yield (
                    f"{setting(c, key)}: reads the routers of whole rows, which parallel.{axis}={n} splits; set "
                    f"parallel.{axis}=1."
                )


def _run(c: RL | Stage) -> Iterator[str]:
    try:
        check_warmup(c, 0)
    except BirlError as error:
        yield str(error)
    for key, url in (("checkpoint.store", c.checkpoint.store), ("resume", c.resume)):
        if url.startswith("s3://") and find_spec("s3fs") is None:
            yield f"{key}={url}: s3fs is not installed; pip install 'birl[s3]'."
    if c.resume.startswith("file://") and not Path(c.resume.removeprefix("file://")).is_dir():
        yield f"resume={c.resume}: there is no such folder."
    words = documentation(type(c))["resume"].choices
    if c.resume and c.resume not in words and "://" not in c.resume and not Path(c.resume).is_dir():
        yield (
            f"resume={c.resume}: there is no such checkpoint folder; use auto, never or an existing one "
            f"(`birl checkpoints RUN` lists them).{did_you_mean(c.resume, words)}"
        )
    for name, address in ADDRESSES.items():
        mode = getattr(c.track, name)
        if "://" in mode:
            yield f"track.{name}={mode}: set an address in the environment: {address}."
        if mode in ("offline", "online") and find_spec(name) is None:
            yield f"track.{name}={mode}: {name} is not installed; pip install 'birl[{name}]', or track.{name}=off."


#: configurations that have the keys, and the function that yields errors
COMPUTED: tuple[tuple[Any, Callable[[Any], Iterator[str]]], ...] = (
    (object, _own_parts),
    (RL | Eval, _options),
    (RL | Stage, _data),
    (Eval, _eval),
    (SFT, _roles),
    (RL | Eval, _rewards),
    (RL, _sampling),
    (RL, _policies),
    (RL | Eval, _engines),
    (RL | Eval | Serve, _int8),
    (RL, _new_weights),
    (RL | Stage, _whole_rows),
    (RL | Stage, _run),
)
