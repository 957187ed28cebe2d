"""Runs `birl` commands as processes, one after the other: for --multirun and `birl reproduce`."""

import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from birl.errors import BirlError, first_line
from birl.process import tied


@dataclass
class Jobs:
    """Runs jobs. Each process has its own session, so that it receives Ctrl-C exactly once, from here: a job saves and
    exits at the first signal and dies at the second; the terminal would otherwise send one too."""

    running: subprocess.Popen[bytes] | None = None
    stopped: int = 0  # number of the received signal
    codes: list[int | None] = field(default_factory=list)

    def run(self, commands: list[list[str]], names: list[str]) -> int:
        """Run all commands and print a table of their exit codes. Returns the exit code."""
        with self.forwarding():
            seconds = [self._timed(command, f"{i}/{len(commands)}") for i, command in enumerate(commands, 1)]
        self._table(names, seconds)
        if self.stopped:
            return 128 + self.stopped
        return 0 if all(code == 0 for code in self.codes) else 1

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """In this context signals are forwarded to the running job, and no other one starts."""
        previous = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def start(self, command: Sequence[str], label: str = "", folder: Path | None = None) -> int | None:
        """Run one `birl` command in `folder`. Returns its exit code; None if a signal came before it started."""
        if self.stopped:
            return None
        print(f"{label}birl {' '.join(command)}", flush=True)
        words = tied([sys.executable, "-m", "birl", *command])  # ends when this process ends
        self.running = subprocess.Popen(words, start_new_session=True, cwd=folder)
        if self.stopped:  # the signal came between the check above and the start
            self.running.send_signal(signal.SIGTERM)
        code, self.running = self.running.wait(), None
        return code

    def _timed(self, command: list[str], count: str) -> float:
        start = time.monotonic()
        self.codes.append(self.start(command, f"[{count}] "))
        return 0.0 if self.codes[-1] is None else time.monotonic() - start

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.stopped = number
        if self.running is not None and self.running.poll() is None:
            self.running.send_signal(number)

    def _table(self, names: list[str], seconds: list[float]) -> None:
        width = max(len(name) for name in [*names, "job"])
        print(f"\n{'job':<{width}}  {'exit':>7}  {'seconds':>8}")
        for name, code, duration in zip(names, self.codes, seconds, strict=True):
            print(f"{name:<{width}}  {'not run' if code is None else code:>7}  {duration:>8.1f}")


def sweep(overrides: list[str]) -> list[list[str]]:
    """The jobs of `--multirun`: every combination of `key=a,b`, `key=range(0,3)` and `key=choice(a,b)`."""
    return [list(job) for job in itertools.product(*(_values(argument) for argument in overrides))]


def swept_keys(overrides: list[str]) -> list[str]:
    """The keys that `sweep` varies."""
    return [argument.partition("=")[0] for argument in overrides if len(_values(argument)) > 1]


def job_names(jobs: list[list[str]], swept: list[str]) -> list[str]:
    """Folder names of the jobs, from their swept values: `lr=1e-5,seed=1`."""
    names: list[str] = []
    last = [key.rpartition(".")[2] for key in swept]
    for job in jobs:
        values = [word.partition("=")[::2] for word in job]
        parts = []
        for key, value in values:
            if key in swept:
                short = key.rpartition(".")[2]
                short = short if last.count(short) == 1 else key
                parts.append(f"{short}={re.sub(r'[^A-Za-z0-9_.+-]+', '_', value)[-60:].strip('_')}")
        name = ",".join(parts)
        names.append(f"{name}-{len(names)}" if name in names else name)
    return names


def _values(argument: str) -> list[str]:
    """One word per value. A text that Hydra's grammar cannot read is one value; `load` accepts it or reports it."""
    if "=" not in argument:
        return [argument]
    try:
        override: Override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return [argument]
    if override.is_discrete_sweep():
        try:
            values = list(override.sweep_string_iterator())
        except HydraException as error:
            raise BirlError(f"{argument}: {first_line(error)}. Use a list, range(...) or choice(...)") from None
        if not values:
            raise BirlError(f"{argument}: this sweep is empty")
        return [f"{override.get_key_element()}={value}" for value in values]
    if override.is_sweep_override():
        raise BirlError(
            f"{argument}: has no list of values to try; use {override.key_or_group}=a,b or range(...) or choice(...)"
        )
    return [argument]
