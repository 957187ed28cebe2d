"""Jinja with memory limits: a chat template comes with the model, and may be hostile.

`deadline` ends a template that computes for long, but a single call into C is not interrupted, and a template that
doubles a string forty times, or computes `'x' * 10**10`, would first use up all memory. So every operation whose result
can be larger than its inputs is checked: before it, if a factor tells the size, else after it."""

import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sized, ValuesView
from datetime import datetime
from functools import wraps
from itertools import chain
from string import Formatter
from threading import local
from typing import Any

from jinja2 import compiler, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from birl.text import tools

LARGEST = 2**23  # largest value [characters, with everything that it contains written out]
TOGETHER = 2**29  # largest total of all values of one rendering [characters]
WIDEST = 10**5  # largest width, indent or repetition passed as a number
BITS = 2**15  # largest integer [bits]
ENTRY = 64  # cost of an element of a list or dict [characters]
SIZED = re.compile("batch|center|expandtabs|indent|ljust|rjust|round|slice|to_bytes|tojson|wordwrap|zfill")
HOLDERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_WIDE = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*?(?:\*|\d{6})")
_spent = local()


class TooLarge(Exception):
    """A template exceeds the limits."""


def bounded() -> None:
    """Make transformers compile templates with these limits from now on; starts a rendering in this thread."""
    from transformers.utils import chat_template_utils as foreign

    if foreign.ImmutableSandboxedEnvironment is not Bounded:
        foreign.ImmutableSandboxedEnvironment = Bounded
        foreign._compile_jinja_template.cache_clear()
    _spent.characters = 0


def size(value: Any) -> int:
    """Characters of a value when written out: an element that a list has twice counts twice. Stops above `LARGEST`."""
    total, rest = -ENTRY, [iter((value,))]
    while rest and total <= LARGEST:
        for one in rest[-1]:
            total += ENTRY
            if isinstance(one, str | bytes):
                total += len(one)
            elif isinstance(one, Mapping):
                rest.append(chain(one.keys(), one.values()))
                break
            elif isinstance(one, HOLDERS):
                rest.append(iter(one))
                break
            if total > LARGEST:
                break
        else:
            rest.pop()
    return total


def _allow(characters: int) -> None:
    if characters > LARGEST:
        raise TooLarge


def checked(value: Any) -> Any:
    """Return the value. Raises `TooLarge` if it, or the total of this rendering, is too large."""
    if isinstance(value, int):
        if value.bit_length() > BITS:
            raise TooLarge
    else:
        characters = size(value)
        _spent.characters = getattr(_spent, "characters", 0) + characters
        _allow(characters)
        if _spent.characters > TOGETHER:
            raise TooLarge
    return value


def _join(parts: Iterable[Any], between: Any) -> list[Any]:
    parts = list(parts)
    _allow(size(parts) + len(parts) * len(str(between)))
    return parts


def _format(form: str, given: Any) -> None:
    if any("{" in (spec or "") or re.search(r"\d{6}", spec or "") for _, _, spec, _ in Formatter().parse(form)):
        raise TooLarge
    _allow(len(form) + form.count("{") * size(given))


def _percent(form: str, given: Any) -> None:
    if _WIDE.search(form):
        raise TooLarge
    _allow(len(form) + form.count("%") * size(given))


def _replace(text: str, old: Any, new: Any, *_: Any) -> None:
    _allow(len(text) + text.count(str(old)) * len(str(new)))


def _numbers(name: str, given: Iterable[Any]) -> None:
    if SIZED.fullmatch(name) and any(isinstance(one, int | float) and abs(one) > WIDEST for one in given):
        raise TooLarge


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with the limits."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context comes first, then the value

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        front, (value, *given) = args[:skip], args[skip:]
        _numbers(name, chain(given, kwargs.values()))
        if name == "join":
            value = _join(value, kwargs.get("d", given[0] if given else ""))
        elif name == "format":
            _percent(str(value), kwargs or tuple(given))
        elif name == "replace":
            _replace(str(value), *{**dict(zip(("old", "new"), given, strict=False)), **kwargs}.values())
        return checked(function(*front, value, *given, **kwargs))

    return call


class _Filters(dict[str, Callable[..., Any]]):
    """Filters with limits; transformers adds its own after the environment is made."""

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__({name: _filter(name, function) for name, function in filters.items()})

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _filter(name, function))


class _Generator(compiler.CodeGenerator):
    """Code generator that routes concatenations and literals through the environment's checks."""

    def _checked(self, visit: Callable[..., None], node: Any, frame: compiler.Frame, load: bool = True) -> None:
        self.write("environment.checked(" if load else "")
        visit(node, frame)
        self.write(")" if load else "")

    def visit_Concat(self, node: nodes.Concat, frame: compiler.Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_List(self, node: nodes.List, frame: compiler.Frame) -> None:
        self._checked(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: compiler.Frame) -> None:
        self._checked(super().visit_Tuple, node, frame, node.ctx == "load")

    def visit_Dict(self, node: nodes.Dict, frame: compiler.Frame) -> None:
        self._checked(super().visit_Dict, node, frame)


class Bounded(ImmutableSandboxedEnvironment):
    """The sandboxed environment in which transformers compiles chat templates, with limits: raises `TooLarge`."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "%", "+"})
    checked = staticmethod(checked)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters = _Filters(self.filters)

    def from_string(self, *args: Any, **kwargs: Any) -> Any:
        self.globals["strftime_now"] = lambda form: (tools.now or datetime.now()).strftime(form)
        return super().from_string(*args, **kwargs)

    def concat(self, parts: Iterable[str]) -> str:
        total, kept = 0, []
        for part in parts:
            total += len(part)
            _allow(total)
            kept.append(part)
        return checked("".join(kept))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _allow(LARGEST * (left.bit_length() * abs(right) // BITS))
        elif operator == "%" and isinstance(left, str):
            _percent(left, right)
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, Sized) and isinstance(times, int):
                    _allow(size(many) * times)
        return checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)
        name, own = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(own, str | bytes | int):
            _numbers(name, chain(args, kwargs.values()))
        else:  # it may store them, as a namespace does
            _allow(size((args, kwargs)))
        if isinstance(own, str):
            if name == "join" and len(args) == 1:
                args = (_join(args[0], own),)
            elif name in ("format", "format_map"):
                _format(own, (args, kwargs))
            elif name == "replace" and len(args) > 1:
                _replace(own, *args)
            elif name == "translate" and len(args) == 1:
                _allow(len(own) * max((len(v) for v in args[0].values() if isinstance(v, str)), default=1))
        return checked(super().call(context, function, *args, **kwargs))
