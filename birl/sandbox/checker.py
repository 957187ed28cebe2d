"""Runs in the sandbox and runs one test on one solution, in two processes, so that the solution cannot forge the
verdict.

The solution is loaded in a child that can reach this process only through a socket: not its standard output, not its
memory (it is not dumpable, and the sandbox refuses ptrace), and it was forked before test and nonce were read. This
process runs the test; a call of the solution's function is a message to the child, and plain data in return. The
verdict depends on `==` of plain data in this process, so an object that claims to equal everything equals nothing here.
The caller gets only the verdict: no object of a solution is ever read outside of the sandbox.

Standard library only, together with `names.py` and `values.py`. Its standard output is one JSON object with the nonce.
"""

import builtins
import collections
import contextlib
import ctypes
import importlib
import io
import json
import os
import re
import socket
import sys
import types
from decimal import Decimal
from fractions import Fraction
from typing import Any

from birl.sandbox.names import Unfit, names_of, run_suites
from birl.sandbox.values import pack, same_value, short, shown, unpack

LONGEST = 1 << 24  # largest message [bytes]
PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, Decimal, Fraction, type(None))
PR_SET_DUMPABLE = 4
#: methods of text, sets and numbers that return yes or no
PREDICATES = {"startswith", "endswith"} | {
    name for kind in (str, frozenset, float) for name in dir(kind) if name.startswith("is")
}
#: what finds a name of the solution that the test writes in a text, as in exec("assert f(1) == 2")
HIDING = re.compile(r"\b(?:exec|eval|globals|locals|vars|__dict__)\b")
NAMES = ("collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "bisect", "operator")


class SolutionFailed(BaseException):
    """The solution's process ended or sends invalid messages. Not hidden by an `except Exception` of a test."""


def write(pipe: io.BufferedWriter, message: dict[str, Any]) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def read(pipe: io.BufferedReader) -> dict[str, Any]:
    line = pipe.readline(LONGEST)
    try:
        message = json.loads(line, parse_int=short)
    except (ValueError, RecursionError) as error:
        raise SolutionFailed("the solution's process ended" if not line else "no message") from error
    if not isinstance(message, dict):
        raise SolutionFailed("no message")
    return message


# ---- the solution's side ---------------------------------------------------------------------------------------------


class Solution:
    """Loads solution.py and executes the requests of the other side: call, get an attribute, the next item."""

    def __init__(self, link: socket.socket) -> None:
        self.input, self.output = link.makefile("rb"), link.makefile("wb")
        self.objects: list[Any] = []
        self.names: dict[str, Any] = {}

    def serve(self) -> None:
        read(self.input)  # "go": the other side is no longer dumpable
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
        self.given = dict(self.names)
        with open("solution.py", encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, "solution.py", "exec"), self.names)  # this is the sandbox
        return {}

    def answer(self, action: Any) -> None:
        try:
            reply = action()
        except BaseException as error:
            reply = {"raised": [kind.__name__ for kind in type(error).__mro__], "args": []}
            with contextlib.suppress(BaseException):  # they may be any objects
                reply["args"] = self.packed(list(error.args))
        write(self.output, reply)

    def do_find(self, name: str) -> dict[str, Any]:
        if name in self.names:
            return {"value": self.packed(self.names[name])}
        if isinstance(self.names.get("Solution"), type) and hasattr(self.names["Solution"], name):
            return {"value": self.packed(getattr(self.names["Solution"](), name))}
        raise NameError(f"name {name!r} is not defined")

    def do_names(self) -> dict[str, Any]:
        own = [name for name, item in self.names.items() if item is not self.given.get(name)]
        return {"value": own + dir(self.names.get("Solution"))}

    def do_call(self, what: int, args: list[Any], words: dict[str, Any]) -> dict[str, Any]:
        given = [self.unpacked(value) for value in args]
        named = {name: self.unpacked(value) for name, value in words.items()}
        value = self.objects[what](*given, **named)
        changed = [self.packed(value) for value in (*given, *named.values())]
        return {"value": self.packed(value), "args": changed, "waits": isinstance(value, types.CoroutineType)}

    def do_wait(self, what: int) -> dict[str, Any]:
        return {"value": self.packed(importlib.import_module("asyncio").run(self.objects[what]))}

    def do_get(self, what: int, name: str) -> dict[str, Any]:
        return {"value": self.packed(getattr(self.objects[what], name))}

    def do_set(self, what: int, name: str, value: Any) -> dict[str, Any]:
        setattr(self.objects[what], name, self.unpacked(value))
        return {}

    def packed(self, value: Any) -> Any:
        def keep(item: Any) -> Any:
            self.objects.append(item)
            return {"t": "object", "v": len(self.objects) - 1}

        return pack(value, keep)

    def unpacked(self, value: Any) -> Any:
        def find(kind: str, inner: Any) -> Any:
            if kind == "object":
                return self.objects[inner]
            return lambda *args: self.back(inner, args)

        return unpack(value, find)

    def back(self, function: int, args: tuple[Any, ...]) -> Any:
        """Call a function of the test that was passed as an argument."""
        write(self.output, {"back": function, "args": [self.packed(value) for value in args]})
        return self.unpacked(read(self.input)["value"])


