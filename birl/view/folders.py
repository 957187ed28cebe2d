"""The run folders of the page, their state, and the list of them with current results, without reading long files."""

import hashlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from birl.errors import BirlError, did_you_mean
from birl.track import runs
from birl.track.runs import about
from birl.view.answer import Answer
from birl.view.columns import Columns

RESCAN = 2.0  # s; delay until new runs are shown
POINTS = 60  # lines of metrics.jsonl for the small curve of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run folder. Everything is read from the files at each access, as the run may be in progress.

    Example: Run(id="demo-1f3a5c", folder=Path("runs/demo"), name="demo")
    """

    id: str
    folder: Path
    name: str

    @property
    def config(self) -> dict[str, Any]:
        """The configuration by dotted key ("optimizer.lr"); empty if config.json cannot be read."""
        return runs.config(self.folder)

    @property
    def problem(self) -> str:
        """What is wrong with the folder, as a sentence; empty if nothing is."""
        return runs.problem(self.folder)

    @property
    def running(self) -> bool:
        """Whether a process of this machine has locked the folder."""
        return runs.running(self.folder)

    @property
    def state(self) -> str:
        """One of `birl.track.runs.STATES`."""
        return runs.state(self.folder)


class Runs:
    """The runs at or below some folders, by id. New ones are found while the page is open.

    Example: runs = Runs([Path("runs")]); run = next(iter(runs)); runs[run.id].folder
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises `BirlError` if a folder is missing."""
        self.roots = [Path(root) for root in roots]
        for root in self.roots:
            if not root.is_dir():
                raise BirlError(_missing(root))
        self._lock = threading.Lock()
        self._found: dict[str, Run] = {}
        self._scanned = -RESCAN

    def __getitem__(self, run_id: str) -> Run:
        """Raises `BirlError` for an unknown id."""
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
                named = [Run(id=_id(folder), folder=folder, name=name) for folder, name in _named(self.roots)]
                self._found = {run.id: run for run in named}
                self._scanned = time.monotonic()
            return self._found


def _named(roots: Sequence[Path]) -> list[tuple[Path, str]]:
    """(folder, name) of each run, with the shortest unique name."""
    result: dict[Path, tuple[Path, str]] = {}  # resolved folder -> folder as it was given, and its name
    for root in roots:
        for folder in runs.find(root):
            name = root.resolve().name if folder == root else str(folder.relative_to(root))
            result.setdefault(folder.resolve(), (folder, name))
    uses = Counter(name for _, name in result.values())
    return sorted((f, name if uses[name] == 1 else str(named)) for f, (named, name) in result.items())


def _id(folder: Path) -> str:
    """A short id, the same in every session, and safe in a URL."""
    readable = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:24].strip("-")
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:6]
    return f"{readable}-{digest}" if readable else digest


def _missing(root: Path) -> str:
    if root.exists():
        return f"{root} is a file; `birl view` takes the folder of a run, or a folder of runs."
    near = did_you_mean(str(root), [str(folder) for folder in runs.folders(root.parent)])
    return f"There is no folder {root}. Name a run or a folder of runs, as in `birl view runs/demo`.{near}"


def routes(runs: Runs) -> list[Route]:
    kept: dict[str, tuple[object, dict[str, Any]]] = {}

    def answer(request: Request) -> Response:
        return Answer({"folders": [str(root) for root in runs.roots], "runs": [_row(run, kept) for run in runs]})

    def told(request: Request) -> Response:
        """The current report, also of an unfinished run. No other script can run, whatever the run wrote."""
        from birl.track.charts import POLICY  # imports rich
        from birl.track.report import report

        html = report(runs[request.query_params.get("run", "")].folder)
        return HTMLResponse(
            html, headers={"content-security-policy": f"{POLICY}; sandbox allow-scripts; frame-ancestors 'none'"}
        )

    return [Route("/api/runs", answer, methods=["GET"]), Route("/report", told, methods=["GET"])]


def _row(run: Run, kept: dict[str, tuple[object, dict[str, Any]]]) -> dict[str, Any]:
    """The cached row of a run, renewed when the run starts or ends, or one of its files has changed."""
    files = [run.folder / name for name in ("config.json", "metrics.jsonl", "validation.jsonl", "summary.json")]
    stamp = run.running, *(_stamp(file) for file in files)
    known = kept.get(run.id)
    if known is None or known[0] != stamp:
        known = kept[run.id] = stamp, row(run)
    return known[1]


def row(run: Run) -> dict[str, Any]:
    """Row of a run in the list; unknown values are null."""
    result, table = about(run.folder), Columns(run.folder / "metrics.jsonl").glimpse(POINTS)
    steps, values = table["step"], table[result.headline]
    there = np.isfinite(steps) & np.isfinite(values)
    curve = list(zip(steps[there].tolist(), values[there].tolist(), strict=True))
    return {**result.as_json(), "id": run.id, "name": run.name, "curve": curve}


def _stamp(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        result = path.stat()
        return result.st_size, result.st_mtime_ns
    return 0, 0
