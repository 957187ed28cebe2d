import random
from typing import Any, cast

import pytest

from birl.engine.pages import FIRST, Pages, pages_for, sharing
from birl.engine.request import Request
from birl.engine.scheduler import SOON, ScheduledTokens, Scheduler
from birl.engine.steps import Steps
from birl.errors import BirlError
from birl.types import SamplingParams, Stop


def request(prompt: int, answer: int, first: int = 1) -> Request:
    return Request(
        prompt=tuple(range(first, first + prompt)),
        params=SamplingParams(max_tokens=answer, seed=0),
        max_tokens=answer,
        end_ids=frozenset(),
        checker=None,
        future=cast(Any, None),
    )


def compute(plan: list[ScheduledTokens]) -> None:
    """What the engine does with a plan."""
    for work in plan:
        work.request.computed += len(work.tokens)
    for work in plan:
        for r in work.samplers:
            r.append(7, -1.0, 0)


def check(scheduler: Scheduler, plan: list[ScheduledTokens]) -> None:
    """Every position has its page; a page that is not full belongs to one request, others to all that begin with the
    same tokens; the books close."""
    users: dict[int, int] = {}
    for r in scheduler.running:
        assert len(r.pages) == pages_for(len(r)) and len(set(r.pages)) == len(r.pages)
        for i, page in enumerate(r.pages):
            users[page] = users.get(page, 0) + 1
            others = [o for o in scheduler.running if page in o.pages]
            end = (i + 1) * 32
            assert len(others) == 1 or all(o.pages[i] == page and o.span(0, end) == r.span(0, end) for o in others)
            assert len(others) == 1 or end <= len(r)
    assert users == {p: n for p, n in enumerate(scheduler.pages.users) if n}
    pages = scheduler.pages
    assert sorted([*pages.free, *pages.idle]) == [p for p, n in enumerate(pages.users) if not n]
    assert pages.idle.keys() <= pages.keys.keys() and pages.known == {key: page for page, key in pages.keys.items()}
    assert all(before in (FIRST, *pages.keys) for before, _ in pages.known)  # nothing is behind what was forgotten
    planned = [r for w in plan for r in (w.request, *w.followers)]
    assert len(planned) == len({id(r) for r in planned})


