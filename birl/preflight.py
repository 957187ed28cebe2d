"""Checks that everything that a configuration names exists, before torch is imported, which takes seconds."""

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsspec import available_protocols

from birl.config import schema
from birl.config.decided import ENGINES, SELF, compares, teachers_of
from birl.config.file import flatten
from birl.data.files import FORMATS, check_readable, data_files, first_parquet
from birl.data.forms import pair_form, text_form
from birl.data.messages import Shown
from birl.data.parse import check_json, parse_csv, parse_json
from birl.data.rows import Rows, part
from birl.data.sources import check_place
from birl.data.tasks import Tasks, check_answers, read_sources, reader_of, teacher_named
from birl.envs.open import check_world
from birl.errors import BirlError, did_you_mean, no_file
from birl.hub import addressed, check_model, read_config
from birl.learner import step_folders
from birl.models.manifest import damage
from birl.named import Given, missing, refuse_given
from birl.text.parts import Finder
from birl.track.folder_lock import check_same, held, plain
from birl.track.runs import state, summary
from birl.track.sink import KINDS

STORES = ("checkpoint.store", "resume")
MODELS = ("model.path", "critic.path", "reward.model", "algorithm.teacher", "distill.teacher")
FUNCTIONS = ("reward.functions", "algorithm.advantage", "algorithm.surrogate")
SIZE = 2**21  # largest file that is parsed in plain Python [bytes]
ROWS = 1000  # rows of a file that are checked


def check_data(config: Any, given: Given | None = None, *, rows: bool = True) -> None:
    """Check the files of data.train and data.validation, or the rows that a program has `given`; with `rows`, read the
    first ones as `config` would. Raises `BirlError`."""
    data, given = config.data, given or Given()
    each: list[tuple[Any, ...]] = [
        ("train", data.train, given.train, data.max_samples),
        ("validation", data.validation, given.validation, data.max_validation_samples),
    ]
    for which, paths, own, limit in each:
        for source, _ in [] if own is None else read_sources(data, which, own):
            _check(source, config, which == "train")
        for path in paths if own is None else ():
            check_place(path)
            local = Path(path).expanduser()
            if local.is_dir() and next(data_files(local), None) is None:
                raise BirlError(f"The folder {path} holds no data files ({' '.join(FORMATS)}).")
            if local.is_file() and (table := _parsed(local)) is not None and rows:
                source = Rows(str(local), [part(local.name, local.stem, table, str(local))], limit)
                _check(source, config, which == "train")


def _parsed(path: Path) -> list[dict[str, Any]] | None:
    kind = check_readable(path)
    if kind == "parquet":
        return first_parquet(path, ROWS)
    if path.stat().st_size > SIZE or kind not in ("json", "csv"):
        return None
    if kind == "csv":
        return list(parse_csv(path))
    check_json(path)
    return list(parse_json(path))


def _check(rows: Rows, config: Any, taught: bool) -> None:
    first = range(min(len(rows), ROWS))
    if isinstance(config.data, schema.Data):
        reader = reader_of(rows, config.data, True, tuple(config.model.picture_hosts))
        check_answers(rows, reader.answer, compares(config))
        tasks = Tasks(rows, replace(reader, offline=True))
        names = teachers_of(config) if taught and isinstance(config, schema.RL) and config.algorithm.teachers else {}
        for i in first:
            task = tasks[i]
            if names:
                teacher_named(task, config.algorithm.teacher_column, names, rows.where(i))
        return
    if isinstance(config.data, schema.Texts):
        form = text_form(rows, config.data)
    else:
        form = pair_form(rows, config.data, getattr(config, "preference", None))
    for i in first:
        finder = Finder(folder=rows.folder(i), hosts=tuple(config.model.picture_hosts), offline=True)
        form.read(rows[i], rows.where(i), Shown.of(rows[i], finder, rows.where(i)))


def check_folder(run: Path, config: Any, dry_run: bool) -> None:
    """Raises `BirlError` if the folder cannot be written, another process writes to it, or it holds a run with steps
    and another configuration: the run checks this again after torch is loaded."""
    with nullcontext() if dry_run else held(run):
        pass
    metrics = run / "metrics.jsonl"
    if config.resume == "auto" and not config.checkpoint.store and metrics.is_file() and metrics.stat().st_size:
        saved = step_folders.saved(run / "checkpoints")
        check_same(run, config, saved[-1].path if saved else None)


