"""`birl eval --judge`: agreement with people is measured right, and a judge's preferences are seen."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from birl.algorithms.uncertainty import kappa, ordered, over_prompts, ranks, spearman
from birl.cli import main
from tests.rewards.hostile import Hostile


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_statistics_are_their_definitions() -> None:
    rng = random.Random(0)
    for _ in range(50):
        n = rng.randint(3, 12)
        a, b = ([rng.randint(0, 4) for _ in range(n)] for _ in range(2))
        place = [1 + sum(y < x for y in a) + (sum(y == x for y in a) - 1) / 2 for x in a]
        assert ranks(a).tolist() == place
        pairs = [(i, j) for i in range(n) for j in range(i) if a[i] != a[j]]
        alike = [1.0 if (a[i] - a[j]) * (b[i] - b[j]) > 0 else 0.5 if b[i] == b[j] else 0.0 for i, j in pairs]
        assert not pairs or ordered(a, b) == pytest.approx(sum(alike) / len(pairs))
        x, y = rng.sample(range(99), n), rng.sample(range(99), n)  # without ties: 1 - 6 sum(d^2) / (n^3 - n)
        d = ranks(x) - ranks(y)
        assert spearman(x, y) == pytest.approx(1 - 6 * float(d @ d) / (n**3 - n))
    assert spearman([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(3**0.5 / 2)  # with a tie
    assert math.isnan(spearman([1.0, 1.0], [1.0, 2.0])) and math.isnan(kappa([1, 1], [1, 1]))
    # 20 both yes, 15 both no, 5 and 10 apart: observed 0.7, chance 0.5 (Cohen's example of two raters)
    yes, no = [1] * 20 + [0] * 15 + [1] * 5 + [0] * 10, [1] * 20 + [0] * 15 + [0] * 5 + [1] * 10
    assert kappa(yes, no) == pytest.approx(0.4)


def test_an_interval_takes_prompts_whole() -> None:
    """Answers to one prompt that are all alike say no more than one of them."""
    values = np.repeat(np.random.default_rng(0).normal(size=30), 10)
    prompts = [np.arange(10 * i, 10 * i + 10) for i in range(30)]
    low, high = over_prompts(lambda i: float(values[i].mean()), prompts)
    alone, apart = over_prompts(lambda i: float(values[i].mean()), [np.array([i]) for i in range(300)])
    assert low < values.mean() < high and (high - low) > 2 * (apart - alone)
    assert all(map(math.isnan, over_prompts(lambda i: 1.0, prompts[:1])))


def write(rows: list[dict[str, Any]], name: str = "judged.jsonl") -> str:
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    return f"data.validation={name}"


def calibrate(server: Hostile, rows: list[dict[str, Any]], *words: str) -> dict[str, dict[str, Any]]:
    judge = [] if any(w.startswith("reward.judge=") for w in words) else [f"reward.judge={server.url}/v1#m"]
    assert main(["eval", "--judge", write(rows), *judge, "output=out.json", *words]) == 0
    result = json.loads(Path("out.json").read_text())["measures"]
    return {judge: {m["name"]: m for m in own} for judge, own in result.items()}


def scores(n: int = 40) -> list[dict[str, Any]]:
    """Two answers to each prompt: people give what the answer's number says."""
    rng = random.Random(1)
    return [
        {"prompt": f"p{i // 2}", "response": f"{rng.randint(1, 9)}{'x' * rng.randint(0, 20)}", "score": 0}
        for i in range(n)
    ]


def test_a_judge_that_agrees(server: Hostile, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"score": int(row["response"][0])} for row in scores()]
    server.judge = lambda shown, body: f"Score: 0.{shown[0][0]}"
    (own,) = calibrate(server, rows).values()
    assert own["spearman"]["value"] == pytest.approx(1) and own["spearman"]["n"] == 40
    assert own["order"]["value"] == 1 and own["order"]["n"] <= 20
    assert abs(own["prefers longer"]["value"]) < 1e-9
    out = capsys.readouterr().out
    assert re.search(r"spearman +1\.000 +1\.000 - 1\.000 +40", out) and "Written to out.json" in out


def test_good_and_bad(server: Hostile) -> None:
    rows = [row | {"score": int(row["response"][0]) >= 5} for row in scores()]
    server.judge = lambda shown, body: f"Score: 0.{shown[0][0]}"
    (own,) = calibrate(server, rows).values()
    assert own["accuracy"]["value"] == own["kappa"]["value"] == 1
    assert own["accuracy"]["low"] < 0.9, "twenty prompts are not certainty"
    (own,) = calibrate(server, rows, "validation.threshold=0.8").values()
    assert own["accuracy"]["value"] < 0.9 and own["kappa"]["value"] < 0.8


def test_a_judge_that_likes_long_answers(server: Hostile) -> None:
    rows = [row | {"score": int(row["response"][0])} for row in scores()]
    server.judge = lambda shown, body: f"Score: {min(len(shown[0]), 30) / 30:.3f}"
    (own,) = calibrate(server, rows).values()
    assert own["prefers longer"]["value"] > 0.5 and own["prefers longer"]["low"] > 0
    assert own["spearman"]["value"] < 0.5


def preferences(n: int = 30) -> list[dict[str, Any]]:
    rng = random.Random(2)
    return [
        {"prompt": f"p{i}", "chosen": f"good{'x' * rng.randint(0, 9)}", "rejected": f"bad{'x' * rng.randint(0, 9)}"}
        for i in range(n)
    ]


