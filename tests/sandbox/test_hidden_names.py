"""Tests that name the solution only in a text: exec, eval, globals."""

import pytest

from birl.sandbox.protocol import Sandbox
from tests.sandbox.test_code import passed, sandbox  # noqa: F401

RIGHT = "def f(x): return x + 1\ndef gcd(a, b): return gcd(b, a % b) if b else a"
SNIPPETS = (
    "exec('assert f(1) == 2')",
    "assert eval('f(1)') == 2",
    "assert globals()['f'](1) == 2",
    "assert globals().get('f')(1) == 2 and 'f' in globals()",
    "def check():\n    assert eval('f(1)') == 2\ncheck()",
    "def check():\n    exec('assert f(1) == 2')\ncheck()",
    "for i in range(3):\n    exec(f'assert f({i}) == {i + 1}')",
    "name = 'f'\nassert eval(name)(1) == 2",
    "exec(compile('assert f(1) == 2', 'x', 'exec'))",
    "import solution\nassert vars(solution)['f'](1) == 2",
    "import solution\nassert solution.__dict__['f'](1) == 2",
    "assert vars()['f'](1) == 2",
    "assert eval('gcd(4, 6)') == 2 and eval('f(1)') == 2",
    "import math\nassert eval('math.isclose(f(1), 2)')",
)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_solution_may_be_named_in_a_text(sandbox: Sandbox, snippet: str) -> None:  # noqa: F811
    """They scored 0 whatever the solution was."""
    assert passed(sandbox, RIGHT, [snippet]) == [True]
    assert passed(sandbox, RIGHT.replace("x + 1", "x + 2"), [snippet]) == [False]
    assert passed(sandbox, "def g(x): return x + 1", [snippet]) == [False]


@pytest.mark.parametrize(
    "lie",
    [
        "def isclose(*_): return True",
        "def len(x): return 2",
        "class math:\n    isclose = lambda *_: True",
        "def eval(text): return 2\ndef globals(): return {'f': lambda x: 2}",
        "__builtins__ = {}\n__name__ = 'x'",
    ],
)
def test_helpers_in_a_text_do_not_come_from_the_solution(sandbox: Sandbox, lie: str) -> None:  # noqa: F811
    tests = [
        "import math\nassert eval('math.isclose(f(1), 2)')",
        "from math import isclose\nassert isclose(eval('f(1)'), 2)",
        "assert isclose(eval('f(1)'), 2)",
        "from math import isclose\nassert eval('isclose(f(1), 2)')",
        "assert eval('len([f(1)] * 2) == f(1)')",
        "assert eval('f(1)') == 2",
    ]
    assert passed(sandbox, f"def f(x): return 2\n{lie}", tests) == [True] * 6
    assert passed(sandbox, f"def f(x): return 3\n{lie}", tests) == [False] * 6
