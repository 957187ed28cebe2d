"""Plain data of tests and solutions: encoded as JSON that takes no more space or time than its bytes, and compared.

Standard library only, no imports of birl: it runs in the sandbox together with `checker.py`.
"""

import builtins
import collections
import decimal
import fractions
import math
import re
import reprlib
from typing import Any

DEEPEST = 200  # depth of nested lists
LARGEST = 1 << 16  # bits of numerator and denominator of a fraction, whose gcd has to be computed
DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?([eE][+-]?\d{1,6})?|Infinity|s?NaN\d{0,9})", re.ASCII)
CLOSE = 1e-9  # relative difference at which two floats are the same
MARKED = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}  # {"t": name, "v": items}


def pack(value: Any, keep: Any) -> Any:
    """Encode a value as JSON data. Subclasses become their base class, with the base's methods: their overrides are
    ignored. `keep` encodes values that are no plain data."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int.__int__(value)
        return value if -(1 << 63) <= value < 1 << 63 else {"t": "int", "v": f"{value:x}"}  # decimals need n^2 steps
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
    """Decode a value. Its size is at most that of the message: no text becomes a number that takes more space or time
    than the text. Raises `ValueError`, `KeyError` or `TypeError` for data that `pack` never makes."""
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


def short(digits: str) -> int:
    """Parse an integer of JSON; `pack` encodes long ones in hexadecimal."""
    if len(digits) > 20:
        raise ValueError("a number of many digits")
    return int(digits)


def same_value(value: Any, expected: Any) -> bool:
    """Whether values are equal; a tuple equals a list (JSON has none), a key that is a number equals its text, and
    floats may differ in the last digits. True is not 1, and a set is no list."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        named = {key if isinstance(key, str) else str(key): item for key, item in value.items()}
        wanted = {key if isinstance(key, str) else str(key): item for key, item in expected.items()}
        alike = len(value) == len(expected) and named.keys() == wanted.keys()
        return alike and all(same_value(named[key], wanted[key]) for key in wanted)
    if isinstance(value, collections.deque) and isinstance(expected, collections.deque):
        return same_value(list(value), list(expected))
    if isinstance(value, set | frozenset) and isinstance(expected, set | frozenset):
        return _with_booleans(value) == _with_booleans(expected)
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
    if isinstance(value, int | float) and isinstance(expected, int | float) and float in (type(value), type(expected)):
        if value == expected or (value != value and expected != expected):  # both are NaN
            return True
        return max(abs(value), abs(expected)) < 1e300 and math.isclose(value, expected, rel_tol=CLOSE)
    return value == expected


def _with_booleans(value: Any) -> set[Any]:
    return {(isinstance(item, bool), item) for item in value}


class Shown(reprlib.Repr):
    """Short text of a value for verdicts, without all digits of a long number."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 4, 80, 80, 80

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"(a number of {x.bit_length()} bits)"


shown = Shown()
