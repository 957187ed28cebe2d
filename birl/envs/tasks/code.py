"""Write a function that passes its unit tests, which run in a sandbox. One turn."""

import random
from dataclasses import dataclass

from birl.envs.tasks.problems import problems
from birl.envs.tasks.problems import row as problem_row
from birl.envs.tasks.rows import Row, at_least, check_keys, column, count, drawn
from birl.sandbox.code import cases, last_block, run_tests
from birl.sandbox.open import open_sandbox
from birl.sandbox.protocol import Limits, Sandbox
from birl.types import Conversation, Feedback, Message, Task


class Code:
    """The reward is 1 where the last ```python block of the answer passes all tests. With `partial` it is the share of
    the tests that pass; the score is 1 or 0 all the same. What the tests are: docs/sandbox.md."""

    @dataclass(kw_only=True)
    class Config:
        partial: bool = False
        """Whether the reward is the share of tests that pass."""
        tests: int = 5
        """Tests of each problem."""
        seconds: float = 2.0
        """Longest a test may run [s]."""
        memory_mb: int = 256
        """Memory of a test [MiB]."""
        sandbox: str = "auto"
        """Where tests run: auto (the best that works here) | a kind of docs/sandbox.md."""
        workers: int = 0
        """Tests that run at once. 0: one for each core."""
        rows: int = 100
        """Training tasks; there are about 120."""
        validation_rows: int = 20
        """Held-out tasks. No problem with its numbers and letters is in both."""
        seed: int = 0
        """Seed of the choice of tasks."""

        def __post_init__(self) -> None:
            check_keys(
                "code",
                tests=at_least(self.tests, 1),
                seconds="" if self.seconds > 0 else f"is {self.seconds:g}, must be above 0",
                memory_mb=at_least(self.memory_mb, 32),
                workers=at_least(self.workers, 0),
                rows=at_least(self.rows, 1),
                validation_rows=at_least(self.validation_rows, 0),
            )

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        known = problems()

        def draw(rng: random.Random) -> tuple[str, Row]:
            family, k, c = rng.choice(known)
            return f"{family.name} {k} {c}", problem_row(family, k, c, config.tests)

        return drawn(draw, count(config, split), split, config.seed, "code")

    @classmethod
    async def shared(cls, config: Config) -> Sandbox:
        return await open_sandbox(config.sandbox, workers=config.workers)

    @staticmethod
    def gold(task: Task) -> list[str]:
        return [f"```python\n{task.answer}\n```"]

    def __init__(self, task: Task, config: Config, shared: Sandbox) -> None:
        self.task, self.config, self.sandbox = task, config, shared

    async def start(self) -> Conversation:
        return self.task.prompt

    async def step(self, reply: Message) -> Feedback:
        tests, solution = cases(column(self.task, "tests")), last_block(reply.content)
        if not solution.strip():
            return Feedback(reward=0.0, info={"code/passed": 0.0})
        try:
            report = await run_tests(self.sandbox, solution, tests, limits(self.config.seconds, self.config.memory_mb))
        except ExceptionGroup as several:  # the tests run at once; the first problem says enough
            raise several.exceptions[0] from None
        passed = report.share == 1
        return Feedback(
            reward=report.share if self.config.partial else float(passed),
            score=float(passed),
            info={"code/passed": report.share},
        )

    async def close(self) -> None:
        pass


def limits(seconds: float, memory_mb: int) -> Limits:
    return Limits(seconds=seconds, cpu_seconds=max(1, round(seconds + 0.5)), memory_mb=memory_mb)
