"""Loads an environment of verifiers by name or from a file, and takes back what it does to the process."""

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from birl.envs.adapters.package import arguments, imported, unknown
from birl.envs.adapters.verifiers_client import watch
from birl.errors import BirlError
from birl.named import from_file

KIND = "verifiers"


def loaded(task: str, parameters: list[str]) -> Any:
    """The environment that env.task names. Raises `BirlError`."""
    vf = imported("verifiers", KIND)
    if not task:
        raise BirlError("env=verifiers needs env.task: the name of an environment, or my_env.py.")
    try:
        load = vf.load_environment
    except AttributeError:
        raise BirlError(
            f"env=verifiers: verifiers {vf.__version__} has no environments any more, only tasksets. Install one that "
            "has both: pip install 'verifiers<0.4'"
        ) from None
    if not task.endswith(".py"):
        names = {module.name for module in pkgutil.iter_modules()}
        if task.replace("-", "_").rpartition("/")[2] not in names:
            raise unknown("env.task", task, names)
        return made(task, parameters, load, task)
    if not Path(task).is_file():
        raise BirlError(f"env.task={task}: there is no such file in {Path.cwd()}.")
    result = from_file(Path(task))
    if not hasattr(result, "load_environment"):
        raise BirlError(f"env.task={task}: it has no function load_environment.")
    return made(task, parameters, result.load_environment)


def made(task: str, parameters: list[str], load: Any, *name: str) -> Any:
    with signals_kept():
        env = load(*name, **arguments(parameters))
    if env.requires_group_rollouts:
        raise BirlError(f"env.task={task}: its rubric scores groups, and episodes are scored alone here.")
    if not env.score_rollouts:
        raise BirlError(f"env.task={task}: it has score_rollouts=False, so its episodes have no reward.")
    watch(env.rubric)
    return env


@contextmanager
def signals_kept() -> Iterator[None]:
    """An environment takes SIGINT and SIGTERM for itself when it is made, which only the main thread may do, and which
    the run has handlers for."""
    module = imported("verifiers.legacy.envs.environment", KIND)
    real = module.signal
    module.signal = SimpleNamespace(**{**vars(real), "signal": lambda *args: None})
    try:
        yield
    finally:
        module.signal = real
