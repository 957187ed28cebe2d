"""Runs one command of many on the same files: unpacks what the one before left, and packs what this one leaves.

It is a program in a sandbox, beside what a model wrote; standard library only. `order.json` has the command, its
folder, environment and seconds; `state.tar` is read and written; folders to `clear` are removed before `more.tar` is
unpacked on top. Whatever the model left, names that are taken, folders that are closed or an archive of its own, the
command runs, so that tests come to a verdict.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from typing import BinaryIO

OWN = ("archive.py", "order.json", "state.tar", "more.tar", "__pycache__")


def taken(name: str) -> BinaryIO | None:
    """A file, open, and without its name."""
    if not os.path.exists(name):
        return None
    file = open(name, "rb")  # noqa: SIM115
    os.remove(name)
    return file


def unpack(file: BinaryIO | None) -> None:
    """And close it."""
    if file is not None:
        with file, tarfile.open(fileobj=file) as archive:
            if hasattr(tarfile, "tar_filter"):  # not in every Python 3.11
                archive.extraction_filter = tarfile.tar_filter
            archive.extractall(
                ".", [m for m in archive if m.isreg() or m.isdir() or m.issym() or m.islnk()]
            )  # no pipes


def clear(name: str, number: int) -> None:
    """Its name is free afterwards, though what is in it cannot be removed."""
    if os.path.lexists(name):
        aside = f".cleared-{os.getpid()}-{number}"
        os.rename(name, aside)
        if os.path.islink(aside) or not os.path.isdir(aside):
            os.unlink(aside)
        shutil.rmtree(aside, ignore_errors=True)


def start(order: dict, folder: str) -> subprocess.Popen:
    environment = {**os.environ, **order["environment"]}
    return subprocess.Popen(order["command"], cwd=folder, env=environment, start_new_session=True)


def run(order: dict) -> int:
    try:
        os.makedirs(order["folder"], exist_ok=True)
        started = start(order, order["folder"])
    except OSError as error:  # a file has its place, or it is closed
        print(error, file=sys.stderr)
        started = start(order, ".")
    try:
        return started.wait(order["seconds"])
    except subprocess.TimeoutExpired:
        print(f"it took longer than {order['seconds']:g} s", file=sys.stderr)
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def main() -> None:
    with open("order.json") as file:
        order = json.load(file)
    state, more = taken("state.tar"), taken("more.tar")  # at once: the state may hold another more.tar
    try:
        unpack(state)
    except (tarfile.TarError, OSError, ValueError) as error:  # what a command left in its place
        print(f"the files are lost: {error}", file=sys.stderr)
    for number, name in enumerate(order["clear"]):
        clear(name, number)
    unpack(more)
    code = run(order)
    try:
        with tarfile.open("state.tar", "w") as archive:
            for name in sorted(set(os.listdir(".")) - set(OWN)):
                with contextlib.suppress(FileNotFoundError, PermissionError):  # it went meanwhile, or is closed
                    archive.add(name)
    except OSError as error:
        print(f"the files are lost: {error}", file=sys.stderr)
        clear("state.tar", -1)
    sys.stdout.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    main()
