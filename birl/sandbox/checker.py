"""Runs in the sandbox and tries one test on one solution: two processes, so that the solution cannot forge the verdict.

The solution is loaded in a child, which has no way to this process but a socket: not its standard output, not its
memory (it is not dumpable, and the sandbox refuses ptrace), and it was forked before the test and the nonce were read.
This process runs the test; a call of the solution's function is a message to the child and plain data back. What
decides is `==` of plain data on this side, so an object that is equal to everything is equal to nothing here. Who
started the run gets the verdict alone: nothing that a solution made is ever read outside of the sandbox.

Standard library only; nothing of birl. Its standard output is one JSON object with the nonce.
"""

import ast
import builtins
import collections
import contextlib
import ctypes
import decimal
import fractions
import importlib
import io
import json
import math
import os
import re
import reprlib
import socket
import symtable
import sys
import types
from collections.abc import Iterator
from typing import Any

LONGEST = 1 << 24  # bytes of one message
DEEPEST = 200  # lists within lists
LARGEST = 1 << 16  # bits of the numbers of a fraction, whose divisor has to be worked out
DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?([eE][+-]?\d{1,6})?|Infinity|s?NaN\d{0,9})", re.ASCII)
CLOSE = 1e-9  # relative difference at which two floats are the same
PR_SET_DUMPABLE = 4
NAMES = ("collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "bisect", "operator")
HELPERS = ("math", "collections", "itertools", "functools", "copy", "decimal", "fractions", "statistics")
OTHERS = ("np", "numpy", "pd", "pandas", "scipy", "sympy", "torch", "pytest")  # modules that no solution stands in for
MARKED = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}


class SolutionFailed(BaseException):
    """The solution's process ended, or answers nonsense. No `except Exception` of a test hides it."""


# ---- plain data as JSON: lists as they are, what JSON has not as {"t": type, "v": value} -----------------------------


def pack(value: Any, keep: Any) -> Any:
    """Subclasses become their base, by the base's own methods: what they override has no say. `keep` takes what is no
    plain data and gives what stands for it."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int.__int__(value)
        return value if -(1 << 63) <= value < 1 << 63 else {"t": "int", "v": f"{value:x}"}  # decimals take n^2 steps
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [pack(item, keep) for item in list.__iter__(value)]
    for name, base in MARKED.items():
        if isinstance(value, base):
            return {"t": name, "v": [pack(item, keep) for item in base.__iter__(value)]}
    if isinstance(value, dict):
        return {"t": "dict", "v": [[pack(k, keep), pack(v, keep)] for k, v in dict.items(value)]}
    if kind in (bytes, bytearray):
        return {"t": kind.__name__, "v": value.hex()}
    if kind is complex:
        return {"t": "complex", "v": [value.real, value.imag]}
    if kind is range:
        return {"t": "range", "v": [pack(end, keep) for end in (value.start, value.stop, value.step)]}
    if kind is decimal.Decimal:
        return {"t": "Decimal", "v": str(value)}
    if kind is fractions.Fraction:
        return {"t": "Fraction", "v": [pack(value.numerator, keep), pack(value.denominator, keep)]}
    return keep(value)


def unpack(value: Any, find: Any, depth: int = 0) -> Any:
    """The value again. Its size is at most that of the message: no text becomes a number that takes more room or time
    than the text. Raises `ValueError`, `KeyError` or `TypeError` for what `pack` never makes."""
    if depth > DEEPEST:
        raise ValueError("too deep")
    if isinstance(value, list):
        return [unpack(item, find, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kind, inner = value["t"], value["v"]
    if kind in MARKED and isinstance(inner, list):
        return MARKED[kind](unpack(item, find, depth + 1) for item in inner)
    if kind == "dict" and isinstance(inner, list):
        return {unpack(k, find, depth + 1): unpack(v, find, depth + 1) for k, v in inner}
    if kind == "int" and isinstance(inner, str):
        return int(inner, 16)
    if kind in ("bytes", "bytearray") and isinstance(inner, str):
        return getattr(builtins, kind).fromhex(inner)
    if kind == "Decimal" and isinstance(inner, str) and DECIMAL.fullmatch(inner):
        return decimal.Decimal(inner)
    if kind in ("complex", "range", "Fraction") and isinstance(inner, list):
        parts = [unpack(part, find, DEEPEST) for part in inner]
        numbers = (int, float) if kind == "complex" else (int,)
        if len(parts) > 3 or not all(isinstance(part, numbers) for part in parts):
            raise ValueError(f"no {kind}")
        if kind == "Fraction":
            if max(part.bit_length() for part in parts) > LARGEST:
                raise ValueError("a fraction that is too large")
            return fractions.Fraction(*parts)
        return getattr(builtins, kind)(*parts)
    if kind in ("object", "function") and type(inner) is int:
        return find(kind, inner)
    raise ValueError(f"no {str(kind)[:20]}")


def _short(digits: str) -> int:
    """Of a number in JSON: `pack` makes long ones hexadecimal."""
    if len(digits) > 20:
        raise ValueError("a number of many digits")
    return int(digits)


def same_value(value: Any, expected: Any) -> bool:
    """Equal, where a tuple is as good as a list (JSON has none), a key that is a number as good as its text, and floats
    may differ in the last digits. True is not 1, and a set is no list."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        named = {key if isinstance(key, str) else str(key): item for key, item in value.items()}
        wanted = {key if isinstance(key, str) else str(key): item for key, item in expected.items()}
        return named.keys() == wanted.keys() and all(same_value(named[key], wanted[key]) for key in wanted)
    if isinstance(value, collections.deque) and isinstance(expected, collections.deque):
        return same_value(list(value), list(expected))
    for kinds in ((set, frozenset), (bytes, bytearray), (range,), (str,)):
        if isinstance(value, kinds) or isinstance(expected, kinds):
            return isinstance(value, kinds) and isinstance(expected, kinds) and value == expected
    if isinstance(value, bool) or isinstance(expected, bool) or value is None or expected is None:
        return type(value) is type(expected) and value == expected
    numbers = (int, float, complex, decimal.Decimal, fractions.Fraction)
    if not isinstance(value, numbers) or not isinstance(expected, numbers):
        return False
    if isinstance(value, complex) or isinstance(expected, complex):
        pairs = ((value.real, expected.real), (value.imag, expected.imag))
        return all(same_value(a, b) for a, b in pairs)
    if isinstance(value, float) and isinstance(expected, int | float):
        return value == expected or (abs(expected) < 1e300 and math.isclose(value, expected, rel_tol=CLOSE))
    return value == expected


