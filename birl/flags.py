"""Flags of a command: `--name VALUE`, `--name=VALUE` and `--switch`, anywhere between its other words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from birl.errors import BirlError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag. `value`: placeholder of its value in help, empty for a switch. `takes`: description of valid values with
    an example, for error messages. `read`: converts text to the value; raises ValueError.

    Example: Flag(name="--limit", value="N", takes="a whole number, as in --limit 50", read=whole)
    """

    name: str
    value: str = ""
    takes: str = ""
    read: Callable[[str], Any] = str

    def __str__(self) -> str:
        return f"{self.name} {self.value}".rstrip()


JSON = Flag(name="--json")


def taken(command: str, words: Sequence[str], flags: Sequence[Flag]) -> tuple[dict[str, Any], list[str]]:
    """Parse the words of a command: values of the flags that are present (True for a switch), and the other words. The
    last occurrence of a flag counts. Raises `BirlError` for an unknown flag.

    Example: taken("view", ["runs", "--port=1"], [PORT]) == ({"--port": 1}, ["runs"])
    """
    known = {flag.name: flag for flag in flags}
    result: dict[str, Any] = {}
    rest, left = list[str](), iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            rest.append(word)
            continue
        flag = known.get(name)
        if flag is None or (equals and not flag.value):
            has = ", ".join(map(str, flags)) or "no flags"
            raise BirlError(f"{word}: `birl {command}` has {has}.{did_you_mean(name, known)}")
        if flag.value and not equals:
            value = next(left, "")
        result[flag.name] = _read(flag, value) if flag.value else True
    return result, rest


def _read(flag: Flag, value: str) -> Any:
    try:
        if not value or value.startswith("--"):
            raise ValueError
        return flag.read(value)
    except ValueError:
        got = f", not {value!r}" if value else ""
        raise BirlError(f"{flag.name} takes {flag.takes}{got}") from None


def whole(text: str) -> int:
    """Parse a number of ASCII digits. Raises ValueError."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError
    return int(text)
