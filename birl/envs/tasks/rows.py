"""Rows of generated tasks: seeded, and never the same problem in both splits; and what an answer says in the end: its
last `<answer>...</answer>`, where it has one, else all of it, the last number in that, and the exact value of an
expression of numbers, which is parsed, never evaluated as Python."""

import ast
import hashlib
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from birl.config.schema.kinds import Count, Whole
from birl.errors import BirlError
from birl.types import Message, Task

Row = dict[str, Any]
Replies = Annotated[int, Field(ge=2)]  # the last one answers
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[-\u2212]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")
SPELLED = "zero one two three four five six seven eight nine ten eleven twelve"
WORDS = {word: n for n, word in enumerate(SPELLED.split())}
LONGEST = 100_000  # characters that are read, from the end
EXPRESSION = 200  # characters of an expression: bounds the size of the numbers and the depth of the parser
ALLOWED = re.compile(r"[\d+\-*/().\s]+")
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
AS_ASCII = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "[": "(", "]": ")"})


@dataclass(kw_only=True)
class Drawn:
    """The keys that all tasks have whose rows are drawn."""

    rows: Count = 1000
    """Training tasks."""
    validation_rows: Whole = 100
    """Held-out tasks. No problem is in both splits."""
    seed: int = 0
    """Seed of the tasks."""

    def size(self, split: str) -> int:
        return self.rows if split == "train" else self.validation_rows


def held_out(problem: str, share: float = 0.2) -> bool:
    """Whether a problem belongs to validation, by its text only, so that no seed moves it to the other split."""
    return int.from_bytes(hashlib.blake2b(problem.encode(), digest_size=4).digest(), "little") < share * 2**32


def drawn(draw: Callable[[random.Random], tuple[str, Row]], config: Drawn, split: str, kind: str) -> list[Row]:
    """Different rows of one split. `draw` returns a problem, which determines the split, and its row."""
    rng, rows = random.Random(f"{kind}/{split}/{config.seed}"), config.size(split)
    result: dict[str, Row] = {}
    for _ in range(100 * rows + 10_000):
        if len(result) == rows:
            return list(result.values())
        problem, row = draw(rng)
        if held_out(problem) == (split == "validation"):
            result.setdefault(row["prompt"], row)
    raise BirlError(
        f"env.kind={kind}: there are only {len(result)} different {split} tasks of {rows}. Lower "
        f"env.{'rows' if split == 'train' else 'validation_rows'}, or make the problems larger (docs/tasks.md)."
    )


def column(task: Task, name: str) -> Any:
    """A column that an environment needs. Users' rows may lack it."""
    if task.columns.get(name) is None:
        raise BirlError(f"{task.place} has no column {name!r}, which the environment needs")
    return task.columns[name]


def answered(task: Task) -> str:
    if task.answer is None:
        raise BirlError(f"{task.place} has no answer, which the environment needs")
    return task.answer


def answered_number(task: Task) -> Fraction:
    if (value := number(answered(task))) is None:
        raise BirlError(f"{task.place}: its answer {task.answer!r} is no number, which the environment needs")
    return value


def final(text: str) -> str:
    text = text[-LONGEST:]
    result = ANSWER.findall(text)
    return (result[-1] if result else text).strip()


def number(text: str, words: bool = False) -> Fraction | None:
    """The last number. With `words`, a number may be a word, as in "three times"."""
    text = final(text)
    result = [(m.start(), m[0]) for m in NUMBER.finditer(text)]
    if words:
        spelled = [(m.start(), m[0].lower()) for m in re.finditer(r"[A-Za-z]+", text)]
        result += [(place, str(WORDS[word])) for place, word in spelled if word in WORDS]
    if not result:
        return None
    digits = max(result)[1].replace(",", "").replace("\u2212", "-")
    return Fraction(digits) if len(digits) <= 1000 else None


def normal(text: str) -> str:
    """Normalise an answer in words: lower case, without articles, punctuation and superfluous blanks."""
    words = re.findall(r"[^\W_]+", text.lower())
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def user_message(text: str) -> tuple[Message, ...]:
    """Text of the environment as messages."""
    return (Message(role="user", content=text),)


class NoExpression(ValueError):
    """The text is no expression, or it has no value. The message says why."""


def evaluate(text: str) -> tuple[Fraction, list[Fraction]]:
    """The value, and the numbers that are used, from left to right. Raises `NoExpression`.

    Example: evaluate("(7 - 3) * 6") == (24, [7, 3, 6])
    """
    text = text.translate(AS_ASCII).strip()
    if len(text) > EXPRESSION:
        raise NoExpression(f"it is longer than {EXPRESSION} characters")
    if not ALLOWED.fullmatch(text):
        raise NoExpression("only numbers, + - * / and parentheses are allowed")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise NoExpression("it is not a complete expression") from None
    used: list[Fraction] = []
    try:
        return _value(tree.body, text, used), used
    except ZeroDivisionError:
        raise NoExpression("it divides by zero") from None


def _value(node: ast.expr, text: str, used: list[Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            # of the text, not of the float that Python parsed: 0.1 is a tenth
            used.append(Fraction(ast.get_source_segment(text, node) or ""))
            return used[-1]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text, used)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            first = _value(left, text, used)
            return OPERATIONS[type(op)](first, _value(right, text, used))
        case _:
            raise NoExpression("only + - * / and parentheses are allowed")
