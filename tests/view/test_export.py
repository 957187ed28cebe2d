import csv
import io
import json
from pathlib import Path

import pytest

from birl.errors import BirlError
from birl.view.episodes import Episodes
from birl.view.search import COLUMNS, lines
from tests.view.made import record, write

FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "  =1", "\uff1d1"]


def exported(tmp_path: Path, records: list, form: str) -> str:
    episodes = Episodes(write(tmp_path / "rollouts.jsonl", records))
    episodes.read_on()
    return b"".join(lines(episodes, range(episodes.count), form)).decode()


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_jsonl_is_the_lines_themselves(tmp_path: Path) -> None:
    text = exported(tmp_path, [record(step=n, text="ä \u2028 \x00") for n in range(3)], "jsonl")
    assert text.encode() == (tmp_path / "rollouts.jsonl").read_bytes()
    assert [json.loads(line)["step"] for line in text.split("\n")[:-1]] == [0, 1, 2]


def test_csv_has_every_figure(tmp_path: Path) -> None:
    (row,) = table(exported(tmp_path, [record(step=4, group=2, episode=1, said=6, reward=0.1, advantage=-0.25)], "csv"))
    assert tuple(row) == COLUMNS
    wanted = {
        "row": "0",
        "step": "4",
        "group": "2",
        "episode": "1",
        "tokens": "6",
        "prompt_tokens": "3",
        "reward": "0.1",
    }
    assert {k: row[k] for k in wanted} == wanted
    assert row["advantage"] == "-0.25"  # a number, however it begins
    assert row["parts"] == '{"math": 1.0}' and row["source"] == "arithmetic" and row["answer"] == "7"


def test_what_has_no_reward_has_an_empty_cell(tmp_path: Path) -> None:
    (row,) = table(
        exported(tmp_path, [record(reward=None, score=None, advantage=None, outcome="timeout", detail="slow")], "csv")
    )
    assert (row["reward"], row["score"], row["advantage"], row["outcome"], row["detail"]) == (
        "",
        "",
        "",
        "timeout",
        "slow",
    )


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("column", ["text", "task", "source", "answer", "detail"])
def test_no_spreadsheet_computes_a_cell(tmp_path: Path, column: str, formula: str) -> None:
    (row,) = table(exported(tmp_path, [record() | {column: formula}], "csv"))
    assert row[column].startswith("'") or not row[column].lstrip().startswith(("=", "+", "-", "@", "\uff1d"))


def test_separators_quotes_and_control_characters_stay_in_their_cell(tmp_path: Path) -> None:
    said = 'a;b,"c"\n=d\x00\x1b[2J\ud800'
    text = exported(tmp_path, [record(text=said), record(text="next")], "csv")
    first, second = table(text)
    assert first["text"] == 'a;b,"c"\n=d⟪U+0000⟫⟪U+001B⟫[2J⟪U+D800⟫' and second["text"] == "next"
    assert text.splitlines()[0].count('","') == len(COLUMNS) - 1  # every cell in quotes


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BirlError, match="formats are jsonl and csv"):
        exported(tmp_path, [record()], "xlsx")
