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
from birl.config.schema import DPO, RL, Eval, Serve, Stage, Tinker, reward_functions
from birl.hub import addressed

HELD_OUT = "there is no held-out data; set data.validation or data.validation_split"
SINGLE = "env.kind=single_turn has a single turn; name an environment"
UNDIVIDED = (
    "a file has no splits or subsets, and split@ names one already; remove the key, or name a folder or a hub set"
)

Rows = dict[str, Callable[[Any], Any]]


def _by(key: str, keys: str, *values: str) -> Rows:
    """`keys` are read if `key` has one of the values, or names an implementation of the user."""

    def read(config: Any) -> bool:
        value = proximal(config) if key == "algorithm.proximal" else value_of(config, key)
        return value in values or ":" in value

    shown = "behaviour" if key == "algorithm.proximal" else f"{{c.{key}}}"
    return {f"{keys}: {key}={shown} does not read it ({' or '.join(values)} does)": read}


def _ordered(key: str, *orders: str) -> Rows:
    """`key` is read by these orders, and by none of the user."""
    why = f"data.order={{c.data.order}} does not read it ({' or '.join(orders)} does)"
    return {f"{key}: {why}": lambda c: not isinstance(c, RL) or c.data.order in orders}


def _engine(keys: str, *kinds: str) -> Rows:
    """`keys` are read by these kinds of engines."""
    why = f"engine.kind={{c.engine.kind}} does not read it ({' or '.join(kinds)} does)"
    return {f"{keys}: {why}": lambda c: isinstance(c, Serve) or kind_of(c.engine) in kinds}


def _reward(keys: str, name: str) -> Rows:
    """`keys` are read by a reward function."""
    return {f"{keys}: reward.functions does not name {name}; add it": lambda c: name in reward_functions(c)}


def _over_http(config: RL | Eval) -> bool:
    functions = reward_functions(config)
    return "judge" in functions or ("model" in functions and addressed(config.reward.model))


def _held_out(config: RL | Stage | Eval) -> bool:
    own = isinstance(config, RL) and config.env.kind != "single_turn"  # an environment may have its own tasks
    return isinstance(config, Eval) or bool(config.data.validation or config.data.validation_split or own)


def _divided(sets: Sequence[str]) -> list[str]:
    """Folders and names of the hub: unlike a file they may have splits and subsets."""
    return [s for s in sets if not s.lower().endswith(ROWS) or Path(s.rpartition("@")[2]).expanduser().is_dir()]


def _started(config: RL | Eval | Serve) -> bool:
    """Whether servers are started by the run, or for it by `birl launch`."""
    attach = [] if isinstance(config, Serve) else config.engine.attach
    return not attach or any(word.startswith(LAUNCHED) for word in attach)


