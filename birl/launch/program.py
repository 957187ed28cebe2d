"""A job started from a Python program: `Trainer(launcher=...)`. Its parameters become words of the configuration and of
the launcher, and Python objects become names that other processes can import."""

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.launch.command import PREFIX, keys_of
from birl.launch.job import derive
from birl.launch.launcher import Handle, Launcher, launcher
from birl.regular import parse_json, read_bytes, write_whole

#: parameters of the Trainer that are keys of launchers, if the launcher has them
GPUS = {"actor_gpu": "gpu", "rollout_gpu": "engine_gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`words`: the configuration, `launch`: the launcher's keys, `here`: reward functions that stay on this machine.

    Example: Program(where="ray", words=("data.train=x.jsonl",), launch=("launch.gpus=1",))
    """

    where: str
    words: tuple[str, ...]
    launch: tuple[str, ...] = ()
    here: Mapping[str, Callable[..., Any]] | None = None

    def submit(self) -> Handle:
        """Submit the job. Raises `BirlError`."""
        place = launcher(self.where)
        keys = keys_of(place.Keys, self.launch)[0]
        handle = place.submit(derive("rl", self.words, keys), keys)
        handle.save()
        return handle

    def train(self) -> dict[str, Any]:
        """Submit, print the learner's output, return its summary. Ctrl-C leaves the job running. Raises `BirlError` if
        a part of it failed."""
        place, handle = launcher(self.where), self.submit()
        try:
            with answering(place, handle, self.here or {}):
                for line in place.logs(handle, "learner", True):
                    print(line.removesuffix("\n"), flush=True)
        except KeyboardInterrupt:
            print(f"\n{handle.name} continues. `birl status {handle.run}`, `birl stop {handle.run}`")
            raise
        failed = [line for line in place.status(handle) if line.state == "failed"]
        if failed:
            raise BirlError(
                f"{handle.name}: {failed[0].role} {failed[0].index} failed: {failed[0].detail} "
                f"`birl logs {handle.run}` shows why."
            )
        return summary(place, handle)


@contextmanager
def answering(place: Launcher, handle: Handle, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Compute rewards in this process for a job on another machine, as a context."""
    if not functions:
        yield
        return
    here: Callable[..., AbstractContextManager[None]] = getattr(place, "answering")  # noqa: B009
    with here(handle, functions):
        yield


def summary(place: Launcher, handle: Handle) -> dict[str, Any]:
    fetch: Callable[[Handle, str], bytes] | None = getattr(place, "fetch", None)
    file = Path(handle.run) / "summary.json"
    try:
        return parse_json(fetch(handle, "summary.json") if fetch else read_bytes(file))
    except (OSError, ValueError) as error:
        raise BirlError(f"{handle.name} has ended, but left no summary.json: {error}") from error


def launch_words(where: str, gpus: Mapping[str, str], further: Mapping[str, Any]) -> tuple[str, ...]:
    """Words for launch.KEY. Raises `BirlError` for what the launcher has no key for."""
    known = [field.name for field in fields(launcher(where).Keys)]
    result = {}
    for parameter, value in gpus.items():
        key = GPUS[parameter]
        if value and key not in known:
            raise BirlError(
                f'{parameter}={value!r}: launcher="{where}" does not choose kinds of GPUs; say how many each process '
                'gets, as in launch={"gpus": 1}'
            )
        result |= {key: value} if value else {}
    result |= further
    words = tuple(f"{PREFIX}{key}={_written(value)}" for key, value in result.items())
    keys_of(launcher(where).Keys, words)  # fail now instead of at submission
    return words


def engine_keys(workers: int, method: str) -> dict[str, Any]:
    """Keys of the configuration for num_rollout_workers and weight_sync_method."""
    keys: dict[str, Any] = {}
    if workers < 0:
        raise BirlError(f"num_rollout_workers={workers}: must be 0 (sample in the learner's process) or more")
    if workers:
        keys |= {"engine.kind": "birl", **({"engine.count": workers} if workers > 1 else {})}
    return keys | ({"weights.method": method} if method else {})


def named(
    where: str, keys: Mapping[str, Any], rewards: Sequence[Callable[..., Any] | str], env: Any
) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """The configuration with names in place of Python objects, and the reward functions that stay in this process, by
    name. Raises `BirlError`."""
    result, here = dict(keys), dict[str, Callable[..., Any]]()
    bridge = getattr(launcher(where), "REWARDS", "")
    names = list(result.get("reward.functions", []))
    for place, function in enumerate(rewards):
        if isinstance(function, str):
            continue
        if bridge:
            short = names[place].removeprefix("given:")
            here[short], names[place] = function, f"{bridge}:{short}"
        else:
            names[place] = importable("reward_funcs", function)
    if names:
        result["reward.functions"] = names
    if here:  # the answers go to another machine, which may be busy
        result.setdefault("reward.timeout", 600)
    if not isinstance(env, str):
        result["env.kind"] = importable("env", env)
    return result, here


def importable(parameter: str, thing: Callable[..., Any]) -> str:
    """file.py:NAME or package.module:NAME of a Python object. Raises `BirlError` if others could not import it."""
    name, module = getattr(thing, "__qualname__", ""), getattr(thing, "__module__", "") or ""
    shown = name or repr(thing)
    if not name.isidentifier() or (module != "__main__" and getattr(sys.modules.get(module), name, None) is not thing):
        raise BirlError(
            f"{parameter}: {shown} is known to this process alone, and training runs in another one. Write it as a "
            "function of a file, and name that: my_rewards.py:my_function"
        )
    try:
        file = Path(inspect.getfile(thing))
    except (TypeError, OSError):
        file = Path("<unknown>")
    if not file.is_file():
        raise BirlError(f"{parameter}: {shown} is in no file that another process could import; put it into one")
    here = file.resolve()
    if here.is_relative_to(Path.cwd()):
        if module == "__main__" and starts_when_imported(here):
            raise BirlError(
                f"{parameter}: {here.name} would start its training again wherever {shown} is imported. Put the lines "
                'that start it under `if __name__ == "__main__":`, or the function into a file of its own'
            )
        return f"{here.relative_to(Path.cwd())}:{name}"
    return f"{here}:{name}" if module == "__main__" else f"{module}:{name}"


def starts_when_imported(file: Path) -> bool:
    """Whether a script calls `.train()` outside of a function, a class and `if __name__ == ...`."""
    tree = ast.parse(file.read_bytes())
    guarded = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If)
    calls = (node for line in tree.body if not isinstance(line, guarded) for node in ast.walk(line))
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "train" for n in calls)


def rows_file(rows: Any, file: Path) -> str:
    """Write rows of a Python program to a file for other processes. Raises `BirlError`."""
    try:
        data = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows).encode()
    except (TypeError, ValueError) as error:
        raise BirlError(f"a row cannot be written as JSON, which another process needs: {error}") from error
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, data)
    return str(file)


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(_quoted(str(one)) for one in value)}]"
    return str(value)


def _quoted(element: str) -> str:
    """Quote an element so that `command.listed` restores it."""
    mark = "'" if '"' in element else '"'
    return f"{mark}{element}{mark}" if "," in element else element