class Short(reprlib.Repr):
    """What a verdict shows of a value: never all the digits of a long number."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 4, 80, 80, 80

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"(a number of {x.bit_length()} bits)"


short = Short()


def write(pipe: io.BufferedWriter, message: dict[str, Any]) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def read(pipe: io.BufferedReader) -> dict[str, Any]:
    line = pipe.readline(LONGEST)
    try:
        message = json.loads(line, parse_int=_short)
    except (ValueError, RecursionError) as error:
        raise SolutionFailed("the solution's process ended" if not line else "no message") from error
    if not isinstance(message, dict):
        raise SolutionFailed("no message")
    return message


# ---- the solution's side ---------------------------------------------------------------------------------------------


class Solution:
    """Loads solution.py and does what the other side asks: call, get an attribute, the next item."""

    def __init__(self, link: socket.socket) -> None:
        self.input, self.output = link.makefile("rb"), link.makefile("wb")
        self.objects: list[Any] = []
        self.names: dict[str, Any] = {}

    def serve(self) -> None:
        read(self.input)  # "go": by now the other side has closed itself off
        self.answer(self.load)
        while True:
            request = read(self.input)
            self.answer(lambda request=request: getattr(self, "do_" + request["do"])(**request["with"]))

    def load(self) -> dict[str, Any]:
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        typing = importlib.import_module("typing")
        self.names = module.__dict__
        self.names.update({name: getattr(typing, name) for name in typing.__all__})
        self.names.update({name: importlib.import_module(name) for name in NAMES})
        with open("solution.py", encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, "solution.py", "exec"), self.names)  # this is the sandbox
        return {}

    def answer(self, action: Any) -> None:
        try:
            reply = action()
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            reply = {"raised": kinds, "text": f"{type(error).__name__}: {error}"[:500]}
        write(self.output, reply)

    def do_find(self, name: str) -> dict[str, Any]:
        if name in self.names:
            return {"value": self.packed(self.names[name])}
        if isinstance(self.names.get("Solution"), type) and hasattr(self.names["Solution"], name):
            return {"value": self.packed(getattr(self.names["Solution"](), name))}
        raise NameError(f"name {name!r} is not defined")

    def do_call(self, what: int, args: list[Any], words: dict[str, Any]) -> dict[str, Any]:
        given = [self.unpacked(value) for value in args]
        value = self.objects[what](*given, **{k: self.unpacked(v) for k, v in words.items()})
        return {"value": self.packed(value), "args": [self.packed(value) for value in given]}

    def do_get(self, what: int, name: str) -> dict[str, Any]:
        return {"value": self.packed(getattr(self.objects[what], name))}

    def do_set(self, what: int, name: str, value: Any) -> dict[str, Any]:
        setattr(self.objects[what], name, self.unpacked(value))
        return {}

    def packed(self, value: Any) -> Any:
        def keep(found: Any) -> Any:
            self.objects.append(found)
            return {"t": "object", "v": len(self.objects) - 1}

        return pack(value, keep)

    def unpacked(self, value: Any) -> Any:
        def find(kind: str, inner: Any) -> Any:
            if kind == "object":
                return self.objects[inner]
            return lambda *args: self.back(inner, args)

        return unpack(value, find)

    def back(self, function: int, args: tuple[Any, ...]) -> Any:
        """Call a function of the test, which was handed over as an argument."""
        write(self.output, {"back": function, "args": [self.packed(value) for value in args]})
        return self.unpacked(read(self.input)["value"])


# ---- the test's side -------------------------------------------------------------------------------------------------


class Remote:
    """An object of the solution. It is equal to itself only, and its arithmetic is not forwarded."""

    def __init__(self, link: "Link", number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **words: Any) -> Any:
        return self._link.call(self._number, args, words)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("get", what=self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("set", what=self._number, name=name, value=self._link.packed(value))

    def __len__(self) -> int:
        try:
            return self.__getattr__("__len__")()
        except AttributeError as error:
            raise TypeError(str(error)) from error  # list() asks for it, and goes on without

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __iter__(self) -> Any:
        following = self.__getattr__("__iter__")().__getattr__("__next__")
        while True:
            try:
                item = following()
            except StopIteration:
                return
            yield item


class Link:
    """Asks the solution's process."""

    def __init__(self, link: socket.socket) -> None:
        self.input, self.output = link.makefile("rb"), link.makefile("wb")
        self.functions: list[Any] = []
        self.calls = 0

    def ask(self, action: str, **words: Any) -> Any:
        return self.find(self.exchange({"do": action, "with": words}).get("value"))

    def call(self, number: int, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        self.calls += 1
        sent = {"what": number, "args": [self.packed(a) for a in args]}
        reply = self.exchange({"do": "call", "with": sent | {"words": {k: self.packed(v) for k, v in words.items()}}})
        for value, after in zip(args, reply.get("args", ()), strict=False):
            _overwrite(value, self.find(after))
        return self.find(reply.get("value"))

    def exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        write(self.output, request)
        reply = read(self.input)
        while "back" in reply:
            value = self.functions[reply["back"]](*[self.find(a) for a in reply["args"]])
            write(self.output, {"value": self.packed(value)})
            reply = read(self.input)
        if "raised" in reply:
            raise _exception(reply)
        return reply

    def packed(self, value: Any) -> Any:
        def keep(found: Any) -> Any:
            if type(found) is Remote:
                return {"t": "object", "v": found._number}
            if not callable(found):
                raise TypeError(f"a test cannot hand a {type(found).__name__} to the solution")
            self.functions.append(found)
            return {"t": "function", "v": len(self.functions) - 1}

        return pack(value, keep)

    def find(self, value: Any) -> Any:
        try:
            return unpack(value, lambda kind, inner: Remote(self, inner))
        except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise SolutionFailed("no value") from error


def _overwrite(value: Any, after: Any) -> None:
    """A function may change its arguments: a copy went over, and comes back."""
    if type(value) is not type(after):
        return
    if isinstance(value, list):
        value[:] = after
    elif isinstance(value, dict | set):
        value.clear()
        value.update(after)


def _exception(reply: dict[str, Any]) -> BaseException:
    """The nearest built-in exception. What would end this process is an error of the solution."""
    for name in reply["raised"]:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(str(reply.get("text", "")))
    return SolutionFailed(str(reply.get("text", "")))


def wanted_names(source: str) -> tuple[set[str], dict[str, Any]]:
    """What a test reads and neither makes nor imports: names of the solution, and what stands for the others. Those are
    modules that are only asked for what is in them, as in `math.isclose`, and functions of the library that take what
    the solution gave, as in `isclose(f(1), 2)`. They do not come from the solution, whose own could say anything."""
    tree = ast.parse(source)
    found = set(_globals(symtable.symtable(source, "test", "exec")))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    held = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    asked = found - {node.id for node in nodes if node not in held}
    given: dict[str, Any] = {name: importlib.import_module(name) for name in asked if name in sys.stdlib_module_names}
    if missing := sorted(asked.intersection(OTHERS)):
        raise Unfit(f"it uses {missing[0]} without importing it")
    found -= given.keys()
    made = {symbol.get_name() for symbol in symtable.symtable(source, "test", "exec").get_symbols() if _is_made(symbol)}
    library = {name: item for module in HELPERS for name, item in vars(importlib.import_module(module)).items()}
    possible = found.intersection(library) - made
    of_solution = found - possible - made
    if of_solution:  # else the function under test is called like one of the library
        results = _results(tree, of_solution)
        taking = {
            call.func.id
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
            if any(_names(word) & results for word in (*call.args, *call.keywords))
        }
        given |= {name: library[name] for name in taking & possible}
    return found - given.keys(), given


def _results(tree: ast.AST, functions: set[str]) -> set[str]:
    """Names of what the solution may have given: its functions, what is assigned from them, and parameters."""
    found = functions | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    size = 0
    while len(found) > size:
        size = len(found)
        for node in ast.walk(tree):
            source = getattr(node, "value", None) or getattr(node, "iter", None)
            if isinstance(source, ast.AST) and _names(source) & found:
                for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
                    found |= _names(target) if target is not None else set()
    return found


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        name = symbol.get_name()
        if symbol.is_referenced() and symbol.is_global() and not hasattr(builtins, name):
            yield name
    for inner in table.get_children():
        yield from _globals(inner)


def _is_made(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported()


class Unfit(Exception):
    """A test that says nothing about a solution."""


def attempt(job: dict[str, Any], link: Link) -> dict[str, Any]:
    """What came of one test."""
    link.exchange({"go": True})  # the solution is loaded
    if "call" in job:
        function = link.exchange({"do": "find", "with": {"name": job["call"]}}).get("value")
        if not isinstance(function, dict) or function.get("t") != "object":
            return {"passed": False, "detail": f"{job['call']} is no function"}
        sent = {"what": function["v"], "args": job["args"], "words": {}}
        value = link.find(link.exchange({"do": "call", "with": sent}).get("value"))
        expected = link.find(job["expected"])
        passed = same_value(value, expected)
        return {
            "passed": passed,
            "detail": "" if passed else f"returned {short.repr(value)}, not {short.repr(expected)}",
        }
    wanted, names = wanted_names(job["snippet"])
    for name in sorted(wanted):
        with contextlib.suppress(NameError):
            names[name] = link.ask("find", name=name)
    exec(compile(job["snippet"], "test", "exec"), names | {"__name__": "test"})  # this is the sandbox
    if not link.calls:
        raise Unfit("it calls nothing of the solution")  # it would pass with any
    return {"passed": True}


def fork_solution(link: socket.socket) -> None:
    """Never returns."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # the other side's input holds the test, and its output takes the verdict
    os.dup2(2, 1)
    kept = os.dup2(link.fileno(), 3)
    link.detach()
    os.closerange(4, 1 << 16)
    sys.path.insert(0, os.getcwd())
    try:
        Solution(socket.socket(fileno=kept)).serve()
    finally:
        os._exit(1)


def main() -> None:
    sys.path.pop(0)  # the working folder: the solution could put a module there for this process
    sys.set_int_max_str_digits(0)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        fork_solution(theirs)
    theirs.close()
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    job = json.loads(sys.stdin.buffer.read())
    try:
        found = attempt(job, Link(ours))
    except Unfit as error:
        found = {"unfit": str(error)}
    except BaseException as error:
        found = {"passed": False, "detail": f"{type(error).__name__}: {error}"[:500]}
    os.write(1, json.dumps({"nonce": job["nonce"], **found}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
