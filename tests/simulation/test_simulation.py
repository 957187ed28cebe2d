"""The simulation against sums on paper, against a slow one written differently, and against the real pipeline."""

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birl.cli import main
from birl.errors import BirlError
from birl.rollout import pipeline
from birl.simulation import command, sweep
from birl.simulation.draws import Block, Draws
from birl.simulation.events import Simulation, Split, learner_seconds, sync_seconds
from birl.simulation.fleet import least_loaded
from birl.simulation.read import read
from birl.simulation.run_figures import decoding_steps, nonnegative
from birl.simulation.scenario import Scenario, step_seconds
from birl.types import Group, Task

ROOT = Path(__file__).parents[2]
PLAIN = (  # 100 tokens an answer, 0.01 s a token, 0.5 s a training step, nothing else costs time
    *("engine.base=0.01", "engine.per_sequence=0", "engine.prefill=1e12", "episodes.sigma=0", "episodes.mean=100"),
    *("episodes.prompt=0", "learner.constant=0.5", "learner.per_token=0", "learner.bytes=0", "sync.pause=0"),
    *("sync.bytes=0", "run.group_size=4"),
)


def simulated(scenario: Scenario, steps: int, **split: Any) -> Simulation:
    its = Split(**{"engines": 1, "learners": 1, "max_staleness": 0, "prompts": 2} | split)
    found = Simulation(scenario, its, Draws(scenario.episodes, scenario.run.group_size, scenario.run.seed))
    found.run(steps)
    return found


def ends(*words: str, steps: int = 6, **split: Any) -> list[float]:
    return [round(s.end, 6) for s in simulated(read([*PLAIN, *words]), steps, **split).steps]


# --- on paper ---


def test_synchronous_is_the_sum_and_asynchronous_the_longer() -> None:
    assert ends() == [1.5, 3.0, 4.5, 6.0, 7.5, 9.0]
    one_batch = "engine.max_batch=8"  # the next batch is queued
    assert ends(one_batch, max_staleness=1) == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]  # generation takes longer
    assert ends(one_batch, "learner.constant=2", max_staleness=1) == [3.0, 5.0, 7.0, 9.0, 11.0, 13.0]  # training does


def test_what_each_part_costs() -> None:
    assert ends("engine.per_sequence=0.001", steps=1) == [round(100 * (0.01 + 8 * 0.001) + 0.5, 6)]
    assert ends("engine.max_batch=4", steps=1) == [2.5]
    assert ends("engine.prefill=100", "episodes.prompt=20", steps=1) == [1.5 + 2 * 0.2]  # a prompt once a group
    assert ends("engine.prefill=100", "episodes.prompt=20", "engine.share_prompts=false", steps=1) == [1.5 + 8 * 0.2]
    context = sum(0.01 + 1e-5 * 8 * (20 + k + 0.5) for k in range(100))  # of 8 answers, in the middle of each token
    assert ends("engine.per_context=1e-5", "episodes.prompt=20", steps=1) == [pytest.approx(context + 0.5)]
    assert ends("sync.pause=0.25", "sync.bytes=1e9", steps=2) == [1.5 + 1.25, 2 * (1.5 + 1.25)]
    assert ends("learner.per_token=0.001", steps=1) == [1.5 + 0.8]
    assert ends("learner.per_token=0.001", "learner.bytes=1e9", steps=1, learners=4) == [1.5 + 0.2 + 1.5]
    # a sample is not divided, and is 100 tokens long
    assert ends("learner.per_token=0.001", steps=1, learners=50) == [1.5 + 0.1]
    assert ends("episodes.turns=2", "episodes.wait=3", "episodes.reward=1", steps=1) == [2 * 1.0 + 3 + 1 + 0.5]
    assert ends("sync.switch=0.5", "sync.pause=9", shared=True, steps=1) == [2.0]
    assert ends("sync.source_bandwidth=1e9", "sync.bytes=1e9", engines=4, steps=1) == [1.5 + 4]


