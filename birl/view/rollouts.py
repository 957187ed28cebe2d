"""Routes of rollouts: the list of a search, one episode, its group, its pictures, an export.

Indexing and text search advance a little with every request: the response has their progress, and the page polls until
they are done.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from birl.errors import BirlError
from birl.types import Picture
from birl.view import flags
from birl.view.answer import Answer
from birl.view.episodes import BITS, Episodes
from birl.view.folders import Run, Runs
from birl.view.query import Query
from birl.view.search import Search, lines
from birl.view.tokens import Vocabulary
from birl.view.trajectory import Prompts, group, picture, summary, trajectory
from birl.visible import visible

PATIENCE = 0.4  # seconds that one request spends on the index, and on the search
PAGE = 200  # largest number of rows of one response
BINS = 120  # largest number of bars in the chart of flags
SEARCHES = 8  # cached searches
BEGINNING = 240  # characters of an answer that the list shows
NONE = "This run has no rollouts.jsonl: `birl rl` writes it unless track.rollouts=false, the other commands have none."
TYPES = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}


class Inspector:
    """Cached state of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.episodes = Episodes(run.folder / "rollouts.jsonl")
        self.vocabulary = Vocabulary(run.folder / "model")
        self.prompts = Prompts(self.episodes, self.vocabulary)
        self.searches: OrderedDict[Query, Search] = OrderedDict()

    def search(self, request: Request, patience: float) -> tuple[Search, bool]:
        """The search as far as it is, and whether it is complete; newest step first, unless the condition has an order.
        Raises `BirlError`."""
        asked = request.query_params
        query = Query.parse(asked.get("q", ""), asked.get("text", ""), order="step desc")
        whole = self.episodes.read_on(patience)
        result = self.searches.pop(query, None) or Search(self.episodes, query, self.prompts)
        self.searches[query] = result
        while len(self.searches) > SEARCHES:
            self.searches.popitem(last=False)
        return result, result.go_on(patience) and whole


def routes(runs: Runs) -> list[Route]:
    known: dict[str, Inspector] = {}
    lock = threading.Lock()

    def inspector(request: Request) -> Inspector:
        if not (name := request.query_params.get("run", "")):
            raise BirlError(f"{request.url.path} needs run=...")
        run = runs[name]
        with lock:
            return known.setdefault(run.id, Inspector(run))

    def route(path: str, answer: Callable[[Inspector, Request], Response]) -> Route:
        def endpoint(request: Request) -> Response:  # not async: starlette calls it in a thread
            of = inspector(request)
            with of.episodes.lock:
                return answer(of, request)

        return Route(f"/api/rollouts{path}", endpoint, methods=["GET"])

    answers = {"": _list, "/one": _one, "/group": _group, "/picture": _picture, "/export": _export}
    return [route(path, answer) for path, answer in answers.items()]


def _list(of: Inspector, request: Request) -> Response:
    if not of.episodes.path.exists():
        return Answer({"run": of.run.name, "missing": NONE, "running": of.run.running})
    search, done = of.search(request, PATIENCE)
    rows = search.rows
    offset = min(_number(request, "offset", 0), len(rows))
    page = rows[offset : offset + min(_number(request, "limit", PAGE), PAGE)]
    episodes = of.episodes
    return Answer(
        {
            "run": of.run.name,
            "total": len(rows),
            "rows": [listed(of, int(row)) for row in page],
            "offset": offset,
            "done": done,
            "indexed": episodes.count,
            "indexed_share": episodes.read / episodes.size if episodes.size else 1.0,
            "looked_share": search.looked / episodes.count if episodes.count else 1.0,
            "begun": episodes.begun,
            "skipped": episodes.skipped,
            "broken": [{"line": line, "problem": visible(why)} for line, why in episodes.broken.items()],
            "running": of.run.running,
            "chart": chart(episodes.rows["step"][rows], episodes.rows["flags"][rows])
            if request.query_params.get("chart")
            else None,
        }
    )


def listed(of: Inspector, row: int) -> dict[str, Any]:
    head, asked = of.episodes.head(row), visible(of.prompts.text(row)[:BEGINNING])
    text = flags.plain(str(head.get("text") or ""))
    return {**summary(of.episodes, row, head), "asked": asked, "text": visible(text[:BEGINNING])}


def chart(steps: np.ndarray, bits: np.ndarray) -> dict[str, Any]:
    """Number of rows, and of rows with each flag, by step; neighbouring steps are merged if there are more than 120.
    `steps`, `bits` [N]: step and flags of each row."""
    if not len(steps):
        return {"from": [], "to": [], "rows": [], "flags": {}, "any": []}
    first, last = int(steps.min()), int(steps.max())
    width = -(-(last - first + 1) // BINS)
    count = (last - first) // width + 1
    place = (steps - first) // width
    starts = first + width * np.arange(count)

    def counted(which: np.ndarray) -> np.ndarray:
        return np.bincount(place[which], minlength=count)

    by_flag = {name: counted((bits & bit) != 0) for name, bit in BITS.items()}
    return {
        "from": starts,
        "to": np.minimum(starts + width - 1, last),
        "rows": np.bincount(place, minlength=count),
        "flags": {name: counts for name, counts in by_flag.items() if counts.any()},
        "any": counted(bits != 0),
    }


def _one(of: Inspector, request: Request) -> Response:
    of.episodes.read_on(PATIENCE)
    return Answer(trajectory(of.episodes, of.vocabulary, _number(request, "row", 0)))


def _group(of: Inspector, request: Request) -> Response:
    of.episodes.read_on(PATIENCE)
    row = _number(request, "row", 0)
    of.episodes.head(row)  # raises if there is no such row
    return Answer(group(of.episodes, row))


def _picture(of: Inspector, request: Request) -> Response:
    of.episodes.read_on(PATIENCE)
    head = of.episodes.head(_number(request, "row", 0))
    path = picture(of.run.folder, head, _number(request, "number", 0))
    kind = Picture.of(path.read_bytes()).media_type
    return FileResponse(path, media_type=kind, headers={"X-Content-Type-Options": "nosniff"})


def _export(of: Inspector, request: Request) -> Response:
    form = request.query_params.get("format", "jsonl")
    search, _ = of.search(request, patience=float("inf"))
    name = f"{Path(of.run.folder).name}.{form}".encode("ascii", "replace").decode().replace('"', "")
    return StreamingResponse(
        lines(of.episodes, search.rows.tolist(), form),
        media_type=TYPES[form],
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise BirlError(f"{name}={text:.20}: must be a whole number from 0 on.")
    return int(text)
