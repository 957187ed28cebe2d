"""The choice of tasks by results: its definition, its state, what it refuses, and that it saves groups."""

import asyncio
import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from birl.data.order import ORDERS, RANKING, Order, Rule
from birl.data.stream import Stream
from birl.errors import BirlError
from birl.rollout import pipeline
from birl.rollout.assemble import Usage, has_signal
from birl.types import Completion, Group, Outcome, Stop, Task, Trajectory, Turn
from tests.data.test_stream import source

USAGE = Usage()


def order(by: str = "thompson", *sizes: int, **keys: Any) -> Order:
    rule = {name: keys.pop(name) for name in list(keys) if name in Rule.__slots__}
    sources = [source(n, "abc"[i]) for i, n in enumerate(sizes or (12,))]
    for number, tasks in enumerate(sources):
        tasks.prefix = f"{number}:"
    return Order(sources, Rule(**{"by": by, "n": 4, **rule}), **{"seed": 3, **keys})


def group(number: int, task: Task, rewards: list[float]) -> Group:
    said = Completion(tokens=(1,), logprobs=(0.0,), versions=(0,), stop=Stop.STOP)
    turns = (Turn(prompt=(1,), completion=said),)
    episodes = tuple(Trajectory(turns=turns, reward=r, score=r, outcome=Outcome.OK) for r in rewards)
    return Group(index=number, task=task, trajectories=episodes, start_version=0)


def observe(mine: Order, step: int, position: int, groups: list[Group]) -> dict[str, float]:
    return mine.observe(step, position, [(g, USAGE.usable(g), has_signal(g, USAGE)) for g in groups])


def test_thompson_is_its_definition() -> None:
    """Sorted by |p - target|, with p drawn from each posterior; tied within 1e-9 at most."""
    mine = order(target=0.3)
    observe(mine, 1, 0, [group(i, mine.choose(i), [1.0, 0.0, 0.0, 1.0]) for i in range(3)])
    alpha, beta = mine.known.posterior(1)
    drawn = np.random.default_rng([3, RANKING, 1]).beta(alpha, beta).tolist()
    expected = sorted(range(12), key=lambda i: abs(drawn[i] - 0.3))
    assert [mine.choose(n).id for n in range(3, 15)] == [mine.known.ids[i] for i in expected]


def test_difficulty_draws_in_proportion_to_the_chance_of_a_signal() -> None:
    first = Counter[str]()
    for seed in range(100):
        mine = order("difficulty", 3, seed=seed, half_life=0, retire_after=0)
        for step in range(1, 5):
            observe(
                mine, step, 0, [group(0, mine._task(i), r) for i, r in enumerate(([0.0] * 4, [1.0] * 4, [0.0, 1.0]))]
            )
        first[mine.choose(0).id] += 1
    assert first["0:train:2"] > 50 and min(first["0:train:0"], first["0:train:1"]) > 0


def test_a_curriculum_goes_from_easy_to_hard() -> None:
    def chosen(step: int) -> float:
        mine = order("curriculum", 40, steps=100, start=1.0, target=0.0, half_life=0, retire_after=0)
        for past in range(20):
            observe(mine, past, 0, [group(0, mine._task(i), [i / 39] * 4) for i in range(40)])
        mine.step, mine._ranked = step, None
        return sum(int(mine.choose(n).id.split(":")[2]) for n in range(8)) / 8 / 39

    places = [chosen(step) for step in (0, 50, 100)]
    assert places[0] > 0.8 and 0.35 < places[1] < 0.65 and places[2] < 0.2


@pytest.mark.parametrize("by", ORDERS)
def test_no_task_is_on_its_way_twice_unless_all_are(by: str) -> None:
    mine = order(by)
    assert len({mine.choose(n).id for n in range(12)}) == 12
    assert len({mine.choose(n).id for n in range(12, 24)}) == 12


def test_what_rests_comes_only_where_nothing_else_is_left() -> None:
    mine = order(retire_after=1, target=0.0)
    observe(mine, 1, 0, [group(i, mine._task(i), [0.0] * 4) for i in range(10)])
    ids = [mine.choose(n).id for n in range(12)]
    assert set(ids[:2]) == {"0:train:10", "0:train:11"} and len(set(ids)) == 12


@pytest.mark.parametrize("weights", [[1.0, 3.0, 0.5], [0.0, 1.0, 2.0]])
def test_sources_keep_their_weights(weights: list[float]) -> None:
    """Draw by draw the source that the uniform order takes."""
    mine, plain = (
        order("thompson", 5, 9, 3, weights=weights),
        Stream([source(n, s) for n, s in ((5, "a"), (9, "b"), (3, "c"))], weights=weights, seed=3),
    )
    for number in range(200):
        assert str(mine.choose(number).prompt)[0] == str(next(plain).prompt)[0]
        observe(mine, number + 1, number + 1, [group(number, mine.choose(number), [1.0, 0.0])])


