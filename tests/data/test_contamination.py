"""Which validation rows the training rows have as well."""

import json
from pathlib import Path

import pytest

from birl.cli import main

STORY = "A farmer has {} sheep and {} goats, sells {} of them on Monday, and buys {} hens at the fair on Tuesday."


def write(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": p, "answer": str(len(p.split()))}) + "\n" for p in prompts))
    return str(path)


def check(tmp_path: Path, train: list[str], validation: list[str]) -> int:
    files = [f"data.{n}={write(tmp_path / f'{n}.jsonl', p)}" for n, p in (("train", train), ("validation", validation))]
    return main(["rl", "--contamination", *files])


def test_copies_are_named_whole_and_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = ["what is the capital of the country that lies to the north of France?", "3 + 4"]
    longer = f"Read with care. {STORY.format(3, 4, 5, 6)} How many animals are there now?"
    train = [*other, STORY.format(1, 2, 3, 4), longer]
    validation = ["3 + 5", f"  {STORY.format(1, 2, 3, 4).upper()}", STORY.format(3, 4, 5, 6), "3 - 4"]
    assert check(tmp_path, train, validation) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 of 4 validation rows are in the training data: 1 as they are, 1 in part")
    assert "row 2" in lines[1] and "row 3" in lines[1] and "the same as" in lines[1]
    assert "row 3" in lines[2] and "row 4" in lines[2] and "% of it in" in lines[2]
    assert len(lines) == 3


def test_a_form_of_words_is_no_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    form = "You are a careful assistant who answers with one number. How much is {} plus {} if you count them?"
    train = [form.format(i, 2 * i) for i in range(100, 150)]
    assert check(tmp_path, train, [form.format(i, 3 * i) for i in range(100, 150)]) == 0
    assert "0 of 50" in capsys.readouterr().out


def test_both_sets_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--contamination", f"data.validation={write(tmp_path / 'v.jsonl', ['a'])}"]) == 2
    assert "data.train=my.jsonl" in capsys.readouterr().err
