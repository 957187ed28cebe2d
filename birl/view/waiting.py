"""Breakdown of a run's time: the table of waits that `birl trace` prints, and the trace for Perfetto.

/api/waiting?run=ID            the bottleneck, and the share of each wait in every process
/api/waiting/trace?run=ID      the trace in Chrome's format, as a file
"""

import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from birl.errors import BirlError
from birl.track.limit import limit, phrase
from birl.track.shares import Shares, shares_of
from birl.track.timeline import Timeline, joined
from birl.view.answer import Answer
from birl.view.folders import Run, Runs


@dataclass(slots=True)
class _Traced:
    """Cached trace and results of a run, until the trace grows."""

    timeline: Timeline
    lock: threading.Lock = field(default_factory=threading.Lock)
    shares: Shares | None = None

    def refresh(self) -> None:
        if self.timeline.read():
            self.shares = shares_of(self.timeline)


def routes(runs: Runs) -> list[Route]:
    traces: dict[str, _Traced] = {}

    def answer(request: Request) -> Response:
        run = runs[request.query_params.get("run", "")]
        traced = traces.setdefault(run.id, _Traced(Timeline(run.folder)))
        with traced.lock:
            traced.refresh()
            return Answer(shown(run, traced))

    def trace(request: Request) -> Response:
        run = runs[request.query_params.get("run", "")]
        Timeline(run.folder).read()  # raises if the trace is damaged
        name = f"{Path(run.folder).name}.trace.json".encode("ascii", "replace").decode().replace('"', "")
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return StreamingResponse(joined(run.folder), media_type="application/json", headers=headers)

    return [Route("/api/waiting", answer, methods=["GET"]), Route("/api/waiting/trace", trace, methods=["GET"])]


def shown(run: Run, traced: _Traced) -> dict[str, Any]:
    timeline, shares = traced.timeline, traced.shares
    if not len(timeline):
        raise BirlError(f"{run.name}: the trace is empty so far. Wait for the first step.")
    tables = (shares.learner, *shares.processes.values()) if shares else ()
    return {
        "name": run.name,
        "running": run.running,
        "spans": len(timeline),
        "limit": limit(shares, run.config).sentence,
        "shares": None if shares is None else asdict(shares),
        "words": {n: phrase(n) for table in tables for n in table},
        "broken": timeline.broken[:5],
    }
