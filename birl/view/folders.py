"""Which run folders there are, and what each says about itself."""

import hashlib
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birl.errors import BirlError

MARKS = ("metrics.jsonl", "config.yaml")  # a folder with one of them is a run
DEPTH = 5  # how far below a folder runs are looked for: --multirun puts them one level deeper
RESCAN = 2.0  # s; new runs are found that late


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run folder. Everything is read from the files when it is asked for: a run may be going on.

    Example: Run(id="demo-1f3a5c", folder=Path("runs/demo"), name="demo")
    """

    id: str
    folder: Path
    name: str

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration, keys dotted ("optimizer.lr"); empty where config.json cannot be read."""
        return self._config()[0]

    @property
    def problem(self) -> str:
        """What is wrong with the folder, as a sentence; empty where nothing is."""
        return self._config()[1]

    def _config(self) -> tuple[dict[str, Any], str]:
        path = self.folder / "config.json"
        found, why = _mapping(path)
        if why:
            return {}, f"{path} cannot be read ({why}): the configuration is not shown, everything else is."
        return dict(_dotted(found)), ""

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json, which a run writes when it ends; empty while there is none."""
        return _mapping(self.folder / "summary.json")[0]

    @property
    def running(self) -> bool:
        """Whether a process of this machine has the folder. The lock itself is not tried: a run that starts in that
        moment would be refused its folder."""
        try:
            pid = int((self.folder / ".lock").read_text("ascii"))
        except (OSError, ValueError):
            return False
        return _alive(pid)

    @property
    def state(self) -> str:
        """running; finished; stopped (it saved and can go on); broken off (it ended without saying so)."""
        if self.running:
            return "running"
        summary = self.summary
        if summary:
            return "finished" if summary.get("finished") else "stopped"
        return "broken off"


class Runs:
    """The runs at or below some folders, by id. New ones are found while the page is open.

    Example: runs = Runs([Path("runs")]); run = next(iter(runs)); runs[run.id].folder
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises `BirlError` where a folder is missing."""
        self.roots = [Path(root) for root in roots]
        for root in self.roots:
            if not root.is_dir():
                raise BirlError(_missing(root))
        self._lock = threading.Lock()
        self._found: dict[str, Run] = {}
        self._scanned = -RESCAN

    def __getitem__(self, run_id: str) -> Run:
        """Raises `BirlError` for an id that no run has."""
        known = self._found.get(run_id)
        if known is None or not known.folder.is_dir():
            known = self._scan(again=True).get(run_id)
        if known is None:
            raise BirlError(f"There is no run {run_id!r} any more. Choose another from the list of runs.")
        return known

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._scan().values()))

    def __len__(self) -> int:
        return len(self._scan())

    def _scan(self, again: bool = False) -> dict[str, Run]:
        with self._lock:
            if again or time.monotonic() - self._scanned > RESCAN:
                runs = [Run(id=_id(folder), folder=folder, name=name) for folder, name in _named(self.roots)]
                self._found = {run.id: run for run in runs}
                self._scanned = time.monotonic()
            return self._found


def _named(roots: Sequence[Path]) -> list[tuple[Path, str]]:
    """Each run once, with the shortest name that no other has."""
    found: dict[Path, tuple[Path, str]] = {}
    for root in roots:
        for folder, name in _below(root):
            found.setdefault(folder.resolve(), (root, name))
    uses = Counter(name for _, name in found.values())
    return sorted((f, name if uses[name] == 1 else str(root / name)) for f, (root, name) in found.items())


def _below(root: Path) -> Iterator[tuple[Path, str]]:
    """Run folders at or below `root`, each with its name there; links are followed once."""
    if is_run(root):
        yield root, root.resolve().name
        return
    level, seen = [root], {root.resolve()}
    for _ in range(DEPTH):
        inside = [folder for parent in level for folder in _folders(parent) if folder.resolve() not in seen]
        seen |= {folder.resolve() for folder in inside}
        yield from ((folder, str(folder.relative_to(root))) for folder in inside if is_run(folder))
        level = [folder for folder in inside if not is_run(folder)]


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir()]
    except OSError:
        return []


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in MARKS)


def _id(folder: Path) -> str:
    """Short, the same in every session, and safe in an address."""
    readable = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:24].strip("-")
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:6]
    return f"{readable}-{digest}" if readable else digest


def _missing(root: Path) -> str:
    from birl.config.words import did_you_mean

    if root.exists():
        return f"{root} is a file; `birl view` takes the folder of a run, or a folder of runs."
    near = did_you_mean(str(root), [str(folder) for folder in _folders(root.parent)] if root.parent.is_dir() else [])
    return f"There is no folder {root}. Name a run or a folder of runs, as in `birl view runs/demo`.{near}"


def _mapping(path: Path) -> tuple[dict[str, Any], str]:
    """A JSON object, and why there is none."""
    try:
        found = json.loads(path.read_text("utf-8", "replace"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, getattr(error, "strerror", None) or str(error)
    return (found, "") if isinstance(found, dict) else ({}, "it is no JSON object")


def _dotted(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    with suppress(ProcessLookupError, OverflowError):
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True  # another user's
        return True
    return False