#: keys (`critic.`: a whole section), and why they have no effect, with {c} as the configuration -> condition under
#: which they are read, in configurations that have the keys
UNREAD: Rows = {
    "model.picture_hosts model.freeze_vision: Tinker clients upload pictures, and the vision tower is never "
    "trained": lambda c: not isinstance(c, Tinker),
    "parallel.cp parallel.ep parallel.sequence parallel.context: each process of birl tinker has all tokens of its "
    "rows, and all experts; set parallel.ddp, fsdp or tp": lambda c: not isinstance(c, Tinker),
    "parallel.timeout: there is only one process; set parallel.ddp": lambda c: (
        not isinstance(c, Tinker) or c.parallel.size > 1
    ),
    **_by("algorithm.advantage", "algorithm.baseline algorithm.scale_rewards", "relative"),
    **_by("algorithm.advantage", "algorithm.pass_k", "pass_at_k"),
    **_by("algorithm.entropy_control", "algorithm.entropy_share", "top_entropy", "clip_cov", "kl_cov"),
    **_by("algorithm.entropy_control", "algorithm.covariance_low algorithm.covariance_high", "clip_cov"),
    **_by("algorithm.entropy_control", "algorithm.held_coef", "kl_cov"),
    **_by(
        "algorithm.proximal",
        "algorithm.correction algorithm.correction_level algorithm.correction_high",
        *("recompute", "interpolate"),
    ),
    **_by("algorithm.correction", "algorithm.correction_low", "mask"),
    **_by("algorithm.correction", "algorithm.correction_level algorithm.correction_high", "auto", "truncate", "mask"),
    **_by("algorithm.reject", "algorithm.reject_limit", "divergence", "off_policy"),
    **_by("algorithm.surrogate", "algorithm.dual_clip", "clip"),
    **_by("algorithm.surrogate", "algorithm.clip_low algorithm.clip_high", "clip", "gspo", "gmpo", "cispo"),
    **_by("algorithm.credit", "algorithm.turn_discount", "turn"),
    f"algorithm.credit: {SINGLE}": lambda c: c.env.kind != "single_turn" or c.env.mcp,
    "algorithm.kl_corrected algorithm.kl_target: algorithm.kl_coef=0 turns the KL penalty off; set "
    "algorithm.kl_coef=0.04": lambda c: c.algorithm.kl_coef > 0,
    "algorithm.kl algorithm.kl_in: algorithm.kl_coef=0 turns the KL penalty off; set it": lambda c: (
        c.algorithm.kl_coef > 0 or (c.algorithm.kl, c.algorithm.kl_in) == ("k1", "reward")
    ),
    **_by("algorithm.kl_in", "algorithm.kl_corrected", "loss"),
    "data.weights: data.train names a single set": lambda c: (
        isinstance(c, Eval) or len(c.data.train) != 1 or len(c.data.weights) != 1 or not any(c.data.weights)
    ),
    "algorithm.kl_horizon: algorithm.kl_target=0 keeps kl_coef fixed": lambda c: c.algorithm.kl_target > 0,
    "algorithm.max_refill: algorithm.dynamic_sampling is false": lambda c: c.algorithm.dynamic_sampling,
    "algorithm.teacher_coef algorithm.teacher_divergence algorithm.hint: algorithm.teacher is empty; name a "
    "model": teachers_of,
    "algorithm.teacher_column: algorithm.teachers is empty; name them": lambda c: c.algorithm.teachers,
    "algorithm.teacher_rate: algorithm.teacher is not self": lambda c: c.algorithm.teacher == SELF,
    **_by("algorithm.teacher_divergence", "algorithm.teacher_top_k", "reverse_kl", "forward_kl", "jsd"),
    **_by("algorithm.teacher_divergence", "algorithm.teacher_beta", "jsd"),
    "distill.: distill.teacher is empty; name a model": lambda c: c.distill.teacher,
    **_by("distill.divergence", "distill.beta", "jsd"),
    "algorithm.overlong_penalty: algorithm.overlong_buffer=0; set a number of tokens": lambda c: (
        c.algorithm.overlong_buffer
    ),
    "critic.: algorithm.advantage={c.algorithm.advantage} has no critic; set gae": lambda c: (
        c.algorithm.advantage in CRITIC
    ),
    "critic.path critic.lr critic.freeze_steps critic.passes critic.freeze_attention: critic.shared=true has no "
    "separate critic": lambda c: not c.critic.shared,
    "critic.lam_alpha: algorithm.advantage={c.algorithm.advantage} applies lambda per turn": lambda c: (
        c.algorithm.advantage == "gae"
    ),
    "critic.lam: critic.lam_alpha={c.critic.lam_alpha:g}; set it to 0": lambda c: not c.critic.lam_alpha,
    "critic.coef: critic.shared=false: the critic has its own optimizer": lambda c: c.critic.shared,
    **_engine("engine.python engine.threads engine.start_timeout engine.restarts", *SERVERS),
    **_engine("engine.count engine.arguments engine.attach engine.request_timeout engine.sleep", *SERVERS, OWN),
    **_engine("engine.tensor_parallel engine.pipeline_parallel engine.memory_fraction", "vllm", "sglang"),
    **_engine("engine.max_batch engine.kv_cache_gb", "embedded", *SERVERS),
    **_engine("engine.draft_rows", "embedded", "birl"),
    **_engine("engine.weights", "embedded"),
    **_engine("engine.recompute_kv", "embedded", "birl", "sglang"),
    "engine.recompute_kv: weights do not change in an evaluation": lambda c: not isinstance(c, Eval),
    "engine.recompute_kv: with rollout.max_staleness=0 weights never change during an answer; set 1 or "
    "more": lambda c: not isinstance(c, RL) or c.rollout.max_staleness,
    "engine.count engine.python engine.threads engine.arguments engine.restarts engine.max_batch engine.kv_cache_gb "
    "engine.memory_fraction: engine.attach uses running servers": _started,
    "engine.start_timeout: engine.attach has only addresses, which must be running already": lambda c: (
        _started(c) or any(map(NAME.fullmatch, c.engine.attach))
    ),
    "weights.sync_every weights.folder weights.timeout weights.canary weights.max_gap: the embedded engine samples "
    "from the learner's own weights; set engine.kind=birl for another process": lambda c: weights_method(c) != "memory",
    "weights.folder: only weights.method=reload, volume and checkpoint write one": lambda c: (
        weights_method(c) in ("reload", "volume", "checkpoint")
    ),
    "weights.bucket_mb: this weights.method sends no buckets; direct, nccl and ipc do": lambda c: (
        weights_method(c) in ("direct", "nccl", "ipc")
    ),
    "weights.max_gap: weights.canary=0 compares nothing": lambda c: c.weights.canary,
    "debug.resample: debug.replay is empty; name the run to replay": lambda c: c.debug.replay,
    "parallel.timeout: there is only one process; set parallel.fsdp=2, for example": lambda c: (
        isinstance(c, Tinker) or c.parallel.shares * c.parallel.cp * c.parallel.tp > 1
    ),
    "parallel.sequence: parallel.tp=1": lambda c: isinstance(c, Tinker) or c.parallel.tp > 1,
    "parallel.context: parallel.cp=1 splits no row; set parallel.cp=2, for example": lambda c: (
        isinstance(c, Tinker) or c.parallel.cp > 1
    ),
    "sandbox. reward.code_partial: env={c.env.kind} has its own keys: env.sandbox, env.workers, env.seconds, "
    "env.memory_mb": lambda c: "code" in reward_functions(c) or c.env.kind not in ("code", "python_tool"),
    **_reward("sandbox. reward.code_partial", "code"),
    **_reward("reward.format_pattern", "format"),
    **_reward("reward.model", "model"),
    **_reward("reward.length_target", "length"),
    **_reward("reward.judge reward.judge_prompt reward.judge_tokens reward.judge_cache reward.judge_mode", "judge"),
    **_reward("reward.judge_rounds reward.judge_rubric reward.judge_rubric_column reward.judge_panel", "judge"),
    **_reward("reward.judge_rate", "judge"),
    "reward.judge_panel: reward.judge names one judge": lambda c: len(c.reward.judge) > 1,
    "reward.judge_rounds: reward.judge_mode=score shows one answer at a time; set group or pairs": lambda c: (
        c.reward.judge_mode != "score"
    ),
    "reward.timeout reward.workers: env={c.env.kind} computes the rewards, and reward.functions is empty; name "
    "one": reward_functions,
    "reward.concurrency: no reward is computed over HTTP": _over_http,
    f"env.max_turns: {SINGLE}": lambda c: c.env.kind != "single_turn" or c.env.mcp,
    f"env.sampling: {SINGLE}": lambda c: c.env.kind != "single_turn",
    "env.mcp_timeout env.mcp_longest env.mcp_sandbox: env.mcp names no server": lambda c: c.env.mcp,
    "validation.top_p validation.top_k: validation.temperature=0 is greedy; set a temperature": lambda c: (
        c.validation.temperature
    ),
    "data.train data.weights data.validation_split data.split data.max_samples data.max_prompt_tokens data.shuffle "
    "validation.every validation.at_start data.order data.order_target data.order_start data.order_half_life "
    "data.order_threshold data.retire_after data.retire_for: `birl eval` does not train; it reads data.validation and "
    "samples once": lambda c: not isinstance(c, Eval),
    **_ordered("data.order_target", "thompson", "curriculum"),
    **_ordered("data.order_start", "curriculum"),
    **_ordered("data.shuffle", "uniform"),
    "data.order_half_life data.order_threshold data.retire_after data.retire_for: data.order=uniform ignores results; "
    "set data.order=thompson, for example": lambda c: not isinstance(c, RL) or c.data.order != "uniform",
    "data.retire_for: data.retire_after=0 retires no task": lambda c: not isinstance(c, RL) or c.data.retire_after,
    "data.validation_data_split: data.validation is empty; name a held-out set": lambda c: (
        isinstance(c, Eval) or c.data.validation
    ),
    f"data.max_validation_samples: {HELD_OUT}": _held_out,
    f"validation.every: {HELD_OUT}": lambda c: not c.validation.every or _held_out(c),
    "validation.samples validation.k validation.threshold validation.temperature validation.top_p validation.top_k "
    f"validation.max_tokens: {HELD_OUT}": _held_out,
    f"data.subset: {UNDIVIDED}": lambda c: _divided(c.data.train + c.data.validation),
    f"data.split: {UNDIVIDED}": lambda c: isinstance(c, Eval) or not all("@" in s for s in _divided(c.data.train)),
    f"data.validation_data_split: {UNDIVIDED}": lambda c: not all("@" in s for s in _divided(c.data.validation)),
    "model.tool_format: the rows have no tools; `birl rl`, `eval` and `serve` read it": lambda c: (
        not isinstance(c, Stage)
    ),
    **_by("preference.loss", "preference.label_smoothing", "dpo", "robust"),
    **_by("preference.loss", "preference.margin", "simpo"),
    **_by("preference.loss", "preference.nll_coef", "dpo", "ipo", "hinge", "robust", "simpo"),
    **_by("preference.loss", "preference.reference", "dpo", "ipo", "hinge", "robust", "kto"),
    **_by("preference.loss", "preference.desirable_weight preference.undesirable_weight", "kto"),
    **_by("preference.loss", "data.label_column", "kto"),
    "data.rejected_column: with data.label_column a row has one answer, in data.chosen_column": lambda c: (
        not isinstance(c, DPO) or not c.data.label_column
    ),
    "optimizer.min_lr_ratio: optimizer.schedule=constant stays at the peak; set linear or cosine": lambda c: (
        c.optimizer.schedule != "constant"
    ),
    "epochs: steps={c.steps} sets the length of the run; remove one of the two": lambda c: not c.steps,
    "league.: policies is empty; name one, as in policies=[player]": lambda c: c.policies,
    "league.size: league.every=0 keeps no versions; set league.every=10": lambda c: c.league.every,
    "lora.: lora.rank=0 trains all weights; set lora.rank=16": lambda c: c.lora.rank,
}
