"""Wheel and source archive hold the package and nothing else, and the wheel of the archive is that of the tree."""

import tarfile
import zipfile
from pathlib import Path

import pytest

import birl
from tests.packaging.build import build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist") / "made")


def test_the_source_archive_can_be_built_from_and_holds_no_more(made: tuple[Path, Path]) -> None:
    with tarfile.open(made[0]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    tops = {name.split("/")[0] for name in names}
    assert tops == {"birl", "birl.egg-info", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "setup.cfg"}
    assert not [name for name in names if name.endswith((".pyc", ".pt", ".safetensors")) or "__pycache__" in name]


def test_the_wheel_of_the_archive_has_every_file(made: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(made[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = next(wheel.read(n).decode() for n in wheel.namelist() if n.endswith("/METADATA"))
    tree = {
        str(p.relative_to(ROOT)) for p in (ROOT / "birl").rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    assert names == tree, "package-data of pyproject.toml lacks a file, or a file is in the wrong place"
    assert "birl/py.typed" in names
    assert f"\nVersion: {birl.__version__}\n" in metadata and "\nRequires-Python: >=3.11\n" in metadata
    assert "\nLicense-Expression: MIT\n" in metadata and "\nClassifier: Typing :: Typed\n" in metadata
