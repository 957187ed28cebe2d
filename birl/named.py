"""Load objects by name: a key of a table, `my_file.py:NAME` or `package.module:NAME`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from birl.errors import BirlError, did_you_mean, no_file
from birl.foreign import described, undone

TEMPLATES = ("hermes",)  # chat templates of the package


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Objects that a Python program passes instead of naming them in the configuration: see `birl.Trainer`."""

    rewards: Sequence[Callable[..., Any] | str] = ()
    env: Any = None  # a class or function, as env.kind names one
    train: Any = None  # rows: a datasets.Dataset or a list of dicts
    validation: Any = None


def template_file(name: str) -> Path:
    """File of `model.chat_template`: a template of the package by name, or a path."""
    return Path(__file__).parent / "text" / "templates" / f"{name}.jinja" if name in TEMPLATES else Path(name)


def load(key: str, name: str, table: Mapping[str, Any]) -> Callable[..., Any]:
    """The object that `name`, the value of `key`, refers to. Raises `BirlError`."""
    place, colon, attribute = name.rpartition(":")
    if not colon:
        near = did_you_mean(name, table)
        raise BirlError(f"{key}={name}: must be {' | '.join(table)}, or my_file.py:my_function.{near}")
    refuse_given(key, name)
    try:
        path = Path(place).expanduser().absolute() if place.endswith(".py") else None
        if path is not None and not path.is_file():
            raise BirlError(f"{key}={name}: {no_file(place)}")
        with undone():
            make_importable(Path.cwd())
            module = from_file(path) if path is not None else importlib.import_module(place)
    except BirlError:
        raise
    except (Exception, SystemExit) as error:  # anything that the user's file raises
        told = f"{key}={name}: {place} cannot be imported: {described(error, place)}."
        raise BirlError(told.replace("..", ".") + missing(error)) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        near = f"{did_you_mean(attribute, known)} It has: {', '.join(known) or 'none'}."
        raise BirlError(f"{key}={name}: {place} has no function {attribute}.{near}")
    return function


def refuse_given(key: str, name: str) -> None:
    """Raises `BirlError` for a name in config.yaml that stands for an object of a Python program."""
    place, _, attribute = name.partition(":")
    if place == "given":
        raise BirlError(
            f"{key}={name}: was handed over by a Python program, which alone has it. Run that program again, or write "
            f"{attribute} into a file, and name that: my_file.py:{attribute}."
        )


def module(what: str, place: str) -> Any:
    """Import the module `place` of birl, when a key needs it. Raises `BirlError` with `what` needs it if this
    installation does not contain it."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if not f"{place}.".startswith(f"{error.name}."):
            raise
        raise BirlError(f"{what}: this installation of birl has no {error.name}.") from error


# Packages whose import name differs from the name for pip.
PACKAGES = {"bs4": "beautifulsoup4", "cv2": "opencv-python", "dotenv": "python-dotenv", "PIL": "pillow",
            "sklearn": "scikit-learn", "yaml": "pyyaml"}  # fmt: skip


def missing(error: BaseException) -> str:
    """How to install the package that an import did not find; empty for other errors."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    if package == "birl":
        return " This installation of birl is without it."
    return f" Install it for this Python: {sys.executable} -m pip install {PACKAGES.get(package, package)}"


def make_importable(folder: Path) -> None:
    """Append `folder` to sys.path, after the standard library and installed packages: a user's math.py must not shadow
    Python's, and an agents.py that imports the package agents must not get itself."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


class _Uncached(SourceFileLoader):
    """Loader without .pyc files: a full disk truncates them, and a change within the same second is not noticed."""

    def path_stats(self, path: str) -> Any:
        raise OSError("no bytecode")  # makes the loader skip the cache


def from_file(path: Path) -> ModuleType:
    """The module in a file, loaded once. In sys.modules by a unique name, which classes need for their type hints."""
    name = f"birl_custom_{path.stem}_{abs(hash(path.resolve())):x}"
    if name in sys.modules and getattr(sys.modules[name], "__birl_time__", None) == path.stat().st_mtime_ns:
        return sys.modules[name]
    make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(name, path, loader=_Uncached(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    module.__birl_time__ = path.stat().st_mtime_ns  # pyright: ignore[reportAttributeAccessIssue]
    return module