def test_new_weights_make_running_contexts_be_computed_again() -> None:
    words = ("engine.prefill=1000", "engine.max_batch=16", "episodes.turns=1", "learner.constant=0.3")
    slow, fast = (
        ends(*words, f"engine.recompute_kv={on}", "episodes.sigma=1", max_staleness=1)[-1] for on in ("true", "false")
    )
    assert slow > fast


def test_failures_cost_what_they_must() -> None:
    quiet = ends(steps=40)[-1]
    words = ("failures.hours_between=0.005", "failures.restart=2", "failures.checkpoint_every=4")
    failing = simulated(read([*PLAIN, *words]), 40)
    assert failing.rolled_back > 0 and failing.steps[-1].end > quiet + 2 * failing.rolled_back / 4
    assert ends("failures.checkpoint=1", "failures.checkpoint_every=2", steps=4) == [1.5, 4.0, 5.5, 8.0]


# --- the same rules, written as slowly and plainly as possible ---


class Plain:
    """One heapless loop over everything: the next event of all is looked for every time."""

    def __init__(self, scenario: Scenario, split: Split, draws: Draws) -> None:
        self.its, self.split, self.draws, self.now = scenario, split, draws, 0.0
        self.engines = [{"open": [], "hold": 0.0, "stall": 0.0, "steps": 0.0} for _ in range(split.engines)]
        self.done: dict[int, float] = {}
        self.left: dict[int, int] = {}
        self.version: dict[int, int] = {}

    def admit(self, count: int, version: int) -> None:
        for place in range(len(self.version), len(self.version) + count):
            self.version[place] = version
            block, paid = self.draws.groups(np.array([place])), set()
            self.left[place] = block.tokens.shape[1]
            for e in range(block.tokens.shape[1]):
                if self.its.run.route == "episode" or e == 0:
                    at = min(range(len(self.engines)), key=lambda i: (len(self.engines[i]["open"]), i))
                turns = [int(t) for t in block.tokens[0, e] if t]
                shared = self.its.engine.share_prompts and at in paid
                paid.add(at)
                due = 0.0 if shared else self.its.episodes.prompt
                self.engines[at]["open"].append(
                    {
                        "place": place,
                        "turns": turns,
                        "wait": block.wait[0, e].tolist(),
                        "reward": float(block.reward[0, e]),
                    }
                    | {"turn": 0, "size": self.its.episodes.prompt, "due": due, "ready": self.now, "left": None}
                )

    def rate(self, engine: dict[str, Any]) -> float:
        running = [a for a in engine["open"] if a["left"] is not None]
        return step_seconds(self.its.engine)[len(running)]

    def until(self, engine: dict[str, Any]) -> float:
        running = [a for a in engine["open"] if a["left"] is not None]
        found = [math.inf]
        if running:
            found.append(engine["hold"] + engine["stall"] + min(a["left"] for a in running) * self.rate(engine))
        if len(running) < self.its.engine.max_batch:
            found += [max(a["ready"] - self.now, 0.0) for a in engine["open"] if a["left"] is None]
        return min(found)

    def passes(self, dt: float) -> None:
        for engine in self.engines:
            running = [a for a in engine["open"] if a["left"] is not None]
            held = min(engine["hold"], dt)
            stalled = min(engine["stall"], dt - held)
            engine["hold"], engine["stall"] = engine["hold"] - held, engine["stall"] - stalled
            made = (dt - held - stalled) / self.rate(engine)
            engine["steps"] += made if running else 0.0
            for a in running:
                a["left"] -= made
        self.now += dt
        for engine in self.engines:
            self.events(engine)

    def events(self, engine: dict[str, Any]) -> None:
        for a in [a for a in engine["open"] if a["left"] is not None and a["left"] <= 1e-6]:
            a["size"] += a["turns"][a["turn"]]
            a["left"] = None
            if a["turn"] + 1 < len(a["turns"]):
                a["ready"] = self.now + a["wait"][a["turn"]]
                a["turn"], a["due"] = a["turn"] + 1, self.its.episodes.observation
                a["size"] += a["due"]
            else:
                engine["open"].remove(a)
                place = a["place"]
                self.left[place] -= 1
                self.done[place] = max(self.done.get(place, 0.0), self.now + a["reward"])
        running = sum(a["left"] is not None for a in engine["open"])
        waiting = [a for a in engine["open"] if a["left"] is None and a["ready"] <= self.now + 1e-9]
        for a in sorted(waiting, key=lambda a: (a["ready"], a["place"]))[: self.its.engine.max_batch - running]:
            if not any(b["left"] is not None for b in engine["open"]):
                engine["steps"] = 0.0
            a["left"] = a["turns"][a["turn"]] + math.ceil(engine["steps"] - 1e-6) - engine["steps"]
            engine["stall"] += a["due"] / self.its.engine.prefill

    def go(self, horizon: float) -> None:
        while (dt := min(min(map(self.until, self.engines)), horizon - self.now)) < horizon - self.now:
            self.passes(dt)
        self.passes(horizon - self.now)

    def run(self, steps: int) -> list[float]:
        its, split = self.its, self.split
        window, n = its.run.order_window, its.sync.every
        self.admit((split.max_staleness - n + 2) * split.prompts - window, 0)
        self.passes(0.0)
        gone, found = set[int](), []
        for step in range(1, steps + 1):
            taken: list[int] = []
            while len(taken) < split.prompts:
                first = next(p for p in range(10**6) if p not in gone)
                ready = [p for p in range(first, first + window + 1) if p not in gone and p in self.done]
                ready = [p for p in ready if self.left[p] == 0 and self.done[p] <= self.now + 1e-9]
                if ready:
                    taken.append(ready[0])
                    gone.add(ready[0])
                    continue
                rewards = [t for p, t in self.done.items() if self.left[p] == 0 and t > self.now + 1e-9]
                self.passes(min([min(map(self.until, self.engines)), *(t - self.now for t in rewards)]))
            self.check(step, taken)
            syncs = step % n == 0
            seconds, _ = learner_seconds(its, split.learners, self.draws.groups(np.array(taken)))
            self.go(self.now + seconds + (sync_seconds(its, split.engines) if syncs else 0.0))
            if syncs:
                for engine in self.engines:
                    engine["hold"] += its.sync.pause
                    context = sum(a["size"] + self.sampled(a) for a in engine["open"] if a["left"] is not None)
                    engine["stall"] += context / its.engine.prefill
                    for a in engine["open"]:
                        if a["left"] is None and a["turn"]:
                            a["due"] = a["size"]
                self.go(self.now + its.sync.pause)
            found.append(self.now)
            self.admit(split.prompts, step - step % n)
            self.passes(0.0)
        return found

    def sampled(self, a: dict[str, Any]) -> float:
        return a["turns"][a["turn"]] - a["left"]

    def check(self, step: int, taken: list[int]) -> None:
        assert all(0 <= step - 1 - self.version[p] <= self.split.max_staleness for p in taken)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Scenario, Split]:
    prompts, every = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    staleness = draw(st.integers(every - 1, 3))
    spare = (staleness - every + 1) * prompts
    turns, wait = draw(st.sampled_from([([1, 1], 0), ([1, 3], [0, 1.5]), ([2, 2], 0.4)]))
    words = [
        *("episodes.mean=12", "episodes.max=60", f"episodes.turns={turns}", f"episodes.wait={wait}"),
        f"episodes.sigma={draw(st.sampled_from([0, 0.8]))}",
        f"episodes.reward={draw(st.sampled_from([[0, 0], [0, 0.7]]))}",
        f"episodes.observation={draw(st.integers(0, 5))}",
        f"engine.base=0.01 engine.per_sequence={draw(st.sampled_from([0, 0.002]))}".split()[0],
        f"engine.per_sequence={draw(st.sampled_from([0, 0.002]))}",
        f"engine.max_batch={draw(st.sampled_from([1, 3, 64]))}",
        f"engine.prefill={draw(st.sampled_from([300, 1e9]))}",
        f"learner.constant={draw(st.sampled_from([0.1, 1.0]))}",
        f"sync.every={every}",
        f"run.group_size={draw(st.integers(1, 4))}",
        f"run.order_window={draw(st.integers(0, spare))}",
        f"run.route={draw(st.sampled_from(['episode', 'group']))}",
        f"run.seed={draw(st.integers(0, 99))}",
    ]
    split = Split(engines=draw(st.integers(1, 4)), learners=1, max_staleness=staleness, prompts=prompts)
    return read(words), split


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_it_computes_what_the_plain_simulation_does(case: tuple[Scenario, Split]) -> None:
    scenario, split = case
    draws = Draws(scenario.episodes, scenario.run.group_size, scenario.run.seed)
    fast = Simulation(scenario, split, draws)
    assert [s.end for s in fast.run(5)] == pytest.approx(Plain(scenario, split, draws).run(5), rel=1e-5)


