"""Unit tests of solutions: the three forms, what passes, partial credit, limits, and data that tests nothing."""

import asyncio
import collections
import decimal
import fractions
import json
from collections.abc import Iterator
from typing import Any

import pytest

from birl.errors import BirlError
from birl.sandbox import values
from birl.sandbox.code import Case, Report, SandboxFailed, cases, last_block, run_tests, same_output
from birl.sandbox.open import open_sandbox
from birl.sandbox.protocol import Ending, Limits, Result, Sandbox
from birl.sandbox.values import same_value

LIMITS = Limits(seconds=30)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    opened = asyncio.run(open_sandbox(workers=2))
    yield opened
    asyncio.run(opened.close())


def tried(sandbox: Sandbox, solution: str, tests: Any, **options: Any) -> Report:
    return asyncio.run(run_tests(sandbox, solution, cases(tests), LIMITS, **options))


def passed(sandbox: Sandbox, solution: str, tests: Any) -> list[bool]:
    return [verdict.passed for verdict in tried(sandbox, solution, tests).verdicts]


def test_programs_that_read_and_print(sandbox: Sandbox) -> None:
    tests = {"inputs": ["2 3\n", ["4 5"], "0 0"], "outputs": ["5\n", ["9"], "1"]}
    assert passed(sandbox, "print(sum(map(int, input().split())))", tests) == [True, True, False]
    assert passed(sandbox, "print(5)\nraise SystemExit(1)", tests) == [False] * 3


def test_calls(sandbox: Sandbox) -> None:
    tests = {"fn_name": "twice", "inputs": [[2], ["a"], [[1]], [0.15]], "outputs": [4, "aa", [1, 1], 0.3]}
    assert passed(sandbox, "def twice(x):\n    print('noise')\n    return 2 * x", tests) == [True] * 4
    assert (
        passed(sandbox, "class Solution:\n    def twice(self, x: List[int]):\n        return x", tests) == [False] * 4
    )
    line = [{"fn_name": "add", "input": "1\n[2, 3]", "output": "[1, 2, 3]"}]
    assert passed(sandbox, "def add(x, rest):\n    return (x, *rest)", line) == [True]


def test_asynchronous_functions(sandbox: Sandbox) -> None:
    right = "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1"
    tests = [
        {"fn_name": "f", "input": "1", "output": "2"},
        "import asyncio\nassert asyncio.run(f(1)) == 2",
        "import asyncio\nasync def both():\n    return await asyncio.gather(f(1), f(x=2))\n"
        "assert asyncio.run(both()) == [2, 3]",
        "import asyncio\nassert asyncio.run(f(1)) == 3",
        "assert f(1) == 2",  # it was not awaited
    ]
    assert passed(sandbox, right, tests) == [True, True, True, False, False]
    raises = "async def f(x):\n    raise ValueError(x)"
    caught = "import asyncio\ntry:\n    asyncio.run(f(1))\nexcept ValueError as e:\n    assert e.args == (1,)\n"
    assert passed(sandbox, raises, [caught + "else:\n    assert False", tests[0]]) == [True, False]


SUITE = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(1), {})\n"
WRITTEN = "from solution import f\ndef test_a():\n    assert f(1) == 2\ndef test_b():\n    assert f(2) == {}\n"


def test_suites_that_nothing_calls(sandbox: Sandbox) -> None:
    guarded = SUITE + "if __name__ == '__main__':\n    unittest.main()"
    tests = [form.format(right) for form in (SUITE, guarded, WRITTEN) for right in (2, 3)]
    assert passed(sandbox, "def f(x):\n    return x + 1", tests) == [True, False, True, False, False, True]
    hostile = "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()"
    assert passed(sandbox, hostile, tests) == [False] * 6
    assert passed(sandbox, "def g(x): return x", tests) == passed(sandbox, "exit(0)", tests) == [False] * 6


@pytest.mark.parametrize(
    ("snippet", "why"),
    [
        ("import numpy as np\nassert f(1) == 2", "imports numpy, which the sandbox does not have"),
        ("def test_a(fixture):\n    assert f(1) == 2", "test_a has parameters"),
        ("def test_a():\n    assert True", "calls nothing of the solution"),
    ],
)
def test_suites_that_test_nothing(sandbox: Sandbox, snippet: str, why: str) -> None:
    with pytest.raises(BirlError, match=why):
        passed(sandbox, "def f(x):\n    return x + 1", [snippet])


