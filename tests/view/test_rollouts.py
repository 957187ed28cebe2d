"""What the page is answered."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from birl.track.log import encode
from birl.view.command import app
from birl.view.folders import Runs
from tests.view.made import QUESTION, record, run_folder, spoken, write

PORT = 8311


class Asked:
    def __init__(self, folder: Path) -> None:
        runs = Runs([folder])
        self.run, self.folder = next(iter(runs)).id, folder
        self.client = TestClient(app(runs, PORT), base_url=f"http://127.0.0.1:{PORT}", raise_server_exceptions=False)

    def get(self, path: str = "", **query: Any) -> Any:
        return self.client.get(f"/api/rollouts{path}", params={"run": self.run, **query})

    def json(self, path: str = "", **query: Any) -> Any:
        answer = self.get(path, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Asked]:
    rows = [
        record(step=s, group=s * 10 + g, episode=e, reward=float(e), score=float(e))
        for s in (1, 2, 3)
        for g in range(2)
        for e in range(4)
    ]
    rows.append(
        spoken([(QUESTION, False), ("It is \x1b seven 🙂<|im_end|>", True)], step=4, group=50, reward=None, score=None)
    )
    yield Asked(run_folder(tmp_path / "demo", rows))


def test_a_list_of_what_was_found(page: Asked) -> None:
    found = page.json(q="step = 2 order by reward desc", limit=3)
    assert (found["total"], found["indexed"], found["done"]) == (8, 25, True)
    assert [row["row"] for row in found["rows"]] == [11, 15, 10]
    assert found["rows"][0]["reward"] == 3.0 and found["rows"][0]["task"] == "train.jsonl:20"
    assert [row["row"] for row in page.json(q="step = 2 order by reward desc", offset=6)["rows"]] == [8, 12]
    last = page.json(q="step = 4")["rows"][0]
    assert last["reward"] is None and last["text"] == "It is ⟪U+001B⟫ seven 🙂"


def test_the_chart_counts_flags_by_step(page: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birl.view.rollouts.PATIENCE", float("inf"))  # a busy machine may not read 1000 rows in 0.4 s
    chart = page.json(chart=1)["chart"]
    assert chart["from"] == [1, 2, 3, 4] and chart["rows"] == [8, 8, 8, 1]
    many = [record(step=s, text=r"\boxed{}") for s in range(1, 1001)]
    write(page.folder / "rollouts.jsonl", many)
    chart = page.json(chart=1)["chart"]
    assert len(chart["from"]) <= 120 and sum(chart["flags"]["format"]) == sum(chart["rows"]) == 1000
    assert chart["to"][-1] == 1000 and page.json(q="step>5000", chart=1)["chart"]["from"] == []


def test_an_episode_and_its_group(page: Asked) -> None:
    found = page.json("/one", row=24)
    assert found["samples"][0]["shown"][-1] == "<|im_end|>" and found["known"]
    assert [b["role"] for b in found["samples"][0]["blocks"]] == ["user", "assistant"]
    assert [one["row"] for one in page.json("/group", row=5)["episodes"]] == [7, 6, 5, 4]


def test_new_rows_and_broken_lines_are_told(page: Asked) -> None:
    assert page.json()["total"] == 25
    with (page.folder / "rollouts.jsonl").open("ab") as file:
        file.write(b"{broken\n" + encode(record(step=9)))
    found = page.json()
    assert (found["total"], found["skipped"]) == (26, 1)
    assert found["broken"][0]["line"] == 26 and "not JSON" in found["broken"][0]["problem"]


def test_exports_are_files(page: Asked) -> None:
    answer = page.get("/export", q="step = 1 and reward >= 3", format="jsonl")
    assert [json.loads(line)["reward"] for line in answer.content.splitlines()] == [3.0, 3.0]
    assert answer.headers["content-disposition"] == 'attachment; filename="demo.jsonl"'
    answer = page.get("/export", q="step = 1", format="csv")
    assert len(list(csv.DictReader(io.StringIO(answer.text)))) == 8
    assert answer.headers["content-type"].startswith("text/csv")


@pytest.mark.parametrize(
    ("path", "query", "said"),
    [
        ("", {"q": "rewrad>=1"}, "Did you mean reward"),
        ("", {"q": "true; drop table rollouts"}, "Only SELECT"),
        ("", {"offset": "-1"}, "offset=-1: must be a whole number"),
        ("", {"limit": "many"}, "limit=many"),
        ("/one", {"row": "99"}, "no row 99; there are 25"),
        ("/one", {"row": "1e3"}, "row=1e3"),
        ("/group", {"row": "99"}, "no row 99"),
        ("/picture", {"row": "0"}, "no picture 0"),
        ("/export", {"format": "xlsx"}, "formats are jsonl and csv"),
        ("", {"run": "other"}, "no run 'other'"),
        ("", {"run": ""}, "needs run="),
    ],
)
def test_a_wrong_question_is_answered_with_what_is_wrong(page: Asked, path: str, query: dict, said: str) -> None:
    answer = page.get(path, **query)
    assert answer.status_code == 400 and said in answer.json()["error"]


def test_a_run_without_rollouts_says_so(page: Asked) -> None:
    (page.folder / "rollouts.jsonl").unlink()
    assert "track.rollouts=false" in page.json()["missing"]
    answer = page.get("/one", row=0)
    assert answer.status_code == 400 and "track.rollouts=false" in answer.json()["error"]


def test_a_picture_is_shown_and_nothing_else(page: Asked, tmp_path: Path) -> None:
    (page.folder / "screenshots").mkdir()
    (page.folder / "screenshots" / "000.png").write_bytes(b"\x89PNG")
    (tmp_path / "secret.png").write_bytes(b"secret")
    write(page.folder / "rollouts.jsonl", [record(step=9, pictures=["screenshots/000.png", "../secret.png"])], "ab")
    answer = page.get("/picture", row=25, number=0)
    assert answer.content == b"\x89PNG" and answer.headers["content-type"] == "image/png"
    assert page.get("/picture", row=25, number=1).status_code == 400
    assert page.json("/one", row=25)["pictures"] == 2


def test_a_long_search_is_answered_piece_by_piece(page: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    from birl.view import rollouts, search

    monkeypatch.setattr(rollouts, "PATIENCE", 0.0)
    monkeypatch.setattr(search, "MOST", 4)
    write(page.folder / "rollouts.jsonl", [record(step=1, text="x")] * 40)
    answers = [page.json(text="x")]
    while not answers[-1]["done"]:
        answers.append(page.json(text="x"))
    assert len(answers) > 5 and answers[-1]["total"] == 40
    assert [a["total"] for a in answers] == sorted(a["total"] for a in answers)
