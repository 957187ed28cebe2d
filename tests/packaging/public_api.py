"""The public API as plain text, docs/public_api.txt: each module with its names and signatures.

    python -m tests.packaging.public_api            what differs from the file; 1 where something does
    python -m tests.packaging.public_api --write    write the file anew (make api)

The file's headings are the list of public modules: a line with a new one makes it public.
"""

import difflib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = Path(__file__).parents[2] / "docs" / "public_api.txt"
HEAD = """\
# The public API: what users may import, with parameters and defaults. `make api` writes this file; a test compares it
# with the code, so that nobody changes it by accident. Types and meaning are in the docstrings.
"""


def listing(text: str) -> str:
    """The file as it should be, for the modules that `text` has as headings."""
    modules = [line for line in text.splitlines() if re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)*", line)]
    parts = ["\n".join([name, *(f"  {line}" for line in lines(import_module(name)))]) for name in modules]
    return HEAD + "".join(f"\n{part}\n" for part in parts)


def lines(module: ModuleType) -> Iterator[str]:
    for name in public(module):
        found = getattr(module, name)
        if inspect.isclass(found):
            yield from of_class(name, found)
        elif callable(found):
            yield f"{name}{signature(found)}"
        else:
            yield name


def public(module: ModuleType) -> list[str]:
    """What it exports, or else every function and class that it defines itself; birl.types also classes of samples."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = vars(module).items()
    kept = [n for n, v in own if callable(v) and getattr(v, "__module__", "") == module.__name__]
    if module.__name__ == "birl.types":
        kept += [n for n, v in own if inspect.isclass(v) and v.__module__ == "birl.samples"]
    return sorted(name for name in kept if not name.startswith("_"))


def of_class(name: str, found: type) -> Iterator[str]:
    if issubclass(found, Enum):
        yield f"class {name}: {', '.join(f'{m.name}={m.value!r}' for m in found)}"
        return
    bases = [b.__name__ for b in found.__bases__ if b.__name__ not in ("object", "Protocol")]
    shown = f"class {name}" + (f" of {', '.join(bases)}" if bases else "")
    members = {
        n: v for base in reversed(found.__mro__) if base.__module__.startswith("birl.") for n, v in vars(base).items()
    }
    if is_dataclass(found):
        yield f"{shown}: {', '.join(map(field, fields(found)))}"
    elif "__init__" in members and not getattr(found, "_is_protocol", False):
        yield f"{shown}{signature(found)}"
    else:
        yield shown
    for method, value in sorted(members.items()):
        if not method.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)):
            yield f"  .{method}{signature(getattr(found, method))}"
        elif not method.startswith("_") and isinstance(value, property):
            yield f"  .{method}"


def field(one: Any) -> str:
    if one.default_factory is not MISSING:
        return f"{one.name}=..."
    return one.name if one.default is MISSING else f"{one.name}={value(one.default)}"


def signature(function: Any) -> str:
    """Parameters and defaults, without types: how those are printed differs between versions of Python."""
    given = inspect.signature(function)
    bare = []
    for parameter in given.parameters.values():
        default = parameter.default if parameter.default is inspect.Parameter.empty else Written(parameter.default)
        bare.append(parameter.replace(annotation=inspect.Parameter.empty, default=default))
    return str(given.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class Written:
    """A default as it is shown."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __repr__(self) -> str:
        return value(self.given)


def value(given: Any) -> str:
    """Objects without a repr of their own would show their address."""
    if isinstance(given, Enum):
        return str(given.value)
    if callable(given):
        return getattr(given, "__name__", "...")
    return "..." if " at 0x" in repr(given) else repr(given)


def difference() -> str:
    """Empty where the file is right."""
    have = FILE.read_text(encoding="utf-8")
    return "".join(difflib.unified_diff(have.splitlines(True), listing(have).splitlines(True), "listed", "now", n=1))


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text(listing(FILE.read_text(encoding="utf-8")), encoding="utf-8")
    print(difference(), end="")
    sys.exit(bool(difference()))