# --- what always holds ---


@settings(max_examples=40, deadline=None)
@given(case=cases(), hours=st.sampled_from([0, 0.02, 0.005]))
def test_every_group_once_within_the_bound_and_no_work_lost(case: tuple[Scenario, Split], hours: float) -> None:
    scenario, split = case
    failures = replace(scenario.failures, hours_between=hours, restart=1.0, checkpoint_every=2)
    found = simulated(replace(scenario, failures=failures), 8, **{f: getattr(split, f) for f in Split.__slots__})
    taken = [g for s in found.steps for g in s.taken]
    assert len(taken) == len(set(taken)) == 8 * split.prompts
    assert max(taken) <= len(taken) + scenario.run.order_window  # nobody waits for ever
    assert set(range(len(taken) - scenario.run.order_window)) <= set(taken)
    assert all(0 <= age <= split.max_staleness for s in found.steps for age in s.staleness)
    answers = sum(s.answers for s in found.steps)
    decoded = found.fleet.totals()["decoded"]
    assert decoded >= answers - 1e-3
    if not hours and split.max_staleness == 0:  # nothing was begun that is not trained
        assert decoded == pytest.approx(answers)
    row = sweep.row_of(found, 0, 0)
    assert row.of_ideal <= 1 + 1e-9 and row.engines_busy <= 1 + 1e-9 and row.learners_busy <= 1 + 1e-9


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.integers(0, 2))
def test_more_engines_are_never_slower_when_computing_is_all(engines: int, prompts: int, size: int, stale: int) -> None:
    words = ("engine.base=0", "engine.per_sequence=0.01", "learner.constant=0.01", f"run.group_size={size}")
    few, more = (
        ends(*words, engines=n, prompts=prompts, max_staleness=stale, steps=6)[-1] for n in (engines, engines + 1)
    )
    # what comes while others run waits for their step to end, so that one step may be lost in each training step
    lost = 6 * 0.01 * 2 * prompts * size if stale else 0.0
    assert more <= few + lost + 1e-6


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 20), st.integers(1, 4))
def test_least_loaded_is_what_one_after_another_chooses(load: list[int], count: int, weight: int) -> None:
    now, chosen = list(load), []
    for _ in range(count):
        chosen.append(min(range(len(now)), key=lambda e: (now[e], e)))
        now[chosen[-1]] += weight
    assert least_loaded(np.array(load), count, weight).tolist() == chosen


