"""Questions that want a small program, and a Python interpreter to call. It runs in a sandbox, anew for each call."""

import json
import random
from dataclasses import dataclass
from fractions import Fraction

from birl.envs.tasks.answer import number
from birl.envs.tasks.rows import Row, answered, at_least, drawn
from birl.envs.tasks.sandboxed import Sandboxed, shared_sandbox
from birl.sandbox.code import SandboxFailed
from birl.sandbox.protocol import Ending, Result, Sandbox
from birl.types import Conversation, Feedback, Message, Task, ToolCall

PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and gives what it prints. Nothing is kept from one call to the next.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program; it prints its result."}},
            "required": ["code"],
        },
    },
}
LONGEST = 2000  # characters of what is printed that the model sees


class PythonTool:
    """The reward is 1 where the last number of the reply without calls is the result, else 0. What goes wrong in a
    program is told to the model; what goes wrong with the sandbox is an error of the episode."""

    tools = (PYTHON,)

    @dataclass(kw_only=True)
    class Config(Sandboxed):
        turns: int = 4
        """Replies; then the episode ends without an answer. At most env.max_turns count."""
        validation_rows: int = 100
        """Held-out tasks. No question is in both."""

        def __post_init__(self) -> None:
            self.check(
                "python_tool",
                turns=at_least(self.turns, 2),
            )

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        def draw(rng: random.Random) -> tuple[str, Row]:
            question, answer, code = rng.choice(QUESTIONS)(rng)
            row = {"prompt": f"{question} Use Python, then say the result.", "answer": str(answer), "code": code}
            return question, {**row, "data_source": "python_tool"}

        return drawn(draw, config, split, "python_tool")

    @classmethod
    async def shared(cls, config: Config) -> Sandbox:
        return await shared_sandbox(config)

    @staticmethod
    def gold(task: Task) -> list[Message | str]:
        code = task.columns.get("code")
        call = ToolCall(name="python", arguments=json.dumps({"code": code}), id="call-1")
        first = [Message(role="assistant", content="", tool_calls=(call,))] if code else []
        return [*first, f"The result is {task.answer}."]

    def __init__(self, task: Task, config: Config, shared: Sandbox) -> None:
        self.task, self.config, self.sandbox = task, config, shared
        self.turn = self.calls = 0

    async def start(self) -> Conversation:
        return self.task.prompt

    async def step(self, reply: Message) -> Feedback:
        self.turn += 1
        if not reply.tool_calls:
            right = number(reply.content) == Fraction(answered(self.task))
            return Feedback(reward=float(right), info={"python_tool/calls": float(self.calls)})
        self.calls += len(reply.tool_calls)
        told = [
            Message(role="tool", content=await self._called(call), tool_call_id=call.id, name=call.name)
            for call in reply.tool_calls
        ]
        return Feedback(messages=tuple(told), done=self.turn >= self.config.turns)

    async def _called(self, call: ToolCall) -> str:
        code = json.loads(call.arguments).get("code")
        if call.name != "python":
            return f"Error: there is no tool {call.name}; there is python."
        if not isinstance(code, str):
            return "Error: python needs code, as text."
        return told(await self.sandbox.run({"main.py": code}, ["python", "main.py"], self.config.limits))

    async def close(self) -> None:
        pass


def told(result: Result) -> str:
    """What the model sees of a run. Raises `SandboxFailed`."""
    if result.ending is Ending.ERROR:
        raise SandboxFailed(f"{result.kind}: {result.detail}")
    printed = result.stdout.decode(errors="replace").rstrip()
    if result.good:
        return printed[:LONGEST] or "(nothing was printed)"
    last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    why = last or result.detail or f"exit code {result.exit_code}"
    return f"{printed[:LONGEST]}\nError: {why[:LONGEST]}".lstrip()


def divisible(rng: random.Random) -> tuple[str, int, str]:
    low, size, p, q = rng.randint(1, 999), rng.randint(500, 5000), rng.randint(3, 29), rng.randint(3, 29)
    high = low + size
    answer = sum(n % p == 0 or n % q == 0 for n in range(low, high + 1))
    code = f"print(sum(n % {p} == 0 or n % {q} == 0 for n in range({low}, {high} + 1)))"
    return f"How many whole numbers from {low} to {high} are divisible by {p} or by {q}?", answer, code


def digits(rng: random.Random) -> tuple[str, int, str]:
    base, power = rng.randint(3, 99), rng.randint(10, 60)
    answer = sum(map(int, str(base**power)))
    return (
        f"What is the sum of the digits of {base} to the power of {power}?",
        answer,
        (f"print(sum(map(int, str({base} ** {power}))))"),
    )


def squares(rng: random.Random) -> tuple[str, int, str]:
    low, size, m = rng.randint(1, 99), rng.randint(20, 400), rng.randint(7, 97)
    high = low + size
    answer = sum(n * n for n in range(low, high + 1)) % m
    code = f"print(sum(n * n for n in range({low}, {high} + 1)) % {m})"
    return f"What remains when the sum of the squares of {low} to {high} is divided by {m}?", answer, code


QUESTIONS = (divisible, digits, squares)
