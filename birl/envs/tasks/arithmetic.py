"""Sums, differences and products of two numbers, in several wordings. One turn."""

import random
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from birl.config.schema.kinds import Count, Whole
from birl.envs.single_turn import SingleTurn
from birl.envs.tasks.rows import Drawn, Row, answered_number, drawn, number
from birl.types import Feedback, Message

WORDINGS = {
    "+": ("What is {a} + {b}?", "{a} + {b} = ?", "Add {a} and {b}.", "What is {a} plus {b}?",
          "What is the sum of {a} and {b}?", "Calculate {a} + {b}.", "Which number is {b} more than {a}?"),
    "-": ("What is {a} - {b}?", "{a} - {b} = ?", "Subtract {b} from {a}.", "What is {a} minus {b}?",
          "What is left of {a} when you take away {b}?", "Calculate {a} - {b}.", "Which number is {b} less than {a}?"),
    "*": ("What is {a} * {b}?", "{a} * {b} = ?", "Multiply {a} by {b}.", "What is {a} times {b}?",
          "What is the product of {a} and {b}?", "Calculate {a} * {b}.", "How much is {a} times {b}?"),
}  # fmt: skip
Signs = Annotated[list[Literal["+", "-", "*"]], Field(min_length=1)]


class Arithmetic(SingleTurn):
    """The reward is 1 if the last number of the answer is the result, else 0."""

    @dataclass(kw_only=True)
    class Config(Drawn):
        largest: Annotated[int, Field(ge=2)] = 9
        """Largest operand; the smallest is 1."""
        operations: Signs = field(default_factory=lambda: ["+", "*"])
        """Operations, of + - *. Differences are never negative."""
        rows: Count = 800
        """Training tasks."""
        validation_rows: Whole = 100
        """Held-out tasks. No problem is in both splits, regardless of wording and order of operands."""

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        def draw(rng: random.Random) -> tuple[str, Row]:
            sign, a, b = rng.choice(config.operations), rng.randint(1, config.largest), rng.randint(1, config.largest)
            if sign == "-":
                a, b = max(a, b), min(a, b)
            value = {"+": a + b, "-": a - b, "*": a * b}[sign]
            prompt = rng.choice(WORDINGS[sign]).format(a=a, b=b)
            problem = f"{sign} {min(a, b)} {max(a, b)}"
            return problem, {"prompt": prompt, "answer": str(value), "data_source": "arithmetic"}

        return drawn(draw, config, split, "arithmetic")

    async def step(self, reply: Message) -> Feedback:
        return Feedback(reward=float(number(reply.content) == answered_number(self.task)))
