"""Rewards for format and length of an answer."""

import re
from typing import Any

from birl.config.schema import Reward

THOUGHT = re.compile(r"^.*</think>|<think>.*", re.DOTALL)  # the thinking, also if it did not end


def format(completions: list[str], pattern: str = Reward.format_pattern, **_: Any) -> list[float]:
    """1 if the pattern occurs in the answer (`.` also matches a line break), else 0.

    Example: format(["<think>3 + 4</think><answer>7</answer>", "7"]) == [1.0, 0.0]
    """
    # a pattern can take exponential time; the deadline of the worker process bounds it
    result = re.compile(pattern, re.DOTALL)
    return [float(result.search(completion) is not None) for completion in completions]


def length(completions: list[str], target: int = Reward.length_target, **_: Any) -> list[float]:
    """min(1, max(0, 2 - characters / target)): 1 up to the target, 0 from twice the target.

    Example: length(["x" * 10, "x" * 15, "x" * 30], target=10) == [1.0, 0.5, 0.0]
    """
    return [min(1.0, max(0.0, 2.0 - len(completion) / target)) for completion in completions]
