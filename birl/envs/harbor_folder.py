"""A task folder of the Harbor format: what it asks, what its container would begin with, and its tests."""

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
from birl.regular import inside, read_text

MOST = 64 << 20  # bytes of all files of a task
ROOTS = ("app", "workspace", "logs", "tests", "solution", "tmp")  # folders of the root that are there in the sandbox
SECONDS = 600.0  # for tests whose task does not say
LEFT_OUT = ("FROM", "LABEL", "MAINTAINER", "EXPOSE", "USER", "CMD", "ENTRYPOINT", "SHELL", "HEALTHCHECK", "ARG")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """`files`, `tests` and `solution`: content by path below the root. `builds`: commands of the container's build;
    `seconds`: what the tests may take."""

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


def read_all(root: Path, build: str) -> list[Folder]:
    """The task folders in `root`, or itself. Raises `BirlError`."""
    if not root.is_dir():
        raise BirlError(f"env.tasks={root}: there is no such folder in {Path.cwd()}.")
    places = [root] if (root / "task.toml").is_file() else sorted(p.parent for p in root.glob("*/task.toml"))
    if not places:
        raise BirlError(f"env.tasks={root}: no folder in it has a task.toml.")
    return [read(place, build) for place in places]


def read(path: Path, build: str) -> Folder:
    """Raises `BirlError` with the file, and what is wrong or cannot be done without containers."""
    settings = toml(path / "task.toml")
    if (path / "steps").is_dir() or "steps" in settings:
        raise BirlError(f"{path}: it has several steps, which env=harbor does not play.")
    for needed in ("instruction.md", "tests/test.sh"):
        if not (path / needed).is_file():
            raise BirlError(f"{path}: it has no {needed}.")
    for name in ("instruction.md", "tests", "tests/test.sh", "solution", "environment", "environment/Dockerfile"):
        inside(path, name)
    environment = path / "environment"
    if composed := next(iter(environment.glob("docker-compose*")), None):
        raise BirlError(f"{composed}: several containers cannot be had in the sandbox.")
    recipe = Recipe(environment)
    if recipe.builds and build == "refuse":
        raise BirlError(
            f"{environment}/Dockerfile: RUN {recipe.builds[0][:80]}: there is no container to build. env.build=skip "
            "leaves such lines out, where this machine has what they install; env.build=run runs them in the sandbox."
        )
    verifier = settings.get("verifier", {})
    if not isinstance(verifier, dict):
        raise BirlError(f"{path}/task.toml: verifier={verifier!r:.100}: must be a table.")
    seconds = verifier.get("timeout_sec", SECONDS)
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= 86400:
        raise BirlError(f"{path}/task.toml: verifier.timeout_sec={seconds!r}: must be a number of seconds above 0.")
    lines = text_of(path / "instruction.md").splitlines()
    while lines and (not lines[0].strip() or ("canary" in lines[0].lower() and lines[0].startswith(("#", "<!--")))):
        del lines[0]
    return Folder(
        path=path,
        name=path.name,
        instruction="\n".join(lines).strip(),
        workdir=recipe.workdir,
        environment=recipe.variables,
        files=recipe.files,
        tests=contents(path / "tests", "tests"),
        solution=contents(path / "solution", "solution") if (path / "solution/solve.sh").is_file() else {},
        builds=tuple(recipe.builds),
        seconds=float(seconds),
    )


def toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text_of(inside(path.parent, path.name)))
    except ValueError as error:
        raise BirlError(f"{path}: {error}".partition("\n")[0]) from None
    except RecursionError:
        raise BirlError(f"{path}: it is nested too deep.") from None


def text_of(path: Path) -> str:
    """Raises `BirlError` where it is no UTF-8, cannot be read, or is too long."""
    try:
        if path.stat().st_size > MOST:
            raise BirlError(f"{path}: it has {path.stat().st_size >> 20} MiB; a task has at most {MOST >> 20}.")
        return read_text(path)
    except (OSError, ValueError) as error:
        raise BirlError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def contents(folder: Path, place: str) -> dict[str, bytes]:
    """Regular files below a folder, by their paths below `place`; links lead nowhere."""
    names = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    size = sum(p.stat().st_size for p in names)
    if size > MOST:
        raise BirlError(f"{folder}: its files have {size >> 20} MiB, and {MOST >> 20} MiB can be in a sandbox.")
    return {str(PurePosixPath(place, p.relative_to(folder).as_posix())): p.read_bytes() for p in names}


class Recipe:
    """What a Dockerfile says of files, variables and the working folder, and which commands it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workdir = folder, "/app"
        self.variables: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        self.builds: list[str] = []
        text = text_of(folder / "Dockerfile") if (folder / "Dockerfile").is_file() else ""
        for line in re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", text)).splitlines():
            word, _, rest = line.strip().partition(" ")
            if word:
                try:
                    self.take(word.upper(), rest.strip())
                except (ValueError, IndexError):  # quotes that do not end, or nothing behind the word
                    raise BirlError(f"{folder}/Dockerfile: {line.strip()[:80]}: it cannot be read.") from None

    def take(self, word: str, rest: str) -> None:
        match word:
            case "WORKDIR":
                self.workdir = self.inside(rest)
            case "ENV":
                pairs = shlex.split(rest)
                pairs = pairs if "=" in pairs[0] else [f"{pairs[0]}={' '.join(pairs[1:])}"]
                self.variables |= {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
            case "COPY" | "ADD":
                *sources, target = [w for w in shlex.split(rest) if not w.startswith(("--chown", "--chmod", "--link"))]
                if not sources or sources[0].startswith("--"):
                    raise BirlError(f"{self.folder}/Dockerfile: {word} {rest[:60]}: it is not known what that does.")
                for source in sources:
                    self.copy(source, target, several=len(sources) > 1)
            case "RUN":
                self.builds.append(rest)
            case _ if word not in LEFT_OUT:
                raise BirlError(f"{self.folder}/Dockerfile: {word} {rest[:60]}: it is not known what that does.")

    def copy(self, source: str, target: str, several: bool) -> None:
        origin, place = (self.folder / source).resolve(), self.inside(target)
        if not origin.exists() or not origin.is_relative_to(self.folder.resolve()):
            raise BirlError(f"{self.folder}/Dockerfile: COPY {source}: there is no such file in {self.folder}.")
        if origin.is_dir():
            self.files |= {k: v for k, v in contents(origin, place[1:]).items() if not k.endswith("/Dockerfile")}
        else:
            if origin.stat().st_size > MOST:
                raise BirlError(f"{origin}: it has {origin.stat().st_size >> 20} MiB; a task has at most {MOST >> 20}.")
            whole = f"{place}/{origin.name}" if several or target.endswith("/") or target == "." else place
            self.files[whole.lstrip("/")] = origin.read_bytes()

    def inside(self, place: str) -> str:
        """A path in full. Raises `BirlError` for one that the sandbox has not."""
        result = PurePosixPath(self.workdir, place)
        if ".." in result.parts or len(result.parts) < 2 or result.parts[1] not in ROOTS:
            raise BirlError(
                f"{self.folder}/Dockerfile: {place}: the sandbox has {', '.join('/' + r for r in ROOTS)} alone."
            )
        return str(result)


def packed(files: Mapping[str, bytes]) -> bytes:
    """An archive; scripts can be run."""
    result = io.BytesIO()
    with tarfile.open(fileobj=result, mode="w") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(name.removeprefix("tmp/"))
            about.size, about.mode = len(content), 0o755 if content.startswith(b"#!") or name.endswith(".sh") else 0o644
            archive.addfile(about, io.BytesIO(content))
    return result.getvalue()
