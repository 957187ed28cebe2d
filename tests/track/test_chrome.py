"""The trace in Chrome's format, by the rules of "Trace Event Format" that Chrome and Perfetto read."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from birl.cli import main
from birl.track.chrome import events
from birl.track.rows import nested, rows_of
from birl.track.timeline import Timeline
from tests.track import traces
from tests.track.traces import ZERO, span


def check(found: list[dict[str, Any]]) -> None:
    """Raises where a reader would stumble."""
    processes, threads = {}, {}
    for event in found:
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["args"], dict)
        assert event["ph"] in ("M", "X", "C")
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                threads[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert type(event["ts"]) is int and event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(type(v) in (int, float) for v in event["args"].values())
    timed = [e for e in found if e["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in (e for e in found if e["ph"] == "X"):
        assert type(event["dur"]) is int and event["dur"] >= 0
        assert event["pid"] in processes and (event["pid"], event["tid"]) in threads
        stack, end = open_until[event["pid"], event["tid"]], event["ts"] + event["dur"]
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        assert not stack or end <= stack[-1], "events of a thread overlap without lying inside of each other"
        stack.append(end)


def test_every_span_is_an_event(tmp_path: Path) -> None:
    made = traces.ahead()
    run = traces.write(tmp_path / "run", made)
    stamp = "2025-10-09T08:53:30.000+00:00"  # ten seconds after ZERO
    (run / "metrics.jsonl").write_text(
        json.dumps(
            {
                "step": 1,
                "time": stamp,
                "staleness/mean": 0.5,
                "staleness/max": 1.0,
                "queue/ready": None,
                "queue/running": float("inf"),
            }
        )
        + "\n"
    )
    assert main(["trace", str(run), "--output", str(tmp_path / "t.json")]) == 0
    found = json.loads((tmp_path / "t.json").read_text())
    check(found)
    complete = [e for e in found if e["ph"] == "X"]
    assert len(complete) == len(made)
    train = [e for e in complete if e["name"] == "train"]
    assert [e["ts"] for e in train] == [6_000_000 + 10_000_000 * n for n in range(6)]
    assert {e["dur"] for e in train} == {3_000_000}
    assert train[0]["args"] == {"step": 1, "version": 1, "tokens": 9000} and train[0]["cat"] == "loop"
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert names == ["learner", "engine 127.0.0.1:8000", "engine 127.0.0.1:8001", "rollout"]
    threads = {e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert {"loop", "requests 1", "requests 4", "weights", "admission"} <= threads
    counters = [e for e in found if e["ph"] == "C"]
    assert [e["args"]["version"] for e in counters if e["name"] == "version" and e["pid"] == 1] == [1, 2, 3, 4, 5, 6]
    staleness = [e for e in counters if e["name"] == "staleness"]
    assert [e["args"] for e in staleness] == [{"mean": 0.5, "max": 1.0}]
    assert staleness[0]["ts"] == pytest.approx(1e6 * (1760000010 - ZERO))


def test_clocks_that_are_read_one_after_the_other_do_not_break_it(tmp_path: Path) -> None:
    """A span that begins a microsecond before the one before it is over; a wait that ends after what it lies in."""
    spans = [
        span("learner", "loop", "wait:rollout", 0, 1.000001),
        span("learner", "loop", "train", 1.0, 2.0),
        span("learner", "loop", "wait:engines", 2.5, 0.500002),
        span("learner", "loop", "sync", 2.999999, 1.0),
        span("engine", "requests", "generate", 0, 1.000001, busy=0.5),
        span("engine", "requests", "generate", 1.0, 1.0),
    ]
    timeline = Timeline(traces.write(tmp_path, spans))
    timeline.read()
    found = events(timeline)
    check(found)
    assert [e["name"] for e in found if e["ph"] == "X" and e["pid"] == 1 and e["dur"] > 10] == [
        *("wait:rollout", "train", "wait:engines", "sync")
    ]
    assert [e["args"].get("busy") for e in found if e.get("cat") == "requests"] == [0.5, None]


def test_an_empty_trace_is_an_empty_list(tmp_path: Path) -> None:
    traces.write(tmp_path, [])
    assert main(["trace", str(tmp_path), "--output", str(tmp_path / "t.json")]) == 0
    assert json.loads((tmp_path / "t.json").read_text()) == []


def test_rows_hold_what_does_not_overlap() -> None:
    assert rows_of([0, 1, 2, 2.5, 9], [2, 3, 4, 5, 10]).tolist() == [0, 1, 0, 2, 0]
    assert rows_of([], []).tolist() == []
    start, end, depth = nested([0, 1, 5, 5.5], [4, 4.000001, 6, 5.7])
    assert depth.tolist() == [0, 1, 0, 1] and end.tolist() == [4, 4, 6, 5.7] and start.tolist() == [0, 1, 5, 5.5]
