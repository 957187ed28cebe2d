"""Builds the source archive and the wheel in a folder of their own, as `pip` would, without the network.

python -m tests.packaging.build FOLDER
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: what a source archive may hold, beside what setuptools writes
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "birl")


def build(folder: Path) -> tuple[Path, Path]:
    """(source archive, wheel), the wheel made from the unpacked archive. Raises `RuntimeError` with the output."""
    source = folder / "source"  # setuptools writes build/ and *.egg-info beside pyproject.toml
    source.mkdir(parents=True)
    for name in SHIPPED:
        (source / name).symlink_to(ROOT / name)
    archive = folder / backend(source, "build_sdist", folder)
    subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True)
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    return archive, folder / backend(unpacked, "build_wheel", folder)


def backend(source: Path, hook: str, folder: Path) -> str:
    """The name of the file that a hook of setuptools made."""
    code = f"from setuptools import build_meta as b; import sys; print(b.{hook}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, folder.resolve()], cwd=source, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr or done.stdout)
    return done.stdout.split()[-1]


if __name__ == "__main__":
    for made in build(Path(sys.argv[1])):
        print(made)
