"""docker/Dockerfile names only what exists. A linter checks the rest: make lint-docker."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each, with continued lines joined and comments left out."""
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split()[0].upper(), line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def copied() -> list[str]:
    found = []
    for word, rest in instructions():
        if word == "COPY":
            found += [name for name in rest.split() if not name.startswith("--")][:-1]
    return found


def test_every_path_that_is_copied_exists_and_is_not_ignored() -> None:
    kept = [
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    for name in copied():
        assert (ROOT / name).exists(), name
        assert any(fnmatch(name.removeprefix("./"), pattern) for pattern in kept), f".dockerignore leaves out {name}"


def test_what_a_build_of_the_package_needs_is_copied() -> None:
    from tests.packaging.build import SHIPPED

    assert set(SHIPPED) <= {name.removeprefix("./") for name in copied()}


def test_the_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r'"\.\[([^\]]+)\]"', FILE.read_text())
    assert named and all(extra in extras for names in named for extra in names.split(","))


def test_stages_follow_from_one_another_and_the_targets_of_the_page_exist() -> None:
    stages: list[str] = []
    for word, rest in instructions():
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            assert base in stages or base.startswith("python:"), base
            assert ":" in base or base in stages, "a base image without a version"
            stages.append(name)
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"--target (\w+)", page + FILE.read_text()))
    assert targets == {"cpu", "cuda"} <= set(stages)


def test_it_does_not_run_as_root_and_holds_no_secret() -> None:
    words = instructions()
    assert [rest for word, rest in words if word == "USER"] == ["1000"]
    assert [word for word, _ in words].index("USER") < [word for word, _ in words].index("ENTRYPOINT")
    assert not re.search(r"(?i)(token|password|secret|api_key)\s*=", FILE.read_text())


def test_the_python_is_one_that_birl_runs_on() -> None:
    found = re.search(r"ARG PYTHON=3\.(\d+)", FILE.read_text())
    assert found is not None and int(found[1]) >= 11
