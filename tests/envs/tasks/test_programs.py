"""Code with unit tests and the Python tool: programs run in a real sandbox, and what they say is not believed."""

import asyncio
import json
from typing import Any

import pytest

from birl.config.schema import Env as Keys
from birl.envs.open import open_world
from birl.envs.tasks.problems import problems
from birl.envs.tasks.problems import row as problem_row
from birl.errors import BirlError
from birl.sandbox.code import SandboxFailed
from birl.sandbox.protocol import Ending, Result
from birl.types import Feedback, Message, Task, ToolCall
from tests.envs.tasks.playing import row


def played(kind: str, options: dict[str, str], task: Task, *episodes: list[str | Message]) -> list[list[Feedback]]:
    """Episodes in one sandbox."""

    async def run() -> list[list[Feedback]]:
        world = await open_world(Keys(kind=kind, options={"workers": "1", **options}), str)
        try:
            found = []
            for replies in episodes:
                env: Any = world.open(task)
                said = [m if isinstance(m, Message) else Message(role="assistant", content=m) for m in replies]
                found.append([await env.step(reply) for reply in said])
            return found
        finally:
            await world.close()

    return asyncio.run(run())


TESTS = {"fn_name": "add", "inputs": [[1, 2], [3, -3], [0, 5], [2, 2]], "outputs": [3, 0, 5, 4]}
ANSWERS = {
    "right": ("def add(a, b):\n    return a + b", 1.0),
    "half": ("def add(a, b):\n    return 3 if a == 1 else 5", 0.5),
    "wrong": ("def add(a, b):\n    return None", 0.0),
    "syntax": ("def add(a, b) return", 0.0),
    "exit": ("import os\nos._exit(0)", 0.0),
    "other name": ("def plus(a, b):\n    return a + b", 0.0),
    "equals everything": (
        "class Same(int):\n    def __eq__(self, other): return True\ndef add(a, b):\n    return Same(99)",
        0.0,
    ),
}


def test_code_is_worth_what_its_tests_say() -> None:
    task = row(answer="-", tests=TESTS)
    replies = [[f"So:\n```python\n{code}\n```"] for code, _ in ANSWERS.values()]
    found = played("code", {"partial": "true"}, task, *replies, ["no code"])
    for (name, (_, share)), (feedback,) in zip(ANSWERS.items(), found, strict=False):
        assert (feedback.reward, feedback.score, feedback.done) == (share, float(share == 1), True), name
        assert feedback.info == {"code/passed": share}
    assert found[-1][0].reward == 0
    half = played("code", {}, task, replies[1])
    assert half[0][0].reward == 0 and half[0][0].info == {"code/passed": 0.5}


def test_lazy_solutions_pass_no_test() -> None:
    for family, k, c in problems():
        tests = problem_row(family, k, c, 5)["tests"]
        for (given,), wanted in zip(tests["inputs"], tests["outputs"], strict=True):
            assert wanted and wanted != given


def call(code: object, name: str = "python") -> Message:
    made = ToolCall(name=name, arguments=json.dumps({"code": code}), id="a")
    return Message(role="assistant", content="", tool_calls=(made,))


CALLS: list[tuple[Message, str]] = [
    (call("print(6 * 7)"), "42"),
    (call("x = 1"), "(nothing was printed)"),
    (call("print('a'); 1 / 0"), "a\nError: ZeroDivisionError: division by zero"),
    (call("print(x"), "Error: SyntaxError: '(' was never closed"),
    (call("print(x)"), "Error: NameError: name 'x' is not defined"),
    (call(7), "Error: python needs code, as text."),
    (call("1", "bash"), "Error: there is no tool bash; there is python."),
    (call("print('y' * 9999)"), "y" * 2000),
]


def test_the_python_tool_answers_whatever_it_is_asked() -> None:
    found = played("python_tool", {"turns": "20"}, row(answer="42"), [m for m, _ in CALLS])
    for (_, told), feedback in zip(CALLS, found[0], strict=True):
        (message,) = feedback.messages
        assert (message.role, message.content, message.tool_call_id) == ("tool", told, "a")
        assert (feedback.reward, feedback.done) == (0, False)


def test_python_tool_episodes() -> None:
    task = row(answer="42")
    slow, good, wrong = played(
        "python_tool", {"seconds": "0.5", "turns": "2"}, task,
        [call("while True: pass"), call("print(1)")], [call("print(42)"), "It is 42."], ["It is 41."],
    )  # fmt: skip
    assert slow[0].messages[0].content.startswith("Error: ") and slow[1].done
    assert (good[1].reward, good[1].done, good[1].info) == (1, True, {"python_tool/calls": 1.0})
    assert wrong[0].reward == 0


def test_a_broken_sandbox_is_an_error_and_no_reward() -> None:
    class Broken:
        kind = "broken"

        async def run(self, *_: object) -> Result:
            return Result(ending=Ending.ERROR, kind="broken", detail="no space left")

    from birl.envs.tasks.code import Code
    from birl.envs.tasks.python_tool import PythonTool

    shared: Any = Broken()
    good = Message(role="assistant", content="```python\ndef add(a, b): return a + b\n```")
    with pytest.raises(SandboxFailed, match="broken: no space left"):
        asyncio.run(Code(row(answer="-", tests=TESTS), Code.Config(), shared).step(good))
    with pytest.raises(SandboxFailed, match="no space left"):
        asyncio.run(PythonTool(row(answer="1"), PythonTool.Config(), shared).step(call("1")))


@pytest.mark.parametrize("kind", ["code", "python_tool"])
def test_a_sandbox_that_there_is_not_is_told(kind: str) -> None:
    with pytest.raises(BirlError, match=r"env\.sandbox=box: must be auto \| zygote"):
        asyncio.run(open_world(Keys(kind=kind, options={"sandbox": "box"}), lambda said: "x"))
