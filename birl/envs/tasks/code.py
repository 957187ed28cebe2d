"""Write a function that passes its unit tests, which run in a sandbox. One turn."""

import random
from dataclasses import dataclass

from birl.config.schema.kinds import Count, Positive, Whole
from birl.envs.single_turn import SingleTurn
from birl.envs.tasks.problems import problems
from birl.envs.tasks.problems import row as problem_row
from birl.envs.tasks.rows import Row, column, drawn
from birl.envs.tasks.tooled import Sandboxed, shared_sandbox
from birl.sandbox.code import cases, last_block, run_tests
from birl.sandbox.protocol import Sandbox
from birl.types import Feedback, Message, Task


class Code(SingleTurn):
    """The reward is 1 if the last ```python block of the answer passes all tests. With `partial` it is the share of
    passed tests; the score is still 1 or 0. Format of the tests: docs/sandbox.md."""

    @dataclass(kw_only=True)
    class Config(Sandboxed):
        partial: bool = False
        """Reward the share of passed tests. False: 1 if all tests pass, else 0."""
        tests: Count = 5
        """Tests per problem."""
        seconds: Positive = 2.0
        """Time limit of a test [s]."""
        rows: Count = 100
        """Training tasks; there are about 120."""
        validation_rows: Whole = 20
        """Held-out tasks. No problem with the same numbers and letters is in both splits."""

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        known = problems()

        def draw(rng: random.Random) -> tuple[str, Row]:
            family, k, c = rng.choice(known)
            return f"{family.name} {k} {c}", problem_row(family, k, c, config.tests)

        return drawn(draw, config, split, "code")

    @classmethod
    async def shared(cls, config: Config) -> Sandbox:
        return await shared_sandbox(config)

    @staticmethod
    def gold(task: Task) -> list[str]:
        return [f"```python\n{task.answer}\n```"]

    def __init__(self, task: Task, config: Config, shared: Sandbox) -> None:
        super().__init__(task)
        self.config, self.sandbox = config, shared

    async def step(self, reply: Message) -> Feedback:
        tests, solution = cases(column(self.task, "tests")), last_block(reply.content)
        if not solution.strip():
            return Feedback(reward=0.0, info={"code/passed": 0.0})
        report = await run_tests(self.sandbox, solution, tests, self.config.limits)
        passed = report.share == 1
        return Feedback(
            reward=report.share if self.config.partial else float(passed),
            score=float(passed),
            info={"code/passed": report.share},
        )