def test_without_weights_sources_are_one_pool() -> None:
    mine = order("thompson", 5, 9, 3)
    assert len({mine.choose(n).id for n in range(17)}) == 17


def test_epochs_end_it() -> None:
    assert len(list(order(end=30).tasks(4))) == 26


def lives(by: str, staleness: int, length: int, steps: int = 24) -> list[str]:
    """The tasks of a run that is ended and begun again every `length` steps, its state in JSON meanwhile. Groups
    overtake each other, and those without signal are refused."""
    chosen: list[str] = []
    state, at = None, pipeline.Step(number=0, groups=[], refused=[], position=0)
    while at.number < steps:
        mine, stop, last = order(by, 12, 9, weights=[1, 2], steps=steps), asyncio.Event(), at.number + length
        mine.restore(state, at.number, at.position)

        async def rollout(number: int, task: Task) -> Group:
            luck = random.Random(number)
            for _ in range(luck.randint(0, 9)):
                await asyncio.sleep(0)
            return group(number, task, [float(luck.random() < int(task.id.split(":")[2]) / 11) for _ in range(4)])

        async def train(step: pipeline.Step, mine: Order = mine, stop: asyncio.Event = stop, last: int = last) -> None:
            nonlocal state, at
            everything = sorted([*step.groups, *step.refused], key=lambda g: g.index)
            chosen.extend(f"{g.index} {g.task.id}" for g in everything)
            observe(mine, step.number, step.position, everything)
            state, at = json.loads(json.dumps(mine.state)), step
            if step.number == last:
                stop.set()

        asyncio.run(
            pipeline.run(
                mine.tasks(at.position, at.ahead),
                rollout,
                train,
                keep=lambda g: has_signal(g, USAGE),
                groups_per_step=3,
                max_staleness=staleness,
                window=staleness,
                first_step=at.number + 1,
                steps=steps,
                position=at.position,
                done=at.ahead,
                stop=stop,
            )
        )
    return chosen


@pytest.mark.parametrize("by", ORDERS)
def test_it_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(by: str) -> None:
    assert lives(by, 0, 5) == lives(by, 0, 24)


def test_an_asynchronous_one_trains_each_group_once() -> None:
    numbers = [int(line.split()[0]) for line in lives("thompson", 2, 5)]
    assert len(set(numbers)) == len(numbers) > 72


def test_what_was_consumed_ahead_is_not_asked_again() -> None:
    """A resumed run passes over it; it would stay on its way for ever."""
    mine = order()
    list(islice(mine.tasks(4, {5, 7}), 5))
    assert sorted(mine.pending) == ["4", "6", "8"] and mine._flying.sum() == 3


def test_pending_groups_keep_their_tasks_whatever_is_learned_meanwhile() -> None:
    """An asynchronous run stops with groups on their way: each number stands for the same task in the next life."""
    mine = order()
    before = [mine.choose(n).id for n in range(6)]
    observe(mine, 1, 3, [group(n, mine.choose(n), [1.0, 0.0]) for n in (0, 4, 2)])
    state = json.loads(json.dumps(mine.state))
    again = order()
    again.restore(state, 1, 1)
    assert [again.choose(n).id for n in (1, 3, 5)] == [before[n] for n in (1, 3, 5)]
    assert [again.choose(n).id for n in range(6, 12)] == [mine.choose(n).id for n in range(6, 12)]


