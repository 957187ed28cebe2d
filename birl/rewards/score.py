"""Combines reward functions: completions in, one `Score` each out."""

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from birl.errors import BirlError
from birl.rewards.functions import BUILTINS, PER_CALL, Answers, CallFailed, Parameters, resolve
from birl.rewards.pool import Pool, Worker, local
from birl.types import UNSCORED, Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Reward of one completion. `value` is NaN unless the outcome is ok; `parts`: value of each function, if it
    returned one; `detail`: first line of the error. `extra`: values that the functions passed to `log_extra` for this
    completion; `logged`: mean of the values passed to `log_metric` in the calls that scored it.

    Example: Score(value=1.5, parts={"math": 1.0, "format": 0.5}, outcome=Outcome.OK)
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome = Outcome.OK
    detail: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    logged: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class RewardValue:
    """Value of one function for one completion; None: the function does not score it."""

    value: float | CallFailed | None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    logged: Mapping[str, float] = field(default_factory=dict[str, float])


Call = Callable[[Mapping[str, Any], int, float], Awaitable[tuple[Answers, float]]]


@dataclass(frozen=True, slots=True)
class Function:
    """One reward function, in any process."""

    name: str
    parameters: Parameters
    call: Call  # (arguments, number of completions, deadline in seconds) -> (answers, seconds it took)
    remote: bool  # arguments cross a pipe as JSON
    reads_text: bool  # of completions given as messages