def test_preferences_and_position(server: Hostile) -> None:
    pairs = ("reward.judge_mode=pairs", "reward.judge_rounds=2")
    server.judge = lambda shown, body: "Better: 1"
    (own,) = calibrate(server, preferences(), *pairs).values()
    assert own["accuracy"]["value"] == 0.5 and own["prefers first"]["value"] == 1
    assert own["changes with order"]["value"] == 1 and len(server.bodies) == 60
    (own,) = calibrate(server, preferences(), *pairs[:1]).values()
    assert 0.2 < own["accuracy"]["value"] < 0.8 and abs(own["kappa"]["value"]) < 0.6
    Path("cache").rename("old")
    server.judge = lambda shown, body: f"Better: {1 + shown[0].startswith('bad')}"
    (own,) = calibrate(server, preferences(), *pairs).values()
    assert own["accuracy"]["value"] == own["kappa"]["value"] == 1
    assert own["prefers first"]["value"] == 0.5 and own["changes with order"]["value"] == 0


def test_a_group_has_positions_too(server: Hostile) -> None:
    rows = [row | {"score": int(row["response"][0])} for row in scores()]
    server.judge = lambda shown, body: "Scores: " + ", ".join(f"{i + 1}={1 - i / 9:.3f}" for i in range(len(shown)))
    (own,) = calibrate(server, rows, "reward.judge_mode=group").values()
    assert own["prefers first"]["value"] == 1


def test_each_judge_and_the_panel(server: Hostile, capsys: pytest.CaptureFixture[str]) -> None:
    def says(shown: list[str], body: Any) -> str:
        return {"good": f"Score: 0.{shown[0][0]}", "bad": f"Score: {1 - int(shown[0][0]) / 10:.1f}"}.get(
            body["model"], "?"
        )

    server.judge = says
    rows = [row | {"score": int(row["response"][0])} for row in scores()]
    named = [f"{server.url}/v1#{name}" for name in ("good", "bad", "mute")]
    result = calibrate(server, rows, f"reward.judge=[{','.join(named)}]")
    good, bad, panel = result[named[0]], result[named[1]], result["mean of 3"]
    assert good["spearman"]["value"] == pytest.approx(1) and bad["spearman"]["value"] == pytest.approx(-1)
    assert result[named[2]] == {} and panel["spearman"]["n"] == 40
    assert f"{named[2]}: no verdict on 40 (unreadable)" in capsys.readouterr().out


def test_conversations_and_criteria_of_rows(server: Hostile) -> None:
    talk = [{"role": "user", "content": "who?"}]
    chosen, rejected = ([*talk, {"role": "assistant", "content": word}] for word in ("me", "x"))
    rows = [{"chosen": chosen, "rejected": rejected, "own": [f"{i + 1}: It says me."]} for i in range(3)]
    server.judge = lambda shown, body: f"Scores: 1={int(shown[0] == 'me')}"
    (own,) = calibrate(server, rows, "reward.judge_rubric_column=own").values()
    assert own["accuracy"]["value"] == 1 and own["accuracy"]["n"] == 3
    assert all(
        "who?" in b["messages"][0]["content"] and "It says me." in b["messages"][0]["content"] for b in server.bodies
    )


ROW = {"prompt": "a", "response": "b", "score": 1}
BAD = [
    ([{"prompt": "a", "answer": "b"}], "--judge needs a prompt"),
    ([ROW | {"score": "good"}], r"judged.jsonl, row 1: `score` is 'good', it needs to be a number"),
    ([ROW, ROW | {"response": 7}], "row 2: response is a number"),
    ([{"prompt": "a", "chosen": "b", "rejected": None}], "row 1: rejected is null"),
]


@pytest.mark.parametrize(("rows", "told"), BAD)
def test_bad_rows_are_named(
    server: Hostile, rows: list[dict[str, Any]], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--judge", write(rows), f"reward.judge={server.url}/v1"]) == 2
    assert re.search(told, " ".join(capsys.readouterr().err.split())) and not server.bodies


def test_bad_words_are_named(server: Hostile, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write([ROW | {"rubric": [3]}])
    here = f"reward.judge={server.url}/v1"
    for words, told in (
        (["env=countdown", here], "--judge needs human-judged rows"),
        ([rows], "reward.functions=judge: needs the address of a judge"),
        ([rows, "reward.judge=gpt"], "give the address of each judge"),
        ([rows, here, "reward.judge_rubric=['-1: Bad']"], "reward.judge_rubric: no weight is above 0"),
        ([rows, here, "reward.judge_rubric_column=rubric"], r"row 1: column rubric\[0\] is no criterion"),
        ([rows, here, "reward.judge_rubric_column=other"], "the rows have no such column"),
        ([rows, here, "reward.judge_rounds=2"], "reward.judge_mode=score shows one answer at a time"),
        ([rows, here, "reward.judge_mode=pairs", "reward.judge_rounds=3"], "a pair has two orders"),
        ([rows, f"reward.judge=[{server.url}/v1,{server.url}/v1]"], "the same judge is named twice"),
        ([rows, here, "reward.judge_panel=median"], "reward.judge names one judge"),
    ):
        assert main(["eval", "--judge", *words]) == 2
        assert re.search(told, " ".join(capsys.readouterr().err.split())), told
    server.judge = lambda shown, body: "I pass."
    assert main(["eval", "--judge", rows, here]) == 2
    told = capsys.readouterr().err.replace("birl:", "")
    assert "no question has a verdict. Most frequent: 1 x the judge's last line" in " ".join(told.split())
