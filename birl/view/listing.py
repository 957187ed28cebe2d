"""The list of runs: what each came to so far, without reading its long files."""

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from birl.track.progress import headline, is_share, validation_name, validation_score
from birl.view.answer import Answer
from birl.view.folders import Run, Runs
from birl.view.identity import algorithm

END = 1 << 16  # bytes at each end of a long file; a line of metrics has a thousandth part of it
WHOLE = 1 << 24  # bytes of validation.jsonl that are read for its best; of a longer one only the end


def routes(runs: Runs) -> list[Route]:
    kept: dict[str, tuple[object, dict[str, Any]]] = {}

    def answer(request: Request) -> Response:
        return Answer({"folders": [str(root) for root in runs.roots], "runs": [_row(run, kept) for run in runs]})

    return [Route("/api/runs", answer, methods=["GET"])]


def _row(run: Run, kept: dict[str, tuple[object, dict[str, Any]]]) -> dict[str, Any]:
    """The row of a run, read again only where one of its files has changed."""
    files = [run.folder / name for name in ("config.json", "metrics.jsonl", "validation.jsonl", "summary.json")]
    stamp = tuple(_stamp(file) for file in files)
    if run.id not in kept or kept[run.id][0] != stamp:
        kept[run.id] = stamp, row(run)
    return {**kept[run.id][1], "state": run.state}


def row(run: Run) -> dict[str, Any]:
    """What the list shows of a run; null for what is not known."""
    config, summary = run.config, run.summary
    first = next(records(run.folder / "metrics.jsonl", 0), {})
    last = next(records(run.folder / "metrics.jsonl", -1), {})
    return {
        "id": run.id,
        "name": run.name,
        "folder": str(run.folder),
        "problem": run.problem,
        "step": last.get("step", 0),
        "total": config.get("steps") or None,
        "headline": headline(last),
        "last": last.get(headline(last)),
        "validation": best(run.folder / "validation.jsonl"),
        "seconds": summary.get("seconds", seconds(first, last)),
        "model": Path(str(config.get("model.path", ""))).name,
        "algorithm": algorithm(config),
        "seed": config.get("seed"),
        "changed": _stamp(run.folder / "metrics.jsonl")[1] / 1e9 or None,
    }


def best(path: Path) -> dict[str, Any] | None:
    """The best validation: its value, step and name."""
    everything = path.stat().st_size <= WHOLE if path.exists() else False
    read = ((validation_score(r), r.get("step")) for r in records(path, 0 if everything else -1))
    found = [(score, step) for score, step in read if score is not None]
    name = validation_name(next(records(path, -1), {}))
    if not found or not name:
        return None
    value, step = (max if is_share(name) else min)(found, key=lambda pair: pair[0])
    return {"value": value, "step": step, "name": name}


def seconds(first: dict[str, Any], last: dict[str, Any]) -> float | None:
    """From the end of the first step to that of the last, and the first step itself."""
    with suppress(KeyError, TypeError, ValueError):
        between = datetime.fromisoformat(last["time"]) - datetime.fromisoformat(first["time"])
        return between.total_seconds() + float(first.get("time/step") or 0.0)
    return None


def records(path: Path, place: int) -> Iterator[dict[str, Any]]:
    """The whole records of a file from its beginning (`place` 0), or from its end backwards (-1) as far as `END` bytes
    reach. Lines that are no JSON object are left out; so is a half-written last one."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        if place < 0:
            size = file.seek(0, 2)
            file.seek(max(0, size - END))
            lines: Any = reversed(file.read().split(b"\n")[:-1])
        else:
            lines = file
        for line in lines:
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and (place < 0 or line.endswith(b"\n")):
                    yield record


def _stamp(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    return 0, 0
