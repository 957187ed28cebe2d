"""The trace of real runs: it says what metrics.jsonl says, in one process and in several, also after a crash."""

import json
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from birl.config import schema
from birl.track.limit import limit
from birl.track.runs import config
from birl.track.shares import shares_of
from birl.track.timeline import Timeline, exclusive, steps_of
from tests.track.traces import check
from tests.train import test_offline as offline
from tests.train.test_resume import command, finish, start
from tests.train.test_rl import log, many_a, run


def read(folder: Path) -> Timeline:
    timeline = Timeline(folder / "run")
    timeline.read()
    assert not timeline.broken
    return timeline


def sums(timeline: Timeline, process: str = "learner", lane: str = "loop") -> dict[int, dict[str, float]]:
    """Seconds by step and name, each span as long as it is."""
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, begin, end, step, _ in exclusive(timeline, process, lane):
        found[step][name] += end - begin
    return found


def agrees(timeline: Timeline, steps: list[dict[str, Any]]) -> None:
    """Every time of metrics.jsonl is that of the spans which count for its line, but for their rounding."""
    told = sums(timeline)
    for step in steps:
        its = told[step["step"]]
        for metric, name in (("time/wait", "wait:rollout"), ("time/train", "train"), ("time/checkpoint", "checkpoint")):
            assert its.get(name, 0.0) == pytest.approx(step.get(metric, 0.0), abs=5e-6), (step["step"], metric)
        if "time/weights" in step and its.get("sync"):
            assert its["sync"] >= step["time/weights"] - 1e-3
    assert {s.number for s in steps_of(timeline)} >= {s["step"] for s in steps}


@pytest.mark.parametrize("words", [(), ("rollout.max_staleness=2", "rollout.prompts=2")])
def test_the_trace_and_the_metrics_agree(tiny: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    more = ("steps=6", "checkpoint.every=2", "data.validation_split=0.2", "validation.every=3")
    run(tiny, tmp_path, *more, *words)
    timeline, steps = read(tmp_path), log(tmp_path)
    agrees(timeline, steps)
    generated = timeline.of("engine", "compute")
    by_step = {n: timeline.busy[generated & (timeline.step == n)].sum() for n in range(1, 7)}
    tokens = {n: timeline.tokens[generated & (timeline.step == n)].sum() for n in range(1, 7)}
    whole = sum(s["time/generate"] for s in steps)
    assert sum(by_step.values()) >= whole - 1e-3  # validations generate, too
    assert sum(tokens.values()) >= sum(s["tokens/generated"] for s in steps)
    groups = timeline.of("rollout", "groups")
    records = {(r["group"], r["step"]) for r in log(tmp_path, "rollouts")}
    assert set(timeline.group[groups].tolist()) >= {group for group, _ in records}
    assert timeline.of("engine", "requests").sum() >= len(log(tmp_path, "rollouts"))
    assert timeline.version[timeline.of("learner", "loop", "train")].tolist() == [1, 2, 3, 4, 5, 6]
    assert timeline.of("learner", "loop", "validate").sum() == len(log(tmp_path, "validation"))
    check(tmp_path / "run")
    shares = shares_of(timeline)
    assert shares is not None and sum(shares.learner.values()) == pytest.approx(1, abs=1e-6)
    assert limit(shares, config(tmp_path / "run")).sentence


def test_slow_rewards_are_found_out(tiny: Path, tmp_path: Path) -> None:
    import asyncio

    async def slow(completions: list[str], **_: object) -> list[float]:
        await asyncio.sleep(0.5)
        return many_a(completions)

    run(tiny, tmp_path, "steps=5", "rollout.prompts=2", "checkpoint.every=0", reward=slow)
    timeline = read(tmp_path)
    found = limit(shares_of(timeline), config(tmp_path / "run"))
    assert found.side == "rewards" and "reward.workers" in found.sentence
    assert timeline.seconds[timeline.of("rollout", "rewards")].min() >= 0.5


@pytest.mark.usefixtures("forking")
def test_engines_in_other_processes_are_seen_from_here(tiny: Path, tmp_path: Path) -> None:
    words = ("engine.kind=birl", "engine.count=2", "rollout.max_staleness=1", "rollout.prompts=2", "steps=4")
    run(tiny, tmp_path, *words, "model.dtype=bfloat16", "engine.start_timeout=60")
    timeline, steps = read(tmp_path), log(tmp_path)
    agrees(timeline, steps)
    engines = [p for p in timeline.processes() if p.startswith("engine ")]
    assert len(engines) == 2 and all(":" in name for name in engines)
    for engine in engines:
        loads = timeline.of(engine, "weights", "load")
        assert {1, 2, 3, 4} <= set(timeline.version[loads].tolist()) and (timeline.paused[loads] >= 0).all()
        requests = timeline.of(engine, "requests", "generate")
        assert requests.any() and (timeline.tokens[requests] > 0).all() and (timeline.version[requests] >= 0).all()
    sent = sums(timeline)
    assert all(sent[n]["sync"] > 0 and sent[n]["wait:engines"] > 0 for n in range(1, 5))
    check(tmp_path / "run")


def test_every_rank_writes_its_own(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, "parallel.ddp=2", "rollout.prompts=2", "checkpoint.every=1", "steps=2")
    timeline = read(tmp_path)
    agrees(timeline, log(tmp_path))
    other = timeline.of("learner rank 1", "calls")
    names = [timeline.names[i] for i in timeline.name[other]]
    assert names.count("train") == 2 and {"wait:rank 0", "wait:other ranks", "checkpoint"} <= set(names)
    mine = timeline.of("learner", "loop", "train")
    theirs = timeline.of("learner rank 1", "calls", "train")
    for begin, end in zip(timeline.start[mine], timeline.end[mine], strict=True):  # one clock
        inside = (timeline.start[theirs] >= begin - 0.01) & (timeline.start[theirs] <= end)
        assert inside.sum() == 1


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_stages_without_engines_are_traced(tiny: Path, tmp_path: Path, kind: str) -> None:
    rows = offline.TEXTS if kind == "sft" else offline.PAIRS
    offline.run(tiny, tmp_path, kind, "validation.every=3", "checkpoint.every=2", held_out=rows[:5])
    timeline = read(tmp_path)
    agrees(timeline, log(tmp_path))
    assert timeline.processes() == ["learner"] and timeline.of("learner", "loop", "validate").any()


def test_killed_at_any_moment_it_goes_on_where_the_metrics_do(tiny: Path, tmp_path: Path) -> None:
    words = command(tiny, tmp_path, "run", "steps=6", "checkpoint.keep_last=2", "rollout.max_staleness=1")
    assert finish(start(words, die_at=45)) == -signal.SIGKILL
    assert finish(start(words)) == 0
    timeline, steps = read(tmp_path), log(tmp_path)
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    agrees(timeline, steps)
    trained = timeline.of("learner", "loop", "train")
    assert timeline.step[trained].tolist() == [1, 2, 3, 4, 5, 6]  # none twice: the rest was cut back
    assert timeline.of("learner", "loop", "started").sum() == 2
    assert (timeline.start[trained][1:] >= timeline.end[trained][:-1]).all()


def test_without_the_key_nothing_is_written(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, "track.trace=false", "steps=1")
    assert not (tmp_path / "run" / "trace.json").exists() and len(log(tmp_path)) == 1
    assert schema.Track().trace and json.loads((tmp_path / "run" / "config.json").read_text())["track.trace"] is False
