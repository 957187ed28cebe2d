"""The exact value of an expression of numbers, + - * / and parentheses. Parsed, never evaluated as Python."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST = 200  # characters: bounds the size of the numbers and the depth of the parser
ALLOWED = re.compile(r"[\d+\-*/().\s]+")
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
AS_ASCII = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "[": "(", "]": ")"})


class NoExpression(ValueError):
    """The text is no expression, or it has no value. The message says why."""


def evaluate(text: str) -> tuple[Fraction, list[Fraction]]:
    """The value, and the numbers that are used, from left to right. Raises `NoExpression`.

    Example: evaluate("(7 - 3) * 6") == (24, [7, 3, 6])
    """
    text = text.translate(AS_ASCII).strip()
    if len(text) > LONGEST:
        raise NoExpression(f"it is longer than {LONGEST} characters")
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
