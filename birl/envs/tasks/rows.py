"""Rows of generated tasks: seeded, and never the same problem in both splits."""

import hashlib
import random
from collections.abc import Callable, Iterable
from typing import Any

from birl.errors import BirlError
from birl.types import Message, Task

SPLITS = ("train", "validation")
Row = dict[str, Any]


def held_out(problem: str, share: float = 0.2) -> bool:
    """Whether a problem belongs to validation. Told from its text alone, so that no seed moves it to the other side."""
    return int.from_bytes(hashlib.blake2b(problem.encode(), digest_size=4).digest(), "little") < share * 2**32


def drawn(draw: Callable[[random.Random], tuple[str, Row]], rows: int, split: str, seed: int, name: str) -> list[Row]:
    """`rows` different rows of one split. `draw` gives a problem, which decides about the split, and its row."""
    rng = random.Random(f"{name}/{split}/{seed}")
    found: dict[str, Row] = {}
    for _ in range(100 * rows + 10_000):
        if len(found) == rows:
            return list(found.values())
        problem, row = draw(rng)
        if held_out(problem) == (split == "validation"):
            found.setdefault(row["prompt"], row)
    raise BirlError(
        f"env.kind={name}: found only {len(found)} different {split} tasks of {rows}. Lower "
        f"{rows_key(split)}, or make the problems larger (docs/tasks.md)."
    )


def rows_key(split: str) -> str:
    return "env.rows" if split == "train" else "env.validation_rows"


def count(config: Any, split: str) -> int:
    return config.rows if split == "train" else config.validation_rows


def column(task: Task, name: str) -> Any:
    """A column that an environment needs. Rows of one's own may lack it."""
    if task.columns.get(name) is None:
        raise ValueError(f"{task.id} has no column {name!r}, which the environment needs")
    return task.columns[name]


def answered(task: Task) -> str:
    if task.answer is None:
        raise ValueError(f"{task.id} has no answer, which the environment needs")
    return task.answer


def said(text: str) -> tuple[Message, ...]:
    """What the environment says, as messages."""
    return (Message(role="user", content=text),)


def check_keys(kind: str, **wrong: bool | str) -> None:
    """Raises `BirlError` with every key that has a reason beside it."""
    problems = [f"env.{key}: {reason}." for key, reason in wrong.items() if reason]
    if problems:
        raise BirlError("\n".join(f"env.kind={kind}: {p}" for p in problems))


def at_least(value: float, least: float) -> str:
    return "" if value >= least else f"is {value:g}, must be at least {least:g}"


def one_of(values: Iterable[str], allowed: Iterable[str]) -> str:
    bad = [v for v in values if v not in tuple(allowed)]
    return f"has {bad[0]!r}, must be of {' | '.join(allowed)}" if bad else ""
