"""Make a target out of given numbers with + - * / and parentheses. One turn."""

import random
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from birl.config.schema.kinds import Count, Decay, Whole
from birl.envs.single_turn import SingleTurn
from birl.envs.tasks.rows import Drawn, NoExpression, Row, column, drawn, evaluate, final
from birl.types import Feedback, Message, Task


class Countdown(SingleTurn):
    """The reward is 1 if the expression has the target as its exact value and uses the given numbers, `partial` if only
    the numbers are right, else 0. The score is 1 or 0."""

    @dataclass(kw_only=True)
    class Config(Drawn):
        count: Annotated[int, Field(ge=2, le=8)] = 3
        """How many numbers are given."""
        largest: Annotated[int, Field(ge=2)] = 20
        """Largest given number; the smallest is 1."""
        target: Count = 100
        """Largest target."""
        use: Literal["exactly_once", "at_most_once"] = "exactly_once"
        """How often each number must or may be used."""
        partial: Decay = 0.0
        """Reward of an expression that uses the numbers correctly but misses the target."""
        rows: Count = 2000
        """Training tasks."""
        validation_rows: Whole = 100
        """Held-out tasks. No set of numbers with its target is in both splits, in any order."""

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        def draw(rng: random.Random) -> tuple[str, Row]:
            while True:
                numbers = [rng.randint(1, config.largest) for _ in range(config.count)]
                value, gold = made(rng, numbers)
                if value.denominator == 1 and 1 <= value <= config.target:
                    break
            target = int(value)
            row = {"prompt": asked(numbers, target, config.use), "answer": gold, "numbers": numbers, "target": target}
            return f"{sorted(numbers)} {target}", {**row, "data_source": "countdown"}

        return drawn(draw, config, split, "countdown")

    @staticmethod
    def gold(task: Task) -> list[str]:
        return [f"<answer>{task.answer}</answer>"]

    def __init__(self, task: Task, config: Config) -> None:
        super().__init__(task)
        self.config = config

    async def step(self, reply: Message) -> Feedback:
        numbers, target = column(self.task, "numbers"), column(self.task, "target")
        expression = final(reply.content).partition("=")[0]
        try:
            value, used = evaluate(expression)
        except NoExpression:
            return Feedback(reward=0.0, info={"countdown/valid": 0.0})
        have, spent = Counter(map(Fraction, numbers)), Counter(used)
        valid = spent == have if self.config.use == "exactly_once" else spent <= have
        right = valid and value == target
        return Feedback(
            reward=1.0 if right else self.config.partial * valid,
            score=float(right),
            info={"countdown/valid": float(valid)},
        )


def asked(numbers: list[int], target: int, use: str) -> str:
    given = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    how = "each exactly once" if use == "exactly_once" else "each at most once"
    return (
        f"Use the numbers {given}, {how}, with + - * / and parentheses to make {target}. "
        "Write the expression as <answer>...</answer>."
    )


def made(rng: random.Random, numbers: list[int]) -> tuple[Fraction, str]:
    """The value and the text of a random expression that uses each number once."""
    parts = [(Fraction(n), str(n)) for n in numbers]
    while len(parts) > 1:
        (a, left), (b, right) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        signs = {"+": a + b, "-": a - b, "*": a * b} | ({"/": a / b} if b else {})
        sign = rng.choice(list(signs))
        parts.append((signs[sign], f"({left} {sign} {right})"))
    value, text = parts[0]
    return value, text[1:-1] if text.startswith("(") else text
