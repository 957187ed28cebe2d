"""Reward functions that hang, die, raise or return what is no reward: an outcome of the answers that they fail on."""

import asyncio
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from birl.rewards.score import Rewards, Score
from birl.types import UNSCORED, Outcome
from tests.rewards.mine import alive, local_length, score, values

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize("value", [1e200, -1e200, 10**400])
async def test_a_number_that_nothing_can_be_computed_with_is_no_reward(value: float) -> None:
    """It would be infinite in float32, and the advantages would be blamed."""

    def large(completions: list[str], **_: object) -> list[float]:
        return [value] * len(completions)

    async with Rewards([large]) as rewards:
        for score in await rewards.score(["q"] * 2, ["a"] * 2, {}, [None] * 2):
            assert score.outcome is Outcome.ENV_ERROR and "large" in score.detail


@pytest.mark.parametrize(
    ("completion", "outcome", "detail"),
    [
        ("hang", Outcome.TIMEOUT, "longer than 5 s"),
        ("sleep with child", Outcome.TIMEOUT, "longer than 5 s"),
        ("raise", Outcome.ENV_ERROR, "mine.py:36: KeyError: 'no such thing'"),
        ("json", Outcome.ENV_ERROR, "mine.py:37: JSONDecodeError: Expecting property name"),
        ("exit", Outcome.ENV_ERROR, "died (exit code 3)"),
        ("sys.exit", Outcome.ENV_ERROR, "mine.py:39: SystemExit: 4"),
        ("segfault", Outcome.ENV_ERROR, "died (SIGSEGV)"),
        ("memory", Outcome.ENV_ERROR, "mine.py:41: MemoryError"),
        ("nan", Outcome.ENV_ERROR, "returned nan"),
        ("inf", Outcome.ENV_ERROR, "returned inf"),
        ("text", Outcome.ENV_ERROR, "returned a str"),
    ],
)
def test_only_the_culprit_fails(completion: str, outcome: Outcome, detail: str, folder: Path) -> None:
    scores = score(["mine.py:bad", local_length], ["a", completion, "b"], timeout=5.0, weights=[1, 0])
    culprit = scores[1]
    assert culprit.outcome is outcome and detail in culprit.detail and culprit.detail.startswith("reward bad: ")
    assert math.isnan(culprit.value) and culprit.parts == {"local_length": float(len(completion))}
    assert "\n" not in culprit.detail
    # the others were scored in one call: a function may compare the completions of a group
    together = 3.0 if "returned" in detail else 2.0
    assert values([scores[0], scores[2]]) == [together, together]
    if completion == "sleep with child":
        assert not alive(int((folder / "child.pid").read_text()))


def test_a_failure_has_its_line_in_a_folder_that_was_deleted(folder: Path) -> None:
    async def main() -> list[Score]:
        async with Rewards([str(folder / "mine.py") + ":bad"]) as rewards:
            shutil.rmtree(gone)
            return await rewards.score(["q"], ["raise"], {}, [None])

    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    assert f"{folder}/mine.py:36: KeyError: 'no such thing'" in asyncio.run(main())[0].detail


def never(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def test_none_means_not_for_this_row(caplog: pytest.LogCaptureFixture) -> None:
    scores = score(["mine.py:bad", local_length], ["a", "none"], weights=[1, 0.5])
    assert values(scores) == [2.5, 2.0]
    assert [dict(s.parts) for s in scores] == [{"bad": 2.0, "local_length": 1.0}, {"local_length": 4.0}]
    assert not caplog.records
    alone = score(["mine.py:bad", never], ["a", "none", "b"])
    assert values([alone[0], alone[2]]) == [1.5, 1.5]
    assert math.isnan(alone[1].value) and alone[1].detail == UNSCORED
    assert "All reward functions returned None for {" in caplog.text and "'completions': 'none'" in caplog.text


def test_all_hang_and_the_total_stays_bounded() -> None:
    scores = score(["mine.py:bad"], ["hang"] * 4 + ["a"], timeout=3.0)
    assert [s.outcome.value for s in scores] == ["timeout"] * 4 + ["ok"]
    assert all("took longer than 3 s" in s.detail for s in scores[:4]), "reward.timeout, also where it had less alone"


def test_a_slow_function_is_told_apart_from_a_hanging_answer() -> None:
    scores = score(["mine.py:slow"], ["a", "b", "c"], timeout=4.0)
    assert {s.outcome for s in scores} == {Outcome.TIMEOUT}
    assert "3 completions together, though each alone is fine; raise reward.timeout" in scores[0].detail


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        ("mine.py:too_few", "reward too_few: returned 2 values for 3 completions"),
        ("mine.py:one_number", "reward one_number: returned float, not a list of 3 numbers"),
        (lambda completions, **_: [1.0], "returned 1 values for 3 completions"),
        (lambda completions, **_: {"a": 1}, "returned dict, not a list"),
        (lambda completions, **_: "good", "returned str, not a list of 3 numbers"),
        (lambda completions, **_: {0.0, 1.0, 0.5}, "returned set, not a list"),
        (lambda completions, **_: iter(int, 1), "returned over 3 values for 3 completions"),
        (lambda completions, **_: 1 / 0, "test_failing.py:"),
    ],
)
def test_wrong_results(function: Any, detail: str) -> None:
    for one in score([function], ["a", "b", "c"]):
        assert one.outcome is Outcome.ENV_ERROR and detail in one.detail and math.isnan(one.value)


