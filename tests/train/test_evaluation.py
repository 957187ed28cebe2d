"""What `birl eval` prints."""

import io
import json
import sys
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from birl.algorithms.uncertainty import interval
from birl.cli.evaluation import ruled, show, tokens
from birl.config.schema import Validation
from birl.errors import BirlError
from birl.rollout.evaluate import Baseline, by_prompt, measure, own_k, plan
from birl.rollout.tasks import tell_plain
from birl.run_folder import next_commands
from birl.types import Completion, Group, Outcome, Stop, Task, Trajectory, Turn

NAMES = ("openai/gsm8k", "math[algebra]", "competition_mathematics_of_many_years", "all")
FIGURES = {"score": 0.5, "length": 12.25, "truncated": 3.0, "failed": 0.0, "n": 1319.0, "pass@1": 0.5, "pass@8": 0.75}
METRICS = {f"validation/{name}/{figure}": value for name in NAMES for figure, value in FIGURES.items()}


def test_every_source_has_its_rows_and_its_whole_name(capsys: pytest.CaptureFixture[str]) -> None:
    show(METRICS, {"validation/openai/gsm8k/pass@1": (0.473, 0.527)})
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
    show(METRICS, {})
    lines = screen.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines) and "\u2026" not in screen.getvalue()
    first = [line.split("  ")[0].strip() for line in lines]
    assert all(name in "".join(first) for name in NAMES)


def test_characters_that_the_output_lacks_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", file)
    show({f"validation/数学/{figure}": value for figure, value in FIGURES.items()}, {})
    file.flush()
    assert isinstance(file.buffer, io.BytesIO) and b"?? " in file.buffer.getvalue()


def test_the_whole_counts_each_row_once_whatever_its_source_is_called() -> None:
    def group(source: str, score: float) -> Group:
        one = Trajectory(turns=(), reward=score, score=score, outcome=Outcome.OK)
        return Group(index=0, task=Task(id="", prompt="x", source=source), trajectories=(one,), start_version=0)

    found = measure([group("all", 1.0), group("math", 0.0)], [1])
    assert (found["validation/all/n"], found["validation/all/score"], found["validation/math/n"]) == (2.0, 0.5, 1.0)


def group_of(*scores: float, extra: Any = None, prompt: str = "x") -> Group:
    answers = tuple(Trajectory(turns=(), reward=s, score=s, outcome=Outcome.OK) for s in scores)
    task = Task(id="", prompt=prompt, source="s", columns={"extra_info": extra} if extra else {})
    return Group(index=0, task=task, trajectories=answers, start_version=0)


@pytest.mark.parametrize(
    ("scores", "threshold", "score", "right"),
    [
        ([(0.0,), (1.0,)], 0.0, 0.5, 0.5),
        ([(0.7,), (0.9,)], 0.0, 0.8, None),  # no right and wrong
        ([(0.7,), (0.9,)], 0.8, 0.8, 0.5),
        ([(1.0,), (3.0,)], 0.0, 2.0, None),
        ([(1.0, 1.0, 1.0), (0.0,)], 0.0, 0.5, 0.5),  # a row with more answers weighs as much as another
    ],
)
def test_answers_are_right_or_wrong_only_where_scores_are(
    scores: list[tuple[float, ...]], threshold: float, score: float, right: float | None
) -> None:
    found = measure([group_of(*own) for own in scores], [1], threshold)
    assert found["validation/all/score"] == pytest.approx(score)
    assert found.get("validation/all/pass@1") == right


def test_a_source_without_right_answers_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    groups = [group_of(0.25), group_of(0.75)]
    show(measure(groups, [1]), {name: interval(each) for name, each in by_prompt(groups, [1]).items()})
    row = ["s", "2", "score", "0.500", "0.250", "-", "0.750"]
    assert capsys.readouterr().out.splitlines()[2].split()[:7] == row
    assert "validation.threshold=0.5" in ruled(groups, 0.0) and "at least 0.5" in ruled(groups, 0.5)
    assert ruled([group_of(0.0)], 0.0) == ""


