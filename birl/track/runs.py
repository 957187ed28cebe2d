"""Reads the state and results of a run from its folder, for `birl runs`, `birl diff` and the live page.

A run may be writing into the folder, may have been killed in the middle of a line, or may be of another version.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from birl.config.file import flat
from birl.regular import open_regular, read_bytes
from birl.track.algorithm import algorithm
from birl.track.progress import headline, rises, validation_name

MARKS = ("metrics.jsonl", "config.yaml")  # a folder with one of them is a run
DEPTH = 5  # levels below a folder that are searched: --multirun adds one
TAIL = 1 << 16  # bytes that are read first to find the last line of a file
COMMAND_KEYS = {"rl": "algorithm.baseline", "rm": "ranking.centering", "dpo": "preference.loss"}  # only it has the key
ALWAYS_OTHER = ("run", "resume")  # keys that differ between any two runs
STATES = ("running", "done", "stopped", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Summary of one run. `state`: running | done | stopped (by a signal, and saved) | failed (it ended otherwise: an
    error, a kill, a power cut). `problem`: what is wrong with its folder, or "". `total`: steps, None if epochs decide.
    `reward`: value of `headline` (reward/mean, or loss) in the last step. `best`: best value of `validation`, the name
    of a figure, at `best_step`. `seconds`: of all its processes. `updated`: seconds since 1970."""

    path: Path
    command: str
    state: str
    model: str
    algorithm: str
    problem: str = ""
    step: int = 0
    total: int | None = None
    headline: str = "loss"
    reward: float | None = None
    validation: str = ""
    best: float | None = None
    best_step: int = 0
    seconds: float | None = None
    updated: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in MARKS)


def find(root: Path) -> Iterator[Path]:
    """All runs at `root` or below. Runs are not nested."""
    if is_run(root):
        yield root
        return
    level, seen = [root], {root.resolve()}
    for _ in range(DEPTH):
        inside = [folder for parent in level for folder in folders(parent) if folder.resolve() not in seen]
        seen |= {folder.resolve() for folder in inside}  # links are followed once: they may form a cycle
        yield from (folder for folder in inside if is_run(folder))
        level = [folder for folder in inside if not is_run(folder)]


def folders(parent: Path) -> list[Path]:
    """The folders directly in `parent`; none if it cannot be read."""
    with suppress(OSError), os.scandir(parent) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    return []


def config(run: Path) -> dict[str, Any]:
    """The configuration by dotted key; empty if it cannot be read: then `problem` has the reason."""
    return dict(flat(mapping(run / "config.json")))


