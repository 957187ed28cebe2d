"""External programs of launchers (ray, aws, kubectl, sky): find them, run them, or print commands for the user."""

import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path

from birl.errors import BirlError

SHOWN = 2000  # characters of a program's output that an error shows
REST = 2.0  # s to wait for the last lines
LONG = 3600.0  # s: machines start and install PyTorch; or a run saves and ends


def write(folder: Path, rendered: Mapping[str, str]) -> None:
    """Write a job's files, readable for this user only."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in rendered.items():
        with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)


def need(programs: Mapping[str, str], folder: Path, commands: str) -> None:
    """`programs`: name -> how to install it. Raises `BirlError` with the commands to run if one is missing."""
    missing = {name: how for name, how in programs.items() if shutil.which(name) is None}
    if missing:
        names = ", ".join(f"{name} ({how})" for name, how in missing.items())
        raise BirlError(
            f"Nothing was started: this machine lacks {names}. Everything is in {folder}; where they are, run\n"
            + commands.rstrip("\n")
        )


def run(words: Sequence[str], timeout: float = 600.0, shown: bool = False, env: Mapping[str, str] | None = None) -> str:
    """Run a program and return its output; with `shown` it prints to the terminal instead. Raises `BirlError` with the
    end of its output if it fails, is missing, or exceeds `timeout` [s]."""
    try:
        done = subprocess.run(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=None if shown else subprocess.PIPE,
            stderr=None if shown else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, **(env or {})},
        )
    except FileNotFoundError:
        raise BirlError(f"`{words[0]}` is not installed on this machine.") from None
    except subprocess.TimeoutExpired:
        raise BirlError(f"`{shlex.join(words)}` took longer than {timeout:g} s.") from None
    if done.returncode:
        output = ((done.stderr or "") + (done.stdout or "")).strip()[-SHOWN:]
        raise BirlError(f"`{shlex.join(words)}` ended with code {done.returncode}. {output}".rstrip())
    return done.stdout or ""


def run_all(steps: Iterable[Sequence[str]], hint: str, env: Mapping[str, str] | None = None) -> str:
    """Run all programs, also after one that failed; returns their output. Raises `BirlError`: `hint`, failures."""
    printed: list[str] = []
    failed: list[str] = []
    for words in steps:
        try:
            printed.append(run(words, LONG, env=env))
        except BirlError as error:
            failed.append(str(error))
    if failed:
        raise BirlError(f"Not everything worked; {hint}\n" + "\n".join(failed))
    return "".join(printed)


def lines(words: Sequence[str], over: Callable[[], bool] | None = None) -> Generator[str, None, None]:
    """Output lines of a program until it ends. It is ended if the reader stops, or when `over` returns true, which a
    thread polls."""
    try:
        process = subprocess.Popen(
            list(words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        raise BirlError(f"`{words[0]}` is not installed on this machine.") from None
    assert process.stdout is not None
    if over is not None:
        threading.Thread(target=_end_when, args=(over, process), daemon=True).start()
    try:
        yield from process.stdout
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_when(over: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        if over():
            time.sleep(REST)
            process.terminate()
