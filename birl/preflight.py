"""What a configuration names: is it there? Told before torch is imported, which takes seconds."""

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsspec import available_protocols

from birl.config import schema
from birl.config.decided import ENGINES, SELF, addressed, teachers_of
from birl.config.load import flatten
from birl.data.early import check_data
from birl.envs.open import check_world
from birl.errors import BirlError, did_you_mean
from birl.hub import check_model
from birl.named import missing

STORES = ("checkpoint.store", "resume")
MODELS = ("model.path", "critic.path", "reward.model", "algorithm.teacher", "distill.teacher")
FUNCTIONS = ("reward.functions", "algorithm.advantage", "algorithm.surrogate")


def check_names(config: Any) -> None:
    """Raises `BirlError` for files, folders, data sets, models, environments and functions that are not there."""
    keys = flatten(config)
    if hasattr(config, "data"):
        check_data(config)
    for key in STORES:
        scheme = keys.get(key, "").partition("://")[0].partition("::")[0]
        if "://" in keys.get(key, "") and scheme not in available_protocols():
            raise BirlError(
                f"{key}={keys[key]}: fsspec knows no {scheme}://. Write a URL as in s3://bucket/prefix or "
                "file:///folder."
            )
    if hasattr(config, "env"):
        check_world(config.env)
    engine = getattr(config, "engine", None)
    if isinstance(engine, schema.Engine) and not engine.attach and not engine.python:
        package = ENGINES[engine.kind].package if engine.kind in ENGINES else ""
        if package and find_spec(package) is None:
            raise BirlError(
                f"engine.kind={engine.kind}: {package} is not installed for this Python. Install it ({sys.executable} "
                f"-m pip install {package}), name a Python that has it (engine.python=PATH), or a server that runs "
                "(engine.attach=[http://HOST:PORT])."
            )
    for key in FUNCTIONS:
        names = keys.get(key) or ()
        for name in [names] if isinstance(names, str) else names:
            place, colon, function = name.rpartition(":")
            if colon and "://" not in name:
                check_function(key, place, function)
    for key in MODELS:
        if (path := keys.get(key)) and "://" not in path and path != SELF:
            check_model(key, path)
    if isinstance(config, schema.RL) and config.algorithm.teachers:
        for path in teachers_of(config).values():
            if not addressed(path):
                check_model("algorithm.teachers", path)


def check_function(key: str, place: str, name: str) -> None:
    """Without running the file or package: it may be slow, and belongs into a worker. Raises `BirlError`."""
    if not place.endswith(".py"):
        if not is_module(place):
            raise BirlError(
                f"{key}={place}:{name}: there is no module {place}. Write a file as my_file.py:{name}; a package must "
                f"be installed for {sys.executable}."
            )
        return
    file, path = place, Path(place).expanduser()
    if not path.is_file():
        raise BirlError(f"{key}={file}:{name}: there is no file {file} in {Path.cwd()}.")
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # the worker says where
    for package in imported(tree.body):
        if not is_module(package, path.parent):
            raise BirlError(
                f"{key}={file}:{name}: {file} imports {package}, which is not installed."
                + missing(ModuleNotFoundError(name=package))
            )
    known = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    if not re.search(rf"\b{re.escape(name)}\b", path.read_text("utf-8", "replace")):  # nor assigned, nor imported
        raise BirlError(
            f"{key}={file}:{name}: {file} has no function {name}.{did_you_mean(name, known)} "
            f"It has: {', '.join(sorted(known)) or 'none'}."
        )


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The packages that these nodes import. Of the body of a file: those that it cannot do without."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def is_module(name: str, *beside: Path) -> bool:
    """Whether there is a module of that name, in the current folder or `beside` something else, or installed; none is
    imported."""
    head, *rest = name.split(".")
    spec = find_spec(head) or PathFinder.find_spec(head, [os.getcwd(), *map(str, beside)])
    for part in rest:
        spec = PathFinder.find_spec(part, spec.submodule_search_locations or []) if spec else None
    return spec is not None
