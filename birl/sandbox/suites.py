"""Tests that are written as functions test_... (pytest) or as classes of unittest, and that nothing calls.

Standard library only: it runs in the sandbox beside `checker.py`.
"""

import inspect
import sys
import types
from typing import Any

from birl.sandbox.names import Unfit


def run_suites(names: dict[str, Any]) -> None:
    """Call what a test has defined: each function test_..., and each TestCase. Raises what fails, and `Unfit` where a
    function wants arguments, which a fixture would give."""
    framework: Any = sys.modules.get("unittest")
    for name, item in list(names.items()):
        if isinstance(item, types.FunctionType) and name.startswith("test"):
            if inspect.signature(item).parameters:
                raise Unfit(f"{name} has parameters, and there is no pytest to give them")
            item()
        elif framework is not None and isinstance(item, type) and issubclass(item, framework.TestCase):
            result = framework.TestResult()
            framework.defaultTestLoader.loadTestsFromTestCase(item).run(result)
            for _, trace in (*result.failures, *result.errors):
                raise AssertionError(trace.strip().rpartition("\n")[2])
            if result.unexpectedSuccesses:
                raise AssertionError("a test that was to fail has passed")
