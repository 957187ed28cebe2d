"""Runs one of several commands on the same files: unpacks the state of the previous command, and packs the new state.

Runs in a sandbox, together with files of the model; standard library only. `order.json` has the command, its folder,
environment and seconds; `state.tar` is read and written; folders in `clear` are removed before `more.tar` is unpacked.
Whatever the model left (occupied names, unreadable folders, its own archive), the command runs, so that the tests give
a verdict.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from typing import BinaryIO

MOST = 1 << 19  # bytes of each output of a command
OWN = ("archive.py", "order.json", "state.tar", "more.tar", "__pycache__")


def taken(name: str) -> BinaryIO | None:
    """Open a file and unlink it; None if it does not exist."""
    if not os.path.exists(name):
        return None
    file = open(name, "rb")  # noqa: SIM115
    os.remove(name)
    return file


def unpack(file: BinaryIO | None) -> None:
    """Unpack an archive and close it."""
    if file is not None:
        with file, tarfile.open(fileobj=file) as archive:
            if hasattr(tarfile, "tar_filter"):  # missing in early releases of Python 3.11
                archive.extraction_filter = tarfile.tar_filter
            archive.extractall(
                ".", [m for m in archive if m.isreg() or m.isdir() or m.issym() or m.islnk()]
            )  # no pipes


def clear(name: str, number: int) -> None:
    """Free the name, even if its contents cannot be removed."""
    if os.path.lexists(name):
        aside = f".cleared-{os.getpid()}-{number}"
        os.rename(name, aside)
        if os.path.islink(aside) or not os.path.isdir(aside):
            os.unlink(aside)
        shutil.rmtree(aside, ignore_errors=True)


def start(order: dict, folder: str) -> subprocess.Popen:
    environment = {**os.environ, **order["environment"]}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        order["command"], cwd=folder, env=environment, start_new_session=True, stdout=pipe, stderr=pipe
    )


def forward(source: int, target: int) -> None:
    """Copy the first `MOST` bytes of an output, and discard the rest, for which the sandbox would end the run."""
    left = MOST
    while part := os.read(source, 1 << 16):
        left -= os.write(target, part[:left]) if left else 0


def run(order: dict) -> int:
    try:
        os.makedirs(os.path.realpath(order["folder"]), exist_ok=True)  # /app is a link, at first to nothing
        started = start(order, order["folder"])
    except OSError as error:  # a file is in its place, or it is not accessible
        print(error, file=sys.stderr)
        started = start(order, ".")
    outputs = [
        threading.Thread(target=forward, args=(pipe.fileno(), number), daemon=True)
        for number, pipe in ((1, started.stdout), (2, started.stderr))
        if pipe
    ]
    for output in outputs:
        output.start()
    try:
        code = started.wait(order["seconds"])
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    for output in outputs:
        output.join(1.0)  # a process outside of the group may hold the pipe
    if code is not None:
        return code
    print(f"it took longer than {order['seconds']:g} s", file=sys.stderr)
    for number, name in enumerate(order["clear"]):  # a reward of tests that were ended is none
        clear(name, number)
    return 124


def main() -> None:
    with open("order.json") as file:
        order = json.load(file)
    state, more = taken("state.tar"), taken("more.tar")  # both now: the state may contain another more.tar
    try:
        unpack(state)
    except (tarfile.TarError, OSError, ValueError) as error:  # a command has replaced it
        print(f"the files are lost: {error}", file=sys.stderr)
    for number, name in enumerate(order["clear"]):
        clear(name, number)
    unpack(more)
    code = run(order)
    try:
        with tarfile.open("state.tar", "w") as archive:
            for name in sorted(set(os.listdir(".")) - set(OWN)):
                with contextlib.suppress(FileNotFoundError, PermissionError):  # removed meanwhile, or not readable
                    archive.add(name)
    except OSError as error:
        print(f"the files are lost: {error}", file=sys.stderr)
        clear("state.tar", -1)
    sys.stdout.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    main()
