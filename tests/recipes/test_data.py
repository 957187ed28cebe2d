"""The data that recipes bring along: what writes it, and that it is what was written."""

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from birl.named import from_file
from birl.types import Message, Task

DATA = Path(__file__).parents[2] / "recipes" / "data"


def test_right_calls_are_what_the_script_writes(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from_file(DATA / "make_calculator.py").main(40)
    assert capsys.readouterr().out == (DATA / "calculator" / "calls.jsonl").read_text()


@pytest.mark.parametrize(("name", "number"), [("code", 24), ("countdown", 128), ("letter_counting", 160)])
def test_solutions_are_what_the_script_writes_and_right(
    name: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    module = from_file(DATA / "make_solutions.py")
    module.main(name, number)
    text = capsys.readouterr().out
    assert text == (DATA / name / "solutions.jsonl").read_text()
    rows = [json.loads(line) for line in text.encode().splitlines()]
    task, config, _ = module.TASKS[name]
    for row, asked in zip(rows, task.tasks(dataclasses.replace(config, rows=number), "train"), strict=True):
        own = Task(id="", prompt=row["prompt"], answer=asked["answer"], columns=asked)
        if name == "code":
            assert [row["response"]] == task.gold(own)  # which `birl eval --validate` runs
            continue
        env = task(own, config) if name == "countdown" else task(own)
        assert asyncio.run(env.step(Message(role="assistant", content=row["response"]))).reward == 1.0, row
    env = yaml.safe_load((DATA.parent / name / "rl.yaml").read_text())["env"]
    keys = {key: value for key, value in env.items() if key not in ("kind", "max_turns")}
    held_out = {row["prompt"] for row in task.tasks(task.Config(**keys), "validation")}
    assert not held_out & {row["prompt"] for row in rows}


PAGE = """Some words
Submit [13] button
Two words [14]
[15] textbox focused
cat, dog [16] checkbox checked='false'
Tab #2 [17] tab
Close [18] button
Password
[19] textbox value='a [7] b'"""


@pytest.mark.parametrize(
    ("task", "goal", "replies"),
    [
        ("click-test", "Click the button.", ["Submit [13]\nclick('13')"]),
        ("click-link", 'Click on the link "two words".', ["Two words [14]\nclick('14')"]),
        ("click-dialog-2", 'Click the button in the dialog box labeled "x".', ["Close [18]\nclick('18')"]),
        ("click-tab", "Click on Tab #2.", ["Tab #2 [17]\nclick('17')"]),
        ("focus-text-2", "Focus into the 2nd input textbox.", ["[19]\nclick('19')"]),
        ("click-checkboxes", "Select nothing and click Submit.", ["Submit [13]\nclick('13')"]),
        ("enter-text", 'Enter "Ann" into the text field and press Submit.', ["[15]\nfill('15', 'Ann')", None]),
        ("click-widget", 'Click on a "checkbox" widget.', ["cat, dog [16]\nclick('16')"]),
    ],
)
def test_a_script_says_the_element_and_the_action(task: str, goal: str, replies: list[str | None]) -> None:
    module = from_file(DATA / "make_miniwob.py")
    said = list(module.SCRIPTS[task](goal, module.Page(PAGE)))
    assert [told for told, wanted in zip(said, replies, strict=True) if wanted] == [r for r in replies if r]


def test_a_page_without_the_element_is_told() -> None:
    module = from_file(DATA / "make_miniwob.py")
    with pytest.raises(LookupError, match="no 'Nowhere' in"):
        list(module.SCRIPTS["click-button"]('Click on the "Nowhere" button.', module.Page(PAGE)))


def test_the_episodes_act_on_what_they_see() -> None:
    episodes = [
        json.loads(line)["messages"] for line in (DATA / "miniwob" / "episodes.jsonl").read_bytes().splitlines()
    ]
    assert len(episodes) == 6 * len(from_file(DATA / "make_miniwob.py").SCRIPTS)
    for messages in episodes:
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        for seen, said in zip(messages[::2], messages[1::2], strict=True):
            element, action = said["content"].split("\n")
            assert f"\n{element} " in seen["content"] or f"\n{element}\n" in seen["content"]
            assert action.split("'")[1] == element.rpartition("[")[2].rstrip("]")
    assert Counter(messages[0]["content"].startswith("Goal: ") for messages in episodes) == {True: len(episodes)}


def test_a_curve_has_what_the_run_wrote(tmp_path: Path) -> None:
    measured = {"reward/mean": 0.5, "length/mean": 3.0, "entropy": None, "grad_norm": 1.0, "tokens/generated": 7}
    lines = [json.dumps({"step": step, "time/step": 1.5, **measured}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    one = {"step": 0, "validation/all/score": 0.25, "validation/math/score": 0.25}
    (tmp_path / "validation.jsonl").write_text(json.dumps(one) + "\n")
    curve = from_file(DATA.parent / "curve.py").curve
    before, first, second = curve(tmp_path)
    assert before == {"step": 0, "held_out": 0.25} and "held_out" not in first
    assert (second["seconds"], second["reward"], second["entropy"]) == (3.0, 0.5, "")
    two = {**one, "step": 2, "validation/code/score": 0.75}
    (tmp_path / "validation.jsonl").write_text(json.dumps(one) + "\n" + json.dumps(two) + "\n")
    found = curve(tmp_path)[2]
    assert (found["held_out"], found["held_out/math"], found["held_out/code"]) == (0.25, 0.25, 0.75)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time/step": 2, "loss": 0.5, "grad_norm": 1}) + "\n")
    (tmp_path / "validation.jsonl").write_text(json.dumps({"step": 1, "validation/accuracy": 0.9}) + "\n")
    assert curve(tmp_path)[1] == {"step": 1, "seconds": 2.0, "loss": 0.5, "grad_norm": 1, "held_out": 0.9}
