"""Right answers that are not worth 1 are found, with their rows, without a model."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from birl.cli import main
from birl.envs.open import TASKS
from birl.envs.tasks.invented import passages


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.validation={name}"


def validated(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    code = main(["eval", "--validate", "threads=1", *words])
    return code, capsys.readouterr().out.splitlines()


ROWS = {"search": (), "code": ("env.rows=16", "env.validation_rows=4", "env.tests=2", "env.workers=1")}
ROWS["python_tool"] = ("env.rows=16", "env.validation_rows=4", "env.workers=1")


@pytest.mark.parametrize("kind", TASKS)
def test_every_built_in_task_is_right(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = validated(capsys, f"env={kind}", *ROWS.get(kind, ("env.rows=16", "env.validation_rows=4")))
    assert code == 0 and len(printed) == 1
    done, _, total = printed[0].partition(" of ")
    assert total == f"{done} rows: the gold answer scores 1." and int(done) >= 20


def test_wrong_rows_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("short.py").write_text("def short(completions, **_):\n    return [float(len(c) < 5) for c in completions]\n")
    rows = [{"prompt": "?", "answer": a} for a in ("7", "seven", "1/2", "")]
    code, printed = validated(capsys, written("my.jsonl", rows), "reward=short.py:short")
    assert code == 1 and printed[0] == "2 of 4 rows: the gold answer scores 1."
    assert printed[1] == "  my.jsonl, row 2: scores 0 (gold: seven)"
    assert printed[2].startswith("  my.jsonl, row 4: `answer` is empty")


def test_rows_for_a_built_in_task(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "?", "answer": "(6 - 2) * 5", "numbers": [5, 6, 2], "target": 20},
        {"prompt": "?", "answer": "6 * 2 + 5", "numbers": [5, 6, 2], "target": 20},
        {"prompt": "?", "answer": "5 + 6", "numbers": None, "target": 11},
    ]
    code, printed = validated(capsys, written("my.jsonl", rows), "env=countdown")
    assert code == 1 and len(printed) == 3
    assert printed[1] == "  my.jsonl, row 2: scores 0 (gold: <answer>6 * 2 + 5</answer>)"
    assert "row 3: env_error: " in printed[2] and "has no column 'numbers'" in printed[2]


OWN = """
from birl.types import Feedback, Message

class Two:
    def __init__(self, task): self.task, self.turn = task, 0
    def gold(self, task): return task.columns["replies"]
    async def start(self): return self.task.prompt
    async def step(self, reply):
        self.turn += 1
        if reply.content == "crash": raise RuntimeError("broken")
        done = self.turn == 2 or reply.content == "stop"
        return Feedback(messages=(Message(role="user", content="on"),), reward=float(reply.content == "b"), done=done)
    async def close(self): pass

class NoGold(Two):
    gold = None

async def agent(task, model):
    first = await model.ask([Message(role="user", content="?")])
    return float(first.content == "7")

async def elsewhere(task, base_url): return 1.0
def judge(completions, gold, **_): return [float(c == g) for c, g in zip(completions, gold)]
def step(state, action, extra_info): return {"reward": float(state + action == "?7"), "done": True}
"""


def test_several_turns(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(OWN)
    replies = [["a", "b"], ["a", "a"], ["a"], ["stop", "b"], ["crash"]]
    rows = [{"prompt": "?", "replies": r} for r in replies]
    code, printed = validated(capsys, written("my.jsonl", rows), "env=own.py:Two")
    assert code == 1 and printed[0].startswith("1 of 5 rows")
    assert [line.partition(": ")[2] for line in printed[1:]] == [
        "scores 0 (gold: a | a)",
        "continues after the last gold reply (gold: a)",
        "scores 0 (gold: stop | b)",
        "env_error: own.py:10: RuntimeError: broken (gold: crash)",
    ]


@pytest.mark.parametrize("words", ["env=own.py:agent", "env=own.py:step", "reward=own.py:judge"])
def test_other_ways_in(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(OWN)
    rows = [{"prompt": "?", "answer": "7"}]
    assert validated(capsys, written("my.jsonl", rows), words)[0] == 0


def test_no_model_is_told_to_be_loaded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "birl.cli.evaluation", raising=False)
    assert main(["eval", "--validate", written("my.jsonl", [{"prompt": "?", "answer": "7"}])]) == 0
    assert capsys.readouterr().err == ""


def test_what_cannot_be_played_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(OWN)
    data = written("my.jsonl", [{"prompt": "?", "answer": "7"}])
    code, printed = validated(capsys, data, "env=own.py:elsewhere")
    assert code == 1 and "without a gateway" in printed[1]
    data = written("none.jsonl", [{"prompt": "?"}])
    code, printed = validated(capsys, data, "env=own.py:NoGold")
    assert code == 1 and printed[1] == "  none.jsonl, row 1: has no answer, and the environment has no `gold`"
    assert main(["eval", "--validate", "env=own.py:Two"]) == 2
    assert "env.kind=own.py:Two has no tasks of its own" in capsys.readouterr().err
    assert main(["rl", "--validate", "env=countdown"]) == 2
    assert "--validate belongs to `birl eval`" in capsys.readouterr().err


def test_long_lists_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = validated(capsys, written("my.jsonl", [{"prompt": "?", "answer": "x y z"}] * 30), "env=arithmetic")
    assert code == 1 and len(printed) == 22 and printed[-1] == "  and 10 more"


SHOWN = ("arithmetic", "letter_counting", "countdown", "guess_number", "search", "calculator", "code", "python_tool")


def test_the_rows_of_the_page_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in page.partition("```jsonl\n")[2].partition("```")[0].encode().splitlines()]
    assert len(rows) == len(SHOWN)
    for kind, row in zip(SHOWN, rows, strict=True):
        code, printed = validated(capsys, written("my.jsonl", [row]), f"env={kind}")
        assert code == 0, printed
    found = next(p["text"] for p in passages() if p["title"] == rows[4]["searches"][-1])
    assert rows[4]["answer"] in found