FUNCTIONS = """
def hardest(tasks, step, rng):
    return [t.id for t in sorted(tasks, key=lambda t: (t.rate, t.id))]
def some(tasks, step, rng): return ["0:train:4", "0:train:2"]
def seen(tasks, step, rng):
    asked = [t for t in tasks if t.seen is not None]
    assert step == 0 or [(t.successes, t.failures, t.seen, t.source) for t in asked] == [(1.0, 1.0, 1, "train")]
    return [t.id for t in tasks]
def fails(tasks, step, rng): return [1 / 0]
def ends(tasks, step, rng): raise SystemExit(3)
def unknown(tasks, step, rng): return ["0:train:1", "0:train:99"]
def number(tasks, step, rng): return [7]
def twice(tasks, step, rng): return ["0:train:1", "0:train:2", "0:train:1"]
def nothing(tasks, step, rng): return []
def later(tasks, step, rng): return [] if step else [t.id for t in tasks]
def no_list(tasks, step, rng): return None
def any_order(tasks, step, rng): return {t.id for t in tasks}
def weighed(tasks, step, rng): return {t.id: 1.0 for t in tasks}
def endless(tasks, step, rng):
    while True: yield from (t.id for t in tasks)
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "orders.py").write_text(FUNCTIONS)
    return tmp_path / "orders.py"


def test_a_function_of_the_users(functions: Path) -> None:
    assert [order(f"{functions}:some").choose(n).id for n in range(1)] == ["0:train:4"]
    mine = order(f"{functions}:some")
    assert [mine.choose(n).id.split(":")[2] for n in range(4)] == ["4", "2", "4", "2"]  # the others are never asked
    mine = order(f"{functions}:hardest")
    observe(mine, 1, 0, [group(i, mine._task(i), [float(i != 7)] * 4) for i in range(12)])
    assert mine.choose(5).id == "0:train:7"
    mine = order(f"{functions}:seen")
    observe(mine, 1, 0, [group(0, mine._task(5), [1.0, 0.0])])
    mine.choose(0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", r"orders\.py:fails: it failed at step 0: \S*orders\.py:\d+: ZeroDivisionError: division by zero"),
        ("ends", r"it failed at step 0: \S*orders\.py:\d+: SystemExit: 3"),
        ("unknown", r"returned '0:train:99', which is the id of no task\. Did you mean 0:train:9\?"),
        ("number", "returned 7, which is the id of no task"),
        ("twice", "returned '0:train:1' more than once"),
        ("any_order", "returned a set, which has no order: return a list of ids"),
        ("weighed", "returned a dict, which has no order"),
        ("endless", "returned '0:train:0' more than once"),
        ("nothing", "returned no task"),
        ("no_list", "TypeError"),
        ("absent", r"has no function absent\..* It has: hardest"),
    ],
)
def test_a_function_that_is_wrong_says_so_at_the_start(functions: Path, name: str, said: str) -> None:
    with pytest.raises(BirlError, match=said):
        order(f"{functions}:{name}")


def test_a_function_that_fails_later_says_when(functions: Path) -> None:
    mine = order(f"{functions}:later")
    observe(mine, 1, 1, [group(0, mine.choose(0), [1.0])])
    with pytest.raises(BirlError, match="returned no task"):
        mine.choose(1)
    with pytest.raises(BirlError, match="no task of train, from which"):
        order(f"{functions}:some", 12, 4, weights=[1, 1])


def test_scores_that_are_no_success_rates_need_a_threshold() -> None:
    mine = order()
    with pytest.raises(BirlError, match=r"0:train, row [1-9]\d* has the score -1, .* Set data.order_threshold"):
        observe(mine, 1, 1, [group(0, mine.choose(0), [1.0, -1.0])])
    mine = order(threshold=0.5)
    assert observe(mine, 1, 1, [group(0, mine.choose(0), [5.0, -1.0, 0.5, 0.4])])["order/observed"] == 0.5


def groups_needed(by: str, seed: int, steps: int = 40, wanted: int = 8) -> int:
    """How many groups dynamic sampling generates for `steps` x `wanted` ones with a signal. Of 400 tasks one in ten can
    be learned at first; each group with a signal moves its task by much and all by a little."""
    chosen = np.random.default_rng(seed)
    skill = np.where(chosen.random(400) < 0.1, 0.0, np.where(chosen.random(400) < 0.3, 5.0, -5.0))
    sources, made = [source(400)], 0
    mine = None if by == "uniform" else Order(sources, Rule(by=by, n=8), seed=seed, steps=steps)

    async def rollout(number: int, task: Task) -> Group:
        nonlocal made
        made += 1
        chance = 1 / (1 + np.exp(-skill[int(task.id.split(":")[1])]))
        return group(number, task, (np.random.default_rng([seed, number]).random(8) < chance).astype(float).tolist())

    async def train(step: pipeline.Step) -> None:
        for one in step.groups:
            skill[int(one.task.id.split(":")[1])] += 0.3
        skill[:] += 0.03
        if mine is not None:
            observe(mine, step.number, step.position, [*step.groups, *step.refused])

    tasks = Stream(sources, seed=seed) if mine is None else mine.tasks(0)
    keep = lambda g: has_signal(g, USAGE)  # noqa: E731
    asyncio.run(pipeline.run(tasks, rollout, train, keep=keep, groups_per_step=wanted, steps=steps))
    return made


def test_thompson_needs_fewer_groups_for_the_same_signal() -> None:
    uniform, thompson = (sum(groups_needed(by, seed) for seed in range(2)) for by in ("uniform", "thompson"))
    assert thompson < 0.7 * uniform
