"""What a Python program hands over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a Python program hands over instead of naming it: see `birl.Trainer`."""

    rewards: Sequence[Callable[..., Any] | str] = ()
    env: Any = None  # a class or function, as env.kind names one
    train: Any = None  # rows: a datasets.Dataset or a list of dicts
    validation: Any = None
