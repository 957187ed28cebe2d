"""Installs what was built into an empty environment, and uses it: `make check-install`.

    python -m tests.packaging.install [--python PYTHON] [--light]

--light leaves out PyTorch and what needs it, for a Python that has no small build of it: then everything is imported
that must work without.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.packaging.build import ROOT, build
from tests.packaging.extras import NEEDS_TORCH, base

LIGHT = ("birl", "birl.types", "birl.config.load", "birl.cli", "birl.rollout.episode", "birl.envs.open", "birl.track")
TIMED = """
import sys, time
start = time.perf_counter()
import birl
took = time.perf_counter() - start
heavy = {"torch", "transformers", "datasets", "starlette", "uvicorn", "httpx", "fsspec", "s3fs", "modal", "ray"}
assert took < 1, took
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
print(f"import birl {birl.__version__}: {took * 1000:.0f} ms, {birl.__file__}")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--light", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return check(Path(folder), arguments.python, arguments.light)


def check(folder: Path, python: str, light: bool) -> int:
    _, wheel = build(folder / "dist")
    run(python, "-m", "venv", folder / "venv")
    new = folder / "venv" / "bin"
    pip = (new / "python", "-m", "pip", "install", "-q", "--prefer-binary", "-c", ROOT / "constraints.txt")
    if light:
        run(*pip, *[str(r) for r in base() if r.name not in NEEDS_TORCH])
        run(*pip, "--no-deps", wheel)
    else:
        run(*pip, "torch", *shlex.split(os.environ.get("TORCH_FLAGS", "")))
        run(*pip, wheel)
        run(new / "python", "-m", "pip", "check")
    run(new / "python", "-c", TIMED, cwd=folder)
    run(new / "python", "-c", "".join(f"import {name}\n" for name in LIGHT), cwd=folder)
    run(new / "birl", "--version", cwd=folder)
    run(new / "birl", "rl", "--help", "lr", cwd=folder)
    if not light:
        run(new / "birl", "doctor", cwd=folder)
        run(new / "python", "-c", "from birl import Trainer; Trainer(train_dataset='my.jsonl')", cwd=folder)
    print(f"installed and used: {wheel.name} on {python}")
    return 0


def run(*words: object, cwd: Path | None = None) -> None:
    """Stops with the command where it fails. Nothing of this environment is seen by the new one."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    print("+", *words[:6], flush=True)
    subprocess.run([str(word) for word in words], cwd=cwd, env=clean, check=True, timeout=1800)


if __name__ == "__main__":
    sys.exit(main())
