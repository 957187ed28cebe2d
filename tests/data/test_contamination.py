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


@pytest.mark.parametrize(
    ("seen", "asked"),
    [
        ("Is the café open at Straße 7?", "is the cafe\u0301 OPEN at STRASSE \uff17?"),
        ("How much is 7 - 4 * 2?", "How much\u00a0is 7 \u2212 4 \u00d7 2?"),
        ("The answer is a word.", "The ans\u00adwer is\u200b a word."),
    ],
)
def test_forms_of_unicode_do_not_hide_a_copy(tmp_path: Path, seen: str, asked: str) -> None:
    train, validation = ([{"prompt": p, "answer": "1"}] for p in (seen, asked))
    for name, rows in (("t", train), ("v", validation)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert main(["rl", "--contamination", f"data.train={tmp_path}/t.jsonl", f"data.validation={tmp_path}/v.jsonl"]) == 1


def test_scripts_without_spaces_have_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story, other = "农夫有三只羊和四只山羊星期一卖掉了五只", "今天天气很好我们一起去公园散步吧"
    assert check(tmp_path, [f"请仔细阅读。{story}。"], [f"{story}还剩几只", other]) == 1
    assert "1 of 2 validation rows are in the training data: 0 as they are, 1 in part" in capsys.readouterr().out


def test_a_form_of_words_is_no_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    form = "You are a careful assistant who answers with one number. How much is {} plus {} if you count them?"
    train = [form.format(i, 2 * i) for i in range(100, 150)]
    assert check(tmp_path, train, [form.format(i, 3 * i) for i in range(100, 150)]) == 0
    assert "0 of 50" in capsys.readouterr().out


def test_both_sets_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--contamination", f"data.validation={write(tmp_path / 'v.jsonl', ['a'])}"]) == 2
    assert "data.train=my.jsonl" in capsys.readouterr().err
