"""Parts of an algorithm by name, or `my_file.py:my_function`, with their options bound and checked.

A surrogate is `f(logp, old_logp, advantages, sample, *, options) -> Surrogate`, an advantage is `f(rewards, group, *,
options) -> advantages`. Options are resolved by name: from the tensors of the step (`ref_logp`, `entropy`, `group`,
`lengths`, ...), the keys of `algorithm` (`clip_low`, ...), or the list of `name=value` in the function's `_args` key.
Missing, unknown and mistyped options are reported before the run begins.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from birl.errors import BirlError, did_you_mean
from birl.foreign import described, harmless
from birl.named import load


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function with its constant options; `tensors`: names of the step's tensors that it takes; `own`: KEY=NAME of a
    user's function."""

    function: Callable[..., Any]
    options: Mapping[str, Any]
    tensors: tuple[str, ...]
    own: str = ""

    def bound(self, tensors: Mapping[str, Any]) -> Callable[..., Any]:
        """The function with its options and `tensors`. A user's one raises its errors as `BirlError`."""
        extra = {name: tensors[name] for name in self.tensors}

        def call(*args: Any) -> Any:
            try:
                return self.function(*args, **self.options, **extra)
            except BaseException as error:  # whatever the user's function raises
                if not self.own:
                    raise
                raise BirlError(f"{self.own}: it failed: {described(error)}") from harmless(error)

        return call


def part(
    key: str,
    name: str,
    table: Mapping[str, Callable[..., Any]],
    keys: Any,
    args: Sequence[str],
    offered: Sequence[str],
    positional: Sequence[str] = (),
) -> NamedFunction:
    """Return the function of `key`=`name`. `keys`: the section with keys such as clip_low. `offered`: tensors by name;
    `positional`: names of those by position."""
    function = table.get(name) or load(key, name, table)
    if name not in table:
        _check_positional(function, f"{key}={name}", positional)
    given = dict(_split(f"{key}_args", word) for word in args)
    options: dict[str, Any] = {}
    tensors: list[str] = []
    for parameter in _options(function, key, name):
        if parameter.name in offered:
            tensors.append(parameter.name)
        elif parameter.name in given:
            options[parameter.name] = _read(f"{key}_args", parameter, given.pop(parameter.name))
        elif hasattr(keys, parameter.name):
            options[parameter.name] = getattr(keys, parameter.name)
        elif parameter.default is parameter.empty:
            raise BirlError(
                f"{key}={name}: needs {parameter.name}. Set {key}_args=[{parameter.name}=...], or give the parameter a "
                "default."
            )
    if given:
        known = [p.name for p in _options(function, key, name) if p.name not in offered]
        wrong = next(iter(given))
        hint = did_you_mean(wrong, known) or f" It has: {', '.join(known) or 'none'}."
        raise BirlError(f"{key}_args: {name} has no option {wrong}.{hint}")
    return NamedFunction(function, options, tuple(tensors), "" if name in table else f"{key}={name}")


def _check_positional(function: Callable[..., Any], what: str, names: Sequence[str]) -> None:
    """Raises `BirlError` unless the function takes so many positional arguments."""
    try:
        whole = inspect.signature(function)
    except ValueError as error:  # a function in C
        raise BirlError(f"{what}: {error}; name a function that is written in Python.") from error
    try:
        whole.replace(parameters=[p for p in whole.parameters.values() if p.kind is not p.KEYWORD_ONLY]).bind(*names)
    except TypeError as error:
        raise BirlError(f"{what}: {error}. It is called with ({', '.join(names)}); options go behind a *.") from error


def _options(function: Callable[..., Any], key: str, name: str) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise BirlError(f"{key}={name}: **options cannot be checked; name each option of the function.")
    return [p for p in parameters if p.kind is p.KEYWORD_ONLY]


def _split(key: str, word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name.strip():
        raise BirlError(f"{key}: {word!r} is not name=value.")
    return name.strip(), value.strip()


def _read(key: str, parameter: inspect.Parameter, value: str) -> Any:
    """Parse by the type of the parameter's default, else by its annotation, else as a number if it is one."""
    default: Any = parameter.default
    wanted: Any = parameter.annotation
    if default is not parameter.empty:
        wanted = cast(type[Any], type(default))
    if wanted is bool:
        if value not in ("true", "false"):
            raise BirlError(f"{key}: {parameter.name}={value} must be true or false.")
        return value == "true"
    if wanted is str:
        return value
    try:
        return int(value) if wanted is int else float(value)
    except ValueError:
        if wanted in (int, float):
            raise BirlError(f"{key}: {parameter.name}={value} must be a number.") from None
        return value
