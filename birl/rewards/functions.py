"""Reward functions: looked up by name, called with the columns they ask for, and their results checked.

A reward function is a callable, `(completions, prompts, **columns) -> list[float]`. This file is used on both sides of
the pipe to a worker process, so it imports nothing heavy.
"""

import functools
import hashlib
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from birl.errors import BirlError, did_you_mean
from birl.foreign import described
from birl.named import from_file
from birl.types import LARGEST, Outcome

BUILTINS = {
    "math": "birl.rewards.math:math",
    "code": "birl.rewards.code:code",
    "format": "birl.rewards.text:format",
    "length": "birl.rewards.text:length",
    "endpoint": "birl.rewards.requests:endpoint",
    "judge": "birl.rewards.judge:judge",
}
OPTIONS = {
    "format_pattern": ("format", "pattern"),
    "length_target": ("length", "target"),
    "address": ("endpoint", "address"),
    "endpoint_concurrency": ("endpoint", "concurrency"),
    "endpoint_timeout": ("endpoint", "timeout"),
    "panel": ("judge", "panel"),
    "code_partial": ("code", "partial"),
    "sandbox": ("code", "sandbox"),
}

PER_CALL = ("trainer_state", "log_extra", "log_metric")  # arguments that are not a list with one entry per completion


@dataclass(frozen=True, slots=True)
class Answers:
    """The result of a call. `values`: for each completion its value, None if the function does not score it, or an
    error message. `extra`: arguments of `log_extra` by name, one entry for each completion. `logged`: arguments of
    `log_metric` by name."""

    values: list[float | str | None]
    extra: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    logged: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    @classmethod
    def received(cls, reply: Any, n: int) -> "Answers":
        """Check the reply of a worker, which a reward function may have tampered with. Raises `CallFailed`."""
        try:
            result = cls(**reply)
            texts = [value if isinstance(value, str) else None for value in result.values]
            values = [text or _number(value) for text, value in zip(texts, result.values, strict=True)]
            extra = {name: list(column) for name, column in result.extra.items()}
            logged = {name: [float(value) for value in column] for name, column in result.logged.items()}
            uneven = any(len(column) != n for column in (values, *extra.values())) or not all(logged.values())
        except (TypeError, ValueError, AttributeError):
            uneven, values, extra, logged = True, [], {}, {}
        if uneven:
            raise CallFailed(Outcome.ENV_ERROR, "the worker's reply has another form than its own")
        return cls(values, extra, logged)


class Invocation:
    """One call of a function: the arguments that exist only in its process, and what it logs.

    Example: call = Invocation({"completions": ["7"], "log_metric": None}, n=1)
             call.answers(function(**call.arguments))
    """

    def __init__(self, arguments: Mapping[str, Any], n: int) -> None:
        own = {
            "trainer_state": SimpleNamespace(**(arguments.get("trainer_state") or {})),
            "log_extra": self.log_extra,
            "log_metric": self.log_metric,
        }
        self.arguments = {name: own.get(name, value) for name, value in arguments.items()}
        self.n = n
        self.extra: dict[str, list[Any]] = {}
        self.logged: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log one value for each completion, for rollouts.jsonl."""
        listed = list(values)
        if len(listed) != self.n:
            raise ValueError(f"log_extra({column!r}, ...): {len(listed)} values for {self.n} completions")
        self.extra[str(column)] = [_stored(value) for value in listed]

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; metrics.jsonl has its mean over a step."""
        self.logged.setdefault(str(name), []).append(float(value))

    def answers(self, result: object) -> Answers:
        """The checked result. Raises `CallFailed` if it is not a list with one entry for each completion."""
        return Answers(checked(result, self.n), self.extra, self.logged)


def _stored(value: Any) -> bool | int | float | str | None:
    """The value as JSON: an integer of thousands of digits cannot be written in decimal."""
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return f"{value:#x}"
    return value if isinstance(value, bool | int | float | None) else str(value)


class CallFailed(Exception):
    """A call returned no values at all. `isolate`: scoring the completions one by one may find the culprit."""

    def __init__(self, outcome: Outcome, detail: str, *, isolate: bool = True, seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.isolate = isolate
        self.seconds = seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The arguments that a function takes by name, and whether it takes any others (`**kwargs`).

    Example: Parameters(required=("completions",), optional=("gold",), anything=False)
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    anything: bool = False
    bound: tuple[str, ...] = ()  # already bound as options: a column of that name must not replace it

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Parameters":
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some callables written in C have no signature
            return cls(required=(), anything=True)
        bound = tuple(function.keywords) if isinstance(function, functools.partial) else ()
        by_name = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in bound]
        return cls(
            required=tuple(p.name for p in by_name if p.default is p.empty),
            optional=tuple(p.name for p in by_name if p.default is not p.empty),
            anything=any(p.kind is p.VAR_KEYWORD for p in parameters),
            bound=bound,
        )

    @property
    def named(self) -> tuple[str, ...]:
        return self.required + self.optional

    def select(self, name: str, offered: Mapping[str, Any]) -> dict[str, Any]:
        """The offered arguments that the function takes. Raises `BirlError` if a required one is missing."""
        missing = [parameter for parameter in self.required if parameter not in offered]
        if missing:
            raise BirlError(
                f"reward function {name!r} has a parameter {missing[0]!r}, but there is no such column."
                f"{did_you_mean(missing[0], offered)} It can have: {', '.join(sorted(offered))}."
            )
        taken = set(offered) - set(self.bound) if self.anything else self.named
        return {key: value for key, value in offered.items() if key in taken}