def ended(run: Path, config: Any) -> dict[str, Any]:
    """summary.json of a finished run whose command, given again, would do nothing: the same configuration, no newer
    data, and an intact newest checkpoint of the last step. Empty for any other run."""
    told, saved = summary(run), step_folders.saved(run / "checkpoints")
    places = [Path(path).expanduser() for path in (*config.data.train, *config.data.validation)]
    if (
        not saved
        or told.get("step") != saved[-1].step
        or state(run) != "done"
        or read_config(run) != plain(config)
        or config.checkpoint.store
        or config.resume != "auto"
        or any(getattr(config.track, name) != "off" for name in KINDS)  # may still have something to upload
        or not (config.steps or (places and all(map(Path.is_file, places))))
        or any(path.stat().st_mtime > (run / "summary.json").stat().st_mtime for path in places if path.is_file())
        or damage(saved[-1].path, "manifest.json")
    ):
        return {}
    return told


def check_names(config: Any, rows: bool = True) -> None:
    """Raises `BirlError` for files, folders, data sets, models, environments and functions that do not exist, and for
    wrong ones among the first `rows`."""
    keys = flatten(config)
    if hasattr(config, "data"):
        check_data(config, rows=rows)
    for key in STORES:
        scheme = keys.get(key, "").partition("://")[0].partition("::")[0]
        if "://" in keys.get(key, "") and scheme not in available_protocols():
            raise BirlError(
                f"{key}={keys[key]}: fsspec knows no {scheme}://. Write a URL as in s3://bucket/prefix or "
                "file:///folder."
            )
    if hasattr(config, "env"):
        check_world(config.env)
    check_engine(getattr(config, "engine", None))
    for key in FUNCTIONS:
        names = keys.get(key) or ()
        for name in [names] if isinstance(names, str) else names:
            place, colon, function = name.rpartition(":")
            if colon and "://" not in name:
                check_function(key, place, function)
    models = [(key, path) for key in MODELS if (path := keys.get(key)) and "://" not in path and path != SELF]
    if isinstance(config, schema.RL) and config.algorithm.teachers:
        models += [("algorithm.teachers", path) for path in teachers_of(config).values() if not addressed(path)]
    for key, path in models:
        check_model(key, path)


def check_engine(engine: Any) -> None:
    """Raises `BirlError` if servers have to be started and their package is not installed. `engine`: the section of
    `birl rl`, or another command's value of that name."""
    if not isinstance(engine, schema.Engine):
        return
    package = ENGINES[engine.kind].package if engine.kind in ENGINES else ""
    if package and not engine.attach and not engine.python and find_spec(package) is None:
        raise BirlError(
            f"engine.kind={engine.kind}: {package} is not installed for this Python. Install it ({sys.executable} "
            f"-m pip install {package}), name a Python that has it (engine.python=PATH), or a server that runs "
            "(engine.attach=[http://HOST:PORT])."
        )


def check_function(key: str, place: str, name: str) -> None:
    """Check that the function exists without running the file or package, which may be slow and runs in a worker.
    Raises `BirlError`."""
    refuse_given(key, f"{place}:{name}")
    if not place.endswith(".py"):
        if not is_module(place):
            raise BirlError(
                f"{key}={place}:{name}: there is no module {place}. Write a file as my_file.py:{name}; a package must "
                f"be installed for {sys.executable}."
            )
        return
    file, path = place, Path(place).expanduser()
    if not path.is_file():
        raise BirlError(f"{key}={file}:{name}: {no_file(file)}")
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise BirlError(f"{key}={file}:{name}: {file}, line {error.lineno}: {error.msg}.") from error
    except ValueError:
        return  # the worker reports the line
    for package in imported(tree.body):
        if not is_module(package, path.parent):
            raise BirlError(
                f"{key}={file}:{name}: {file} imports {package}, which is not installed."
                + missing(ModuleNotFoundError(name=package))
            )
    if any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body):
        raise BirlError(
            f"{key}={file}:{name}: {name} is a class; name a function, or an object of it, as in `score = {name}()`."
        )
    known = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    if not re.search(rf"\b{re.escape(name)}\b", path.read_text("utf-8", "replace")):  # neither assigned nor imported
        raise BirlError(
            f"{key}={file}:{name}: {file} has no function {name}.{did_you_mean(name, known)} "
            f"It has: {', '.join(sorted(known)) or 'none'}."
        )


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Packages that these nodes import. For the body of a file: its top-level imports, which are always executed."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def is_module(name: str, *beside: Path) -> bool:
    """Whether a module of that name exists, in the current folder, in `beside`, or installed; none is imported."""
    head, *rest = name.split(".")
    spec = find_spec(head) or PathFinder.find_spec(head, [os.getcwd(), *map(str, beside)])
    for inner in rest:
        spec = PathFinder.find_spec(inner, spec.submodule_search_locations or []) if spec else None
    return spec is not None
