"""Routes of metrics: their names, curves, exact values, and comparisons of runs."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from birl.errors import BirlError
from birl.track.figures import described, ordered
from birl.track.progress import rises
from birl.track.runs import differences
from birl.view.answer import Answer
from birl.view.folders import Runs
from birl.view.history import AXES, History, Index

WIDTH = (10, 4000)  # limits of a chart's width [pixels]
# Figures that should rise or fall; for others, such as an entropy, neither is better.
RISING = ("reward/", "score/", "speed/", "accuracy", "margin")
FALLING = ("loss", "time/", "memory/", "mismatch/", "updates/nonfinite", "updates/skipped", "packing/padding")


def routes(runs: Runs) -> list[Route]:
    index = Index(runs)

    def metrics(request: Request) -> Response:
        asked = index.asked(request.query_params)
        about = [_locked(h, History.about) for h in asked]
        told = described(name for run in about for name in run["names"])
        return Answer({"version": _version(asked), "runs": about, "figures": told})

    def curves(request: Request) -> Response:
        return Answer(_curves(index.asked(request.query_params), request.query_params))

    def values(request: Request) -> Response:
        at, axis = _number(request.query_params, "at"), _axis(request.query_params)
        asked = index.asked(request.query_params)
        return Answer({"runs": {h.run.id: _locked(h, History.values, axis, at) for h in asked}})

    def compare(request: Request) -> Response:
        asked = index.asked(request.query_params)
        own = [{"id": h.run.id, "name": h.run.name, "state": h.run.state, "problem": h.run.problem} for h in asked]
        keys = sorted(differences([h.run.config for h in asked]), key=lambda row: row["key"])
        return Answer({"runs": own, "keys": keys, "figures": figures(asked)})

    served = {"metrics": metrics, "curves": curves, "values": values, "compare": compare}
    return [Route(f"/api/{name}", answer, methods=["GET"]) for name, answer in served.items()]


def _curves(histories: list[History], query: QueryParams) -> dict[str, Any]:
    """The requested curves, unless the page has the newest version."""
    version = _version(histories)
    answer = {
        "version": version,
        "running": {history.run.id: history.run.running for history in histories},
        "read": min(history.read for history in histories),
    }
    if query.get("known") == version:
        return {**answer, "unchanged": True}
    kind, wanted = _axis(query), query.getlist("metric")
    width = int(min(max(_number(query, "width", 600), WIDTH[0]), WIDTH[1]))
    spans = [span for history in histories if (span := _locked(history, History.span, kind))]
    whole = (min(r[0] for r in spans), max(r[1] for r in spans)) if spans else (0.0, 1.0)
    low, high = _number(query, "from", whole[0]), _number(query, "to", whole[1])
    result = {}
    for history in histories:
        with history.lock:
            names = set(history.names)
            result[history.run.id] = {n: history.curve(n, kind, low, high, width) for n in wanted if n in names}
    return {**answer, "span": whole, "curves": result}


def _version(histories: list[History]) -> str:
    """Version of the data of these histories; changes when one has new rows."""
    return " ".join(history.version for history in histories)


def _locked(history: History, act: Callable[..., Any], *words: Any) -> Any:
    """Call `act` under the history's lock, as other request threads may be reading."""
    with history.lock:
        return act(history, *words)


def _axis(query: QueryParams) -> str:
    kind = query.get("x", "step")
    if kind not in AXES:
        raise BirlError(f"x={kind}: the axis is one of {', '.join(AXES)}.")
    return kind


def _number(query: Mapping[str, str], key: str, default: float = 0.0) -> float:
    with suppress(ValueError):
        value = float(query.get(key) or default)
        if np.isfinite(value):
            return value
    raise BirlError(f"{key}={query.get(key)}: a number is needed.")


def figures(histories: list[History]) -> list[dict[str, Any]]:
    """The last and the best value, with its step, for each figure and run."""
    names = dict.fromkeys(name for history in histories for name in history.names)
    result = []
    for name, heading in ((row.name, row.heading) for row in ordered(names)):
        way = "" if name == "loss" and "reward/mean" in names else better(name)  # a policy's loss is not informative
        values = [_figures(history, name, way) for history in histories]
        result.append({"name": name, "heading": heading, "better": way, "values": values})
    return result


def better(name: str) -> str:
    """Direction in which a figure is better: "high", "low", or "" if unknown."""
    if name.startswith("validation/"):
        if "/pass@" in name or name.endswith(("/score", "accuracy")):
            return "high"
        return "" if rises(name) else "low"
    if name == "reward/std":
        return ""
    if name.startswith(RISING) or name.endswith(("/accuracy", "/margin")):
        return "high"
    return "low" if name.startswith(FALLING) else ""


def _figures(history: History, name: str, direction: str) -> dict[str, Any] | None:
    with history.lock:
        table = history.table(name)
        values, steps = table[name], table["step"]
        there = np.flatnonzero(np.isfinite(values))
        if not len(there):
            return None
        result: dict[str, Any] = {"last": values[there[-1]], "last_step": steps[there[-1]]}
        if direction:
            place = there[(np.argmax if direction == "high" else np.argmin)(values[there])]
            result |= {"best": values[place], "best_step": steps[place]}
        return result