def is_file(spec: str) -> bool:
    return spec.rpartition(":")[0].endswith(".py")


def resolve(spec: str, folder: Path) -> str:
    """The spec with an absolute file path. Raises `BirlError` for errors that can be found without importing it."""
    place, colon, function = spec.rpartition(":")
    if not colon:
        if spec in BUILTINS:
            return spec
        if spec.endswith(".py"):
            raise BirlError(f"reward {spec!r} names a file but no function: write {spec}:my_function")
        raise BirlError(
            f"there is no reward function {spec!r}.{did_you_mean(spec, BUILTINS)} "
            f"Use {', '.join(BUILTINS)}, my_file.py:my_function or package.module:function."
        )
    if not place or not function:
        raise BirlError(f"reward {spec!r} must look like my_file.py:my_function or package.module:function")
    if not is_file(spec):
        return spec
    path = (folder / Path(place).expanduser()).resolve()
    if not path.is_file():
        hint = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")])
        raise BirlError(f"reward {spec!r}: there is no file {place} (looked in {path.parent}).{hint}")
    return f"{path}:{function}"


def load(spec: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Import a resolved spec and bind its options. Raises `BirlError` that says what is wrong and where."""
    place, _, name = BUILTINS.get(spec, spec).rpartition(":")
    try:
        module = from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == place.partition(".")[0]:
            raise BirlError(f"reward {spec!r}: there is no module {place!r}") from error
        raise BirlError(f"reward {spec!r} cannot be imported: {described(error, place)}") from error
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = did_you_mean(name, known) or f" It has: {', '.join(sorted(known)) or 'none'}."
        raise BirlError(f"reward {spec!r}: {place} has no function {name!r}.{hint}")
    if not callable(function):
        raise BirlError(f"reward {spec!r}: {name!r} in {place} is a {type(function).__name__}, not a function")
    bound = {OPTIONS[key][1]: value for key, value in options.items() if OPTIONS[key][0] == spec}
    if spec in BUILTINS and (prepare := getattr(module, "prepare", None)) is not None:
        prepare(**bound)
    return functools.partial(function, **bound) if bound else function


def digest(spec: str) -> str:
    """SHA-256 of the file that a spec names, to detect changes during a run. Empty for modules."""
    return hashlib.sha256(Path(spec.rpartition(":")[0]).read_bytes()).hexdigest() if is_file(spec) else ""


def failed(error: BaseException, function: Callable[..., Any]) -> CallFailed:
    inner = function.func if isinstance(function, functools.partial) else function
    code = getattr(inspect.unwrap(inner), "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return CallFailed(Outcome.ENV_ERROR, described(error, "" if code is None else code.co_filename))


def checked(result: object, n: int) -> list[float | str | None]:
    """Check a function's result, value by value. Raises `CallFailed` if it is not a list of n elements."""
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping | set | frozenset):
        raise CallFailed(
            Outcome.ENV_ERROR, f"returned {type(result).__name__}, not a list of {n} numbers", isolate=False
        )
    values: Sequence[object] = list(islice(result, n + 1))  # a generator may be infinite
    if len(values) != n:
        many = str(len(result) if isinstance(result, Sized) else len(values) if len(values) < n else f"over {n}")
        raise CallFailed(Outcome.ENV_ERROR, f"returned {many} values for {n} completions", isolate=False)
    return [_number(value) for value in values]


def _number(value: object) -> float | str | None:
    if value is None:
        return None
    if isinstance(value, Exception):  # of one completion; the others have values
        return next(iter(str(value).splitlines()), type(value).__name__)[:400]
    if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return f"returned a {type(value).__name__} instead of a number"
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception as error:
        return f"returned a {type(value).__name__} that is no number ({error})".splitlines()[0]
    if abs(number) > LARGEST and math.isfinite(number):
        return f"returned {number:g}, which is too large: a reward is between -{LARGEST:g} and {LARGEST:g}"
    return number if math.isfinite(number) else f"returned {number}"
