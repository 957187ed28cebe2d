"""How problems with a configuration are put into words."""

from typing import Any

from birl.config.keys import written
from birl.config.schema import RL, Config, Stage


def command(config: Config | type) -> str:
    """What `birl` calls the command of a configuration."""
    return (config if isinstance(config, type) else type(config)).__name__.lower()


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def setting(config: Config, key: str) -> str:
    return f"{key}={written(value_of(config, key))}"


def capacity_setting(config: RL | Stage) -> str:
    """How many tokens a packed row may have, and why."""
    each, keys = setting(config, "learner.tokens_per_microbatch"), config.parallel
    axes = {"cp": keys.cp, "tp": keys.splits // keys.cp}
    factors = "".join(f" x parallel.{axis}={n}" for axis, n in axes.items() if n > 1)
    return f"{each}{factors} ({config.capacity} tokens)" if factors else each


def needed_setting(config: RL | Stage, tokens: int) -> str:
    """The setting that lets a packed row have so many tokens."""
    return f"learner.tokens_per_microbatch={-(-tokens // config.parallel.splits)}"