@pytest.mark.parametrize("seed", range(10))
def test_everybody_is_served_once_within_the_memory(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(max_batch=5, pages=Pages(12), prefill=rng.choice([7, 64, 2048]))
    requests = [request(rng.choice([1, 32, 33, 64, 90]), rng.randint(1, 90), rng.choice([1, 200])) for _ in range(30)]
    for r in requests:
        scheduler.add(r)
    finished: list[Request] = []
    for _ in range(10_000):
        plan = scheduler.plan()
        assert plan and len(scheduler.running) <= 5
        check(scheduler, plan)
        compute(plan)
        finished += scheduler.retire()
        if not scheduler.busy:
            break
    assert len(finished) == len(requests) == len({id(r) for r in finished})
    assert all(len(r.tokens) == r.max_tokens and r.stop is Stop.LENGTH for r in finished)
    assert scheduler.pages.room == 12


def test_the_youngest_is_preempted_and_goes_to_the_head() -> None:
    scheduler = Scheduler(max_batch=8, pages=Pages(4))
    a, b, c = request(40, 60), request(41, 60, first=300), request(10, 10, first=600)
    for r in (a, b, c):
        scheduler.add(r)
    compute(scheduler.plan())
    assert scheduler.running == [a, b] and list(scheduler.waiting) == [c]
    while not scheduler.preempted:
        compute(scheduler.plan())
    assert scheduler.running == [a] and list(scheduler.waiting) == [b, c]


def test_answers_to_one_prompt_share_full_pages_and_one_computation() -> None:
    scheduler = Scheduler(max_batch=8, pages=Pages(20))
    for _ in range(3):
        scheduler.add(request(70, 5))
    (work,) = scheduler.plan()
    assert len(work.tokens) == 70 and len(work.samplers) == 3
    a, b, c = scheduler.running
    assert a.pages[:2] == b.pages[:2] == c.pages[:2] and len({a.pages[2], b.pages[2], c.pages[2]}) == 3
    compute([work])
    tables, lengths = [r.pages for r in (a, b, c)], [71] * 3
    assert sharing(tables, lengths) == ([3], [2])


def test_rows_that_share_pages_are_neighbours_in_one_group() -> None:
    shared, own = [5, 6, 7], [[8], [9], [10]]
    assert sharing([shared + o for o in own] + [[1, 2]], [97, 98, 99, 40]) == ([3, 1], [3, 2])
    assert sharing([shared] * 20, list(range(55, 75)), most=8) == ([10, 10], [2, 3])
    assert sharing([shared] * 20, list(range(60, 80)), most=8) == ([8, 12], [2, 3])
    assert sharing([[1], [2]], [4, 5]) == ([1, 1], [1, 1])


def test_a_step_computes_sequences_with_common_pages_side_by_side() -> None:
    plan = []
    for pages in ([1, 2, 3], [4, 5], [1, 2, 6], [4, 7]):  # agents of two tasks, as their turns come in
        one = request(70, 5)
        one.pages = pages
        plan.append(ScheduledTokens(request=one, start=69, tokens=[1]))

    class Ended(Exception): ...

    class Runner:
        def run(self, plan: list[ScheduledTokens]) -> None:
            raise Ended

    with pytest.raises(Ended):
        Steps(100, cast(Any, Runner()), cast(Any, None), 0).single(plan)
    tables = [work.request.pages for work in plan]
    assert sharing(tables, [70, 70, 40, 40]) == ([2, 2], [2, 1]) and tables[0][:2] == tables[1][:2] == [1, 2]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(BirlError, match=r"holds 96 tokens.*may need 120"):
        Scheduler(max_batch=8, pages=Pages(3)).add(request(60, 60))


def test_bursts_are_short_while_requests_wait() -> None:
    scheduler = Scheduler(max_batch=2, pages=Pages(200), prefill=100)
    for i, prompt in enumerate((20, 200, 20)):
        scheduler.add(request(prompt, 30, first=300 * i))
    ahead = []
    while not ahead or scheduler.busy:
        plan = scheduler.plan()
        rows = [w for w in plan if len(w.tokens) == 1]
        ahead.append(scheduler.look_ahead(rows, 16))
        compute([w for w in plan if w not in rows])
        for work in rows:
            compute([work])
            for _ in range(ahead[-1] - 1):
                if work.request.stop is None:
                    compute([ScheduledTokens(request=work.request, start=work.request.computed, tokens=[7])])
        scheduler.retire()
    assert ahead[:2] == [1, 1]  # the second prompt takes two steps more, in which the first goes on token by token
    assert set(ahead[3:9]) == {SOON} and ahead[-2:] == [16, 13]  # the third waits for a place, and then is alone


def test_abort_works_for_waiting_and_running() -> None:
    scheduler = Scheduler(max_batch=1, pages=Pages(9))
    a, b = request(5, 5), request(5, 5)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.plan()
    a.aborted = b.aborted = True
    assert scheduler.retire() == [b, a] and a.stop is b.stop is Stop.ABORT and not scheduler.busy
    assert scheduler.pages.room == 9


def test_what_is_only_scored_goes_first_and_alone() -> None:
    """After an update everybody's context is computed anew; the learner waits for the canary, not for that."""
    scheduler = Scheduler(max_batch=8, pages=Pages(200), prefill=300)
    answers = [request(200, 50, first=300 * i) for i in range(3)]
    for r in answers:
        scheduler.add(r)
    compute(scheduler.plan())
    scheduler.restart()
    asked = request(20, 4, first=2000)
    asked.params = SamplingParams(max_tokens=4, forced=(7, 7, 7, 7), seed=0)
    scheduler.add(asked)
    assert [w.request for w in scheduler.plan()] == [asked]
    assert [w.request for w in scheduler.plan()] == [asked, answers[0], answers[1]]  # nobody waits for long
