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
USUAL = 10.0  # seconds a call may take
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
    needed = tests_seconds(config)
    if 0 < config.reward.timeout < needed:
        found.append(
            f"{said(config, 'reward.timeout')}: the tests of {most_answers(config)} answers, {at_once(config)} at "
            f"once, may take {needed:g} s by sandbox.total_seconds={sandbox.total_seconds:g}; set "
            f"reward.timeout={needed:g} or more, or 0."
        )
    return found


def reward_timeout(config: RL | Eval) -> float:
    """Longest one call of a reward function may take [s]."""
    if config.reward.timeout:
        return config.reward.timeout
    return max(USUAL, tests_seconds(config)) if "code" in reward_functions(config) else USUAL


def tests_seconds(config: RL | Eval) -> float:
    """What `code` may take for one group [s]."""
    return math.ceil(most_answers(config) / at_once(config)) * config.sandbox.total_seconds + ROOM


def most_answers(config: RL | Eval) -> int:
    """Answers that one call judges."""
    if isinstance(config, RL):
        return max(config.validation.samples, config.rollout.group_size + config.rollout.oversample)
    return config.validation.samples


def at_once(config: RL | Eval) -> int:
    """Programs that one reward worker runs at once."""
    return config.sandbox.workers or max(1, cores() // config.reward.workers)