@pytest.mark.parametrize("end", ["exit()", "exit(0)", "quit()", "import sys\nsys.exit()"])
def test_programs_that_end_themselves(sandbox: Sandbox, end: str) -> None:
    """exit and quit are of the module site, which the sandbox's Python does not load."""
    assert passed(sandbox, f"print(2)\n{end}\nprint(3)", {"input": "", "output": "2"}) == [True]
    assert passed(sandbox, "print(2)\nexit(1)", {"input": "", "output": "2"}) == [False]


@pytest.mark.parametrize(
    "snippet",
    [
        "assert f([3, 1]) == [1, 3]",
        "xs = [3, 1]\nsort(xs)\nassert xs == [1, 3]",
        "def check(candidate):\n    assert candidate([2, 1]) == [1, 2]\n    assert candidate([]) == []\ncheck(f)",
        "import math\nassert math.isclose(half(3), 1.5)",
        "assert apply(lambda x: x + [4], [1]) == [1, 4]",
        "try:\n    half('x')\n    assert False\nexcept TypeError:\n    pass",
        "s = Stack()\ns.push(4)\ns.push(5)\nassert s.pop() == 5 and s.items == [4] and len(s) == 1",
        "assert list(count(3)) == [0, 1, 2]",
        "assert pair() == ((1, 2), {'a': {1}}, b'x', 1j, None, 10 ** 5000, {2: 'b'}, float('inf'))",
        "assert half(half(8)) == 2.0 and isinstance(half(1), float)",
        "import collections\nassert ''.join(collections.deque(f('ba'))) == 'ab'",
        "it = count(3)\nassert [next(it), next(it), next(it, 7), next(it, 7)] == [0, 1, 2, 7]",
        "try:\n    half(None)\nexcept TypeError as e:\n    assert str(e) == 'x is no number'",
        "try:\n    f(b'\\xff')\n    assert False\nexcept UnicodeDecodeError as e:\n    assert e.reason == 'end'",
        "xs = [3, 1]\nsort(xs=xs)\nassert xs == [1, 3]",
        "import collections\nq = collections.deque('ba')\nturn(q)\nassert list(q) == ['a', 'b']",
    ],
)
def test_assertions(sandbox: Sandbox, snippet: str) -> None:
    solution = """
def f(xs):
    if isinstance(xs, bytes): raise UnicodeDecodeError("ascii", xs, 0, 1, "end")
    return sorted(xs)
def sort(xs): xs.sort()
def turn(q): q.reverse()
def half(x):
    if x is None: raise TypeError("x is no number")
    return x / 2
def apply(function, value): return function(value)
def count(n): yield from range(n)
def pair(): return (1, 2), {"a": {1}}, b"x", 1j, None, 10 ** 5000, {2: "b"}, float("inf")
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
"""
    report = tried(sandbox, solution, [snippet])
    assert report.share == 1, report
    wrong = solution.replace("sorted(xs)", "xs").replace("x / 2", "3").replace("append(x)", "append(0)")
    wrong = wrong.replace("x is no", "x is a").replace('"end"', '""').replace("q.reverse()", "pass")
    wrong = wrong.replace("xs.sort()", "pass").replace("range(n)", "range(2)").replace("(1, 2)", "(1, 3)")
    assert tried(sandbox, wrong.replace("return function(value)", "return 0"), [snippet]).share == 0


def test_partial_credit_and_limits_of_each_test(sandbox: Sandbox) -> None:
    solution = (
        "import time\ndef f(x):\n    if x == 1: time.sleep(60)\n    if x == 2: print('x' * 9999999)\n    return x"
    )
    tests = {"fn_name": "f", "inputs": [[0], [1], [2], [3]], "outputs": [0, 1, 2, 3]}
    limits = Limits(seconds=20, output_bytes=1000)
    report = asyncio.run(run_tests(sandbox, solution, cases(tests), limits, at_once=2))
    assert [v.passed for v in report.verdicts] == [True, False, False, True] and report.share == 0.5
    assert [v.detail.partition(":")[0] for v in report.verdicts[1:3]] == ["timeout", "output"]