def differences(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dotted keys that differ, with the value of each run; "set": whether each run has the key. A run whose
    configuration cannot be read does not count as different."""
    known = [config for config in configs if config]
    return [
        {"key": key, "values": [config.get(key) for config in configs], "set": [key in config for config in configs]}
        for key in dict.fromkeys(key for config in known for key in config)
        if key not in ALWAYS_OTHER and any(key not in c or c[key] != known[0].get(key) for c in known)
    ]


def problem(run: Path) -> str:
    """What is wrong with the folder, as a sentence; empty if nothing is."""
    return _problem(run, _mapping(run / "config.json")[1])


def _problem(run: Path, why: str) -> str:
    path = run / "config.json"
    return f"{path} cannot be read ({why}): the configuration is not shown, everything else is." if why else ""


def summary(run: Path) -> dict[str, Any]:
    """The summary that the run wrote at its end; empty before that."""
    return mapping(run / "summary.json")


def mapping(path: Path) -> dict[str, Any]:
    """A JSON object; empty if it cannot be read."""
    return _mapping(path)[0]


def _mapping(path: Path) -> tuple[dict[str, Any], str]:
    """A JSON object, and why it could not be read."""
    try:
        result = json.loads(read_bytes(path).decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, getattr(error, "strerror", None) or str(error)
    return (result, "") if isinstance(result, dict) else ({}, "it is no JSON object")


def running(run: Path) -> bool:
    """Whether a process of this machine holds the folder's lock. Does not try the lock: that could disturb a run that
    starts."""
    try:
        pid, *began = read_bytes(run / ".lock").decode("ascii").split()[:2]
        pid, inode = int(pid), (run / ".lock").stat().st_ino
        if pid <= 0:
            return False
        os.kill(pid, 0)
        if began and began[0] == began_at(pid):  # written if the disk has no locks
            return True
    except PermissionError:
        return True  # another user's process
    except (OSError, ValueError, OverflowError):
        return False
    with suppress(OSError, IndexError):  # the pid may have been reused
        return any(line.split()[5].endswith(f":{inode}") for line in Path("/proc/locks").read_text().splitlines())
    return True


def began_at(pid: int) -> str:
    """Start time of a process of this machine, as a text that differs for a later process with the same pid; "" if
    unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def state(run: Path) -> str:
    """One of `STATES`."""
    return _state(run, last_record(run / "metrics.jsonl"), summary(run))


def _state(run: Path, last: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    if running(run):
        return "running"
    step = _number(last.get("step")) or 0.0
    reached = [n for key in ("step", "steps") if (n := _number(told.get(key))) is not None]
    if told and (reached or [step])[0] >= step:
        return "done" if told.get("finished", True) else "stopped"
    return "failed"


def last_record(path: Path) -> dict[str, Any]:
    """The last whole line of a JSON Lines file; empty if there is none. Reads only the end of the file."""
    with suppress(OSError), open_regular(path) as file:
        size, wanted = file.seek(0, os.SEEK_END), TAIL
        while True:
            file.seek(max(0, size - wanted))
            lines = file.read(wanted).split(b"\n")
            for line in reversed(lines[0 if wanted >= size else 1 :]):
                with suppress(ValueError, RecursionError):
                    result = json.loads(line)
                    if isinstance(result, dict):
                        return result
            if wanted >= size:
                break
            wanted *= 16
    return {}


def about(run: Path) -> About:
    """Summarize a run for a table."""
    written, why = _mapping(run / "config.json")
    keys, told, last = dict(flat(written)), summary(run), last_record(run / "metrics.jsonl")
    known, name = _state(run, last, told), headline(last)
    validation, best, best_step = best_validation(run)
    return About(
        path=run,
        command=next((command for command, key in COMMAND_KEYS.items() if key in keys), "sft"),
        state=known,
        model=_short(str(keys.get("model.path", "?"))),
        algorithm=algorithm(keys),
        problem=_problem(run, why),
        step=int(_number(last.get("step")) or 0),
        total=int(_number(keys.get("steps")) or 0) or None,
        headline=name,
        reward=_number(last.get(name)),
        validation=validation.removeprefix("validation/"),
        best=best,
        best_step=best_step,
        seconds=_number(told.get("seconds")) if known in ("done", "stopped") else _between(run, last),
        updated=max((_changed(run / file) for file in ("metrics.jsonl", "summary.json", "config.json")), default=0.0),
    )


def best_validation(run: Path) -> tuple[str, float | None, int]:
    """Name of a run's main validation figure, its best value and the step of that. Bad lines are skipped."""
    path = run / "validation.jsonl"
    try:
        result = path.stat()
    except OSError:
        return "", None, 0
    return _best(path, result.st_size, result.st_mtime_ns)


@lru_cache(256)
def _best(path: Path, size: int, changed: int) -> tuple[str, float | None, int]:
    """Cached by size and time: validations are long and rare, while the page asks after every step."""
    records: list[dict[str, Any]] = []
    with suppress(OSError), open_regular(path) as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                if isinstance(record := json.loads(line), dict):
                    records.append(record)
    name = validation_name(records[-1]) if records else ""
    values = [(value, int(_number(r.get("step")) or 0)) for r in records if (value := _number(r.get(name))) is not None]
    value, step = (max if rises(name) else min)(values, key=lambda pair: pair[0]) if values else (None, 0)
    return name, value, step


def _short(model: str) -> str:
    """The base name of a local folder; a hub id unchanged."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith((".", "/", "~")) else model


def _between(run: Path, last: Mapping[str, Any]) -> float | None:
    """Seconds from the first step's record to the last one."""
    with (
        suppress(OSError, ValueError, KeyError, TypeError, RecursionError),
        open_regular(run / "metrics.jsonl") as file,
    ):
        first = json.loads(file.readline())
        spent = datetime.fromisoformat(last["time"]) - datetime.fromisoformat(first["time"])
        return spent.total_seconds() + (_number(first.get("time/step")) or 0.0)
    return None


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _number(value: Any) -> float | None:
    with suppress(OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None
