"""Rules for engines, their weights and asynchronous training. Standard library only."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from birl.config.schema import RL, Engine, Eval
from birl.config.words import changed, without_effect

SERVERS = ("birl", "vllm", "sglang")
OWN = "my_file.py:MyEngine"  # stands for every class of the user's
NAME = re.compile(r"[\w.-]+/[\w.-]+")  # experiment/trial
LAUNCHED = "birl-launch/"  # names of engines that `birl launch` starts beside the run

#: keys of `engine` that only some kinds read
READ_BY = {
    **dict.fromkeys(("python", "threads", "start_timeout", "restarts"), SERVERS),
    **dict.fromkeys(("count", "arguments", "attach", "request_timeout", "sleep"), (*SERVERS, OWN)),
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "memory_fraction"), ("vllm", "sglang")),
    **dict.fromkeys(("max_batch", "kv_cache_gb"), ("embedded", *SERVERS)),
    "draft_rows": ("embedded", "birl"),
    "recompute_kv": ("embedded", "birl", "sglang"),
}
METHODS = {
    "embedded": ("memory",),
    "birl": ("reload", "shared", "volume", "direct", "nccl", "checkpoint"),
    "vllm": ("reload", "shared", "checkpoint"),
    "sglang": ("reload", "shared", "checkpoint"),
    OWN: ("reload", "shared", "direct"),
}


def kind_of(engine: Engine) -> str:
    """engine.kind, or `OWN`."""
    return OWN if ":" in engine.kind else engine.kind


def weights_method(config: RL) -> str:
    """weights.method, with auto decided."""
    if config.weights.method != "auto":
        return config.weights.method
    return "memory" if config.engine.kind == "embedded" else "reload"


def engine_problems(config: RL | Eval) -> list[str]:
    engine, found = config.engine, []
    for key, kinds in READ_BY.items():
        if kind_of(engine) not in kinds:
            reason = f"engine.kind={engine.kind} does not read it ({' or '.join(kinds)} does)"
            found += without_effect(config, f"engine.{key}", reason)
    if isinstance(config, Eval):
        found += without_effect(config, "engine.recompute_kv", "weights do not change in an evaluation")
    for address in engine.attach:
        if not NAME.fullmatch(address) and not (
            urlsplit(address).scheme in ("http", "https") and urlsplit(address).netloc
        ):
            found.append(
                f"engine.attach: {address!r} is neither an address (http://host:port) nor a name (experiment/trial)."
            )
    if engine.attach and not any(word.startswith(LAUNCHED) for word in engine.attach):
        for key in ("count", "python", "threads", "arguments", "restarts", "max_batch", "kv_cache_gb"):
            found += without_effect(config, f"engine.{key}", "engine.attach uses servers that run already")
        if not any(map(NAME.fullmatch, engine.attach)):
            found += without_effect(config, "engine.start_timeout", "engine.attach names addresses, which must answer")
    if engine.python and not (Path(engine.python).is_file() and os.access(engine.python, os.X_OK)):
        found.append(f"engine.python={engine.python}: is no Python interpreter; name the file, as in .venv/bin/python.")
    return found


def _debug_problems(config: RL) -> list[str]:
    debug, found = config.debug, []
    if not debug.replay:
        return without_effect(config, "debug.resample", "debug.replay is empty; name the run to replay")
    if config.engine.kind != "embedded":
        found.append("debug.replay: samples nothing, or in this process; set engine.kind=embedded.")
    if debug.only_rollout:
        found.append("debug.only_rollout=true: a replay samples nothing; use one of them.")
    if Path(debug.replay) == Path(config.run):
        found.append(f"debug.replay={debug.replay}: a replay is a run of its own; name another folder with run=...")
    return found


def asynchronous_problems(config: RL) -> list[str]:
    rollout, weights, engine, found = config.rollout, config.weights, config.engine, []
    method, allowed = weights_method(config), METHODS.get(kind_of(engine), ())
    if allowed and method not in allowed:
        found.append(f"weights.method={method}: engine.kind={engine.kind} takes {' | '.join(allowed)}.")
    if engine.attach and method == "checkpoint":
        found.append(
            "weights.method=checkpoint: starts servers anew, which engine.attach leaves to others; use reload."
        )
    if method == "memory":
        for key in ("sync_every", "folder", "timeout", "canary", "max_gap"):
            reason = (
                "the embedded engine samples from the learner's own weights; set engine.kind=birl for another process"
            )
            found += without_effect(config, f"weights.{key}", reason)
    if method not in ("reload", "volume", "checkpoint"):
        found += without_effect(config, "weights.folder", f"weights.method={method} writes none")
    if method not in ("direct", "nccl"):
        found += without_effect(config, "weights.bucket_mb", f"weights.method={method} sends no buckets")
    if weights.canary == 0 and changed(config, "weights.max_gap"):
        found += without_effect(config, "weights.max_gap", "weights.canary=0 compares nothing")
    if weights.sync_every > max(rollout.max_staleness, 0) + 1:
        found.append(
            f"weights.sync_every={weights.sync_every}: the weights would be older than rollout.max_staleness="
            f"{rollout.max_staleness} allows; set weights.sync_every={rollout.max_staleness + 1} or less."
        )
    else:
        most = (rollout.max_staleness - weights.sync_every + 1) * rollout.prompts
        if rollout.order_window > most:
            found.append(
                f"rollout.order_window={rollout.order_window}: no step could be filled; at most (max_staleness - "
                f"sync_every + 1) x prompts = {most}. Lower it, or raise rollout.max_staleness."
            )
    found += _debug_problems(config)
    if engine.sleep and rollout.max_staleness > 0:
        found.append(
            f"engine.sleep=true: servers that sleep while the learner trains sample nothing meanwhile, and "
            f"rollout.max_staleness={rollout.max_staleness} asks for just that; use one of them."
        )
    return found
