"""Unit tests of untrusted code: each test is a separate run, and its verdict is out of the code's reach."""

import asyncio
import json
import math
import re
import secrets
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.sandbox import values
from birl.sandbox.protocol import Ending, Limits, Result, Sandbox

CHECKER = {  # a zygote has imported it already
    "checker.py": b"import sys\nsys.dont_write_bytecode = True\nfrom birl.sandbox.checker import main\nmain()\n",
    **dict.fromkeys(("birl/__init__.py", "birl/sandbox/__init__.py"), b""),
    **{
        f"birl/sandbox/{n}.py": Path(__file__).with_name(f"{n}.py").read_bytes() for n in ("checker", "names", "values")
    },
}
BLOCK = re.compile(
    r"(?:^[ \t]*|(?=```py))(`{3,}+|~{3,}+)[ \t]*\{?(\w*)[^\n`]*\n(.*?)^[ \t]*\1", re.DOTALL | re.MULTILINE
)
PYTHON = ("python", "py", "python3")
LONGEST = 1 << 16  # largest verdict [bytes]
BLANK = " \t\r\f\v"
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,9})?|[+-]?inf(inity)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test in one of three forms: `stdin` and the `expected` standard output; a `call` of a function with `args`
    and the `expected` value; or a `snippet` of assertions.

    Example: Case(call="add", args=(3, 4), expected=7)
    """

    stdin: str | None = None
    call: str = ""
    args: tuple[Any, ...] = ()
    expected: Any = None
    snippet: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of one test. `detail`: why it did not pass."""

    passed: bool
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of all tests of one solution, in order."""

    verdicts: tuple[Verdict, ...]

    @property
    def share(self) -> float:
        """Fraction of the tests that passed: partial credit."""
        return sum(verdict.passed for verdict in self.verdicts) / len(self.verdicts)


class SandboxFailed(Exception):
    """The sandbox itself failed, which says nothing about the solution."""


def last_block(text: str) -> str:
    """The last ```python block of an answer, else the last one without a language. Empty if there is none.

    Example: last_block("So:\\n```python\\nprint(7)\\n```") == "print(7)\\n"
    """
    blocks = [(match[2].lower(), match[3]) for match in BLOCK.finditer(text)]
    for wanted in (PYTHON, ("",)):
        result = [content for language, content in blocks if language in wanted]
        if result:
            return textwrap.dedent(result[-1])  # a block within a list item
    return ""


def cases(tests: Any) -> list[Case]:
    """Parse a row's tests in the formats of common datasets (docs/sandbox.md). Raises `BirlError` for anything else."""
    if isinstance(tests, str):
        tests = _parsed(tests)
    if isinstance(tests, dict):
        tests = [tests]
    if not isinstance(tests, list | tuple) or not tests:
        raise BirlError("tests: must be a list of tests, and have at least one.")
    return [case for test in tests for case in _cases(test)]


def _parsed(text: str) -> Any:
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return _json(text)
        except ValueError:
            pass
    return [text]


def _json(text: str) -> Any:
    """Parse JSON with integers of any length: Python's parser refuses more than 4300 digits."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4300 else int(Decimal(digits)))


def _cases(test: Any) -> list[Case]:
    if isinstance(test, str) and test.strip():
        return [Case(snippet=test)]
    if not isinstance(test, dict):
        raise BirlError(f"tests: {str(test)[:80]!r} is neither assertions nor an object.")
    name = str(test.get("fn_name") or "")
    if "inputs" in test and "outputs" in test:
        inputs, outputs = test["inputs"], test["outputs"]
        if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):  # no texts
            raise BirlError(f"tests: inputs and outputs must be lists, not {str(inputs)[:80]!r}; one test has input.")
        if len(inputs) != len(outputs) or not inputs:
            raise BirlError(f"tests: {len(inputs)} inputs and {len(outputs)} outputs.")
        pairs = list(zip(inputs, outputs, strict=True))
    elif "input" in test and "output" in test:
        pairs = [(test["input"], test["output"])]
    else:
        raise BirlError(f"tests: an object needs inputs and outputs, and has {', '.join(test) or 'nothing'}.")
    return [_called(name, i, o) if name else _printed(i, o) for i, o in pairs]


def _called(name: str, given: Any, expected: Any) -> Case:
    if isinstance(given, str):  # one JSON value per line, as in LiveCodeBench
        try:
            given = [_json(line) for line in given.split("\n") if line.strip()]
            expected = _json(expected) if isinstance(expected, str) else expected
        except ValueError as error:
            raise BirlError(f"tests: input and output of {name} must be JSON, one argument a line: {error}.") from None
    if not isinstance(given, list | tuple):
        raise BirlError(f"tests: the inputs of {name} must be a list of arguments, not {str(given)[:80]!r}.")
    return Case(call=name, args=tuple(given), expected=expected)


def _printed(given: Any, expected: Any) -> Case:
    lines = ["\n".join(map(str, side)) if isinstance(side, list | tuple) else str(side) for side in (given, expected)]
    return Case(stdin=lines[0], expected=lines[1])


async def run_tests(
    sandbox: Sandbox,
    solution: str,
    tests: Sequence[Case],
    limits: Limits,
    *,
    seconds: float = math.inf,
    at_once: int = 1,
) -> Report:
    """Run a solution on every test. After `seconds`, running tests are ended, and those not started count as failed.
    Raises `SandboxFailed`, and `BirlError` for a test that tests nothing."""
    deadline = time.monotonic() + seconds
    turn = asyncio.Semaphore(at_once)

    async def attempt(case: Case) -> Verdict:
        async with turn:
            left = deadline - time.monotonic()
            if left <= 0:
                return Verdict(passed=False, detail=f"not begun within {seconds:g} s")
            return await run_test(sandbox, solution, case, replace(limits, seconds=min(limits.seconds, left)))

    tasks = [asyncio.ensure_future(attempt(case)) for case in tests]
    try:
        return Report(verdicts=tuple(await asyncio.gather(*tasks)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_test(sandbox: Sandbox, solution: str, case: Case, limits: Limits) -> Verdict:
    if case.stdin is not None:
        result = await sandbox.run({"solution.py": solution}, ["python", "solution.py"], limits, case.stdin)
        return _verdict(result, _failure_of_output(result, case))
    nonce = secrets.token_hex(16)
    job: dict[str, Any] = {"nonce": nonce}
    if case.call:
        args, expected = (values.pack(value, _no_object) for value in (list(case.args), case.expected))
        job |= {"call": case.call, "args": args, "expected": expected}
    else:
        job |= {"snippet": case.snippet}
    files = {**CHECKER, "solution.py": solution}
    result = await sandbox.run(files, ["python", "checker.py"], limits, json.dumps(job))
    return _verdict(result, _failure_of_job(result, case, nonce))


def _verdict(result: Result, failure: str) -> Verdict:
    if result.ending is Ending.ERROR:
        raise SandboxFailed(f"{result.kind}: {result.detail}")
    if result.ending is not Ending.OK:
        failure = f"{result.ending}: {result.detail}"
    return Verdict(passed=not failure, detail=failure, seconds=result.seconds)


def _failure_of_output(result: Result, case: Case) -> str:
    if result.exit_code != 0:
        errors = result.stderr.decode(errors="replace").strip().splitlines()
        return f"exit code {result.exit_code}: {errors[-1][:200] if errors else ''}"
    printed = result.stdout.decode(errors="replace")
    return "" if same_output(printed, case.expected) else f"printed {printed[:100]!r}, not {case.expected[:100]!r}"


def _failure_of_job(result: Result, case: Case, nonce: str) -> str:
    """Why a test failed; empty if the checker reports a pass: its message has the nonce, unknown to the solution."""
    try:
        verdict = json.loads(result.stdout[:LONGEST])
    except (ValueError, RecursionError):
        verdict = None
    if not isinstance(verdict, dict) or not secrets.compare_digest(str(verdict.get("nonce")).encode(), nonce.encode()):
        return "the test did not come to its end"
    if "unfit" in verdict:
        raise BirlError(f"the test {case.snippet[:100]!r} is unfit: {verdict['unfit']}.")
    return "" if verdict.get("passed") is True else str(verdict.get("detail") or "did not pass")


def _no_object(value: Any) -> Any:
    raise BirlError(f"tests: {str(value)[:80]!r} is no plain data.")


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs are equal, except for spaces at the ends of lines and text; or word for word, with numbers
    compared as numbers (`1.0` and `1`), non-integers up to 1e-9. Only "\\n" ends a line."""
    printed, expected = (text.strip(BLANK + "\n") for text in (printed, expected))
    if printed.count("\n") != expected.count("\n"):
        return False
    pairs = zip(printed.split("\n"), expected.split("\n"), strict=True)
    return all(_same_line(left.strip(BLANK), right.strip(BLANK)) for left, right in pairs)


def _same_line(left: str, right: str) -> bool:
    if left == right:
        return True
    words = [re.split(f"[{BLANK}]+", line) for line in (left, right)]
    return len(words[0]) == len(words[1]) and all(map(_same_word, *words))


def _same_word(left: str, right: str) -> bool:
    if left == right:
        return True
    if not all(len(word) < 400 and NUMBER.fullmatch(word) for word in (left, right)):
        return False
    near = (float(left), float(right))
    rounded = not all(number.is_integer() for number in near) and max(map(abs, near)) < math.inf
    return Decimal(left) == Decimal(right) or (rounded and math.isclose(*near, rel_tol=values.CLOSE))
