"""A command of the user's that is to run in another folder."""

import os
import shutil
import sys
from pathlib import Path

from birl.errors import BirlError


def full_names(words: list[str], key: str, text: str) -> list[str]:
    """A command whose program and files are named in full, as it runs in another folder. Raises `BirlError`, in which
    `key` is `text`."""
    # Not resolved, as a virtual environment's python is a link.
    result = [os.path.abspath(w) if os.path.isfile(w) or ("/" in w and os.path.exists(w)) else w for w in words]
    if Path(result[0]).name.startswith("python") and (absent := missing(result[1:])):
        raise BirlError(f"{key}={text}: there is no file {absent} in {Path.cwd()}.")
    program = shutil.which(result[0], path=path())
    if program is None:
        raise BirlError(f"{key}={text}: there is no program {result[0]}.")
    return [program, *result[1:]]


def missing(arguments: list[str]) -> str:
    """The script that Python is to run, where it does not exist: those that do have their full names."""
    script = next((word for word in arguments if not word.startswith("-")), "")
    module = any(word.startswith(("-m", "-c")) for word in arguments)
    return script if script.endswith(".py") and not module and not os.path.isabs(script) else ""


def path() -> str:
    """`python` is the one that runs birl."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
