"""Rewards through their public face: values, columns, logging, and what is refused at the start."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from birl.errors import BirlError
from birl.rewards.score import Rewards, Score
from tests.rewards.mine import FUNCTIONS, local_async, local_length, score, values

pytestmark = pytest.mark.usefixtures("folder")


def test_mean_without_weights_sum_with_them() -> None:
    functions = ["mine.py:by_length", local_async, local_length]
    scores = score(functions, ["abcd", ""])
    assert values(scores) == pytest.approx([10 / 3, 2 / 3])
    assert scores[0].parts == {"by_length": 4.0, "local_async": 2.0, "local_length": 4.0}
    assert values(score(functions, ["abcd", ""], weights=[1.0, 0.5, -2.0])) == [-3.0, 1.0]


def test_options_reach_their_function() -> None:
    options = {"format_pattern": r"^\d+$", "length_target": 4}
    scores = score(["format", "length"], ["1234", "x" * 6], options=options, columns={"pattern": ["x", "x"]})
    assert [dict(s.parts) for s in scores] == [{"format": 1.0, "length": 1.0}, {"format": 0.0, "length": 0.5}]


def test_default_format_and_length() -> None:
    good = "<think>\n3 + 4\n</think> <answer>7</answer>\n"
    assert values(score(["format"], [good, good + "x", "7"])) == [1.0, 0.0, 0.0]
    assert values(score(["length"], ["", "x" * 256, "x" * 384, "x" * 999])) == [1.0, 1.0, 0.5, 0.0]


def test_columns_prompts_and_gold() -> None:
    columns = {"level": [2, 3], "other": ["a", "b"]}
    assert values(score(["mine.py:columns"], ["x", "y"], columns=columns, gold=["7", "7"])) == [1.0, 0.0]
    assert values(score(["mine.py:only_named"], ["x", "y"], columns=columns)) == [2.0, 3.0]
    own = {**columns, "gold": ["0", "7"], "level": [2, 2]}
    assert values(score(["mine.py:columns"], ["x", "y"], columns=own, gold=["7", "7"])) == [1.0, 1.0]
    assert values(score(["mine.py:columns"], ["x", "y"], columns=own, gold=[None, None])) == [0.0, 1.0]  # no answers


def test_messages_and_unicode_survive_the_pipe() -> None:
    def check(prompts: list[Any], completions: list[str], **_: Any) -> list[float]:
        return [1.0]

    async def main() -> Score:
        async with Rewards([check, "mine.py:by_length"], weights=[0, 1]) as rewards:
            prompt = [{"role": "user", "content": "é"}]
            return (await rewards.score([prompt], ["é\n\u2028\ud800" + "x" * 200_000], {}, [None]))[0]

    assert asyncio.run(main()).value == 200_004


@pytest.mark.parametrize("function", ["mine.py:needs", lambda completions, difficulty: [0.0]])
def test_a_column_that_does_not_exist(function: Any) -> None:
    with pytest.raises(BirlError, match=r"parameter 'difficulty'.*no such column.*completions, gold, level, prompts"):
        score([function], ["x"], columns={"level": [1]})


def test_columns_that_json_cannot_carry(caplog: pytest.LogCaptureFixture) -> None:
    pictures = {"level": [object()]}
    with pytest.raises(BirlError, match=r"'only_named' asks for column 'level'.*\(object\)"):
        score(["mine.py:only_named"], ["x"], columns=pictures)
    assert values(score(["mine.py:by_length"], ["x"], columns=pictures)) == [1.0]
    assert "does not get column 'level'" in caplog.text
    assert values(score([lambda completions, level: [1.0]], ["x"], columns=pictures)) == [1.0]


def test_uneven_columns_and_empty_calls() -> None:
    assert score(["length"], []) == []
    with pytest.raises(ValueError, match="2 completions, but"):
        score(["length"], ["a", "b"], columns={"level": [1]})


async def test_a_column_named_gold_does_not_replace_the_right_answer() -> None:
    def seen(completions: list[str], gold: list[str], **_: object) -> list[float]:
        return [float(g) for g in gold]

    async with Rewards([seen]) as rewards:
        assert [s.value for s in await rewards.score(["q"], ["a"], {"gold": ["9"]}, ["7"])] == [7.0]


def test_same_names_are_told_apart(folder: Path) -> None:
    (folder / "other.py").write_text(FUNCTIONS)
    names = Rewards(["mine.py:bad", "other.py:bad", local_length, local_length]).names
    assert names == ["mine.py:bad", "other.py:bad", "local_length", "local_length_2"]


def test_a_file_named_like_a_module(folder: Path) -> None:
    (folder / "neighbour.py").write_text("WORTH = 5")
    (folder / "math.py").write_text("import neighbour\ndef score(completions, **_):\n    return [neighbour.WORTH]")
    os.chdir("/")  # relative paths hold for the place where Rewards was made; the package must be found from anywhere
    assert values(score([f"{folder}/math.py:score", "math"], ["7"], gold=["7"])) == [3.0]
    os.chdir(folder)
    (folder / "package").mkdir()
    (folder / "queue.py").write_text("raise RuntimeError('not the standard module')")
    (folder / "package/rewards.py").write_text("def score(completions, **_):\n    return [5]")
    assert values(score(["package.rewards:score"], ["7"])) == [5.0]


STATE = {"global_step": 3, "max_steps": 9}


def local_logging(
    completions: Any, completion_ids: Any, trainer_state: Any, log_extra: Any, log_metric: Any
) -> list[float]:
    log_extra("shouted", [c.upper() for c in completions])
    log_metric("longest", max(map(len, completions)))
    log_metric("longest", 0)
    return [float(trainer_state.global_step / trainer_state.max_steps * len(ids)) for ids in completion_ids]


LOGGING = """
def by_name(completions, **kwargs):
    kwargs["log_extra"]("length", [len(c) for c in completions])
    kwargs["log_extra"]("large", [10**5000 for _ in completions])
    kwargs["log_metric"]("calls", 1)
    if "raise" in completions: raise ValueError
    return [kwargs["trainer_state"].global_step] * len(completions)
