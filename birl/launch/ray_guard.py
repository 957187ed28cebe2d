"""Holds a Ray cluster for the process that started it: `python ray_guard.py FOLDER COMMAND...`.

COMMAND ends when that process ends in any way: the pipe at the standard input breaks. It continues if "keep" was
written before. FOLDER is removed at the end; empty: none. Imports the standard library only, to start at once.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading

GRACE = 10.0  # seconds that COMMAND has to end the processes that it started


def main(folder: str, command: list[str]) -> None:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def leave() -> None:
        child.wait()
        end(folder)

    waiting = threading.Thread(target=leave)
    waiting.start()
    if sys.stdin.read() != "keep":
        child.terminate()
        waiting.join(GRACE)
        end(folder)


def end(folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # this process, COMMAND, and its remaining children


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
