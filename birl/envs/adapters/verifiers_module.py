"""The module of a taskset of verifiers 0.4: built in, installed, or a file."""

import importlib.metadata
import importlib.util
import os
import pkgutil
from pathlib import Path

from birl.envs.adapters.package import imported, unknown
from birl.errors import BirlError
from birl.named import make_importable, missing

KIND = "verifiers"


def imported_taskset(task: str) -> str:
    """The name by which verifiers has the taskset that env.task names. Raises `BirlError`."""
    loaders = imported("verifiers.v1.utils.loaders", KIND)
    name = Path(task).stem if task.endswith(".py") else task
    module = name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_").lower()
    path = in_reach(task) if task.endswith(".py") else None
    if path is None:
        groups = [None, imported("verifiers.v1.tasksets", KIND).__path__]
        names = {each.name for group in groups for each in pkgutil.iter_modules(group)}
        if module not in names:
            raise unknown("env.task", task, names)
    try:
        made = loaders.import_taskset(name)
        loaders.taskset_class(name)
    except Exception as error:  # whatever the module raises
        cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        spec = None if path else importlib.util.find_spec(module)
        source = path or Path((spec.origin if spec else None) or "")
        old = source.is_file() and "def load_environment" in source.read_text(encoding="utf-8", errors="replace")
        version = importlib.metadata.version("verifiers")
        hint = f" It is an environment of verifiers 0.3, and {version} is installed: pip install 'verifiers<0.4'"
        raise BirlError(
            f"env.task={task}: {type(cause).__name__}: {' '.join(str(cause).split())}.{hint if old else missing(cause)}"
        ) from error
    if path is not None and Path(made.__file__ or "").resolve() != path:
        raise BirlError(f"env.task={task}: {made.__file__} is imported by the same name. Rename the file.")
    return name


def in_reach(task: str) -> Path:
    """The file, where this process and the tool servers that verifiers starts import it from. Raises `BirlError`."""
    path = Path(task).expanduser().resolve()
    if not path.is_file():
        raise BirlError(f"env.task={task}: there is no such file in {Path.cwd()}.")
    if path.stem != path.stem.lower() or not path.stem.isidentifier():
        raise BirlError(f"env.task={task}: verifiers imports it by its name, of a-z, 0-9 and _. Rename the file.")
    make_importable(path.parent)
    places = [str(path.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(places))
    return path
