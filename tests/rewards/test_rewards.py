"""Rewards through their public face: values, columns, and everything that a reward function can do wrong."""

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from birl.errors import BirlError
from birl.rewards.score import Rewards, Score
from birl.types import UNSCORED, Outcome

FUNCTIONS = '''
import asyncio, json, os, signal, subprocess, sys, time

constant = 3

def by_length(completions, **_):
    return [len(c) for c in completions]

def columns(completions, prompts, gold, level, **more):
    assert prompts == ["p"] * len(completions) and sorted(more) == ["other"], (prompts, more)
    return [1.0 if g == "7" and l == 2 else 0.0 for g, l in zip(gold, level)]

def only_named(completions, level=None):
    return level

def needs(completions, difficulty):
    return [0.0] * len(completions)

def noisy(completions, **_):
    print('{"values": [99]}')
    os.write(1, b"raw\\n")
    subprocess.run(["echo", "from a child"])
    assert sys.stdin.read() == ""
    return [1.0] * len(completions)

def bad(completions, **_):
    """Does what a completion says. A good one is worth the number of completions in the call."""
    for c in completions:
        if c == "hang":
            while True: pass
        if c == "sleep with child":
            child = subprocess.Popen(["sleep", "300"])
            open("worker.pid", "w").write(str(os.getpid()))
            open("child.pid", "w").write(str(child.pid))
            time.sleep(300)
        if c == "raise": raise KeyError("no such thing")
        if c == "json": json.loads("{")
        if c == "exit": os._exit(3)
        if c == "sys.exit": sys.exit(4)
        if c == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        if c == "memory": raise MemoryError
    return [{"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0"}.get(c, len(completions))
            for c in completions]

def too_few(completions, **_): return [1.0] * (len(completions) - 1)
def one_number(completions, **_): return 1.0
def slow(completions, **_): time.sleep(1.5 * len(completions)); return [1.0] * len(completions)

loops = set()
async def coroutine(completions, **_):
    await asyncio.sleep(0)
    loops.add(asyncio.get_running_loop())
    return [float(len(loops))] * len(completions)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def score(
    functions: list[Any],
    completions: list[str],
    *,
    columns: dict[str, list[Any]] | None = None,
    gold: Sequence[str | None] | None = None,
    **settings: Any,
) -> list[Score]:
    async def main() -> list[Score]:
        async with Rewards(functions, **settings) as rewards:
            n = len(completions)
            return await rewards.score(["p"] * n, completions, columns or {}, list(gold or [None] * n))

    return asyncio.run(main())


def values(scores: list[Score]) -> list[float]:
    assert all(s.outcome is Outcome.OK and not s.detail for s in scores), scores
    return [s.value for s in scores]


def local_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(c)) for c in completions]


async def local_async(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [2.0] * len(completions)


# --- values


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


def test_prints_do_not_disturb_the_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    assert values(score(["mine.py:noisy"], ["a", "b"])) == [1.0, 1.0]
    printed = [capfd.readouterr()]

    def complete() -> bool:
        printed.append(capfd.readouterr())
        return all(text in "".join(p.err for p in printed) for text in ("raw", "from a child"))

    assert wait_for(complete) and not any(p.out for p in printed)


SHOUTS = """
import os, sys

def shout(completions, **_):
    sys.stderr.write("\u00e9" * 500_000)
    sys.stderr.flush()
    os._exit(7)
"""


def test_a_line_of_a_megabyte_is_no_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It was read byte by byte, and told as a whole for every episode."""
    (tmp_path / "shouts.py").write_text(SHOUTS)
    (result,) = score([f"{tmp_path}/shouts.py:shout"], ["a"])
    assert "died (exit code 7): ééé" in result.detail and len(result.detail) < 600
    printed = [capfd.readouterr().err]

    def complete() -> bool:
        printed.append(capfd.readouterr().err)
        return "".join(printed).count("é") == 500_000

    assert wait_for(complete) and "\ufffd" not in "".join(printed)


FORGERS = '''
import os

