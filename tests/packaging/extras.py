"""Resolves every extra together with the base under constraints.txt, for each Python: `make check-extras`.

    python -m tests.packaging.extras [--python 3.12] [EXTRA ...]

uv reads the metadata alone and installs nothing. PyTorch is taken as given: its builds are not in every index.
"""

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13")
#: of the base: what cannot be imported without PyTorch
NEEDS_TORCH = ("torch", "peft", "accelerate")


def base() -> list[Requirement]:
    return [Requirement(r) for r in PROJECT["dependencies"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", choices=PYTHONS)
    parser.add_argument("extra", nargs="*", default=["", *PROJECT["optional-dependencies"]])
    arguments = parser.parse_args()
    failed = []
    for python in arguments.python or PYTHONS:
        for extra in arguments.extra:
            problem = resolve(python, extra)
            print(f"{python}  {extra or '(base)':<16}{'ok' if not problem else 'FAILED'}", flush=True)
            if problem:
                print(problem, file=sys.stderr)
                failed.append((python, extra))
    return bool(failed)


def resolve(python: str, extra: str) -> str:
    """Empty, or why it cannot be installed."""
    words = ["uv", "pip", "compile", "-q", "--python-version", python, "-c", "constraints.txt"]
    words += ["--extra", extra] if extra else []
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as given:
        given.write("torch ; sys_platform == 'never'\n")
        given.flush()
        words += ["--override", given.name, "pyproject.toml", "-o", "/dev/null"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return done.stderr if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
