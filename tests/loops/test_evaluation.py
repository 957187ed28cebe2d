"""What `birl eval` prints."""

import io
import sys

import pytest

from birl.loops.evaluate import measure
from birl.loops.evaluation import show
from birl.types import Group, Outcome, Task, Trajectory

NAMES = ("openai/gsm8k", "math[algebra]", "competition_mathematics_of_many_years", "all")
FIGURES = {"score": 0.5, "length": 12.25, "truncated": 3.0, "failed": 0.0, "n": 1319.0, "pass@1": 0.5, "pass@8": 0.75}
METRICS = {f"validation/{name}/{figure}": value for name in NAMES for figure, value in FIGURES.items()}


def test_every_source_has_its_rows_and_its_whole_name(capsys: pytest.CaptureFixture[str]) -> None:
    show(METRICS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [name for name in NAMES for _ in range(2)]
    row = ["openai/gsm8k", "1319", "pass@1", "0.500", "0.473", "-", "0.527", "0.500", "12.2", "3", "0"]
    assert lines[2].split() == row and lines[3].split()[2:4] == ["pass@8", "0.750"]


def test_a_narrow_terminal_cuts_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    show(METRICS)
    lines = screen.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines) and "\u2026" not in screen.getvalue()
    first = [line.split("  ")[0].strip() for line in lines]
    assert all(name in "".join(first) for name in NAMES)


def test_characters_that_the_output_lacks_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", file)
    show({f"validation/数学/{figure}": value for figure, value in FIGURES.items()})
    file.flush()
    assert isinstance(file.buffer, io.BytesIO) and b"?? " in file.buffer.getvalue()


def test_the_whole_counts_each_row_once_whatever_its_source_is_called() -> None:
    def group(source: str, score: float) -> Group:
        one = Trajectory(turns=(), reward=score, score=score, outcome=Outcome.OK)
        return Group(index=0, task=Task(id="", prompt="x", source=source), trajectories=(one,), start_version=0)

    found = measure([group("all", 1.0), group("math", 0.0)], [1])
    assert (found["validation/all/n"], found["validation/all/score"], found["validation/math/n"]) == (2.0, 0.5, 1.0)