class Rewards:
    """The weighted sum of reward functions (their mean without weights).

    A function is `(completions, prompts, **columns) -> list of numbers`, sync or async. It gets the dataset's other
    columns by name, and `gold`, the reference answers; without `**kwargs` only those it names.

    - By name (`math`, `format`, `length`, `my_file.py:score`, `package.module:score`) it runs in a worker process that
      is killed, with all its children, if a call takes longer than `timeout` seconds.
    - A Python object runs in this process: async in the event loop, which it must not block; sync in a thread, one call
      at a time. A thread that hangs cannot be killed: it is abandoned (it does not keep the program from ending), and
      all completions of that call time out.

    A failure is never a 0. A call that hangs, dies or raises is repeated with one completion at a time to find the
    culprits (about 3 times the timeout at most, plus restarts); the others are then scored together, without them,
    because a function may compare the completions of a group. NaN and infinity are errors of that completion. None
    leaves the function out of that completion's sum; if all return None, it has no value.

    Example: async with Rewards(["math", "my_file.py:score"], weights=[1.0, 0.5]) as rewards:
                 scores = await rewards.score([prompt, prompt], ["7", "8"], {"level": [1, 1]}, gold=["7", "7"])
    """

    def __init__(
        self,
        functions: Sequence[str | Callable[..., Any]],
        *,
        weights: Sequence[float] = (),
        timeout: float = 10.0,
        workers: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = dict(options or {})
        self.folder = Path.cwd()
        self.functions = [resolve(f, self.folder) if isinstance(f, str) else _callable(f) for f in functions]
        self.names = _names(functions)
        self.weights = [float(w) for w in weights] or [1.0 / len(functions)] * len(functions)
        self.timeout = float(timeout)
        self.workers = workers
        self._workers = Pool([])  # without functions by name there are none
        self._calls: list[Call] = []
        self._ready: list[Function] = []
        self._closed = False
        self._unjudged = False  # a completion without a value was reported

    async def start(self) -> None:
        """Start the workers and import the functions. Raises `BirlError` if one cannot be used. `score` calls it if
        necessary, but it takes up to a second: call it while the model loads."""
        if self._closed:
            raise BirlError("these rewards were closed")
        if not self._calls:
            self._open()
        hello = next(iter(await self._workers.start()), {"functions": []})  # the same of all workers
        remote = iter(hello["functions"])
        parameters = [Parameters(**next(remote)) if isinstance(f, str) else Parameters.of(f) for f in self.functions]
        self._ready = [
            Function(name, takes, call, isinstance(f, str), f in BUILTINS or getattr(f, "reads_text", False))
            for name, takes, call, f in zip(self.names, parameters, self._calls, self.functions, strict=True)
        ]

    async def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        gold: Sequence[str | None],
        state: Mapping[str, Any] | None = None,
    ) -> list[Score]:
        """One score for each completion, which is text or a list of messages; birl's own functions get the text.
        `state`: `trainer_state` of the functions, which then also get `log_extra` and `log_metric`. Raises `BirlError`
        if a function needs a column that does not exist."""
        if not self._ready:
            await self.start()
        n = len(completions)
        reserved = {"prompts": list(prompts), "completions": list(completions)}
        if "gold" not in columns or any(g is not None for g in gold):  # a column must not replace the reference answers
            reserved["gold"] = list(gold)
        offered = {**{k: list(v) for k, v in columns.items()}, **reserved}
        uneven = {name: len(values) for name, values in offered.items() if len(values) != n}
        if uneven:
            raise ValueError(f"{n} completions, but {uneven}")
        if n == 0:
            return []
        if state is not None:
            offered |= {"trainer_state": dict(state), "log_extra": None, "log_metric": None}
        asked = [_arguments(function, offered) for function in self._ready]
        calls = [_settle(f, a, n, self.timeout) for f, a in zip(self._ready, asked, strict=True)]
        results = await asyncio.gather(*calls)
        scores = [self._combine([result[i] for result in results]) for i in range(n)]
        self._warn(scores, offered)
        return scores

    async def close(self) -> None:
        """Kill the workers, including calls in progress."""
        self._closed = True
        self._workers.close()

    async def __aenter__(self) -> "Rewards":
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open(self) -> None:
        specs, index = [f for f in self.functions if isinstance(f, str)], count()
        workers = [Worker(specs, options=self.options, folder=self.folder) for _ in range(self.workers)]
        self._workers = Pool(workers if specs else [])
        for function in self.functions:
            if isinstance(function, str):
                self._calls.append(partial(self._workers.run, next(index)))
            else:
                waits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
                self._calls.append(partial(local, function, nullcontext() if waits else asyncio.Lock()))

    def _combine(self, parts: list[RewardValue]) -> Score:
        """Combine one completion's values, in the order of the functions; the first failure sets the outcome."""
        by_name = dict(zip(self.names, parts, strict=True))
        good = {name: part.value for name, part in by_name.items() if isinstance(part.value, float)}
        shared = {
            "parts": good,
            "extra": {name: value for part in parts for name, value in part.extra.items()},
            "logged": {name: value for part in parts for name, value in part.logged.items()},
        }
        for name, part in by_name.items():
            if isinstance(part.value, CallFailed):
                detail = f"reward {name}: {part.value.detail}"
                return Score(value=math.nan, outcome=part.value.outcome, detail=detail, **shared)
        if not good:
            return Score(value=math.nan, outcome=Outcome.ENV_ERROR, detail=UNSCORED, **shared)
        value = sum(weight * good[name] for weight, name in zip(self.weights, self.names, strict=True) if name in good)
        if not math.isfinite(value):
            detail = f"the weighted sum of the rewards is {value}"
            return Score(value=math.nan, outcome=Outcome.ENV_ERROR, detail=detail, **shared)
        return Score(value=value, **shared)

    def _warn(self, scores: list[Score], offered: Mapping[str, Any]) -> None:
        """Warn once about a completion that no function scores."""
        first = next((i for i, score in enumerate(scores) if score.detail == UNSCORED), None)
        if first is None or self._unjudged:
            return
        self._unjudged = True
        row = {name: values[first] for name, values in offered.items() if name not in (*PER_CALL, "completion_ids")}
        log.warning(
            "All reward functions returned None for %.600s. Such answers are left out; at least one function should "
            "return a number for each row.",
            row,
        )