def test_a_group_is_the_same_in_every_split() -> None:
    scenario = read(["episodes.tokens=[[1,2],[100,200,300]]", "episodes.turns=[1,3]"])
    draws = Draws(scenario.episodes, 4)
    whole, part = draws.groups(np.arange(3000)), Draws(scenario.episodes, 4).groups(np.array([2500]))
    assert (whole.tokens[2500] == part.tokens[0]).all()
    groups = [set(g[g > 0].tolist()) for g in whole.tokens]
    assert all(g <= {1, 2} or g <= {100, 200, 300} for g in groups)  # hard prompts stay together
    assert any(g <= {1, 2} for g in groups) and any(g <= {100, 200, 300} for g in groups)


def test_thousands_of_engines_take_seconds() -> None:
    scenario = read(["h200_8b"])
    began = time.monotonic()
    found = simulated(scenario, 5, engines=2048, learners=256, max_staleness=1, prompts=4096)
    assert time.monotonic() - began < 20
    assert sum(len(s.taken) for s in found.steps) == 5 * 4096


# --- the real pipeline ---


class SleepingEngine:
    """Continuous batching with sleeps for steps. `steps`: (sequences, seconds it really took)."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch, self.running, self.waiting = max_batch, [], []
        self.steps: list[tuple[int, float]] = []
        self.pump: asyncio.Task[None] | None = None

    @property
    def open(self) -> int:
        return len(self.running) + len(self.waiting)

    def generate(self, tokens: int) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self.waiting.append([tokens, future])
        if self.pump is None or self.pump.done():
            self.pump = asyncio.create_task(self.decode())
        return future

    async def decode(self) -> None:
        while self.open:
            while self.waiting and len(self.running) < self.max_batch:
                self.running.append(self.waiting.pop(0))
            began, running = time.perf_counter(), len(self.running)
            await asyncio.sleep(0.008 + 0.001 * running)
            for one in self.running:
                one[0] -= 1
            for one in [one for one in self.running if one[0] == 0]:
                self.running.remove(one)
                if not one[1].done():  # the pipeline has ended, and cancelled it
                    one[1].set_result(None)
            await asyncio.sleep(0)  # whoever waits for that may ask again
            self.steps.append((running, time.perf_counter() - began))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_it_predicts_the_real_pipeline(staleness: int) -> None:
    """Component times are measured in the run itself, so that a busy machine does not matter."""
    steps, prompts, size, batch = 7, 3, 3, 8
    words = ["episodes.mean=14", "episodes.max=40", "episodes.prompt=0", f"run.group_size={size}"]
    draws = Draws(read(words).episodes, size)
    engine, trained, stop = SleepingEngine(batch), list[float](), asyncio.Event()

    def tasks() -> Iterator[Task]:
        while True:
            yield Task(id="", prompt="x")

    async def rollout(index: int, task: Task) -> Group:
        lengths = draws.groups(np.array([index])).tokens[0, :, 0].tolist()
        await asyncio.gather(*(engine.generate(tokens) for tokens in lengths))
        return Group(index=index, task=task, trajectories=(), start_version=0)

    async def train(step: pipeline.Step) -> None:
        began = time.perf_counter()
        await asyncio.sleep(0.2)
        trained.append(time.perf_counter() - began)
        if len(trained) == steps:  # of a longer run: one that knows its last step begins less before it
            stop.set()

    async def real() -> float:
        began = time.perf_counter()
        async with asyncio.timeout(30):
            await pipeline.run(tasks(), rollout, train, groups_per_step=prompts, max_staleness=staleness, stop=stop)
        return time.perf_counter() - began

    seconds = asyncio.run(real())
    took = np.array(engine.steps)
    (base, each), _ = nonnegative(np.stack([np.ones(len(took)), took[:, 0]], axis=1), took[:, 1])
    words += [f"engine.base={base}", f"engine.per_sequence={each}", f"engine.max_batch={batch}", "sync.pause=0"]
    words += [f"learner.constant={np.mean(trained)}", "learner.per_token=0", "sync.bytes=0", "engine.prefill=1e12"]
    words += ["engine.recompute_kv=false"]
    predicted = simulated(read(words), steps, prompts=prompts, max_staleness=staleness).steps[-1].end
    assert predicted == pytest.approx(seconds, rel=0.05)


# --- figures of a run ---


def a_run(folder: Path, steps: int = 12, size: int = 4, prompts: int = 2, machines: int = 1) -> Path:
    """As `birl rl` writes it, with engines of known speed: 0.02 s a decoding step + 0.001 s a token + a prompt token in
    0.0005 s; training 0.3 s + 0.002 s a token."""
    folder.mkdir()
    random = np.random.default_rng(0)
    config = {"rollout.prompts": prompts, "rollout.group_size": size, "rollout.max_tokens": 50, "engine.max_batch": 64}
    (folder / "config.json").write_text(json.dumps(config | {"rollout.max_staleness": 0}))
    metrics, rollouts = [], []
    for step in range(1, steps + 1):
        prompt, lengths = int(random.integers(5, 30)), random.integers(5, 50, (prompts, size))
        trained = int(lengths.sum()) + prompt * prompts * size
        generate = 0.02 * int(lengths.max()) + (0.001 * int(lengths.sum()) + 0.0005 * prompt * prompts) / machines
        train = 0.3 + 0.002 * trained
        disturbed = 30 * (step == 5)
        metrics.append(
            {"step": step, "tokens/generated": int(lengths.sum()), "tokens/trained": trained, "time/train": train}
            | {"time/generate": generate + disturbed, "time/reward": 0.1, "time/validate": 2.0, "time/checkpoint": 1.0}
            | {"time/step": generate + disturbed + train + 3.1, "length/max": int(lengths.max())}
            | {"length/mean": float(lengths.mean())}
        )
        for group, row in enumerate(lengths.tolist()):
            for n in row:
                sample = {"tokens": [1] * (prompt + n), "mask": [0] * prompt + [1] * n}
                rollouts.append({"step": step, "group": step * prompts + group, "samples": [sample]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rollouts))
    return folder


def test_the_figures_of_a_run_are_found(tmp_path: Path) -> None:
    found = read([str(a_run(tmp_path / "run"))])
    assert found.engine.base == pytest.approx(0.02) and found.engine.per_sequence == pytest.approx(0.001)
    assert found.engine.prefill == pytest.approx(2000)
    assert found.learner.constant == pytest.approx(0.3) and found.learner.per_token == pytest.approx(0.002)
    assert found.episodes.reward == (0.1, 0.1) and found.learner.trained == 1
    assert len(found.episodes.tokens) == 20  # the first step warms up, something else ran in the fifth
    assert "10 of 11 steps" in found.sources["engine.base"]
    compared = sweep.compare(replace(found, run=replace(found.run, steps=200)))
    assert abs(compared["off"]) < 0.05


def test_the_engines_and_gpus_of_a_run_are_its_own(tmp_path: Path) -> None:
    """What two engines did together is not what one does, and a learner of 8 GPUs is not one of a GPU."""
    folder = a_run(tmp_path / "run", machines=2)
    config = json.loads((folder / "config.json").read_text())
    own = {"engine.kind": "vllm", "engine.count": 2, "engine.tensor_parallel": 4, "parallel.fsdp": 4, "parallel.tp": 2}
    own |= {"rollout.max_staleness": 2, "rollout.order_window": 1, "weights.sync_every": 2}
    (folder / "config.json").write_text(json.dumps(config | own))
    found = read([str(folder)])
    assert (found.engine.gpus, found.learner.gpus, found.run.gpus) == (4, 8, (16,))
    assert (found.result.engines, found.result.learners, found.result.shared) == (2, 1, False)
    assert (found.run.order_window, found.sync.every) == (1, 2)
    assert found.engine.base == pytest.approx(0.02) and found.engine.per_sequence == pytest.approx(0.001)
    (folder / "config.json").write_text(json.dumps(config | {"parallel.ddp": 2, "parallel.tp": 2}))
    found = read([str(folder)])
    assert (found.result.engines, found.engine.gpus, found.learner.gpus, found.result.shared) == (2, 2, 4, True)


def test_an_episode_without_an_answer_is_passed_over(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "group": 999, "samples": [{"tokens": [1, 2], "mask": [0, 0]}]}) + "\n")
    assert len(read([str(folder)]).episodes.tokens) == 20
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write("no JSON\n{")  # and a line that is being written
    with pytest.raises(BirlError, match=r"rollouts\.jsonl: a line is damaged"):
        read([str(folder)])


def test_a_word_may_be_long() -> None:
    answers = [100 + n for n in range(200)]
    assert len(read([f"episodes.tokens={answers}"]).episodes.tokens) == 200


def test_without_rollouts_it_says_what_it_assumes(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", steps=2)
    (folder / "rollouts.jsonl").unlink()
    found = read([str(folder)])
    assert found.sources["engine.table"].startswith("assumed") and "measured" in found.sources["learner.per_token"]
    assert found.sources["episodes.sigma"].startswith("assumed")


def test_decoding_steps_and_least_squares() -> None:
    assert decoding_steps([3, 1, 1], 2) == 3 and decoding_steps([2, 2, 2], 2) == 4
    columns = np.array([[1.0, 1], [1, 2], [1, 4]])
    assert nonnegative(columns, columns @ [2, 3])[0] == pytest.approx((2, 3))
    assert nonnegative(columns, np.array([4.0, 2, 1]))[0][1] == 0  # no time below 0


# --- the command ---


def test_the_command_finds_the_best_split(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--simulate", "run.gpus=[4]", "run.prompts=4", "run.group_size=2", "run.max_staleness=[0,1]"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows, (best,) = found["configurations"], found["best"]
    assert {(r["engines"], r["learners"]) for r in rows if not r["max_staleness"]} == {(4, 4), (1, 3), (2, 2), (3, 1)}
    assert best["seconds_per_step"] <= 1.01 * min(r["seconds_per_step"] for r in rows)
    assert found["figures"]["engine.table"]["source"].startswith("measured")
    assert found["figures"]["learner.bandwidth"]["source"] == "assumed"
    assert main(words) == 0
    page = capsys.readouterr().out
    assert "Fastest:" in page and "times as fast as synchronous" in page and best["advice"] in page


def test_assumptions_are_marked() -> None:
    scenario = read(["h200_8b", "engine.prefill=5000"])
    told = {key: command.source(scenario, key) for key, _ in command.figures(scenario)}
    assert told["engine.prefill"] == "given"
    assert not [key for key, where in told.items() if where.startswith("measured")]
    assert told["engine.base"].startswith("assumed: weights")


def row(**changes: Any) -> sweep.Row:
    values = dict.fromkeys(sweep.Row.__dataclass_fields__, 0) | {"max_staleness": 1}
    return sweep.Row(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, "Balanced"),
        (
            {"learners_waiting": 0.41, "engines_working_while_learners_wait": 0.9},
            "add engines first: learners wait 41%",
        ),
        ({"learners_waiting": 0.41, "engines_working_while_learners_wait": 0.1}, "10% of that; raise max_staleness"),
        ({"engines_waiting": 0.3}, "add learners first: engines wait 30%"),
        ({"engines_waiting": 0.3, "engines_waiting_for_environments": 0.2}, "mostly for environments"),
        ({"engines_waiting": 0.3, "max_staleness": 0}, "take turns: learners wait 0%, engines 30%"),
    ],
)
def test_advice(changes: dict[str, Any], part: str) -> None:
    """And what would not be faster is not advised."""
    assert part in command.advice(row(**changes), lambda **_: True)
    other = command.advice(row(**changes), lambda **_: False)
    assert not re.search(r"raise|\badd\b", other) and ("no faster" in other or not re.search("raise|add", part))


def test_advice_is_not_what_the_table_shows_to_be_slower(capsys: pytest.CaptureFixture[str]) -> None:
    """A learner more would have to exchange gradients, which costs more than it saves, and its GPU an engine."""
    words = ["run.gpus=[3]", "run.max_staleness=[0,1,2]"]
    assert main(["plan", "--simulate", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (best,) = found["best"]
    slower = [r for r in found["configurations"] if r["max_staleness"] == 2 and r["learners"] > best["learners"]]
    assert (best["engines"], best["learners"]) == (2, 1) and best["engines_waiting"] > 0.05
    assert slower and all(r["seconds_per_step"] > best["seconds_per_step"] for r in slower)
    scenario = read(words)
    draws = Draws(scenario.episodes, 8)
    split = Split(engines=2, learners=2, max_staleness=2, prompts=3)
    more = sweep.simulate(scenario, split, 4, draws).seconds_per_step
    assert ("add learners first" in best["advice"]) == (more < 0.99 * best["seconds_per_step"])
    assert "Add learners" not in best["advice"]


def test_advice_is_right() -> None:
    """Where it says add engines, one more is faster; where it says add learners, one more of those."""
    scenario = read(["engine.max_batch=8", "learner.bytes=0", "sync.bytes=0", "sync.pause=0"])
    for engines, learners, part in ((1, 6, "add engines"), (7, 1, "add learners")):
        draws = Draws(scenario.episodes, 8)
        split = Split(engines=engines, learners=learners, max_staleness=2, prompts=8)
        here = sweep.simulate(scenario, split, 8, draws)
        assert part in command.advice(here, sweep.compared_with(scenario, here, draws))
        more = {"engines": engines + 1} if "engines" in part else {"learners": learners + 1}
        assert sweep.simulate(scenario, replace(split, **more), 9, draws).seconds_per_step < here.seconds_per_step
    slow = replace(scenario, learner=replace(scenario.learner, bytes=2e10))  # two learners would exchange them for 20 s
    assert "more learners are no faster" in command.advice(here, sweep.compared_with(slow, here, draws))


def test_the_measured_file_of_the_page_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    file = tmp_path / "async.json"
    file.write_text(re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0])
    assert main(["plan", "--simulate", "--measured", str(file), "run.gpus=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["measured_seconds_per_step"] == json.loads(file.read_text())["result"]["seconds_per_step"]
    assert abs(found["measured"]["off"]) < 0.1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["engine.batch=3"], "there is no such key"),
        (["engin.base=3"], "Did you mean engine"),
        (["max_batch=3"], "Did you mean engine.max_batch?"),
        (["engine=3"], "keys have a section"),
        (["engine.max_batch=1.5"], "must be a whole number"),
        (["engine.max_batch=999999"], "no engine has more"),
        (["engine.base=-1"], "must not be negative"),
        (["engine.base=0"], "a step takes no time"),
        (["engine.table={a: 1}"], "must map sequences"),
        (["engine.table={1: 0.1, 2: 0.05}"], "would take no time"),
        (["run.gpus=[]"], "run.gpus is empty"),
        (["run.gpus=1", "run.max_staleness=1"], "can not be split"),
        (["run.gpus=8", "run.engines=[8]"], "can not be split"),
        (["run.gpus=8", "sync.every=3", "run.max_staleness=1"], "needs run.max_staleness of at least 2"),
        (["episodes.wait=[3,1]"], "the least is above the most"),
        (["episodes.tokens=[[]]"], "at least one"),
        (["learner.bandwidth=0"], "must be above 0"),
        (["learner.trained=2"], "is a share"),
        (["run.route=best"], "must be episode or group"),
        (["nowhere.yaml"], "can not be read"),
        (["--measured"], "--measured takes a file"),
        (["--memory=3"], "--memory"),
        (["run.gpus=2", "run.prompts=1", "failures.hours_between=1e-5", "run.max_staleness=0"], "hours_between"),
    ],
)
def test_mistakes(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--simulate", *words]) == 2
    assert part in capsys.readouterr().err


def test_mistakes_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "no_result.yaml").write_text("engine: {base: 0.1}\n")
    for words, part in (
        (["empty"], "is no run of birl"),
        (["broken.json"], "broken.json"),
        (["list.yaml"], "must hold sections"),
        (["--measured", "no_result.yaml"], "has no result.seconds_per_step"),
    ):
        assert main(["plan", "--simulate", *words[:-1], str(tmp_path / words[-1])]) == 2
        assert part in capsys.readouterr().err


def test_a_block_of_no_groups_is_empty() -> None:
    found = Draws(read([]).episodes, 2).groups(np.zeros(0, np.int64))
    assert isinstance(found, Block) and found.tokens.shape[:2] == (0, 2)