"""


def test_functions_log_and_know_how_far_the_run_is(folder: Path) -> None:
    (folder / "logging_.py").write_text(LOGGING)

    async def main() -> list[Score]:
        async with Rewards(["logging_.py:by_name", local_logging], weights=[1, 3]) as rewards:
            ids = {"completion_ids": [[1], [1, 2], [1, 2, 3]]}
            return await rewards.score(["p"] * 3, ["a", "raise", "bcd"], ids, [None] * 3, STATE)

    first, broken, last = asyncio.run(main())
    assert values([first, last]) == [4.0, 6.0] and "ValueError" in broken.detail
    assert first.extra["large"] == last.extra["large"] == hex(10**5000)
    first, last = (replace(one, extra={k: v for k, v in one.extra.items() if k != "large"}) for one in (first, last))
    assert (dict(first.extra), dict(last.extra)) == ({"length": 1, "shouted": "A"}, {"length": 3, "shouted": "BCD"})
    assert dict(first.logged) == {"calls": 1.0, "longest": 2.5}


def test_completions_of_messages_are_text_for_our_own_functions() -> None:
    seen: list[Any] = []

    def theirs(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    spoken: list[Any] = [[{"role": "assistant", "content": "#### 7"}]]
    assert score(["math", theirs], spoken, gold=["7"])[0].parts == {"math": 1.0, "theirs": 0.0}
    assert seen == spoken


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("maths", "no reward function 'maths'. Did you mean math"),
        ("mine.py", "write mine.py:my_function"),
        ("mime.py:bad", "no file mime.py .* Did you mean mine.py"),
        ("mine.py:", "must look like"),
        ("mine.py:by_lenght", "no function 'by_lenght'. Did you mean by_length"),
        ("mine.py:constant", "'constant' in .* is a int, not a function"),
        ("no.such.module:score", "no module 'no.such.module'"),
        ("broken.py:score", r"broken.py:2: SyntaxError"),
        ("raises.py:score", r"raises.py:2: ImportError: install me"),
        ("missing.py:score", r"missing.py:1: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("dies.py:score", r"died \(exit code 5\)"),
        (7, "must be a name or a callable, not a int"),
    ],
)
def test_unusable_functions(function: Any, message: str, folder: Path) -> None:
    (folder / "broken.py").write_text("x = 1\ndef score(:\n")
    (folder / "raises.py").write_text("x = 1\nraise ImportError('install me')\n")
    (folder / "missing.py").write_text("import nowhere_to_be_found\n")
    (folder / "dies.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(BirlError, match=message):
        score([function], ["x"])