async def _settle(function: Function, arguments: Mapping[str, Any], n: int, timeout: float) -> list[RewardValue]:
    """Each completion's value or failure. If a call fails: find the culprits one by one, score the rest together."""
    try:
        return _split((await function.call(arguments, n, timeout))[0])
    except CallFailed as failure:
        if n == 1 or not failure.isolate:
            return [RewardValue(failure)] * n
        first = failure
    results = [RewardValue(first)] * n
    innocent: list[int] = []
    left = 3 * timeout
    for i in range(n):
        # each hang gets a third of the remaining time, so that every completion is tried and the total stays bounded
        allowed = max(min(timeout, left / 3), min(timeout, 0.1))
        try:
            _, seconds = await function.call(_pick(arguments, [i]), 1, allowed)
            innocent.append(i)
        except CallFailed as failure:
            if failure.outcome is Outcome.TIMEOUT and allowed < timeout:
                alone = f"{round(allowed, 2):g} s alone"
                whole = f"took longer than {timeout:g} s with {n - 1} other completions, and than {alone}"
                detail = failure.detail.replace(f"took longer than {round(allowed, 1):g} s", whole)
                failure = CallFailed(failure.outcome, detail, seconds=failure.seconds)
            results[i] = RewardValue(failure)
            seconds = failure.seconds
        left -= seconds
    for i, result in zip(innocent, await _together(function, arguments, innocent, timeout), strict=True):
        results[i] = result
    return results


async def _together(
    function: Function, arguments: Mapping[str, Any], which: list[int], timeout: float
) -> list[RewardValue]:
    if not which:
        return []
    try:
        return _split((await function.call(_pick(arguments, which), len(which), timeout))[0])
    except CallFailed as failure:
        hint = "; raise reward.timeout" if failure.outcome is Outcome.TIMEOUT else ""
        detail = f"{failure.detail} ({len(which)} completions together, though each alone is fine{hint})"
        return [RewardValue(CallFailed(failure.outcome, detail))] * len(which)


def _split(answers: Answers) -> list[RewardValue]:
    logged = {name: fmean(values) for name, values in answers.logged.items()}
    return [
        RewardValue(
            CallFailed(Outcome.ENV_ERROR, value) if isinstance(value, str) else value,
            {name: values[i] for name, values in answers.extra.items()},
            logged,
        )
        for i, value in enumerate(answers.values)
    ]


def _pick(arguments: Mapping[str, Any], which: list[int]) -> dict[str, Any]:
    return {name: values if name in PER_CALL else [values[i] for i in which] for name, values in arguments.items()}


def _arguments(function: Function, offered: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.parameters.select(function.name, offered)
    if function.reads_text and "completions" in arguments:
        arguments["completions"] = [_text(c) for c in arguments["completions"]]
    return _sendable(function, arguments) if function.remote else arguments


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else "".join(m["content"] for m in completion)


_left_out: set[tuple[str, str]] = set()


def _sendable(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without columns that JSON cannot represent (images); an error if the function names one."""
    bad = [name for name, values in arguments.items() if not _is_json(values)]
    for name in bad:
        kinds = ", ".join(sorted({type(value).__name__ for value in arguments[name]}))
        if name in function.parameters.named:
            raise BirlError(
                f"reward function {function.name!r} asks for column {name!r}, whose values ({kinds}) cannot be sent to "
                f"a worker process. Pass the function as a Python object, or store the column as text or numbers."
            )
        if (function.name, name) not in _left_out:
            _left_out.add((function.name, name))
            log.warning("reward function %r does not get column %r (%s): not JSON", function.name, name, kinds)
    return {name: values for name, values in arguments.items() if name not in bad}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _callable(function: object) -> Callable[..., Any]:
    if not callable(function):
        raise BirlError(f"a reward function must be a name or a callable, not a {type(function).__name__}")
    return function


def _names(functions: Sequence[str | Callable[..., Any]]) -> list[str]:
    """Short names, made unique if two functions have the same."""
    short = [
        f.rpartition(":")[2] if isinstance(f, str) else getattr(f, "__name__", type(f).__name__) for f in functions
    ]
    full = [f if isinstance(f, str) and short.count(s) > 1 else s for f, s in zip(functions, short, strict=True)]
    return [f"{name}_{full[:i].count(name) + 1}" if name in full[:i] else name for i, name in enumerate(full)]
