"""Runs one command of many on the same files: unpacks what the one before left, and packs what this one leaves.

It is a program in a sandbox, beside what a model wrote; standard library only. `order.json` has the command, its
folder, environment and seconds; `state.tar` is read and written; folders to `clear` are removed before `more.tar` is
unpacked on top.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile

OWN = ("archive.py", "order.json", "state.tar", "more.tar", "__pycache__")


def unpack(name: str) -> None:
    if os.path.exists(name):
        with tarfile.open(name) as archive:
            if hasattr(tarfile, "tar_filter"):  # not in every Python 3.11
                archive.extraction_filter = tarfile.tar_filter
            archive.extractall(".")
        os.remove(name)


def run(order: dict) -> int:
    with contextlib.suppress(FileExistsError):
        os.makedirs(order["folder"])
    environment = {**os.environ, **order["environment"]}
    started = subprocess.Popen(order["command"], cwd=order["folder"], env=environment, start_new_session=True)
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
    unpack("state.tar")
    for name in order["clear"]:
        if os.path.islink(name):
            os.unlink(name)
        shutil.rmtree(name, ignore_errors=True)
    unpack("more.tar")
    code = run(order)
    with tarfile.open("state.tar", "w") as archive:
        for name in sorted(set(os.listdir(".")) - set(OWN)):
            with contextlib.suppress(OSError):  # it went meanwhile, or was closed to its owner
                archive.add(name)
    sys.stdout.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    main()
