"""Rows of generated tasks: seeded, and never the same problem in both splits."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from birl.config.schema.kinds import Count, Whole
from birl.envs.tasks.answer import number
from birl.errors import BirlError
from birl.types import Message, Task

Row = dict[str, Any]
Replies = Annotated[int, Field(ge=2)]  # the last one answers


@dataclass(kw_only=True)
class Drawn:
    """The keys that all tasks have whose rows are drawn."""

    rows: Count = 1000
    """Training tasks."""
    validation_rows: Whole = 100
    """Held-out tasks. No problem is in both."""
    seed: int = 0
    """Seed of the tasks."""

    def size(self, split: str) -> int:
        return self.rows if split == "train" else self.validation_rows


def held_out(problem: str, share: float = 0.2) -> bool:
    """Whether a problem belongs to validation. Told from its text alone, so that no seed moves it to the other side."""
    return int.from_bytes(hashlib.blake2b(problem.encode(), digest_size=4).digest(), "little") < share * 2**32


def drawn(draw: Callable[[random.Random], tuple[str, Row]], config: Drawn, split: str, kind: str) -> list[Row]:
    """Different rows of one split. `draw` gives a problem, which decides about the split, and its row."""
    rng, rows = random.Random(f"{kind}/{split}/{config.seed}"), config.size(split)
    result: dict[str, Row] = {}
    for _ in range(100 * rows + 10_000):
        if len(result) == rows:
            return list(result.values())
        problem, row = draw(rng)
        if held_out(problem) == (split == "validation"):
            result.setdefault(row["prompt"], row)
    raise BirlError(
        f"env.kind={kind}: there are only {len(result)} different {split} tasks of {rows}. Lower "
        f"env.{'rows' if split == 'train' else 'validation_rows'}, or make the problems larger (docs/tasks.md)."
    )


def where(task: Task) -> str:
    """For messages, which count rows from 1; ids count from 0."""
    name, _, number = task.id.rpartition(":")
    return f"{name}, row {int(number) + 1}" if number.isdecimal() else task.id


def column(task: Task, name: str) -> Any:
    """A column that an environment needs. Rows of one's own may lack it."""
    if task.columns.get(name) is None:
        raise BirlError(f"{where(task)} has no column {name!r}, which the environment needs")
    return task.columns[name]


def answered(task: Task) -> str:
    if task.answer is None:
        raise BirlError(f"{where(task)} has no answer, which the environment needs")
    return task.answer


def answered_number(task: Task) -> Fraction:
    if (value := number(answered(task))) is None:
        raise BirlError(f"{where(task)}: its answer {task.answer!r} is no number, which the environment needs")
    return value


def user_message(text: str) -> tuple[Message, ...]:
    """What the environment says, as messages."""
    return (Message(role="user", content=text),)
