"""Keys without effect, because of other keys: a table."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from birl.config.check import value_of
from birl.config.decided import (
    CRITIC,
    LAUNCHED,
    NAME,
    OWN,
    SELF,
    SERVERS,
    kind_of,
    proximal,
    teachers_of,
    weights_method,
)
from birl.config.nearest import ROWS
from birl.config.schema import DPO, RL, SFT, Eval, Stage, Tinker, reward_functions
from birl.hub import addressed

ADDRESSES = "engine.attach uses running servers"
LEARNERS = "the embedded engine samples from the learner's own weights; set engine.kind=birl for another process"
HELD_OUT = "there is no held-out data; set data.validation or data.validation_split"
SINGLE = "env.kind=single_turn has a single turn; name an environment"
PROXIMAL = "algorithm.correction algorithm.correction_level algorithm.correction_high"
ORDER = (
    "data.order data.order_target data.order_start data.order_half_life data.order_threshold data.retire_after "
    "data.retire_for"
)
UNDIVIDED = (
    "a file has no splits or subsets, and split@ names one already; remove the key, or name a folder or a hub set"
)
MEASURED = (
    "validation.samples validation.k validation.threshold validation.temperature validation.top_p validation.top_k "
    "validation.max_tokens"
)
ONCE = "`birl eval` does not train; it reads data.validation and samples once"

#: configurations, their keys (`critic.`: a whole section), condition under which these are read, and why not else
Row = tuple[Any, str, Callable[[Any], Any], str]


def _row(of: Any, keys: str, read: Callable[[Any], Any], why: str) -> Row:
    return of, keys, read, why


def _by(key: str, keys: str, *values: str, of: Any = RL) -> Row:
    """`keys` are read if `key` has one of the values, or names an implementation of the user."""

    def read(config: Any) -> bool:
        value = proximal(config) if key == "algorithm.proximal" else value_of(config, key)
        return value in values or ":" in value

    shown = "behaviour" if key == "algorithm.proximal" else f"{{c.{key}}}"
    return of, keys, read, f"{key}={shown} does not read it ({' or '.join(values)} does)"


def _ordered(key: str, *orders: str) -> Row:
    """`key` is read by these orders, and by none of the user."""
    why = f"data.order={{c.data.order}} does not read it ({' or '.join(orders)} does)"
    return RL, key, lambda c: c.data.order in orders, why


def _engine(keys: str, *kinds: str) -> Row:
    """`keys` are read by these kinds of engines."""
    why = f"engine.kind={{c.engine.kind}} does not read it ({' or '.join(kinds)} does)"
    return RL | Eval, keys, lambda c: kind_of(c.engine) in kinds, why


def _reward(keys: str, name: str) -> Row:
    """`keys` are read by a reward function."""
    return RL | Eval, keys, lambda c: name in reward_functions(c), f"reward.functions does not name {name}; add it"


def _over_http(config: RL | Eval) -> bool:
    functions = reward_functions(config)
    return "judge" in functions or ("model" in functions and addressed(config.reward.model))


def _held_out(config: RL | Stage) -> bool:
    own = isinstance(config, RL) and config.env.kind != "single_turn"  # an environment may have its own tasks
    return bool(config.data.validation or config.data.validation_split or own)


def _divided(sets: Sequence[str]) -> list[str]:
    """Folders and names of the hub: unlike a file they may have splits and subsets."""
    return [s for s in sets if not s.lower().endswith(ROWS) or Path(s.rpartition("@")[2]).expanduser().is_dir()]


def _started(config: RL | Eval) -> bool:
    """Whether servers are started by the run, or for it by `birl launch`."""
    attach = config.engine.attach
    return not attach or any(word.startswith(LAUNCHED) for word in attach)


UNREAD: tuple[Row, ...] = (
    _row(
        Tinker,
        "model.picture_hosts model.freeze_vision",
        lambda c: False,
        "Tinker clients upload pictures, and the vision tower is never trained",
    ),
    _row(
        Tinker,
        "parallel.cp parallel.ep parallel.sequence parallel.context",
        lambda c: False,
        "each process of birl tinker has all tokens of its rows, and all experts; set parallel.ddp, fsdp or tp",
    ),
    _row(Tinker, "parallel.timeout", lambda c: c.parallel.size > 1, "there is only one process; set parallel.ddp"),
    _by("algorithm.advantage", "algorithm.baseline algorithm.scale_rewards", "relative"),
    _by("algorithm.advantage", "algorithm.pass_k", "pass_at_k"),
    _by("algorithm.entropy_control", "algorithm.entropy_share", "top_entropy", "clip_cov", "kl_cov"),
    _by("algorithm.entropy_control", "algorithm.covariance_low algorithm.covariance_high", "clip_cov"),
    _by("algorithm.entropy_control", "algorithm.held_coef", "kl_cov"),
    _by("algorithm.proximal", PROXIMAL, "recompute", "interpolate"),
    _by("algorithm.correction", "algorithm.correction_low", "mask"),
    _by("algorithm.correction", "algorithm.correction_level algorithm.correction_high", "auto", "truncate", "mask"),
    _by("algorithm.reject", "algorithm.reject_limit", "divergence", "off_policy"),
    _by("algorithm.surrogate", "algorithm.dual_clip", "clip"),
    _by("algorithm.surrogate", "algorithm.clip_low algorithm.clip_high", "clip", "gspo", "gmpo", "cispo"),
    _by("algorithm.credit", "algorithm.turn_discount", "turn"),
    _row(RL, "algorithm.credit", lambda c: c.env.kind != "single_turn" or c.env.mcp, SINGLE),
    _row(
        RL,
        "algorithm.kl_corrected algorithm.kl_target",
        lambda c: c.algorithm.kl_coef > 0,
        "algorithm.kl_coef=0 turns the KL penalty off; set algorithm.kl_coef=0.04",
    ),
    _by("algorithm.kl_in", "algorithm.kl_corrected", "loss"),
    _row(RL, "algorithm.kl_horizon", lambda c: c.algorithm.kl_target > 0, "algorithm.kl_target=0 keeps kl_coef fixed"),
    _row(RL, "algorithm.max_refill", lambda c: c.algorithm.dynamic_sampling, "algorithm.dynamic_sampling is false"),
    _row(
        RL,
        "algorithm.teacher_coef algorithm.teacher_divergence algorithm.hint",
        teachers_of,
        "algorithm.teacher is empty; name a model",
    ),
    _row(RL, "algorithm.teacher_column", lambda c: c.algorithm.teachers, "algorithm.teachers is empty; name them"),
    _row(RL, "algorithm.teacher_rate", lambda c: c.algorithm.teacher == SELF, "algorithm.teacher is not self"),
    _by("algorithm.teacher_divergence", "algorithm.teacher_top_k", "reverse_kl", "forward_kl", "jsd"),
    _by("algorithm.teacher_divergence", "algorithm.teacher_beta", "jsd"),
    _row(SFT, "distill.", lambda c: c.distill.teacher, "distill.teacher is empty; name a model"),
    _by("distill.divergence", "distill.beta", "jsd", of=SFT),
    _row(
        RL,
        "algorithm.overlong_penalty",
        lambda c: c.algorithm.overlong_buffer,
        "algorithm.overlong_buffer=0; set a number of tokens",
    ),
    _row(
        RL,
        "critic.",
        lambda c: c.algorithm.advantage in CRITIC,
        "algorithm.advantage={c.algorithm.advantage} has no critic; set gae",
    ),
    _row(
        RL,
        "critic.path critic.lr critic.freeze_steps critic.passes critic.freeze_attention",
        lambda c: not c.critic.shared,
        "critic.shared=true has no separate critic",
    ),
    _row(
        RL,
        "critic.lam_alpha",
        lambda c: c.algorithm.advantage == "gae",
        "algorithm.advantage={c.algorithm.advantage} applies lambda per turn",
    ),
    _row(RL, "critic.lam", lambda c: not c.critic.lam_alpha, "critic.lam_alpha={c.critic.lam_alpha:g}; set it to 0"),
    _row(RL, "critic.coef", lambda c: c.critic.shared, "critic.shared=false: the critic has its own optimizer"),
    _engine("engine.python engine.threads engine.start_timeout engine.restarts", *SERVERS),
    _engine("engine.count engine.arguments engine.attach engine.request_timeout engine.sleep", *SERVERS, OWN),
    _engine("engine.tensor_parallel engine.pipeline_parallel engine.memory_fraction", "vllm", "sglang"),
    _engine("engine.max_batch engine.kv_cache_gb", "embedded", *SERVERS),
    _engine("engine.draft_rows", "embedded", "birl"),
    _engine("engine.weights", "embedded"),
    _engine("engine.recompute_kv", "embedded", "birl", "sglang"),
    _row(Eval, "engine.recompute_kv", lambda c: False, "weights do not change in an evaluation"),
    _row(
        RL,
        "engine.recompute_kv",
        lambda c: c.rollout.max_staleness,
        "with rollout.max_staleness=0 weights never change during an answer; set 1 or more",
    ),
    _row(RL | Eval, "engine.count engine.python engine.threads engine.arguments", _started, ADDRESSES),
    _row(RL | Eval, "engine.restarts engine.max_batch engine.kv_cache_gb engine.memory_fraction", _started, ADDRESSES),
    _row(
        RL | Eval,
        "engine.start_timeout",
        lambda c: _started(c) or any(map(NAME.fullmatch, c.engine.attach)),
        "engine.attach has only addresses, which must be running already",
    ),
    _row(
        RL,
        "weights.sync_every weights.folder weights.timeout weights.canary weights.max_gap",
        lambda c: weights_method(c) != "memory",
        LEARNERS,
    ),
    _row(
        RL,
        "weights.folder",
        lambda c: weights_method(c) in ("reload", "volume", "checkpoint"),
        "only weights.method=reload, volume and checkpoint write one",
    ),
    _row(
        RL,
        "weights.bucket_mb",
        lambda c: weights_method(c) in ("direct", "nccl", "ipc"),
        "this weights.method sends no buckets; direct, nccl and ipc do",
    ),
    _row(RL, "weights.max_gap", lambda c: c.weights.canary, "weights.canary=0 compares nothing"),
    _row(RL, "debug.resample", lambda c: c.debug.replay, "debug.replay is empty; name the run to replay"),
    _row(
        RL | Stage,
        "parallel.timeout",
        lambda c: c.parallel.shares * c.parallel.cp * c.parallel.tp > 1,
        "there is only one process; set parallel.fsdp=2, for example",
    ),
    _row(RL | Stage, "parallel.sequence", lambda c: c.parallel.tp > 1, "parallel.tp=1"),
    _row(
        RL | Stage,
        "parallel.context",
        lambda c: c.parallel.cp > 1,
        "parallel.cp=1 splits no row; set parallel.cp=2, for example",
    ),
    _row(
        RL | Eval,
        "sandbox. reward.code_partial",
        lambda c: "code" in reward_functions(c) or c.env.kind not in ("code", "python_tool"),
        "env={c.env.kind} has keys of its own: env.sandbox, env.workers, env.seconds, env.memory_mb",
    ),
    _reward("sandbox. reward.code_partial", "code"),
    _reward("reward.format_pattern", "format"),
    _reward("reward.model", "model"),
    _reward("reward.length_target", "length"),
    _reward("reward.judge reward.judge_prompt reward.judge_tokens reward.judge_cache reward.judge_mode", "judge"),
    _reward("reward.judge_rounds reward.judge_rubric reward.judge_rubric_column reward.judge_panel", "judge"),
    _reward("reward.judge_rate", "judge"),
    _row(RL | Eval, "reward.judge_panel", lambda c: len(c.reward.judge) > 1, "reward.judge names one judge"),
    _row(
        RL | Eval,
        "reward.judge_rounds",
        lambda c: c.reward.judge_mode != "score",
        "reward.judge_mode=score shows one answer at a time; set group or pairs",
    ),
    _row(
        RL | Eval,
        "reward.timeout reward.workers",
        reward_functions,
        "env={c.env.kind} computes the rewards, and reward.functions is empty; name one",
    ),
    _row(RL | Eval, "reward.concurrency", _over_http, "no reward is computed over HTTP"),
    _row(RL | Eval, "env.max_turns", lambda c: c.env.kind != "single_turn" or c.env.mcp, SINGLE),
    _row(RL | Eval, "env.sampling", lambda c: c.env.kind != "single_turn", SINGLE),
    _row(RL | Eval, "env.mcp_timeout env.mcp_longest env.mcp_sandbox", lambda c: c.env.mcp, "env.mcp names no server"),
    _row(
        RL | Eval,
        "validation.top_p validation.top_k",
        lambda c: c.validation.temperature,
        "validation.temperature=0 is greedy; set a temperature",
    ),
    _row(Eval, "data.train data.weights data.validation_split data.split data.max_samples", lambda c: False, ONCE),
    _row(Eval, "data.max_prompt_tokens data.shuffle validation.every validation.at_start", lambda c: False, ONCE),
    _row(Eval, ORDER, lambda c: False, ONCE),
    _ordered("data.order_target", "thompson", "curriculum"),
    _ordered("data.order_start", "curriculum"),
    _ordered("data.shuffle", "uniform"),
    _row(
        RL,
        "data.order_half_life data.order_threshold data.retire_after data.retire_for",
        lambda c: c.data.order != "uniform",
        "data.order=uniform ignores results; set data.order=thompson, for example",
    ),
    _row(RL, "data.retire_for", lambda c: c.data.retire_after, "data.retire_after=0 retires no task"),
    _row(
        RL | Stage,
        "data.validation_data_split",
        lambda c: c.data.validation,
        "data.validation is empty; name a held-out set",
    ),
    _row(RL | Stage, "data.max_validation_samples", _held_out, HELD_OUT),
    _row(RL | Stage, "validation.every", lambda c: not c.validation.every or _held_out(c), HELD_OUT),
    _row(RL, MEASURED, _held_out, HELD_OUT),
    _row(RL | Stage | Eval, "data.subset", lambda c: _divided(c.data.train + c.data.validation), UNDIVIDED),
    _row(RL | Stage, "data.split", lambda c: not all("@" in s for s in _divided(c.data.train)), UNDIVIDED),
    _row(
        RL | Stage | Eval,
        "data.validation_data_split",
        lambda c: not all("@" in s for s in _divided(c.data.validation)),
        UNDIVIDED,
    ),
    _row(Stage, "model.tool_format", lambda c: False, "the rows have no tools; `birl rl`, `eval` and `serve` read it"),
    _by("preference.loss", "preference.label_smoothing", "dpo", "robust", of=DPO),
    _by("preference.loss", "preference.margin", "simpo", of=DPO),
    _by("preference.loss", "preference.nll_coef", "dpo", "ipo", "hinge", "robust", "simpo", of=DPO),
    _by("preference.loss", "preference.reference", "dpo", "ipo", "hinge", "robust", "kto", of=DPO),
    _by("preference.loss", "preference.desirable_weight preference.undesirable_weight", "kto", of=DPO),
    _by("preference.loss", "data.label_column", "kto", of=DPO),
    _row(
        DPO,
        "data.rejected_column",
        lambda c: not c.data.label_column,
        "with data.label_column a row has one answer, in data.chosen_column",
    ),
    _row(
        RL | Stage,
        "optimizer.min_lr_ratio",
        lambda c: c.optimizer.schedule != "constant",
        "optimizer.schedule=constant stays at the peak; set linear or cosine",
    ),
    _row(
        RL | Stage,
        "epochs",
        lambda c: not c.steps,
        "steps={c.steps} sets the length of the run; remove one of the two",
    ),
    _row(RL, "league.", lambda c: c.policies, "policies is empty; name one, as in policies=[player]"),
    _row(RL, "league.size", lambda c: c.league.every, "league.every=0 keeps no versions; set league.every=10"),
    _row(RL | Stage, "lora.", lambda c: c.lora.rank, "lora.rank=0 trains all weights; set lora.rank=16"),
)
