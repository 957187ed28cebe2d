"""Reads task folders of the Harbor format: instruction, initial files of the container, and tests."""

import io
import re
import shlex
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from birl.errors import BirlError
from birl.regular import inside, read_bytes, read_text
from birl.sandbox.confine import ENVIRONMENT

MOST = 64 << 20  # largest size of all files of a task [bytes]
ROOTS = ("app", "workspace", "logs", "tests", "solution", "tmp")  # folders of the root that exist in the sandbox
SECONDS = 600.0  # default timeout of tests and of image builds
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
REWARDS = ("logs/verifier/reward.txt", "logs/verifier/reward.json")
#: settings of task.toml that would change the task or its tests -> the supported value
NOT_PLAYED = {
    "environment": {"gpus": 0, "tpu": None, "mcp_servers": None, "healthcheck": None, "os": "linux"},
    "verifier": {"environment": None, "env": None, "collect": None, "user": None, "environment_mode": "shared"},
    "solution": {"env": None},
}
LEFT_OUT = ("FROM", "LABEL", "MAINTAINER", "EXPOSE", "USER", "CMD", "ENTRYPOINT", "SHELL", "HEALTHCHECK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A task folder. `files`, `tests` and `solution`: content by path below the root. `builds`: build commands of the
    container; `seconds`: timeout of the tests. Settings of a container: `workdir` ("": the image's) and `environment`,
    `image` ("": of the Dockerfile), `build_seconds`, `memory_mb` [MiB] and `cpus` (0: not given), and whether it may
    have a `network`."""

    path: Path
    name: str
    instruction: str
    workdir: str
    environment: Mapping[str, str]
    files: Mapping[str, bytes]
    tests: Mapping[str, bytes]
    solution: Mapping[str, bytes]
    builds: tuple[str, ...]
    seconds: float
    image: str = ""
    build_seconds: float = SECONDS
    memory_mb: int = 0
    cpus: float = 0.0
    network: bool = True


def read_all(root: Path, build: str, container: bool = False) -> list[Folder]:
    """Read the task folders in `root`, or `root` itself. Raises `BirlError`."""
    if not root.is_dir():
        raise BirlError(f"env.tasks={root}: there is no such folder in {Path.cwd()}.")
    places = [root] if (root / "task.toml").is_file() else sorted(p.parent for p in root.glob("*/task.toml"))
    if not places:
        raise BirlError(f"env.tasks={root}: no folder in it has a task.toml.")
    return [read(place, build, container) for place in places]


def read(path: Path, build: str, container: bool = False) -> Folder:
    """Read a task folder. Raises `BirlError` with the file and the problem, with a container or without."""
    settings = toml(path / "task.toml")
    if (path / "steps").is_dir() or "steps" in settings:
        raise BirlError(f"{path}: it has several steps, which env=harbor does not play.")
    for needed in ("instruction.md", "tests/test.sh"):
        if not (path / needed).is_file():
            raise BirlError(f"{path}: it has no {needed}.")
    for name in ("instruction.md", "tests", "tests/test.sh", "solution", "environment", "environment/Dockerfile"):
        inside(path, name)
    if composed := next(iter((path / "environment").glob("docker-compose*")), None):
        raise BirlError(f"{composed}: several containers for one task are not supported.")
    check(path, settings)
    there = in_container(path, settings) if container else in_sandbox(path, settings, build)
    lines = text_of(path / "instruction.md").splitlines()
    while lines and (not lines[0].strip() or ("canary" in lines[0].lower() and lines[0].startswith(("#", "<!--")))):
        del lines[0]
    return Folder(
        path=path,
        name=path.name,
        instruction="\n".join(lines).strip(),
        tests=contents(path / "tests", "tests"),
        solution=contents(path / "solution", "solution") if (path / "solution/solve.sh").is_file() else {},
        seconds=number(path, settings, "verifier", "timeout_sec", SECONDS, 86400.0),
        **there,
    )


def check(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises `BirlError` for settings of task.toml that are not supported."""
    for table, names in NOT_PLAYED.items():
        given = section(path, settings, table)
        for name, plain in names.items():
            if (value := given.get(name)) and value != plain:
                raise BirlError(f"{path}/task.toml: {table}.{name}={value!r:.100}: is not supported by env=harbor.")


def in_sandbox(path: Path, settings: Mapping[str, Any], build: str) -> dict[str, Any]:
    """Initial files, variables and build commands from the Dockerfile and task.toml, for the sandbox."""
    recipe, own = Recipe(path / "environment"), given(path, settings)
    if recipe.builds and build == "refuse":
        raise BirlError(
            f"{recipe.folder}/Dockerfile: RUN {recipe.builds[0][:80]}: there is no container to build. env.build=skip "
            "leaves such lines out, where this machine has what they install; env.build=run runs them in the sandbox."
        )
    workdir = recipe.inside(own["workdir"], path / "task.toml") if own["workdir"] else recipe.workdir
    variables = {**recipe.variables, **own["environment"]}
    return {"workdir": workdir, "environment": variables, "files": recipe.files, "builds": tuple(recipe.builds)}


def given(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Working folder, variables and image from task.toml. Raises `BirlError`."""
    table = section(path, settings, "environment")
    result: dict[str, Any] = {}
    for name, kind in (("docker_image", str), ("workdir", str), ("env", dict)):
        result[name] = table.get(name, kind())
        if not isinstance(result[name], kind) or (name == "docker_image" and result[name].startswith("-")):
            what = "a table" if kind is dict else "text"
            raise BirlError(f"{path}/task.toml: environment.{name}={result[name]!r:.100}: must be {what}.")
    variables: dict[str, str] = {name: str(value) for name, value in result["env"].items()}
    if wanted := next((name for name, value in variables.items() if "${" in value), None):
        raise BirlError(
            f"{path}/task.toml: environment.env.{wanted}={variables[wanted]!r:.100}: variables of this machine are not "
            "handed to a task. Write the value."
        )
    return {"workdir": result["workdir"], "environment": variables, "image": result["docker_image"]}


def in_container(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the container from task.toml."""
    table = section(path, settings, "environment")
    return {
        **given(path, settings),
        "files": {},
        "builds": (),
        "build_seconds": number(path, settings, "environment", "build_timeout_sec", SECONDS, 86400.0),
        "memory_mb": int(number(path, settings, "environment", "memory_mb", 0.0, 2.0**31)),
        "network": table.get("network_mode", "public") == "public" and table.get("allow_internet") is not False,
        "cpus": number(path, settings, "environment", "cpus", 0.0, 4096.0),
    }


def section(path: Path, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, dict):
        raise BirlError(f"{path}/task.toml: {name}={table!r:.100}: must be a table.")
    return table


def number(path: Path, settings: Mapping[str, Any], table: str, name: str, default: float, largest: float) -> float:
    """A number of task.toml. Raises `BirlError` if it is not above 0."""
    value = section(path, settings, table).get(name, default)
    given = name in section(path, settings, table)
    if not isinstance(value, int | float) or isinstance(value, bool) or (given and not 0 < value <= largest):
        raise BirlError(f"{path}/task.toml: {table}.{name}={value!r}: must be a number above 0.")
    return float(value)


def toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text_of(inside(path.parent, path.name)))
    except ValueError as error:
        raise BirlError(f"{path}: {error}".partition("\n")[0]) from None
    except RecursionError:
        raise BirlError(f"{path}: it is nested too deep.") from None


def text_of(path: Path) -> str:
    """Read a text file. Raises `BirlError` if it is no UTF-8, cannot be read, or is too long."""
    try:
        if path.stat().st_size > MOST:
            raise BirlError(f"{path}: it has {path.stat().st_size >> 20} MiB; a task has at most {MOST >> 20}.")
        return read_text(path)
    except (OSError, ValueError) as error:
        raise BirlError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def contents(folder: Path, place: str) -> dict[str, bytes]:
    """Regular files below a folder, by their paths below `place`; links that lead out of it are skipped."""
    top = folder.resolve()
    names = sorted(p for p in folder.rglob("*") if p.is_file() and p.resolve().is_relative_to(top))
    size = sum(p.stat().st_size for p in names)
    if size > MOST:
        raise BirlError(f"{folder}: its files have {size >> 20} MiB, and {MOST >> 20} MiB can be in a sandbox.")
    return {str(PurePosixPath(place, p.relative_to(folder).as_posix())): p.read_bytes() for p in names}


class Recipe:
    """Parses a Dockerfile: files, variables, the working folder, and RUN commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workdir = folder, "/app"
        self.variables: dict[str, str] = {}
        self.arguments: dict[str, str] = {}  # ARG: of the Dockerfile alone
        self.files: dict[str, bytes] = {}
        self.builds: list[str] = []
        text = text_of(folder / "Dockerfile") if (folder / "Dockerfile").is_file() else ""
        for line in re.sub(r"\\[ \t\r]*\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", text)).splitlines():
            if words := line.split(None, 1):
                try:
                    self.take(words[0].upper(), "".join(words[1:]).strip())
                except (ValueError, IndexError):  # unclosed quotes, or no arguments
                    raise BirlError(f"{folder}/Dockerfile: {line.strip()[:80]}: it cannot be read.") from None

    def take(self, word: str, rest: str) -> None:
        match word:
            case "WORKDIR":
                self.workdir = self.inside(self.filled(rest))
            case "ENV" | "ARG":
                pairs = shlex.split(rest)
                pairs = pairs if "=" in pairs[0] else [f"{pairs[0]}={' '.join(pairs[1:])}"]
                known = {name: self.filled(value) for name, _, value in (pair.partition("=") for pair in pairs)}
                (self.variables if word == "ENV" else self.arguments).update(known)
            case "COPY" | "ADD":
                words = map(self.filled, shlex.split(rest))
                *sources, target = [w for w in words if not w.startswith(("--chown", "--chmod", "--link"))]
                if not sources or sources[0].startswith("--"):
                    raise BirlError(f"{self.folder}/Dockerfile: {word} {rest[:60]}: it is not known what that does.")
                for source in sources:
                    self.copy(source, target, several=len(sources) > 1)
            case "RUN":
                self.builds.append(rest)
            case _ if word not in LEFT_OUT:
                raise BirlError(f"{self.folder}/Dockerfile: {word} {rest[:60]}: it is not known what that does.")

    def filled(self, text: str) -> str:
        """The text with the values of its variables; those that are not set are empty, as in Docker. Raises `BirlError`
        for other forms, such as ${NAME:-default}."""
        known = {**ENVIRONMENT, **self.arguments, **self.variables}
        result = VARIABLE.sub(lambda match: known.get(match[1] or match[2], ""), text)
        if "${" in result:
            raise BirlError(f"{self.folder}/Dockerfile: {text[:80]}: it is not known what that does.")
        return result

    def copy(self, source: str, target: str, several: bool) -> None:
        origin, place = (self.folder / source).resolve(), self.inside(target)
        if not origin.exists() or not origin.is_relative_to(self.folder.resolve()):
            raise BirlError(f"{self.folder}/Dockerfile: COPY {source}: there is no such file in {self.folder}.")
        if origin.is_dir():
            own = f"{place[1:]}/Dockerfile" if origin == self.folder.resolve() else ""
            self.files |= {name: content for name, content in contents(origin, place[1:]).items() if name != own}
        else:
            if origin.stat().st_size > MOST:
                raise BirlError(f"{origin}: it has {origin.stat().st_size >> 20} MiB; a task has at most {MOST >> 20}.")
            whole = f"{place}/{origin.name}" if several or target.endswith("/") or target == "." else place
            self.files[whole.lstrip("/")] = read_bytes(origin)

    def inside(self, place: str, file: Path | None = None) -> str:
        """The absolute path, as `file` names it. Raises `BirlError` if it is outside of the sandbox's folders."""
        result = PurePosixPath(self.workdir, place)
        if ".." in result.parts or len(result.parts) < 2 or result.parts[1] not in ROOTS:
            raise BirlError(
                f"{file or self.folder / 'Dockerfile'}: {place}: the sandbox has "
                f"{', '.join('/' + r for r in ROOTS)} alone."
            )
        return str(result)


def packed(files: Mapping[str, bytes]) -> bytes:
    """Pack files into a tar archive; scripts and programs (ELF) are executable."""
    result = io.BytesIO()
    with tarfile.open(fileobj=result, mode="w") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(name.removeprefix("tmp/"))
            runs = content.startswith((b"#!", b"\x7fELF")) or name.endswith(".sh")
            about.size, about.mode = len(content), 0o755 if runs else 0o644
            archive.addfile(about, io.BytesIO(content))
    return result.getvalue()
