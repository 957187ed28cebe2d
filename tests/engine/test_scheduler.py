import random
from typing import Any, cast

import pytest

from birl.engine.request import Request
from birl.engine.scheduler import Scheduler
from birl.errors import BirlError
from birl.types import SamplingParams, Stop


def request(prompt: int, answer: int) -> Request:
    return Request(
        prompt=tuple(range(1, prompt + 1)),
        params=SamplingParams(max_tokens=answer, seed=0),
        max_tokens=answer,
        end_ids=frozenset(),
        checker=None,
        future=cast(Any, None),
    )


@pytest.mark.parametrize("seed", range(10))
def test_everybody_is_served_once_within_the_memory(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(max_batch=5, capacity=400)
    requests = [request(rng.randint(1, 60), rng.randint(1, 60)) for _ in range(30)]
    for r in requests:
        scheduler.add(r)
    slots: dict[int, Request] = {}
    finished: list[Request] = []
    for _ in range(10_000):
        for lost in scheduler.preempt():
            slots = {s: r for s, r in slots.items() if r is not lost}
        first = len(scheduler.running)
        for i, r in enumerate(scheduler.admit()):
            slots[first + i] = r
        assert [slots[i] for i in range(len(scheduler.running))] == scheduler.running
        assert len(scheduler.running) <= 5
        assert len(scheduler.running) * max(map(len, scheduler.running)) <= 400
        for r in scheduler.running:
            r.append(7, -1.0, 0)
        done, moves = scheduler.retire()
        for source, target in moves:
            slots[target] = slots[source]
        slots = {i: slots[i] for i in range(len(scheduler.running))}
        finished += done
        if not scheduler.busy:
            break
    assert len(finished) == len(requests) == len({id(r) for r in finished})
    assert all(len(r.tokens) == r.max_tokens and r.stop is Stop.LENGTH for r in finished)


def test_first_come_first_served_and_preempted_ones_go_to_the_head() -> None:
    scheduler = Scheduler(max_batch=8, capacity=200)
    a, b, c = request(40, 60), request(40, 60), request(10, 10)
    for r in (a, b, c):
        scheduler.add(r)
    assert scheduler.admit() == [a, b]  # c would need 3 x 72
    for _ in range(60):
        for r in scheduler.running:
            r.append(7, -1.0, 0)
        if scheduler.preempt():
            break
    assert scheduler.running == [a] and list(scheduler.waiting) == [b, c]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(BirlError, match=r"holds 100 tokens.*may need 120"):
        Scheduler(max_batch=8, capacity=100).add(request(60, 60))


def test_abort_works_for_waiting_and_running() -> None:
    scheduler = Scheduler(max_batch=1, capacity=100)
    a, b = request(5, 5), request(5, 5)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.admit()
    a.aborted = b.aborted = True
    done, _ = scheduler.retire()
    assert done == [a] and a.stop is Stop.ABORT and not scheduler.busy
