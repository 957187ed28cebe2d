"""The simulation against sums on paper, and against a slow one written differently."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birl.plan import sweep
from birl.plan.fleet import Block, Draws
from birl.plan.pipeline import Simulation, Split
from birl.plan.scenario import Scenario
from birl.plan.simulate_command import read
from tests.plan.plain import Plain, simulated

PLAIN = (  # 100 tokens an answer, 0.01 s a token, 0.5 s a training step, nothing else costs time
    *("engine.base=0.01", "engine.per_sequence=0", "engine.prefill=1e12", "episodes.sigma=0", "episodes.mean=100"),
    *("episodes.prompt=0", "learner.constant=0.5", "learner.per_token=0", "learner.bytes=0", "sync.pause=0"),
    *("sync.bytes=0", "run.group_size=4"),
)


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


# --- the same rules, written plainly ---


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


# the same cases every time: where two events fall together, rounding decides which is first, here and there
@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_it_computes_what_the_plain_simulation_does(case: tuple[Scenario, Split]) -> None:
    scenario, split = case
    draws = Draws(scenario.episodes, scenario.run.group_size, scenario.run.seed)
    fast = Simulation(scenario, split, draws)
    assert [s.end for s in fast.run(5)] == pytest.approx(Plain(scenario, split, draws).run(5), rel=1e-5)


# --- what always holds ---


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_every_group_once_within_the_bound_and_no_work_lost(case: tuple[Scenario, Split]) -> None:
    scenario, split = case
    found = simulated(scenario, 8, **{f: getattr(split, f) for f in Split.__slots__})
    taken = [g for s in found.steps for g in s.taken]
    assert len(taken) == len(set(taken)) == 8 * split.prompts
    assert max(taken) <= len(taken) + scenario.run.order_window  # nobody waits for ever
    assert set(range(len(taken) - scenario.run.order_window)) <= set(taken)
    assert all(0 <= age <= split.max_staleness for s in found.steps for age in s.staleness)
    answers = sum(s.answers for s in found.steps)
    decoded = found.fleet.totals()["decoded"]
    assert decoded >= answers - 1e-3
    if split.max_staleness == 0:  # nothing was begun that is not trained
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


def test_a_group_is_the_same_in_every_split() -> None:
    scenario = read(["episodes.tokens=[[1,2],[100,200,300]]", "episodes.turns=[1,3]"])
    draws = Draws(scenario.episodes, 4)
    whole, part = draws.groups(np.arange(3000)), Draws(scenario.episodes, 4).groups(np.array([2500]))
    assert (whole.tokens[2500] == part.tokens[0]).all()
    groups = [set(g[g > 0].tolist()) for g in whole.tokens]
    assert all(g <= {1, 2} or g <= {100, 200, 300} for g in groups)  # hard prompts stay together
    assert any(g <= {1, 2} for g in groups) and any(g <= {100, 200, 300} for g in groups)


def test_a_block_of_no_groups_is_empty() -> None:
    found = Draws(read([]).episodes, 2).groups(np.zeros(0, np.int64))
    assert isinstance(found, Block) and found.tokens.shape[:2] == (0, 2)
