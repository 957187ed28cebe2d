"""Shared by the adapters: the package's import, names in it, tasks that are seeds, and a game's random numbers."""

import difflib
import importlib
import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from birl.config.schema.kinds import Whole
from birl.envs.tasks.rows import Drawn
from birl.errors import BirlError
from birl.types import Task

# distance between the seeds of training and validation
APART = 2**30
# packages whose requirements conflict with birl's: the extra has their dependencies, and they are installed separately
ALONE = {"gem": " && pip install --no-deps gem-llm"}
WAIT = 60.0  # seconds until another game must have made its move

_lock = threading.Lock()


def imported(module: str, kind: str) -> Any:
    """Import a module. Raises `BirlError` that says how to install it: the extra has the environment's name."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is installed, but a dependency is missing
        command = f"pip install 'birl[{kind.replace('_', '-')}]'{ALONE.get(package, '')}"
        raise BirlError(
            f"env.kind={kind}: the package {package} is not installed. Install it with: {command}"
        ) from None


def unknown(key: str, name: str, known: Iterable[str]) -> BirlError:
    """The error for an unknown name."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are {len(names)}, such as {', '.join(names[:5])}."
    return BirlError(f"{key}={name}: there is no such name. {hint}")


def arguments(words: Iterable[str], dots: bool = False) -> dict[str, Any]:
    """Parse `env.parameters` to keyword arguments: [max_terms=3,name=x] is {"max_terms": 3, "name": "x"}, read as YAML.
    `dots`: names may contain dots."""
    result = {}
    for word in words:
        name, equals, value = word.partition("=")
        parts = name.strip().split(".")
        if not equals or not all(part.isidentifier() for part in parts) or (len(parts) > 1 and not dots):
            raise BirlError(
                f"env.parameters: {word!r} is not name=value. Write env.parameters=[name=value,other=value]."
            )
        try:
            result[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            result[name.strip()] = value
    return result


@dataclass(kw_only=True)
class Seeded(Drawn):
    """Keys of environments whose tasks are seeds."""

    validation_rows: Whole = 100
    """Held-out tasks, with other seeds than the training tasks."""
    seed: int = 0
    """Seed of the first training task; each further task has the next seed."""


def seeds(config: Seeded, name: str, split: str) -> list[dict[str, Any]]:
    """One row for each seed; training and validation have none in common."""
    first = config.seed + (APART if split == "validation" else 0)
    return [{"prompt": f"{name}, seed {i}", "seed": i} for i in range(first, first + config.size(split))]


def seed_of(task: Task) -> int:
    """Seed of a task: the column `seed` of its row."""
    seed = task.columns.get("seed")
    if not isinstance(seed, int) or seed < 0:
        raise BirlError(f"{task.place}: its column `seed` must be a whole number from 0 on, not {seed!r}.")
    return seed


class OwnRandom:
    """State of one game that draws from Python's and NumPy's global generators. Such games seed the generators of the
    whole process, and concurrent episodes would draw from each other's: within this context, the global generators have
    this game's state; afterwards, their previous one. Held for one call into the game at a time, never for an episode:
    an abandoned game delays no other.

    Example: with OwnRandom(7): env.reset()
    """

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed).getstate()
        self.numpy = np.random.RandomState(seed % 2**32).get_state()

    def __enter__(self) -> None:
        if not _lock.acquire(timeout=WAIT):
            raise RuntimeError(f"another game has not finished its move for {WAIT:g} s")
        self.before = random.getstate(), np.random.get_state()
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def __exit__(self, *_: object) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()
        random.setstate(self.before[0])
        np.random.set_state(self.before[1])
        _lock.release()
