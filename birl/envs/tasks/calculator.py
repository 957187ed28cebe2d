"""Sums that are too large for the head, and a calculator to call: OpenAI's tool calls, through the model's own chat
template."""

import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from birl.envs.tasks.rows import NoExpression, Row, drawn, evaluate
from birl.envs.tasks.tooled import Tooled, Turns, text_tool

EXPRESSION = "Numbers, + - * / and parentheses, as in (12 + 3) * 4."
CALCULATOR = text_tool("calculator", "The exact value of an arithmetic expression.", "expression", EXPRESSION)


class Calculator(Tooled):
    kind, tools = "calculator", (CALCULATOR,)

    @dataclass(kw_only=True)
    class Config(Turns):
        digits: Annotated[int, Field(ge=1, le=12)] = 4
        """Number of digits of the largest operands."""

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        def draw(rng: random.Random) -> tuple[str, Row]:
            a, b, c = (rng.randint(2, 10**config.digits - 1) for _ in range(3))
            expression = f"{a} * {b} {rng.choice('+-')} {c}"
            prompt = f"What is {expression}? Use the calculator, then say the result."
            row = {"prompt": prompt, "answer": str(evaluate(expression)[0]), "expression": expression}
            return expression, {**row, "data_source": "calculator"}

        return drawn(draw, config, split, "calculator")

    async def use(self, given: str) -> str:
        try:
            return written(evaluate(given)[0])
        except NoExpression as error:
            return f"Error: {error}."


def written(value: Fraction) -> str:
    """An integer in full; other numbers to 12 digits."""
    try:
        return str(value) if value.denominator == 1 else f"{float(value):.12g}"
    except OverflowError:
        return f"{value.numerator // value.denominator}"
