"""When failures of episodes stop a run, before a step is over."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from birl.errors import BirlError
from birl.rollout.failures import Start, start
from birl.types import Outcome, Task, Trajectory


@pytest.mark.parametrize(
    ("rate", "details", "stops"),
    [
        (0.5, ["no command"] * 8, True),
        (0.5, ["no command"] * 7, False),
        (0.5, [f"no file /tmp/x{i} of 3" for i in range(8)], True),  # the same but for names and numbers
        (0.5, ["", *["no command"] * 20], False),  # the first ended well
        (0.5, [*["no command"] * 5, *["no file"] * 20], False),
        (0.9, ["no command"] * 40, False),  # may be chance
        (0.9, ["no command"] * 44, True),
        (1.0, ["no command"] * 500, False),
        (0.0, ["no command"] * 8, True),
    ],
)
def test_when_failures_from_the_start_are_no_chance(rate: float, details: list[str], stops: bool) -> None:
    start = Start(rate)
    with pytest.raises(BirlError, match="failed alike") if stops else nullcontext():
        for i, why in enumerate(details):
            outcome = Outcome.ENV_ERROR if why else Outcome.OK
            task = Task(id=f"rows.jsonl:{i // 4}", prompt="Go")
            start.saw(task, Trajectory(turns=(), reward=0.0, score=0.0, parts={}, outcome=outcome, detail=why))


def test_failures_at_once_of_some_rows_are_no_start() -> None:
    """The first rows of an evaluation are still at work, while those that fail at once have failed."""
    start = Start(rows=frozenset("abc"))
    bad = Trajectory(turns=(), reward=0.0, score=0.0, parts={}, outcome=Outcome.ENV_ERROR, detail="no command")
    for row in [*"defghijklmnab"]:
        start.saw(Task(id=row, prompt="Go"), bad)
    with pytest.raises(BirlError, match="All of the first 14 episodes failed alike"):
        start.saw(Task(id="c", prompt="Go"), bad)


@pytest.mark.parametrize("tasks", [1, 2])
def test_failures_of_one_task_stop_a_run_only_where_there_is_no_other(tasks: int) -> None:
    start = Start(0.5, tasks=tasks)
    bad = Trajectory(turns=(), reward=0.0, score=0.0, parts={}, outcome=Outcome.ENV_ERROR, detail="no file")
    with pytest.raises(BirlError, match="All of the first 8 episodes") if tasks == 1 else nullcontext():
        for _ in range(20):
            start.saw(Task(id="one", prompt="Go"), bad)
    if tasks == 2:
        start.saw(Task(id="other", prompt="Go"), replace(bad, outcome=Outcome.OK, detail=""))
        start.saw(Task(id="other", prompt="Go"), bad)


@pytest.mark.parametrize(("prompts", "rows", "bad"), [(16, 100, 9), (2, 100, 2), (1, 100, 1), (16, 1, 1), (16, 5, 5)])
def test_a_few_bad_rows_that_fail_at_once_stop_no_training(prompts: int, rows: int, bad: int) -> None:
    """The other rows of the step may still be at work; with more than a half that failed it would stop anyway."""
    first = start(0.5, prompts, rows)
    failed = Trajectory(turns=(), reward=0.0, score=0.0, parts={}, outcome=Outcome.ENV_ERROR, detail="no file")
    for row in [row for row in range(bad - 1) for _ in range(8)]:
        first.saw(Task(id=str(row), prompt="Go"), failed)
    with pytest.raises(BirlError, match="failed alike"):
        for _ in range(8):
            first.saw(Task(id="last", prompt="Go"), failed)
