"""The checkpoint folders of a run: listing, steps, and the state saved beside the tensors. Nothing here needs
torch."""

import contextlib
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birl.cache import sweep
from birl.errors import BirlError
from birl.regular import clear, read_json


def _whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _number(value: object) -> bool:
    return type(value) in (int, float)


def _counts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_whole, value.values()))


def _validation(value: object) -> bool:
    return value is None or (
        isinstance(value, dict) and _whole(value.get("step")) and isinstance(value.get("metrics"), dict)
    )


#: fields of a state that the loops read: name -> its type, in words and as a test
STATE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("position", "nonfinite", "version"), ("a whole number from 0", _whole)),
    "ahead": ("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_whole, value))),
    "best": ("a number or null", lambda value: value is None or _number(value)),
    "best_step": ("a whole number or null", lambda value: value is None or _whole(value)),
    "spent": ("a number", _number),
    **dict.fromkeys(("first_validation", "last_validation"), ("a validation or null", _validation)),
    **dict.fromkeys(("extra", "given"), ("an object", lambda value: isinstance(value, dict))),
    **dict.fromkeys(("totals", "logs"), ("an object of whole numbers", _counts)),
}


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint folder."""

    path: Path
    step: int


def saved(root: Path) -> list[Saved]:
    """All complete checkpoints, oldest first."""
    result = (Saved(path, step_of(path.name)) for path in root.glob("step-*"))
    return sorted((s for s in result if s.step >= 0), key=lambda s: s.step)


def sound(root: Path) -> list[Saved]:
    """Checkpoints of `saved` with a readable state of their step; digests are not compared."""
    result = []
    for entry in saved(root):
        with contextlib.suppress(BirlError):
            read_state(entry.path)
            result.append(entry)
    return result


def latest(root: Path) -> Path | None:
    """The newest sound checkpoint; the newest of all if none is sound."""
    result = sound(root) or saved(root)
    return result[-1].path if result else None


def step_of(name: str) -> int:
    """Step of a complete checkpoint's folder name; -1 for any other name."""
    match = re.fullmatch(r"step-([0-9]{1,18})", name)
    return int(match[1]) if match else -1


def find(root: Path, step: str) -> Path:
    """A run's checkpoint by its number, `last` or `best`. Raises `BirlError`."""
    result = {s.step: s.path for s in saved(root)}
    if step == "last":
        newest = latest(root)
        wanted = None if newest is None else step_of(newest.name)
        if wanted is not None and (damaged := [str(s) for s in result if s > wanted]):
            print(f"birl: {root}: passed over, as state.json cannot be read: {', '.join(damaged)}", file=sys.stderr)
    elif step == "best":
        wanted = best_step(root)
    else:
        wanted = int(step) if step.isdecimal() else None
    if not result:
        raise BirlError(f"There is no checkpoint in {root} yet: train first.")
    if wanted not in result:
        raise BirlError(f"There is no checkpoint {step} in {root}; it has step {', '.join(map(str, result))}.")
    return result[wanted]


def best_step(root: Path) -> int | None:
    """The step of the best validation; None if there was none. Raises `BirlError` if the newest checkpoint cannot be
    read."""
    result = saved(root)
    return read_state(result[-1].path).get("best_step") if result else None


def read_state(path: Path) -> dict[str, Any]:
    """Read the state saved beside the tensors. Raises `BirlError` if it cannot be read."""
    try:
        state = read_json(path / "state.json")
        if problem := misfit(state, path.name):
            raise ValueError(problem)
    except (OSError, ValueError) as error:
        raise BirlError(
            f"{path}/state.json cannot be read ({getattr(error, 'strerror', None) or error}). What else is damaged: "
            f"`birl checkpoints {path.parent.parent} verify`."
        ) from error
    return state


def misfit(state: object, folder: str) -> str:
    """Reason why `state` is not that of a checkpoint in a folder of that name; empty if it is."""
    if not isinstance(state, dict):
        return "it is no JSON object"
    if type(state.get("step")) is not int or state["step"] < 0:
        return "it has no step"
    for name, (what, fits) in STATE.items():
        if name in state and not fits(state[name]):
            return f"{name} is not {what}"
    if step_of(folder) not in (-1, state["step"]):
        return f"it is of step {state['step']}"
    return ""


def prune(root: Path, keep_last: int, keep: set[int]) -> list[Path]:
    """Delete all but the newest `keep_last` (0: keep all) and the steps in `keep`, and partial ones that crashes left.
    A partial one after the newest stays for a day: a run may be writing it. Damaged ones stay, and are not counted."""
    result = sound(root)
    removed = [part for part in root.glob("step-*.part") if result and step_of(part.stem) <= result[-1].step]
    if keep_last > 0:
        removed += [s.path for s in result[:-keep_last] if s.step not in keep]
    sweep(root, "step-*.part")
    for path in removed:
        if path.suffix == ".part":
            clear(path)
        else:  # a half-deleted folder must not count as a checkpoint, nor stay as a damaged one
            shutil.rmtree(path.rename(path.with_name(f"{path.name}.part")))
    return removed


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that it no longer counts: it would otherwise stay the newest after a resume from
    an older one. Nothing is deleted."""
    aside = path.with_name(f"{path.name}.damaged")
    clear(aside)
    return path.rename(aside)
