"""Expressions have their exact value or are refused; nothing is run."""

import random
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birl.envs.tasks.countdown import made
from birl.envs.tasks.rows import NoExpression, evaluate


@pytest.mark.parametrize(
    ("text", "value", "used"),
    [
        ("(7 - 3) * 6", 24, [7, 3, 6]),
        ("1 / 3 + 2 / 3", 1, [1, 3, 2, 3]),
        ("8 / (3 - 8 / 3)", 24, [8, 3, 8, 3]),
        ("7 \u00d7 3 \u2212 1 \u00f7 1", 20, [7, 3, 1, 1]),
        ("-(2 - 5)", 3, [2, 5]),
        ("0.1 + 0.2", Fraction(3, 10), [Fraction(1, 10), Fraction(1, 5)]),
    ],
)
def test_values(text: str, value: object, used: list[object]) -> None:
    assert evaluate(text) == (value, used)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "only numbers"),
        ("seven", "only numbers"),
        ("__import__('os').system('touch pwned')", "only numbers"),
        ("2 ** 9", r"only \+ - \* /"),
        ("9**9**9**9", r"only \+ - \* /"),
        ("7 // 2", r"only \+ - \* /"),
        ("2(3)", r"only \+ - \* /"),
        ("(1, 2)", "only numbers"),
        ("1 +", "not a complete"),
        ("(1 + 2", "not a complete"),
        ("1 / (2 - 2)", "divides by zero"),
        ("(" * 150 + "1" + ")" * 40, "not a complete"),
        ("(" * 99 + "1" + ")" * 99, "not a complete|only"),
        ("1 + " * 100 + "1", "longer than 200"),
        ("+5", r"only \+ - \* /"),
    ],
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_everything_else_is_refused_at_once(text: str, told: str) -> None:
    start = time.monotonic()
    try:
        value, _ = evaluate(text)
        assert text.startswith("(((") and value == 1  # newer parsers read it
    except NoExpression as error:
        assert re.search(told, str(error)), error
    assert time.monotonic() - start < 30


@given(st.lists(st.integers(1, 99), min_size=2, max_size=6), st.integers(0, 2**32))
def test_a_made_expression_has_its_value_and_its_numbers(numbers: list[int], seed: int) -> None:
    value, text = made(random.Random(seed), numbers)
    found, used = evaluate(text)
    assert found == value and sorted(used) == sorted(numbers)