def test_local_functions_that_fail() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    def mute(completions: list[str], **_: Any) -> list[float]:
        raise Mute

    (alone,) = score([mute], ["a"])
    assert alone.outcome is Outcome.ENV_ERROR and alone.detail.endswith("Mute")

    def raises(completions: list[str], **_: Any) -> list[float]:
        return [float({"bad": "x"}.get(c, len(completions))) for c in completions]

    scores = score([raises], ["a", "bad", "b"])
    assert [s.outcome.value for s in scores] == ["ok", "env_error", "ok"] and scores[0].value == 2.0
    assert "ValueError: could not convert" in scores[1].detail


def test_hooks_for_exceptions_are_put_back() -> None:
    async def takes(completions: list[str], **_: Any) -> list[float]:
        sys.excepthook = threading.excepthook = None  # type: ignore[assignment]
        return [1.0] * len(completions)

    assert values(score([takes], ["a"])) == [1.0]
    assert callable(sys.excepthook) and callable(threading.excepthook)


async def _sleeps(completions: list[str], **_: Any) -> list[float]:
    if "bad" in completions:
        await asyncio.sleep(300)
    return [1.0] * len(completions)


@pytest.mark.parametrize("function", [_sleeps, lambda completions: _sleeps(completions)])
def test_async_function_that_hangs(function: Callable[..., Any]) -> None:
    scores = score([function], ["a", "bad", "b"], timeout=2.0)
    assert [s.outcome.value for s in scores] == ["ok", "timeout", "ok"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, asyncio.CancelledError])
@pytest.mark.parametrize("kind", ["plain", "async", "returns a coroutine"])
def test_whatever_a_local_function_raises_is_an_error_of_the_environment(error: type, kind: str) -> None:
    def plain(completions: list[str], **_: Any) -> list[float]:
        if "bad" in completions:
            raise error("no")
        return [1.0] * len(completions)

    async def waits(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return plain(completions)

    function = {"plain": plain, "async": waits, "returns a coroutine": lambda completions: waits(completions)}[kind]
    assert [s.outcome.value for s in score([function], ["a", "bad", "b"])] == ["ok", "env_error", "ok"]


def test_thread_that_hangs_is_left_behind() -> None:
    stop = threading.Event()

    def hangs(completions: list[str], **_: Any) -> list[float]:
        if "bad" in completions:
            stop.wait(300)
        return [1.0] * len(completions)

    async def main() -> list[list[Score]]:
        async with Rewards([hangs], timeout=2.0) as rewards:
            calls = (rewards.score(["p", "p"], c, {}, [None, None]) for c in (["a", "bad"], ["a", "b"]))
            return [await call for call in calls]

    first, second = asyncio.run(main())
    stop.set()
    assert [s.outcome.value for s in first] == ["timeout"] * 2 and "cannot be stopped" in first[0].detail
    assert values(second) == [1.0, 1.0]


def test_catastrophic_pattern() -> None:
    options = {"format_pattern": r"^(a+)+$"}
    scores = score(["format"], ["aaa", "a" * 60 + "b", "b"], options=options, timeout=20.0)
    assert [s.outcome.value for s in scores] == ["ok", "timeout", "ok"]
    assert [scores[0].value, scores[2].value] == [1.0, 0.0]


@pytest.mark.parametrize("answer", ["$100000000!$", "9**9**9"])
def test_mathematics_that_hangs(answer: str) -> None:
    scores = score(["math"], ["$2x$", answer, "$x$"], gold=["x+x"] * 3, timeout=20.0)
    assert [s.outcome.value for s in scores][::2] == ["ok", "ok"] and [scores[0].value, scores[2].value] == [1.0, 0.0]
    assert scores[1].outcome is Outcome.TIMEOUT or scores[1].value == 0.0


def test_huge_power_of_numeric_gold_is_decided_or_timed_out() -> None:
    answers = ["9**9**9", "$10^{10^{10}}$", r"\frac{1}{" * 500 + "1" + "}" * 500, "7"]
    scores = score(["math"], answers, gold=["7"] * 4, timeout=20.0)
    assert scores[3].value == 1.0
    assert all(s.value == 0.0 or s.outcome is Outcome.TIMEOUT for s in scores[:3]), scores