def test_what_it_took_has_every_turn_and_what_failed() -> None:
    said = Completion(tokens=(5, 2), logprobs=(-1.0, -1.0), versions=(0, 0), stop=Stop.STOP)
    turns = (Turn(prompt=(1, 2, 3), completion=said), Turn(prompt=(1, 2, 3, 5, 2, 4), completion=said))
    good = Trajectory(turns=turns, reward=1.0, score=1.0, outcome=Outcome.OK)
    bad = Trajectory(turns=turns[:1], reward=nan, score=nan, outcome=Outcome.TIMEOUT)
    assert tokens([replace(group_of(1.0), trajectories=(good, bad))]) == {"prompts": 12, "answers": 6}


def test_intervals_are_over_prompts_not_answers() -> None:
    """Eight answers to each of four prompts are four values, not 32."""
    groups = [group_of(*[score] * 8) for score in (0.0, 0.0, 1.0, 1.0)]
    assert by_prompt(groups, [1])["validation/all/pass@1"] == [0.0, 0.0, 1.0, 1.0]


def record(path: Path, scores: list[float | None], data: str = "d") -> Path:
    answers = [{"source": "s", "id": str(i), "score": score} for i, score in enumerate(scores)]
    path.write_text(json.dumps({"data": data, "answers": answers}))
    return path


def test_two_models_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    before = Baseline.read(str(record(tmp_path / "a.json", [0.0] * 10 + [1.0] * 10 + [None])))
    after = json.loads(record(tmp_path / "b.json", [1.0] * 8 + [0.0, None] + [1.0] * 10 + [1.0]).read_text())
    (change,) = before.against("d", after["answers"])
    assert change.prompts == 19 and change.before == pytest.approx(10 / 19) and change.after == pytest.approx(18 / 19)
    assert change.p == 2 / 2**8  # eight prompts changed, all for the better
    assert 0.15 < change.low < 8 / 19 < change.high < 0.7
    assert "better by 0.421" in str(change) and "p = 0.0078, 19 prompts" in str(change)
    assert ", equal (95 %" in str(before.against("d", json.loads((tmp_path / "a.json").read_text())["answers"])[0])
    with pytest.raises(BirlError, match="other questions"):
        before.against("e", after["answers"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"data": 1, "answers": 3}', '{"data": "d", "answers": [{}]}'])
def test_what_is_no_evaluation_is_no_baseline(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BirlError, match="output=FILE"):
        Baseline.read(str(tmp_path / "x.json"))
    with pytest.raises(BirlError, match="cannot be read"):
        Baseline.read(str(tmp_path / "none.json"))


def test_greedy_answers_to_one_prompt_are_told_to_be_equal() -> None:
    task = group_of(1.0, extra={"pass@k": 4}).task
    greedy = plan([task], Validation(), 8)
    assert "pass@4 is pass@1" in greedy.greedy_repeats
    assert not plan([task], Validation(temperature=1.0), 8).greedy_repeats
    assert not plan([group_of(1.0).task], Validation(), 8).greedy_repeats


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), 1e300, 0, -3, 2.5, "8", True, 10**9])
def test_a_rows_own_number_of_answers_is_a_whole_one(wrong: object) -> None:
    with pytest.raises(BirlError, match=r"extra_info.pass@k is .*whole number from 1 to 100000"):
        plan([group_of(1.0, extra={"pass@k": wrong}).task], Validation(), 8).greedy_repeats  # noqa: B018
    assert own_k(group_of(1.0, extra={"pass@k": 4.0}).task) == 4 and own_k(group_of(1.0, extra={}).task) == 1
    with pytest.raises(BirlError, match="extra_info is an object written as text"):
        own_k(group_of(1.0, extra='{"pass@k": 4}').task)


@pytest.mark.parametrize(("template", "said"), [(True, ""), (False, "no chat template")])
def test_text_prompts_of_a_model_without_a_chat_template_are_told(
    template: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_plain(SimpleNamespace(has_template=template), [group_of(1.0).task])  # pyright: ignore[reportArgumentType]
    out = capsys.readouterr().out
    assert said in out and bool(out) == bool(said)


@pytest.mark.parametrize(("tensorboard", "number"), [(True, 4), (False, 3)])
def test_the_next_commands_are_those_that_work(tensorboard: bool, number: int) -> None:
    found = next_commands(Path("runs/a run"), True, True, tensorboard)
    assert len(found) == number and "birl view 'runs/a run'" in found
    assert any("tensorboard" in command for command in found) is tensorboard
    assert next_commands(Path("x"), finished=False) == ["run the same command again to go on"]
