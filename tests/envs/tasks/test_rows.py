"""What all generated tasks promise about their rows."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from birl.config.keys import written
from birl.config.load import read_section
from birl.config.schema import Data, Env
from birl.data.tasks import load_tasks
from birl.envs.open import TASKS, check_world
from birl.errors import BirlError
from birl.types import Task

GENERATED = {
    "arithmetic": {"largest": "30"},
    "calculator": {},
    "code": {"rows": "90", "validation_rows": "20"},
    "countdown": {"count": "4"},
    "guess_number": {"high": "100", "turns": "7"},
    "letter_counting": {},
    "python_tool": {},
}
PROBLEM = {  # what must never be on both sides
    "arithmetic": lambda t: t.prompt,
    "calculator": lambda t: t.columns["expression"],
    "code": lambda t: t.prompt,
    "countdown": lambda t: (tuple(sorted(t.columns["numbers"])), t.columns["target"]),
    "guess_number": lambda t: t.answer,
    "letter_counting": lambda t: t.columns["word"],
    "python_tool": lambda t: t.columns["code"],
    "search": lambda t: t.prompt,
}


def made(kind: str, split: str, **options: str) -> list[Task]:
    """The tasks of a class, without what its episodes share."""
    module, _, name = TASKS[kind].rpartition(":")
    task: Any = getattr(import_module(module), name)
    rows = task.tasks(read_section(task.Config, options, "env."), split)
    return list(load_tasks(Data(), split, chat=True, given=rows)[0])  # type: ignore[arg-type]


def test_every_built_in_task_is_looked_at() -> None:
    assert set(TASKS) == set(PROBLEM) == {*GENERATED, "search"}


def test_every_number_is_asked_for() -> None:
    """Whoever had learned which numbers never come would be right to leave them out."""
    held = made("guess_number", "validation", validation_rows="16")
    train = made("guess_number", "train")
    assert {t.answer for t in held} == {t.answer for t in train} == {str(n) for n in range(1, 17)}


@pytest.mark.parametrize("kind", sorted(GENERATED.keys() - {"guess_number"}))
def test_splits_share_nothing_whatever_their_seeds(kind: str) -> None:
    options = {"rows": "300", "validation_rows": "40", **GENERATED[kind]}
    train = made(kind, "train", **options | {"seed": "5"})
    held = made(kind, "validation", **options)
    assert (len(train), len(held)) == (int(options["rows"]), int(options["validation_rows"]))
    assert not {PROBLEM[kind](t) for t in train} & {PROBLEM[kind](t) for t in held}
    assert all(t.answer and t.source == kind for t in [*train, *held])


@pytest.mark.parametrize("kind", GENERATED)
def test_a_seed_gives_the_same_rows_and_another_seed_others(kind: str) -> None:
    def pairs(seed: str) -> list[tuple[object, str | None]]:
        return [(t.prompt, t.answer) for t in made(kind, "train", rows="50", seed=seed)]

    assert pairs("1") == pairs("1") != pairs("2")


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("arithmetic", {"largest": "3", "rows": "500"}, r"only \d+ different train tasks of 500\. Lower env\.rows"),
        ("arithmetic", {"operations": "[^]"}, r"env\.operations=\^: must be \+ \| - \| \*"),
        ("arithmetic", {"operations": "[]"}, r"operations takes a list such as \[\+,\*\]"),
        ("arithmetic", {"rows": "0"}, r"env\.rows=0: must be at least 1\."),
        (
            "countdown",
            {"count": "1", "use": "often"},
            r"(?s)env\.count=1: must be at least 2 and at most 8.*env\.use=often: must be exactly",
        ),
        ("countdown", {"partial": "1"}, r"env\.partial=1: must be at least 0 and less than 1"),
        ("calculator", {"digits": "20"}, r"env\.digits=20: must be at least 1 and at most 12"),
        ("guess_number", {"turns": "4"}, r"env\.turns=4: too few to find one of 16"),
        ("guess_number", {"low": "9", "high": "10"}, r"env\.high=10: must be at least env\.low \+ 3"),
        ("letter_counting", {"absent": "2"}, r"env\.absent=2: must be at least 0 and at most 1"),
        ("search", {"turns": "1"}, r"env\.turns=1: must be at least 2"),
    ],
)
def test_keys_that_cannot_work_are_told(kind: str, options: dict[str, str], told: str) -> None:
    with pytest.raises(BirlError, match=told):
        made(kind, "train", **options)


@pytest.mark.parametrize(("kind", "key"), [("gem", "validation_rows"), ("gymnasium", "rows"), ("verifiers", "rows")])
def test_rows_of_adapters_have_the_same_ranges(kind: str, key: str) -> None:
    with pytest.raises(BirlError, match=rf"env\.{key}=-1: must be at least"):
        check_world(Env(kind=kind, options={key: "-1"}))


def test_the_table_of_keys_is_what_the_tasks_have() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")
    for kind, where in TASKS.items():
        module, _, name = where.rpartition(":")
        keys = vars(getattr(import_module(module), name).Config())
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{kind}` |"))
        told = dict(word[4:].split("=", 1) for word in re.findall(r"`(env\.\w+=[^`]*)`", line))
        own = {key: value for key, value in keys.items() if key not in ("rows", "validation_rows", "seed")}
        assert told == {key: written(value) for key, value in own.items()}, kind
