"""The list of runs: what each came to so far, without reading its long files."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from birl.view.answer import Answer
from birl.view.folders import Run, Runs

TAIL = 1 << 16  # bytes; a line of metrics has a thousandth part of it


def routes(runs: Runs) -> list[Route]:
    def answer(request: Request) -> Response:
        return Answer({"runs": [row(run) for run in runs]})

    return [Route("/api/runs", answer, methods=["GET"])]


def row(run: Run) -> dict[str, Any]:
    last = last_record(run.folder / "metrics.jsonl")
    return {
        "id": run.id, "name": run.name, "folder": str(run.folder), "state": run.state, "running": run.running,
        "step": last.get("step", 0), "problem": run.problem,
    }  # fmt: skip


def last_record(path: Path) -> dict[str, Any]:
    """The last whole line of a file; empty where there is none."""
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL))
        lines = file.read().split(b"\n")[:-1]
        for line in reversed(lines):
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
    return {}
