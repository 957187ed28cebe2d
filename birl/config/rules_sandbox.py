"""Rules about the sandbox: who reads its keys, and whether the deadline of a reward leaves time for it."""

import math

from birl.allocator import cores
from birl.config.schema import RL, Eval, reward_functions
from birl.config.words import said, without_effect

KEYS = (
    "reward.code_partial",
    *(f"sandbox.{key}" for key in ("kind", "workers", "seconds", "total_seconds", "memory_mb")),
)
SANDBOXED = ("code", "python_tool")  # environments that run programs
ROOM = 5.0  # seconds beside the tests themselves: the first call starts the sandbox


def sandbox_problems(config: RL | Eval) -> list[str]:
    if "code" not in reward_functions(config):
        reason = "reward.functions does not name code; add it"
        if config.env.kind in SANDBOXED:
            reason = f"env={config.env.kind} has keys of its own: env.sandbox, env.workers, env.seconds, env.memory_mb"
        return [problem for key in KEYS for problem in without_effect(config, key, reason)]
    sandbox, found = config.sandbox, []
    if sandbox.seconds > sandbox.total_seconds:
        found.append(
            f"{said(config, 'sandbox.seconds')}: all tests together may take only sandbox.total_seconds="
            f"{sandbox.total_seconds:g}; lower one, or raise the other."
        )
    answers = config.validation.samples
    if isinstance(config, RL):
        answers = max(answers, config.rollout.group_size + config.rollout.oversample)
    needed = math.ceil(answers / at_once(config)) * sandbox.total_seconds + ROOM
    if config.reward.timeout < needed:
        found.append(
            f"{said(config, 'reward.timeout')}: the tests of {answers} answers, {at_once(config)} at once, may take "
            f"{needed:g} s by sandbox.total_seconds={sandbox.total_seconds:g}; set reward.timeout={needed:g} or more."
        )
    return found


def at_once(config: RL | Eval) -> int:
    """Programs that one reward worker runs at once."""
    return config.sandbox.workers or max(1, cores() // config.reward.workers)
