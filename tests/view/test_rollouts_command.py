import csv
import json
from pathlib import Path

import pytest

from birl.cli import main
from tests.view.made import record, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [record(step=s, group=s, reward=s % 2, text=f"It is {s} \x1b[31m") for s in range(1, 41)]
    write(tmp_path / "demo" / "rollouts.jsonl", [*rows, record(step=41, reward=None, outcome="timeout", text="")])
    return tmp_path / "demo"


def test_a_search_in_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), "reward>=1 order by step desc", "--limit", "2"]) == 0
    head, first, second, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["row", "step", "outcome", "reward", "tokens", "flags", "text"]
    assert first.split()[:5] == ["38", "39", "ok", "1", "5"] and first.endswith("It is 39 ⟪U+001B⟫[31m")
    assert second.split()[1] == "37" and last == "20 of 41 episodes, 2 shown (--limit N shows more)"


def test_words_of_a_query_need_no_quotes_around_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), "step = 41 and", "outcome = 'timeout'"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "1 of 41 episodes" and out[1].split()[2:5] == ["timeout", "-", "5"]


def test_exports(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.jsonl", "a.csv"):
        assert main(["rollouts", str(run), "reward>=1", "--export", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == f"20 episodes in {tmp_path / name}\n"
    assert len([json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()]) == 20
    with (tmp_path / "a.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(s) for s in range(1, 41, 2)]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "There is no folder nowhere"),
        ([], "Name a run folder"),
        (["RUN", "--limit", "x"], "--limit takes a whole number"),
        (["RUN", "--export", "a.txt"], "ends in .jsonl or .csv"),
        (["RUN", "--export", "gone/a.csv"], "cannot write"),
        (["RUN", "--export=RUN/rollouts.jsonl"], "the run's own file"),
        (["RUN", "--all"], "has --text WORDS, --limit N, --export FILE"),
        (["RUN", "flag:any"], 'near ":". Write a condition in SQL'),
    ],
)
def test_mistakes(run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", *(word.replace("RUN", str(run)) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert (run / "rollouts.jsonl").stat().st_size > 0


def test_broken_lines_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "rollouts.jsonl").open("ab") as file:
        file.write(b"{\n")
    assert main(["rollouts", str(run), "step=41"]) == 0
    assert "rollouts.jsonl, line 42: not JSON (" in (said := capsys.readouterr().err)
    assert said.endswith(". It is left out; delete it to end this message.\n")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: birl rollouts RUN")
