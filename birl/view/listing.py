"""The list of runs with their current results, without reading their long files."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from birl.track.runs import about
from birl.view.answer import Answer
from birl.view.columns import Columns
from birl.view.folders import Run, Runs

POINTS = 60  # lines of metrics.jsonl for the small curve of a run


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