# ---- the test's side -------------------------------------------------------------------------------------------------


class Ended(Exception):
    """The solution raised StopIteration. Except in `next`, that would silently end a loop of the test."""


class Remote:
    """Proxy of an object of the solution. It equals only itself, and arithmetic is not forwarded. `made`: created by a
    class that the test names, or obtained from such an object. Results of functions have no methods of text: an object
    that answers yes to every question would pass."""

    def __init__(self, link: "Link", number: int, made: bool) -> None:
        for name, value in (("_link", link), ("_number", number), ("_made", made)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **words: Any) -> Any:
        return self._link.call(self._number, args, words, self._made)

    def __getattr__(self, name: str) -> Any:
        if name in PREDICATES and not self._made:
            raise AttributeError(f"what the function gave is no plain data, and has no {name}")
        return self._link.ask("get", self._made, what=self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("set", what=self._number, name=name, value=self._link.packed(value))

    def __len__(self) -> int:
        try:
            return self.__getattr__("__len__")()
        except AttributeError as error:
            raise TypeError(str(error)) from error  # list() calls it, and continues without it

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __iter__(self) -> Any:
        iterator = self.__getattr__("__iter__")()
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            yield item

    def __next__(self) -> Any:
        try:
            return self.__getattr__("__next__")()
        except Ended:
            raise StopIteration from None


class Link:
    """Sends requests to the solution's process."""

    def __init__(self, link: socket.socket) -> None:
        self.input, self.output = link.makefile("rb"), link.makefile("wb")
        self.functions: list[Any] = []
        self.calls = 0

    def ask(self, action: str, made: bool = False, **words: Any) -> Any:
        return self.find(self.exchange({"do": action, "with": words}).get("value"), made)

    def call(self, number: int, args: tuple[Any, ...], words: dict[str, Any], made: bool) -> Any:
        self.calls += 1
        sent = {"what": number, "args": [self.packed(a) for a in args]}
        reply = self.exchange({"do": "call", "with": sent | {"words": {k: self.packed(v) for k, v in words.items()}}})
        for value, after in zip((*args, *words.values()), reply.get("args", ()), strict=False):
            _overwrite(value, self.find(after))
        value = self.find(reply.get("value"), made)
        return self.wait(value) if reply.get("waits") and type(value) is Remote else value

    async def wait(self, coroutine: Remote) -> Any:
        """The result of an asynchronous function, which the solution's process runs to its end."""
        return self.ask("wait", what=coroutine._number)

    def exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        write(self.output, request)
        reply = read(self.input)
        while "back" in reply:
            value = self.functions[reply["back"]](*[self.find(a) for a in reply["args"]])
            write(self.output, {"value": self.packed(value)})
            reply = read(self.input)
        if "raised" in reply:
            raise _exception(reply["raised"], self.find(reply.get("args", [])))
        return reply

    def packed(self, value: Any) -> Any:
        def keep(item: Any) -> Any:
            if type(item) is Remote:
                return {"t": "object", "v": item._number}
            if not callable(item):
                raise TypeError(f"a test cannot hand a {type(item).__name__} to the solution")
            self.functions.append(item)
            return {"t": "function", "v": len(self.functions) - 1}

        return pack(value, keep)

    def find(self, value: Any, made: bool = False) -> Any:
        try:
            return unpack(value, lambda kind, inner: Remote(self, inner, made))
        except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise SolutionFailed("no value") from error


def _overwrite(value: Any, after: Any) -> None:
    """Copy changes of arguments back: the function got a copy."""
    if type(value) is not type(after):
        return
    if isinstance(value, list | bytearray):
        value[:] = after
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(after)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(after)


def _exception(names: list[str], args: list[Any]) -> BaseException:
    """The nearest built-in exception. One that would end this process becomes an error of the solution."""
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(TypeError):  # it takes other arguments
                return Ended() if kind is StopIteration else kind(*args)
    return SolutionFailed(f"{str(names[0])[:80]}: {shown.repr(args)}")


def _agreeing(function: Any, own: Any) -> Any:
    """A library function that checks that the solution's function of the same name returns the same."""

    def both(*args: Any, **words: Any) -> Any:
        expected = function(*args, **words)
        if type(expected) in PLAIN and not same_value(value := own(*args, **words), expected):
            raise AssertionError(f"{function.__name__} returned {shown.repr(value)}, not {shown.repr(expected)}")
        return expected

    return both


def _named(link: Link, name: str) -> Any:
    """An object of the solution by name. Raises `NameError`."""
    return link.ask("find", name[0].isupper() and name != "Solution", name=name)


def _module(link: Link) -> types.ModuleType:
    """The module that a test imports as `solution`."""

    def get(name: str) -> Any:
        try:
            return _named(link, "" if name.startswith("__") else name)
        except (NameError, IndexError):
            raise AttributeError(f"the solution has no {name}") from None

    result = types.ModuleType("solution")
    result.__dict__["__getattr__"] = get
    return result


def attempt(job: dict[str, Any], link: Link) -> dict[str, Any]:
    """Run one test and return its result."""
    link.exchange({"go": True})  # the solution is loaded
    if "call" in job:
        function = link.exchange({"do": "find", "with": {"name": job["call"]}}).get("value")
        if not isinstance(function, dict) or function.get("t") != "object":
            return {"passed": False, "detail": f"{job['call']} is no function"}
        sent = {"what": function["v"], "args": job["args"], "words": {}}
        reply = link.exchange({"do": "call", "with": sent})
        if reply.get("waits"):
            reply = link.exchange({"do": "wait", "with": {"what": reply["value"]["v"]}})
        value = link.find(reply.get("value"))
        expected = link.find(job["expected"])
        passed = same_value(value, expected)
        return {
            "passed": passed,
            "detail": "" if passed else f"returned {shown.repr(value)}, not {shown.repr(expected)}",
        }
    own = link.ask("names") if HIDING.search(job["snippet"]) else ()
    names = names_of(job["snippet"], own)
    known = {"__name__": "test", **names.given, **names.either}
    sys.modules["solution"] = _module(link)
    for name in sorted(names.wanted | names.either.keys()):
        with contextlib.suppress(NameError):
            its = _named(link, name)
            known[name] = _agreeing(names.either[name], its) if name in names.either else its
    sys.modules["solution"].__dict__.update({name: known[name] for name in names.wanted & known.keys()} if own else {})
    exec(compile(job["snippet"], "test", "exec"), known)  # this is the sandbox
    if not link.calls:
        run_suites(known)
    if not link.calls:
        raise Unfit("it calls nothing of the solution")  # any solution would pass
    return {"passed": True}


def fork_solution(link: socket.socket) -> None:
    """Serve the solution in this child. Never returns."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # the other side's input has the test, and its output gets the verdict
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
    sys.path.pop(0)  # the working folder: the solution could place a module there for this process
    sys.set_int_max_str_digits(0)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        fork_solution(theirs)
    theirs.close()
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    job = json.loads(sys.stdin.buffer.read())
    try:
        result = attempt(job, Link(ours))
    except Unfit as error:
        result = {"unfit": str(error)}
    except BaseException as error:
        result = {"passed": False, "detail": f"{type(error).__name__}: {error}"[:500]}
    os.write(1, json.dumps({"nonce": job["nonce"], **result}).encode())
    os._exit(0)
