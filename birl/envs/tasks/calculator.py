"""Sums that are too large for the head, and a calculator to call: OpenAI's tool calls, through the model's own chat
template."""

import json
import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from birl.envs.tasks.answer import number
from birl.envs.tasks.expression import NoExpression, evaluate
from birl.envs.tasks.rows import Drawn, Row, answered, at_least, drawn
from birl.types import Conversation, Feedback, Message, Task, ToolCall

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The exact value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers, + - * / and parentheses, as in (12 + 3) * 4.",
                }
            },
            "required": ["expression"],
        },
    },
}


class Calculator:
    """The reward is 1 where the last number of the reply without calls is the result, else 0. What is wrong with a call
    is told to the model, as a tool's answer."""

    tools = (CALCULATOR,)

    @dataclass(kw_only=True)
    class Config(Drawn):
        digits: int = 4
        """Digits of the largest operands."""
        turns: int = 4
        """Replies; then the episode ends without an answer. At most env.max_turns count."""
        validation_rows: int = 100
        """Held-out tasks. No expression is in both."""

        def __post_init__(self) -> None:
            self.check(
                "calculator",
                digits="" if 1 <= self.digits <= 12 else f"is {self.digits}, must be from 1 to 12",
                turns=at_least(self.turns, 2),
            )

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        def draw(rng: random.Random) -> tuple[str, Row]:
            a, b, c = (rng.randint(2, 10**config.digits - 1) for _ in range(3))
            expression = f"{a} * {b} {rng.choice('+-')} {c}"
            prompt = f"What is {expression}? Use the calculator, then say the result."
            row = {"prompt": prompt, "answer": str(evaluate(expression)[0]), "expression": expression}
            return expression, {**row, "data_source": "calculator"}

        return drawn(draw, config, split, "calculator")

    @staticmethod
    def gold(task: Task) -> list[Message | str]:
        expression = task.columns.get("expression")
        call = ToolCall(name="calculator", arguments=json.dumps({"expression": expression}), id="call-1")
        first = [Message(role="assistant", content="", tool_calls=(call,))] if expression else []
        return [*first, f"The result is {task.answer}."]

    def __init__(self, task: Task, config: Config) -> None:
        self.task, self.config = task, config
        self.turn = self.calls = 0

    async def start(self) -> Conversation:
        return self.task.prompt

    async def step(self, reply: Message) -> Feedback:
        self.turn += 1
        if not reply.tool_calls:
            right = number(reply.content) == Fraction(answered(self.task))
            return Feedback(reward=float(right), info={"calculator/calls": float(self.calls)})
        self.calls += len(reply.tool_calls)
        told = tuple(
            Message(role="tool", content=called(call), tool_call_id=call.id, name=call.name)
            for call in reply.tool_calls
        )
        return Feedback(messages=told, done=self.turn >= self.config.turns)

    async def close(self) -> None:
        pass


def called(call: ToolCall) -> str:
    """What the calculator says."""
    if call.name != "calculator":
        return f"Error: there is no tool {call.name}; there is calculator."
    expression: Any = json.loads(call.arguments).get("expression")
    if not isinstance(expression, str):
        return "Error: the calculator needs an expression, as text."
    try:
        return written(evaluate(expression)[0])
    except NoExpression as error:
        return f"Error: {error}."


def written(value: Fraction) -> str:
    """A whole number as it is; other numbers to 12 digits."""
    try:
        return str(value) if value.denominator == 1 else f"{float(value):.12g}"
    except OverflowError:
        return f"{value.numerator // value.denominator}"
