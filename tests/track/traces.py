"""A trace of a run that never was, with figures that are known."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from birl.spans import Span
from birl.track.timeline import joined
from birl.track.trace import FILE, Threads, about

ZERO = 1_760_000_000.0
CONFIG = {"engine.kind": "birl", "engine.count": 2, "rollout.max_staleness": 1}


def span(
    process: str, lane: str, name: str, start: float, seconds: float, step: int = 1, **more: Any
) -> dict[str, Any]:
    """`start` in seconds from the run's beginning."""
    about = {"process": process, "lane": lane, "name": name, "start": round(ZERO + start, 6), "seconds": seconds}
    return {**about, "step": step, **more}


def write(run: Path, spans: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Path:
    """In the order of their ends, as a run does."""
    run.mkdir(parents=True, exist_ok=True)
    threads, lines = Threads(), ["["]
    for one in sorted(spans, key=lambda s: s["start"] + s["seconds"]):
        told = Span(**{key: value for key, value in one.items() if key != "step"})
        lines += [json.dumps(event) + "," for event in threads.events(told, about(told, one["step"]))]
    (run / FILE).write_text("".join(line + "\n" for line in lines))
    (run / "metrics.jsonl").touch()
    (run / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return run


def ahead(
    steps: int = 6,
    *,
    wait: float = 6.0,
    train: float = 3.0,
    sync: float = 1.0,
    engines: int = 2,
    requests: int = 4,
    busy: float = 1.0,
    reward: float = 0.0,
    environment: float = 0.0,
) -> list[dict[str, Any]]:
    """Asynchronous: every step waits, trains and sends, and so long are these [s]. Each engine answers `requests` at
    once in the first `busy` part of every step; then come `reward` and `environment` [s] of each of eight groups."""
    length = wait + train + sync
    found = [span("learner", "loop", "started", 0, 0)]
    for step in range(1, steps + 1):
        t = (step - 1) * length
        found += [
            span("learner", "loop", "wait:rollout", t, wait, step),
            span("learner", "loop", "train", t + wait, train, step, version=step, tokens=9000),
            span("learner", "loop", "wait:engines", t + wait, 0.25, step),
            span("learner", "loop", "sync", t + wait + train, sync, step, version=step),
            span("learner", "loop", "wait:engines", t + wait + train, sync, step),
            span("rollout", "admission", "wait:the next training step", t, wait, step),
        ]
        for engine in (f"engine 127.0.0.1:80{n:02}" for n in range(engines)):
            load = {"version": step, "paused": 0.1}
            found += [
                *(
                    span(engine, "requests", "generate", t, busy * length, step, version=step - 1, tokens=100, group=n)
                    for n in range(requests)
                ),
                span(engine, "weights", "load", t + wait + train, min(sync, 0.1), step, **load),
            ]
        for group in range(8):
            if reward:
                found.append(span("rollout", "rewards", "wait:reward workers", t + busy * length, reward, step))
            if environment:
                found.append(span("rollout", "environments", "wait:environment", t, environment, step, group=group))
    return found


def check(run: Path) -> list[dict[str, Any]]:
    """The events of a run, by the rules of "Trace Event Format" that Chrome and Perfetto read. Raises where a reader
    would stumble."""
    found = json.loads(b"".join(joined(run)))
    processes, threads = {}, {}
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in found:
        assert isinstance(event["name"], str) and event["name"] and event["ph"] in ("M", "X", "C")
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                threads[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            assert type(event["ts"]) is int and type(event["dur"]) is int and event["dur"] >= 0
            assert event["pid"] in processes and (event["pid"], event["tid"]) in threads
        else:
            assert event["args"] and all(type(v) in (int, float) for v in event["args"].values())
    for event in sorted((e for e in found if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        stack, end = open_until[event["pid"], event["tid"]], event["ts"] + event["dur"]
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        assert not stack or end <= stack[-1], "events of a thread overlap without lying inside of each other"
        stack.append(end)
    return found
