"""What a run writes into trace.json, and that it is read as it was written."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from birl import spans
from birl.cli import main
from birl.errors import BirlError
from birl.spans import Span, done
from birl.track.log import read_jsonl
from birl.track.timeline import Timeline, steps_of
from birl.track.trace import FILE, Trace, last_moment, size_before
from birl.waits import waiting
from tests.track import runs, traces
from tests.track.traces import ZERO, check, span


def rows(path: Path) -> list[dict[str, Any]]:
    """The spans, flat."""
    lines = [json.loads(line.removesuffix(b",")) for line in path.read_bytes().splitlines()[1:]]
    names = {1: "x"} | {e["pid"]: e["args"]["name"] for e in lines if e["name"] == "process_name"}
    return [
        {"process": names[e["pid"]], "lane": e["cat"], "name": e["name"], **e["args"]}
        | {"start": e["ts"] / 1e6, "seconds": e["dur"] / 1e6}
        for e in lines
        if e["ph"] == "X"
    ]


def slice_of_work(start: float, seconds: float, version: int = 0) -> Span:
    return Span(
        process="engine",
        lane="compute",
        name="generate",
        start=ZERO + start,
        seconds=seconds,
        version=version,
        tokens=5,
    )


def test_what_was_told_is_written(tmp_path: Path) -> None:
    trace, began = Trace(tmp_path / FILE), time.perf_counter()
    trace.begin(None, step=0)
    done("train", began, version=3, tokens=100)
    trace.next_step(1)
    done("checkpoint", began, ended=began + 0.25)
    trace.close()
    done("train", began)  # nobody listens any more
    started, train, save = rows(tmp_path / FILE)
    assert started["name"] == "started" and started["seconds"] == 0
    assert train == {
        **train,
        "process": "learner",
        "lane": "loop",
        "name": "train",
        "version": 3,
        "tokens": 100,
        "step": 1,
    }
    assert save["seconds"] == pytest.approx(0.25, abs=2e-6) and save["step"] == 2 and "version" not in save
    assert abs(save["start"] + (time.perf_counter() - began) - time.time()) < 30


def test_a_wait_is_told_as_the_table_knows_it(tmp_path: Path) -> None:
    trace = Trace(tmp_path / FILE)
    trace.begin(None, step=0)
    with waiting("training", "4 groups", "rollout"):
        time.sleep(0.01)
    with waiting("rollout", "a free slot", "the next training step"):
        time.sleep(0.003)
    with waiting("rollout", "a free slot", "the next training step"):
        pass  # too short to be told
    with waiting("group 7", "rewards", "reward workers"):
        time.sleep(0.003)
    with waiting("group 7 episode 1", "turn 0", "engine"):
        time.sleep(0.003)  # the engine tells of it
    trace.close()
    found = [(r["process"], r["lane"], r["name"]) for r in rows(tmp_path / FILE)[1:]]
    assert found == [
        ("learner", "loop", "wait:rollout"),
        ("rollout", "admission", "wait:the next training step"),
        ("rollout", "rewards", "wait:reward workers"),
    ]


def test_slices_of_work_are_joined(tmp_path: Path) -> None:
    """Not over a pause, and not over new weights."""
    trace = Trace(tmp_path / FILE)
    trace.begin(None, step=0)
    for start in (0.0, 0.11, 0.2, 1.0):
        trace.add(slice_of_work(start, 0.1))
    trace.add(slice_of_work(1.1, 0.1, version=1))
    trace.close()
    found = rows(tmp_path / FILE)[1:]
    assert [round(r["start"] - ZERO, 3) for r in found] == [0.0, 1.0, 1.1]
    assert [r["seconds"] for r in found] == [0.3, 0.1, 0.1] and [r["tokens"] for r in found] == [15, 5, 5]
    assert found[0]["busy"] == pytest.approx(0.3) and found[2]["version"] == 1


def test_threads_tell_at_once(tmp_path: Path) -> None:
    trace = Trace(tmp_path / FILE)
    trace.begin(None, step=0)
    work = [
        threading.Thread(target=lambda: [done("x", time.perf_counter(), lane=f"{i}") for i in range(200)])
        for _ in range(4)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    trace.close()
    assert len(rows(tmp_path / FILE)) == 801


def test_a_disk_that_is_full_stops_the_run_at_its_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(tmp_path / FILE)
    trace.begin(None, step=0)
    assert trace._log is not None
    monkeypatch.setattr("birl.track.trace.FLUSH", -1.0)

    def full(*_: object, **__: object) -> None:
        raise BirlError(f"cannot write {tmp_path / FILE}: No space left on device")

    append = trace._log.append
    trace._log.append = full  # type: ignore[method-assign]
    done("train", time.perf_counter())  # whoever tells is not disturbed
    trace._log.append = append  # type: ignore[method-assign]
    with pytest.raises(BirlError, match="cannot write"):
        trace.next_step(1)
    trace.close()


def test_a_resume_cuts_it_back_as_it_does_the_metrics(tmp_path: Path) -> None:
    with runs.tracker(tmp_path) as tracker:
        tracker.rewind(None, 0)
        for step in (1, 2, 3):
            done("train", time.perf_counter(), version=step)
            tracker.step(step, runs.metrics(step))
            if step == 2:
                offsets = tracker.offsets()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"ph":"X","name":"tr')  # killed in the middle
    with runs.tracker(tmp_path) as tracker:
        tracker.rewind(offsets, 2)
        done("train", time.perf_counter(), version=30)
        tracker.step(3, runs.metrics(3))
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    found = [(r["name"], r["step"], r.get("version")) for r in rows(tmp_path / FILE)]
    assert found == [
        *[("started", 1, None), ("train", 1, 1), ("train", 2, 2)],
        *[("started", 3, None), ("train", 3, 30)],
    ]
    assert not spans.LISTENERS


def test_without_the_key_there_is_none(tmp_path: Path) -> None:
    with runs.tracker(tmp_path, trace=False) as tracker:
        tracker.rewind(None, 0)
        assert not spans.LISTENERS and FILE not in tracker.offsets()
    with pytest.raises(BirlError, match=r"track\.trace=false"):
        Timeline(tmp_path).read()


def test_other_ranks_go_on_behind_what_rank_0_has_kept(tmp_path: Path) -> None:
    path = traces.write(tmp_path, [span("learner rank 1", "calls", "train", t, 1) for t in range(4)]) / FILE
    until = last_moment(path) - 1.5  # within the third; before the spans are a bracket and four names
    assert size_before(path, until) == sum(len(line) + 1 for line in path.read_bytes().splitlines()[:8])
    trace = Trace(path, process="learner rank 1")
    trace.go_on(until)
    trace.close()
    assert [r["name"] for r in rows(path)] == ["train"] * 3 + ["started"]
    assert last_moment(tmp_path / "nothing") == 0
    with path.open("a") as file:  # joined slices are written late
        file.write(json.dumps(SPAN | {"ts": int(ZERO * 1e6), "dur": 500_000}) + ",\n")
    assert last_moment(path) == pytest.approx(rows(path)[-2]["start"])


def test_it_is_read_on(tmp_path: Path) -> None:
    everything = traces.write(tmp_path, traces.ahead()).joinpath(FILE).read_bytes()
    path, half, whole = tmp_path / FILE, everything.index(b"\n", 9000) - 20, everything.count(b'"ph": "X"')
    path.write_bytes(everything[:half])
    timeline = Timeline(tmp_path)
    assert timeline.read() and not timeline.read()
    some = len(timeline)
    path.write_bytes(everything)  # the last line was half written
    assert timeline.read() and len(timeline) == whole > some and not timeline.broken
    path.write_bytes(everything[: everything.index(b"\n", 5000) + 1])  # a resume cut it back,
    assert timeline.read() and len(timeline) < some
    path.write_bytes(everything.replace(b'"train"', b'"trial"'))  # and wrote something else from there on
    assert timeline.read() and "trial" in timeline.names and len(timeline) == whole


SPAN = {"ph": "X", "name": "train", "cat": "loop", "ts": 1, "dur": 1, "pid": 1, "tid": 1, "args": {}}


@pytest.mark.parametrize(
    "line",
    [
        *["{", "[]", "null", '"x"', '{"ph": "X"}', '{"ph": "M"}', "[" * 100_000],
        *(
            json.dumps(SPAN | wrong)
            for wrong in (
                *({"ts": "now"}, {"dur": -1}, {"dur": float("nan")}, {"pid": ["x"]}, {"pid": 7}, {"cat": None}),
                *({"args": {"tokens": 10**30}}, {"args": {"version": None}}, {"args": None}, {"ts": 10**400}),
            )
        ),
    ],
)
def test_a_line_that_is_no_span_is_passed_over_and_named(tmp_path: Path, line: str) -> None:
    good = traces.write(tmp_path, traces.ahead()).joinpath(FILE)
    name = json.dumps({"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "learner"}}).encode()
    first, *rest = good.read_bytes().splitlines()
    good.write_bytes(b"\n".join([first, name + b",", line.encode() + b",", *rest]) + b"\n")
    timeline = Timeline(tmp_path)
    timeline.read()
    assert timeline.broken == [f"{FILE}, line 3"] and len(timeline) == len(traces.ahead())


def test_every_span_is_an_event_for_perfetto(tmp_path: Path) -> None:
    made = traces.ahead()
    run = traces.write(tmp_path / "run", made)
    assert main(["trace", str(run), "--output", str(tmp_path / "t.json")]) == 0
    found = json.loads((tmp_path / "t.json").read_text())
    assert found == check(run) and (run / FILE).read_text().startswith("[\n")
    complete = [e for e in found if e["ph"] == "X"]
    assert len(complete) == len(made)
    train = [e for e in complete if e["name"] == "train"]
    zero = train[0]["ts"] - 6_000_000
    assert [e["ts"] - zero for e in train] == [6_000_000 + 10_000_000 * n - (n < 0) for n in range(6)]
    assert train[0]["args"] == {"step": 1, "version": 1, "tokens": 9000} and train[0]["cat"] == "loop"
    names = {e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {"learner", "engine 127.0.0.1:8000", "engine 127.0.0.1:8001", "rollout"}
    threads = {e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert {"loop", "requests", "requests 4", "weights", "admission"} <= threads
    assert len(train) == 6 and "loop 2" not in threads
    traces.write(tmp_path, [])
    assert check(tmp_path) == []


def test_counters_and_files_of_other_ranks(tmp_path: Path) -> None:
    with runs.tracker(tmp_path) as tracker:
        tracker.rewind(None, 0)
        for step in (1, 2):
            done("train", time.perf_counter(), version=step)
            done("load", time.perf_counter(), process="engine x", lane="weights", version=step)
            figures = {"staleness/mean": 0.5, "staleness/max": 1.0, "queue/ready": float("nan")}
            tracker.step(step, runs.metrics(step) | figures)
        other = Trace(tmp_path / "trace-rank-1.json", "learner rank 1")
        other.begin(None, 0)
        other.close()
    found = check(tmp_path)
    counters = [(e["name"], e["args"]) for e in found if e["ph"] == "C"]
    assert counters.count(("staleness", {"mean": 0.5, "max": 1.0})) == 2
    assert [args["version"] for name, args in counters if name == "version"] == [1, 1, 2, 2] and len(counters) == 6
    assert "learner rank 1" in {e["args"]["name"] for e in found if e["name"] == "process_name"}


def test_spans_of_a_thread_lie_beside_or_inside_of_each_other(tmp_path: Path) -> None:
    """A span that begins a microsecond before the one before it is over; a wait that ends after what it lies in."""
    spans = [
        span("learner", "loop", "wait:rollout", 0, 1.000001),
        span("learner", "loop", "train", 1.0, 2.0),
        span("learner", "loop", "wait:engines", 2.5, 0.500002),
        span("learner", "loop", "sync", 2.999999, 1.0),
        span("learner", "loop", "wait:engines", 4, 1),
        span("learner", "loop", "sync", 4, 1.5),
        span("engine", "requests", "generate", 0, 1.000001, busy=0.5),
        span("engine", "requests", "generate", 1.0, 1.0),
        span("engine", "requests", "generate", 0.5, 1.0),
    ]
    found = [e for e in check(traces.write(tmp_path, spans)) if e["ph"] == "X"]
    assert len(found) == len(spans) and min(e["dur"] for e in found) > 400_000
    requests = [(e["tid"] % 1000, e["args"].get("busy")) for e in found if e["cat"] == "requests"]
    assert requests == [(1, 0.5), (2, None), (1, None)]


def test_steps_have_the_time_of_their_lines(tmp_path: Path) -> None:
    """Also over a resume, in which time passes that belongs to no step."""
    again = [s | {"start": s["start"] + 1000, "step": s["step"] + 6} for s in traces.ahead(steps=2)]
    timeline = Timeline(traces.write(tmp_path, [*traces.ahead(), *again]))
    timeline.read()
    found = steps_of(timeline)
    assert [s.number for s in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [s.life for s in found] == [1] * 6 + [2] * 2
    assert [s.end - s.begin for s in found] == pytest.approx([10.0] * 8)
    assert found[5].end - ZERO == pytest.approx(60) and found[6].begin - ZERO == pytest.approx(1000)
    expected = {"wait:rollout": 6.0, "train": 2.75, "wait:engines": 1.25, "sync": 0.0}
    assert {name: round(s, 6) for name, s in found[3].seconds.items()} == expected