def test_what_is_not_begun_in_time_has_not_passed(sandbox: Sandbox) -> None:
    tests = {"inputs": [""] * 5, "outputs": [""] * 5}
    report = tried(sandbox, "import time\ntime.sleep(12)", tests, seconds=20.0)
    assert [v.passed for v in report.verdicts] == [True, False, False, False, False]
    assert report.verdicts[-1].detail == "not begun within 20 s"


@pytest.mark.parametrize(
    "solution", ["def f(:", "", "raise KeyError('x')", "import no_such_module", "\0", "x = 1\ud800"]
)
def test_a_solution_that_does_not_load_fails(sandbox: Sandbox, solution: str) -> None:
    assert tried(sandbox, solution, ["assert f(1) == 1"]).share == 0


@pytest.mark.parametrize(
    ("snippet", "why"),
    [
        ("assert sum([1]) == 1", "calls nothing of the solution"),
        ("assert f(1) ==", "is no Python"),
        ("assert np.allclose(f(), 2)", "uses np without importing it"),
    ],
)
def test_a_test_that_says_nothing_is_an_error_of_the_data(sandbox: Sandbox, snippet: str, why: str) -> None:
    with pytest.raises(BirlError, match=why):
        tried(sandbox, "def sum(x): return 0\nclass np:\n    allclose = lambda *_: True\ndef f(): return 1", [snippet])


class Broken:
    kind = "broken"

    async def run(self, *_: Any, **__: Any) -> Result:
        return Result(ending=Ending.ERROR, kind=self.kind, detail="no room")

    async def close(self) -> None: ...


def test_a_sandbox_that_fails_is_no_failed_test() -> None:
    with pytest.raises(SandboxFailed, match="broken: no room"):
        asyncio.run(run_tests(Broken(), "", [Case(stdin="", expected="")], LIMITS))


@pytest.mark.parametrize(
    "value",
    [
        {"t": "Fraction", "v": "1e30000000"},
        {"t": "Fraction", "v": [{"t": "int", "v": "1" * 99999}, 3]},
        {"t": "Fraction", "v": [1, 0]},
        {"t": "bytes", "v": 200000000},
        {"t": "bytearray", "v": 10**15},
        {"t": "Decimal", "v": "1e999999999"},
        {"t": "Decimal", "v": 3},
        {"t": "int", "v": 7},
        {"t": "complex", "v": "1" * 100},
        {"t": "range", "v": [1, "2"]},
        {"t": "range", "v": 10**15},
        {"t": "set", "v": "abc"},
        {"t": "dict", "v": {"a": 1}},
        {"t": "__import__", "v": ["os"]},
        json.loads("[" * 300 + "]" * 300),
        {"v": 1},
    ],
)
def test_what_no_solution_can_have_packed_is_refused_before_it_is_made(value: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, ZeroDivisionError)):
        values.unpack(value, lambda kind, inner: None)


