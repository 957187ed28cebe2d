"""Decides which names of a test are the solution's and which are of Python's library: the solution's own could return
anything. Also runs tests that nothing calls: functions test_... (pytest), and unittest classes.

Standard library only, no imports of birl: it runs in the sandbox together with `checker.py`.
"""

import ast
import builtins
import importlib
import importlib.util
import inspect
import symtable
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

HELPERS = ("math", "collections", "itertools", "functools", "copy", "decimal", "fractions", "statistics")
OTHERS = ("np", "numpy", "pd", "pandas", "scipy", "sympy", "torch", "pytest")  # modules that a solution never replaces


class Unfit(Exception):
    """A test that cannot judge a solution."""


@dataclass(frozen=True)
class Names:
    """Global names that a test reads and neither assigns nor imports."""

    wanted: set[str]
    """Names of the solution."""
    given: dict[str, Any]
    """Names of the library."""
    either: dict[str, Any]
    """Functions of the library. If the solution has its own, it must return the same."""


def names_of(source: str, own: Iterable[str] = ()) -> Names:
    """Classify the global names of a test. Modules used only for their attributes, as in `math.isclose`, are the
    library's. So are names in `HELPERS`, if another name can only be the solution's: otherwise they are tested
    themselves. Functions that take results of the solution, as in `isclose(f(1), 2)`, and classes are then never the
    solution's. `own`: all names of the solution, for a test that may name it in a text. Raises `Unfit`."""
    try:
        tree, table = ast.parse(source), symtable.symtable(source, "test", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unfit(f"it is no Python: {error}") from None
    others = {*dir(builtins), *sys.stdlib_module_names, *OTHERS}
    result = set(_globals(table)) | {name for name in own if name not in others and not name.startswith("__")}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    held = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    asked = result - {node.id for node in nodes if node not in held}
    if missing := next((name for name in _imported(tree) if importlib.util.find_spec(name) is None), ""):
        raise Unfit(f"it imports {missing}, which the sandbox does not have")
    given: dict[str, Any] = {name: importlib.import_module(name) for name in asked if name in sys.stdlib_module_names}
    if missing := sorted(asked.intersection(OTHERS)):
        raise Unfit(f"it uses {missing[0]} without importing it")
    result -= given.keys()
    made = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    library = {name: item for module in HELPERS for name, item in vars(importlib.import_module(module)).items()}
    possible = result.intersection(library) - made
    of_solution = (result - possible - made) | {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "solution"
        for alias in node.names
    }
    if not of_solution:
        return Names(result, given, {})
    results = _results(tree, of_solution)
    taking = {
        call.func.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if any(_names(word) & results for word in (*call.args, *call.keywords))
    }
    either = {name for name in possible - taking if not isinstance(library[name], type) and callable(library[name])}
    given |= {name: library[name] for name in possible - either}
    return Names(result - possible, given, {name: library[name] for name in either})


def _imported(tree: ast.Module) -> Iterator[str]:
    """Modules that a test imports at the top level."""
    for node in tree.body:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [str(node.module)]
        yield from (m.partition(".")[0] for m in modules if m.partition(".")[0] != "solution")


def _results(tree: ast.AST, functions: set[str]) -> set[str]:
    """Names of values that may come from the solution: its functions, assignments from them, and parameters."""
    result = functions | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    size = 0
    while len(result) > size:
        size = len(result)
        for node in ast.walk(tree):
            source = getattr(node, "value", None) or getattr(node, "iter", None)
            if isinstance(source, ast.AST) and _names(source) & result:
                for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
                    result |= _names(target) if target is not None else set()
    return result


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        name = symbol.get_name()
        if symbol.is_referenced() and symbol.is_global() and not hasattr(builtins, name):
            yield name
    for inner in table.get_children():
        yield from _globals(inner)


def run_suites(names: dict[str, Any]) -> None:
    """Run the functions test_... and TestCases that a test defines. Raises their failures, and `Unfit` if a function
    has parameters, which a fixture would provide."""
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