def forge(completions, **_):
    """Writes a reply of its own to every descriptor; the second answer hangs on the row, the third breaks a line."""
    for text in completions:
        for fd in range(3, 64):
            try:
                os.write(fd, b'half' if text == "half" else b'{"values": [1.0], "extra": {}, "logged": {}}\\n' * 3)
            except OSError:
                pass
    return [0.25 for _ in completions]
'''


def test_replies_cannot_be_forged_by_writing_to_every_descriptor(tmp_path: Path) -> None:
    (tmp_path / "forgers.py").write_text(FORGERS)

    async def main() -> None:
        async with Rewards([f"{tmp_path}/forgers.py:forge"], workers=1) as rewards:
            for text in ("a", "half", "b", "c"):
                for score in await rewards.score(["q"] * 2, [text, text], {}, [None, None]):
                    assert (score.value, score.outcome) == (0.25, Outcome.OK), (text, score)

    asyncio.run(main())


CHANGERS = """
import sys

def answer(reply):
    sys.modules["__main__"].asdict = lambda *_: reply
    return [0.5, 0.5]

def unknown(completions, **_): return answer({"nonsense": 1})
def few(completions, **_): return answer({"values": [1.0]})
def many(completions, **_): return answer({"values": [1.0] * 9})
def listed(completions, **_): return answer([1.0, 1.0])
def worded(completions, **_): return answer({"values": [1.0, 1.0], "extra": 3, "logged": {"a": "b"}})

def closes(completions, **_):
    sys.stdout.close()
    sys.stderr.close()
    return [0.25] * len(completions)
"""


@pytest.mark.parametrize("name", ["unknown", "few", "many", "listed", "worded", "closes"])
def test_a_function_that_changes_its_worker_does_not_end_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "changers.py").write_text(CHANGERS)

    async def main() -> None:
        async with Rewards([f"{tmp_path}/changers.py:{name}"]) as rewards:
            for _ in range(2):
                scores = await rewards.score(["q"] * 2, ["a", "b"], {}, [None] * 2)
                wanted = (Outcome.OK, Outcome.OK) if name == "closes" else (Outcome.ENV_ERROR, Outcome.ENV_ERROR)
                assert tuple(score.outcome for score in scores) == wanted, scores

    asyncio.run(main())


def test_a_column_named_gold_does_not_replace_the_right_answer() -> None:
    def seen(completions: list[str], gold: list[str], **_: object) -> list[float]:
        return [float(g) for g in gold]

    async def main() -> None:
        async with Rewards([seen]) as rewards:
            assert [s.value for s in await rewards.score(["q"], ["a"], {"gold": ["9"]}, ["7"])] == [7.0]

    asyncio.run(main())


@pytest.mark.parametrize("value", [1e200, -1e200, 10**400])
def test_a_number_that_nothing_can_be_computed_with_is_no_reward(value: float) -> None:
    """It would be infinite in float32, and the advantages would be blamed."""

    def large(completions: list[str], **_: object) -> list[float]:
        return [value] * len(completions)

    async def main() -> None:
        async with Rewards([large]) as rewards:
            for score in await rewards.score(["q"] * 2, ["a"] * 2, {}, [None] * 2):
                assert score.outcome is Outcome.ENV_ERROR and "large" in score.detail

    asyncio.run(main())


def test_async_by_name_keeps_one_loop() -> None:
    async def main() -> list[float]:
        async with Rewards(["mine.py:coroutine"]) as rewards:
            return [(await rewards.score(["p"], ["x"], {}, [None]))[0].value for _ in range(3)]

    assert asyncio.run(main()) == [1.0, 1.0, 1.0]


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


# --- what goes wrong


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
        (lambda completions, **_: {0.0, 1.0, 0.5}, "returned set, not a list"),
        (lambda completions, **_: iter(int, 1), "returned over 3 values for 3 completions"),
        (lambda completions, **_: 1 / 0, "test_rewards.py:"),
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


# --- problems at the start


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("maths", "no reward function 'maths'. Did you mean 'math'"),
        ("mine.py", "write mine.py:my_function"),
        ("mime.py:bad", "no file mime.py .* Did you mean mine.py"),
        ("mine.py:", "must look like"),
        ("mine.py:by_lenght", "no function 'by_lenght'. Did you mean 'by_length'"),
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": [1.0, 2.0]}, "2 values for 1 functions"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"workers": 0}, "workers at least 1"),
        ({"options": {"format_patern": "x"}}, "did you mean 'format_pattern'"),
        ({"options": {"format_pattern": "("}}, "not a regular expression"),
        ({"options": {"length_target": 0}}, "length_target must be above 0"),
    ],
)
def test_unusable_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BirlError, match=message):
        Rewards(["math"], **settings)
    with pytest.raises(BirlError, match="empty"):
        Rewards([])


def test_a_file_that_changes_during_the_run(folder: Path) -> None:
    async def main() -> list[Score]:
        async with Rewards(["mine.py:bad"]) as rewards:
            (folder / "mine.py").write_text(FUNCTIONS + "\n# another function from here on\n")
            return await rewards.score(["p"] * 2, ["exit", "a"], {}, [None] * 2)

    scores = asyncio.run(main())
    assert all(s.outcome is Outcome.ENV_ERROR for s in scores) and "was changed during the run" in scores[1].detail


# --- processes


def alive(pid: int) -> bool:
    """Running, zombies not counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers() -> list[int]:
    """This process's children that are workers, zombies included."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            words = (process / "cmdline").read_bytes()
            if parent == os.getpid() and (b"birl.rewards.worker" in words or not words):
                pids.append(int(process.name))
    return sorted(pids)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_close_leaves_nothing_behind() -> None:
    async def main() -> list[Score]:
        before = workers()
        rewards = Rewards(["mine.py:bad"], workers=2)
        await rewards.start()
        assert len(workers()) == len(before) + 2
        call = asyncio.create_task(rewards.score(["p"] * 2, ["hang", "a"], {}, [None] * 2))
        await asyncio.sleep(0.1)
        await rewards.close()
        assert workers() == before
        scores = await call
        with pytest.raises(BirlError, match="closed"):
            await rewards.start()
        return scores

    assert [s.outcome for s in asyncio.run(main())] == [Outcome.ABORTED] * 2


def test_one_object_serves_several_event_loops() -> None:
    rewards = Rewards(["mine.py:by_length", local_length])
    for _ in range(2):
        assert asyncio.run(rewards.score(["p"], ["abc"], {}, [None]))[0].value == 3.0
    asyncio.run(rewards.close())


def test_many_groups_at_once() -> None:
    async def main() -> list[list[Score]]:
        async with Rewards(["mine.py:by_length"], workers=2) as rewards:
            calls = (rewards.score(["p"] * 2, ["x" * i, ""], {}, [None] * 2) for i in range(40))
            return await asyncio.gather(*calls)

    assert [scores[0].value for scores in asyncio.run(main())] == list(range(40))


PARENT = """
import asyncio, os, signal
from birl.rewards.score import Rewards
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
async def main():
    rewards = Rewards(["mine.py:bad"], timeout=60)
    await rewards.start()
    call = asyncio.create_task(rewards.score(["p"], ["sleep with child"], {}, [None]))
    while not os.path.exists("child.pid") or not open("child.pid").read():
        await asyncio.sleep(0.05)
    print(open("worker.pid").read(), flush=True)
    await call
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(how: signal.Signals, folder: Path) -> None:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    child = int((folder / "child.pid").read_text())
    assert alive(worker) and alive(child)
    os.kill(worker, signal.SIGINT)  # Ctrl-C is the parent's business
    time.sleep(0.05)
    assert alive(worker)
    parent.send_signal(how)
    parent.wait(timeout=100)
    parent.stdout.close()
    assert wait_for(lambda: not alive(worker) and not alive(child))


def test_worker_is_light_and_alone() -> None:
    code = "import sys, json, birl.rewards.worker, birl.rewards.score; print(json.dumps(sorted(sys.modules)))"
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "sympy", "datasets"} & set(json.loads(done.stdout))