def test_forged_replies_fail_and_are_read_in_the_sandbox_alone(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The solution writes to the pipe of its process, past everything that packs its values."""
    replies = [
        '{"t":"Fraction","v":"1e30000000"}',
        '{"t":"bytes","v":200000000}',
        "1" * 90000,
        "[" * 90000,
        "{}",
        "nul",
    ]
    monkeypatch.setattr(values, "unpack", None)  # of this process
    for value in ["1000000000000000", *replies]:
        solution = (
            f"import os\ndef f(x):\n    os.write(3, b'{{\"value\": %s}}\\n' % {value.encode()!r})\n    os._exit(0)"
        )
        report = tried(sandbox, solution, [*cases_of_call(3), "assert f(1) == 3"])
        assert report.share == 0, report
        assert not any(verdict.detail.startswith(("timeout", "memory")) for verdict in report.verdicts), report


def cases_of_call(expected: Any) -> list[Any]:
    return [{"fn_name": "f", "inputs": [[1]], "outputs": [expected]}]


VALUES = [
    *("10**5000", "-(10**4999)", "{1, 2}", "frozenset([1, (2, 3)])", "b'x\\x00'", "bytearray(b'y')", "1j"),
    *("complex(0.1 + 0.2, 2)", "Fraction(10**30, 7)", "Decimal('1E+30')", "range(3, 10**30)", "{(1, 2): {3}}"),
    *("deque([1, [2]])", "[10**4400, {'a': b'z'}]"),
]


def test_right_values_of_every_plain_type_pass(sandbox: Sandbox) -> None:
    names = {"Fraction": fractions.Fraction, "Decimal": decimal.Decimal, "deque": collections.deque}
    expected = [eval(text, names) for text in VALUES]
    start = "from collections import deque\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
    solution = f"{start}def f(i, x):\n    return x if i < 0 else [{', '.join(VALUES)}][i]"
    given = [*([i, 0] for i in range(len(VALUES))), [-1, 10**5000]]
    tests = {"fn_name": "f", "inputs": given, "outputs": [*expected, 10**5000]}
    report = tried(sandbox, solution, tests)
    assert report.share == 1, [(text, v) for text, v in zip(VALUES, report.verdicts, strict=False) if not v.passed]
    lines = [{"fn_name": "f", "input": f"-1\n{'7' * 5000}", "output": "7" * 5000}]
    assert passed(sandbox, solution, lines) == passed(sandbox, solution, json.dumps(lines)) == [True]
    wrong = {"fn_name": "f", "inputs": [[2, 0], [4, 0], [0, 0]], "outputs": [[1, 2], "x", 10**5000 + 1]}
    report = tried(sandbox, solution, wrong)
    assert report.share == 0 and "a number of 16610 bits" in report.verdicts[2].detail


@pytest.mark.parametrize(
    ("snippet", "lie"),
    [
        ("assert isclose(f(1), 2.0)", "def isclose(*_): return True"),
        ("x = f(1)\nassert isclose(x, 2.0)", "def isclose(*_): return True"),
        ("def check(f):\n    assert isclose(f(1), 2.0)\ncheck(f)", "def isclose(*_): return True"),
        ("assert Counter([f(1)]) == Counter([2])", "def Counter(*_): return 1"),
        ("assert math.isclose(f(1), 2.0)", "class math:\n    isclose = lambda *_: True"),
        ("from math import isclose\nassert isclose(f(1), 2.0)", "def isclose(*_): return True"),
        ("assert f(1) == Decimal('2')", "def Decimal(*_): return 3"),
        ("assert f(4) == sqrt(4)", "def sqrt(*_): return 3"),
        ("assert all(map(lambda x: f(x) == 2, [1, 2]))", "def f(x): raise StopIteration"),
    ],
)
def test_helpers_of_an_assertion_do_not_come_from_the_solution(sandbox: Sandbox, snippet: str, lie: str) -> None:
    assert tried(sandbox, "def f(x): return 2", [snippet]).share == 1
    assert tried(sandbox, f"def f(x): return 3\n{lie}", [snippet]).share == 0


def test_what_a_function_gives_does_not_answer_as_text_would(sandbox: Sandbox) -> None:
    """An object that says yes to everything passed; one of a class that the test names has what methods it likes."""
    tests = [
        'assert f("abc").startswith("a")',
        'x = f("abc")\nassert x.lower().endswith("c") and x.isalpha()',
        'assert f("abc").split("b")[0].startswith("a")',
        'assert all(map(lambda word: word.startswith("a"), [f("abc")]))',
        'assert Solution().f("abc").startswith("a")',
    ]
    right = "def f(x): return x\nclass Solution:\n    def f(self, x): return x"
    yes = (
        "class Yes:\n    def __getattr__(self, name): return lambda *_: self if name in ('lower', 'split') else True\n"
    )
    yes += "    def __getitem__(self, i): return self\n"
    assert passed(sandbox, right, tests) == [True] * 5
    assert passed(sandbox, yes + right.replace("return x", "return Yes()"), tests) == [False] * 5
    own = "class Words:\n    def __init__(self, *words): self.words = {*words}"
    own += "\n    def isempty(self): return not self.words"
    own += "\n    def issubset(self, other): return self.words <= other.words"
    own += "\n    def both(self, other): return Words(*(self.words & other.words))"
    tests = ['assert Words().isempty() and Words("a").issubset(Words("a", "b"))']
    tests += ['assert Words("a", "b").both(Words("a")).issubset(Words("a"))']
    assert passed(sandbox, own, tests) == [True] * 2


def test_a_solution_may_be_named_like_a_function_of_the_library(sandbox: Sandbox) -> None:
    tests = ["assert gcd(4, 6) == 2", "for n in (1, 2):\n    assert gcd(n, 0) == n\nassert lcd(3) == 3"]
    tests += ["def check(candidate):\n    assert candidate(4, 6) == 2\ncheck(gcd)"]
    solution = "def gcd(a, b): return gcd(b, a % b) if b else a\ndef lcd(x): return x"
    assert passed(sandbox, solution, tests) == [True] * 3
    assert passed(sandbox, solution.replace("else a", "else 7"), tests) == [False] * 3


def test_forms_of_tests() -> None:
    call = [Case(call="f", args=(1, 2), expected=3)]
    assert cases({"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}) == call
    assert cases(json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]})) == call
    assert cases("assert f(1)") == cases(["assert f(1)"]) == [Case(snippet="assert f(1)")]
    assert cases([{"input": "1", "output": 2}]) == [Case(stdin="1", expected="2")]


@pytest.mark.parametrize(
    "tests",
    [
        [],
        None,
        "",
        [7],
        {"inputs": [1], "outputs": []},
        {},
        {"inputs": []},
        [{"fn_name": "f", "input": 3, "output": 3}],
        {"inputs": "12", "outputs": "34"},  # not a test for each letter
        {"inputs": 1, "outputs": 1},
        [{"fn_name": "f", "input": "x y", "output": "3"}],
        [{"fn_name": "f", "input": "3", "output": "x y"}],
    ],
)
def test_tests_that_are_none(tests: Any) -> None:
    with pytest.raises(BirlError, match="tests: "):
        cases(tests)


def test_the_last_block() -> None:
    text = "a\n```python\nx = 1\n```\nb\n```\nnot\n```\n```py\nx = 2\n```\n```text\nx\n```"
    assert last_block(text) == "x = 2\n"
    assert last_block("```\nx = 3\n```") == "x = 3\n" and last_block("x = 4") == last_block("```python\nx = 5") == ""
    assert last_block("1. So\n   ```python\n   if x:\n       y\n   ```") == "if x:\n    y\n"
    assert last_block("~~~python\n```\n~~~") == "```\n" and last_block("So:```py\nx\n```") == "x\n"


def test_outputs_and_values_that_are_the_same() -> None:
    assert same_output("1  \n2\n\n", "1\n2") and same_output("1.0 a", "1 a") and not same_output("1 2", "1\n2")
    assert same_output("0.30000000000000004 1e-10", "0.3 1.0000000000001e-10") and same_output("2.9999999999999", "3")
    assert same_output("-0.50 +1e2 .5 inf", "-.5 100 0.5 Infinity") and same_output("a\r\nb", "a\nb")
    others = [
        ("4_2", "42"),
        ("\uff14\uff12", "42"),
        ("1\u2028", "1"),
        ("a\u2028b", "a\nb"),
        ("0.3000001", "0.3"),
        ("12345678901234567.0", "12345678901234568"),
        ("1e400", "inf"),
        ("a\x85b", "a b"),
        ("a\x0bb\x0c", "a\nb"),
    ]
    assert not any(same_output(a, b) for a, b in others)
    assert not same_output("nan", "1") and not same_output("a", "A")
    assert same_value((1, [2.0]), [1, (2,)]) and same_value(0.1 + 0.2, 0.3) and same_value({1: 2}, {"1": 2})
    assert (
        same_value({1, 2}, {2, 1}) and same_value(b"x", b"x") and same_value(1j, 1j) and same_value(10**5000, 10**5000)
    )
    assert not any(
        same_value(a, b) for a, b in [({1}, {2}), ({1}, [1]), (b"x", "x"), (1j, 2j), (b"x", [120]), (1, "a")]
    )
    assert not any(same_value(a, b) for a, b in [(True, 1), (1, "1"), (None, 0), ([1], [1, 2]), ({1: 2}, {1: 3})])
    assert not same_value(10**400, 1.5) and not same_value(1.5, 10**400) and not same_value(float("nan"), 1.0)
    assert same_value(float("nan"), float("nan")) and not same_value({1: 2, "1": 3}, {"1": 3})
    assert not same_value({True}, {1}) and same_value(1, 1 - 1e-15)
    assert same_value(float("inf"), float("inf")) and not same_value(float("inf"), 3) and not same_value(3.0, "3")
