"""The reward `code`: programs of answers against the row's tests, through the worker process, and each of its keys."""

import asyncio
from typing import Any

import pytest

from birl.config.decided import reward_timeout
from birl.config.load import load
from birl.config.schema import RL, Eval, Sandbox
from birl.errors import BirlError
from birl.rewards import code as rewards
from birl.rewards.score import Rewards, Score
from birl.sandbox.code import run_tests
from birl.sandbox.open import open_sandbox
from birl.types import Outcome

GOOD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```"
HALF = "```python\ndef add(a, b):\n    return abs(a + b)\n```"
LOOP = "```python\ndef add(a, b):\n    while True: pass\n```"
TESTS = ["assert add(3, 4) == 7", "assert add(-3, 1) == -2"]


def score(answers: list[str], tests: Any, partial: bool = True, **sandbox: Any) -> list[Score]:
    async def run() -> list[Score]:
        options = {"code_partial": partial, "sandbox": {"workers": 2, **sandbox}}
        async with Rewards(["code"], options=options, timeout=60.0) as found:
            n = len(answers)
            return await found.score(["p"] * n, answers, {"tests": [tests] * n}, [None] * n)

    return asyncio.run(run())


def test_the_share_of_tests_that_pass() -> None:
    found = score([GOOD, HALF, "no program", LOOP], TESTS, seconds=10)
    assert [s.value for s in found] == [1.0, 0.5, 0.0, 0.0] and {s.outcome for s in found} == {Outcome.OK}


def test_a_program_that_was_only_thought_of_is_no_answer() -> None:
    found = score([f"<think>{GOOD}</think>Done.", f"<think>{LOOP}</think>{GOOD}", f"<think>{GOOD}"], TESTS)
    assert [s.value for s in found] == [0.0, 1.0, 0.0]


def test_all_or_nothing() -> None:
    assert [s.value for s in score([GOOD, HALF], TESTS, partial=False)] == [1.0, 0.0]


@pytest.mark.parametrize("tests", [None, [], [7], ["assert len([1]) == 1"]])
def test_bad_tests_are_an_error_and_no_zero(tests: Any) -> None:
    (found,) = score([GOOD], tests)
    assert found.outcome is Outcome.ENV_ERROR and "test" in found.detail


def test_a_sandbox_that_does_not_work_is_an_error_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = score([GOOD], TESTS, kind="docker")
    assert found.outcome is Outcome.ENV_ERROR and "sandbox.kind=docker" in found.detail


def given(monkeypatch: pytest.MonkeyPatch, **keys: Any) -> tuple[list[float], list[Any]]:
    """The rewards of two answers, and how the sandbox and then its programs' time were asked for."""
    asked: list[Any] = []

    async def timed(*args: Any, seconds: float, at_once: int, before: Any = run_tests) -> Any:
        asked.append((args[3].seconds, seconds))
        return await before(*args, seconds=seconds, at_once=at_once)

    async def spied(kind: str, workers: int) -> Any:
        asked.append((kind, workers))
        return await open_sandbox(kind, workers=workers)

    monkeypatch.setattr(rewards, "open_sandbox", spied)
    monkeypatch.setattr(rewards, "run_tests", timed)
    monkeypatch.setattr(rewards, "_open", {})

    async def run() -> list[float]:
        try:
            long = {"workers": 1, "seconds": 60.0, "total_seconds": 120.0}
            return await rewards.code([GOOD, LARGE], [TESTS] * 2, sandbox=long | keys)
        finally:
            for sandbox in rewards._open.values():
                await sandbox.close()

    return asyncio.run(run()), asked


LARGE = "```python\ndef add(a, b):\n    held = bytearray(100 << 20)\n    return a + b\n```"


def test_each_key_has_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(monkeypatch) == ([1.0, 1.0], [("auto", 1), (60.0, 120.0), (60.0, 120.0)])
    found, asked = given(monkeypatch, kind="landlock", workers=3, seconds=50.0, total_seconds=100.0, memory_mb=96)
    assert found == [1.0, 0.0] and asked == [("landlock", 3), (50.0, 100.0), (50.0, 100.0)]


CODE = ["data.train=x.jsonl", "data.validation=x.jsonl", "reward.functions=[code]", "sandbox.workers=2"]


def test_the_deadline_of_the_reward_must_leave_time() -> None:
    with pytest.raises(BirlError, match=r"reward\.timeout=10: the tests of 8 answers, 2 at once, can take 45 s"):
        load(RL, [*CODE, "reward.timeout=10"])
    assert reward_timeout(load(RL, CODE)) == 45 and reward_timeout(load(RL, [*CODE, "reward.timeout=60"])) == 60
    assert reward_timeout(load(Eval, CODE[1:])) == 15 and reward_timeout(load(RL, CODE[:1])) == 10
    assert load(RL, [*CODE, "reward.timeout=45"]).sandbox.workers == 2
    assert load(Eval, [*CODE[1:], "reward.timeout=15"]).sandbox == Sandbox(workers=2)
    with pytest.raises(BirlError, match=r"sandbox\.seconds=20: is longer than the limit of all tests"):
        load(RL, [*CODE, "reward.timeout=99", "sandbox.seconds=20"])


def test_keys_that_nothing_reads_are_refused() -> None:
    with pytest.raises(BirlError, match=r"sandbox\.memory_mb=64: has no effect .* does not name code"):
        load(RL, ["data.train=x.jsonl", "sandbox.memory_mb=64"])
