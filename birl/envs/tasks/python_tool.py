"""Questions that want a small program, and a Python interpreter to call. It runs in a sandbox, anew for each call."""

import random
from dataclasses import dataclass

from birl.envs.tasks.rows import Row, drawn
from birl.envs.tasks.tooled import Sandboxed, Tooled, Turns, shared_sandbox, text_tool
from birl.sandbox.code import SandboxFailed
from birl.sandbox.protocol import Ending, Result, Sandbox
from birl.types import Task

ABOUT = "Runs a Python program and gives what it prints. Nothing is kept from one call to the next."
PYTHON = text_tool("python", ABOUT, "code", "The program; it prints its result.")
LONGEST = 2000  # characters of what is printed that the model sees


class PythonTool(Tooled):
    """A failure of the sandbox is an error of the episode."""

    kind, tools = "python_tool", (PYTHON,)

    @dataclass(kw_only=True)
    class Config(Sandboxed, Turns):
        pass

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

    def __init__(self, task: Task, config: Config, shared: Sandbox) -> None:
        super().__init__(task, config)
        self.sandbox, self.limits = shared, config.limits

    async def use(self, given: str) -> str:
        return told(await self.sandbox.run({"main.py": given}, ["python", "main.py"], self.limits))


def told(result: Result) -> str:
    """Output of a run as text for the model. Raises `SandboxFailed`."""
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
    answer, code = sum(map(int, str(base**power))), f"print(sum(map(int, str({base} ** {power}))))"
    return f"What is the sum of the digits of {base} to the power of {power}?", answer, code


def squares(rng: random.Random) -> tuple[str, int, str]:
    low, size, m = rng.randint(1, 99), rng.randint(20, 400), rng.randint(7, 97)
    high = low + size
    answer = sum(n * n for n in range(low, high + 1)) % m
    code = f"print(sum(n * n for n in range({low}, {high} + 1)) % {m})"
    return f"What remains when the sum of the squares of {low} to {high} is divided by {m}?", answer, code


QUESTIONS = (divisible, digits, squares)
