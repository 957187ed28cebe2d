"""Who computes what next. Pure Python: no tensors, no time, no threads, so that it can be tested with numbers alone.

A running request owns the pages of its positions; full pages of a common prompt belong to all its answers. Requests are
admitted in order of arrival, those that are only scored first, while there are pages for what they have. When
a next token finds no free page, the youngest is preempted: it goes back to the head of the queue with what it
has sampled, and is computed again later, with the same result.
"""

from collections import deque
from dataclasses import dataclass, field

from birl.engine.drafts import Drafts
from birl.engine.pages import Pages, pages_for
from birl.engine.request import Request
from birl.errors import BirlError
from birl.kernels import PAGE
from birl.types import Stop

PREFILL = 2048  # prompt tokens in one step, about
FORCED = 128  # given tokens in one step: each needs logits of its own


@dataclass(slots=True, kw_only=True)
class ScheduledTokens:
    """Compute `tokens`, the next positions of `request`. When that makes its context `complete`, `followers` wait for
    the same logits: requests with the same tokens so far, which then go their own ways. `drafts` are guesses at what
    comes behind, computed as if they were right."""

    request: Request
    start: int
    tokens: list[int]
    followers: list[Request] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    complete: bool = field(init=False)

    def __post_init__(self) -> None:
        self.complete = self.start + len(self.tokens) == len(self.request)

    @property
    def samplers(self) -> list[Request]:
        return [self.request, *self.followers] if self.complete else []


@dataclass(slots=True)
class Scheduler:
    """At most `max_batch` running requests, and about `prefill` prompt tokens in one step."""

    max_batch: int
    pages: Pages
    prefill: int = PREFILL
    drafts: Drafts = field(default_factory=lambda: Drafts(0))
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)  # in order of admission
    preempted: int = 0

    def add(self, request: Request) -> None:
        """Raises `BirlError` when the request could not run even alone."""
        need = len(request.prompt) + request.max_tokens
        if pages_for(need) > self.pages.total:
            raise BirlError(
                f"The KV cache holds {self.pages.total * PAGE} tokens, but one sequence may need {need} "
                f"({len(request.prompt)} of prompt and {request.max_tokens} of answer). Raise engine.kv_cache_gb or "
                "lower rollout.max_tokens."
            )
        if request.only_scored:  # soon over, and after an update the learner waits for it (the canary): not behind
            self.waiting.appendleft(request)  # requests whose keys and values are computed anew
        else:
            self.waiting.append(request)
        self.drafts.add(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self) -> list[ScheduledTokens]:
        """What to compute in this step, with pages for all of it."""
        self.make_room()
        budget = self.prefill
        plan: list[ScheduledTokens] = []
        scored = False
        for request in self.running:
            pending = request.pending()[:budget] if len(request) - request.computed > 1 else request.pending()
            budget -= len(pending) if len(pending) > 1 else 0
            if pending:
                plan.append(ScheduledTokens(request=request, start=request.computed, tokens=pending))
        while self.waiting and len(self.running) < self.max_batch and budget > 0:
            request = self.waiting[0]
            if scored and not request.only_scored:
                break  # no long prompts in this step
            leader = None if request.forced else next((w for w in plan if leads(w, request)), None)
            if not self.admit(request, leader):
                break
            self.running.append(self.waiting.popleft())
            scored = scored or request.only_scored
            if leader is not None:
                leader.followers.append(request)
            else:
                plan.append(ScheduledTokens(request=request, start=request.computed, tokens=request.pending()[:budget]))
                budget -= len(plan[-1].tokens)
        for work in plan:
            self.force(work)
        if plan and budget == self.prefill:
            self.guess(plan)
        return plan

    def force(self, work: ScheduledTokens) -> None:
        """Given tokens are computed like guesses, as many at once as there are pages for."""
        request = work.request
        if request.forced and work.complete:
            work.drafts = list(request.forced[:FORCED])[:-1]
            while len(request.pages) < pages_for(len(request) + len(work.drafts)) and self.pages.free:
                request.pages.append(self.pages.take())
            del work.drafts[len(request.pages) * PAGE - len(request) :]

    def guess(self, plan: list[ScheduledTokens]) -> None:
        """Of the last few sequences, rows that cost no time are used for guesses, as evenly as possible; none is
        preempted for them. With more sequences a right guess rarely ends the batch earlier."""
        spare = self.drafts.rows - len(plan) if 4 * len(plan) <= self.drafts.rows else 0
        for place, work in enumerate(plan):
            if spare <= 0:
                return
            request = work.request
            if request.forced or request.guide or work.followers:
                continue
            guesses = self.drafts.guess(request, -(-spare // (len(plan) - place)))
            while len(request.pages) < pages_for(len(request) + len(guesses)) and self.pages.free:
                request.pages.append(self.pages.take())
            work.drafts = guesses[: len(request.pages) * PAGE - len(request)]
            spare -= len(work.drafts)

    def look_ahead(self, plan: list[ScheduledTokens], most: int) -> int:
        """How many tokens in a row each request in `plan`, all of it next tokens, can be given without a decision of
        ours, at most `most`: pages for them are taken here. 1 where pages are too few."""
        most = min(most, max((w.request.left for w in plan), default=1))
        while most > 1:
            wanted = [(w.request, pages_for(len(w.request) + min(most, w.request.left) - 1)) for w in plan]
            if sum(max(n - len(r.pages), 0) for r, n in wanted) <= len(self.pages.free):
                for request, n in wanted:
                    request.pages += [self.pages.take() for _ in range(n - len(request.pages))]
                break
            most //= 2
        return most

    def make_room(self) -> None:
        """A page for each next token that needs one; the youngest are preempted."""
        place = 0
        while place < len(self.running):
            request = self.running[place]
            if len(request.pages) >= pages_for(len(request)):
                place += 1
            elif self.pages.free:
                request.pages.append(self.pages.take())
            else:
                lost = self.running.pop()
                self.give_back(lost)
                self.waiting.appendleft(lost)
                self.preempted += 1

    def admit(self, request: Request, leader: ScheduledTokens | None) -> bool:
        """Pages for what the request has, some of them those of a running one with the same prompt."""
        if leader is not None:
            known, computed, routes = leader.request.pages[: len(request) // PAGE], len(request), []
        else:
            known, routes = self.known_pages(request)
            computed = len(known) * PAGE
        need = pages_for(len(request)) - len(known)
        spare = min(len(self.running), self.pages.total // 8)  # so that it is not preempted at once
        if need + spare > len(self.pages.free):
            return False
        request.pages = [*map(self.pages.share, known), *(self.pages.take() for _ in range(need))]
        request.computed, request.routes = computed, routes  # a leader's are recorded when they are computed
        return True

    def known_pages(self, request: Request) -> tuple[list[int], list[bytes]]:
        """Full pages of a running request with the same prompt, and their routes; at least one token is left to
        compute."""
        full = min(len(request.prompt), len(request) - 1) // PAGE
        same = (r for r in self.running if r.computed >= full * PAGE and not r.older and r.prompt == request.prompt)
        donor = next(same, None)
        return (donor.pages[:full], donor.routes[: full * PAGE]) if donor is not None else ([], [])

    def retire(self) -> list[Request]:
        """Take out finished and aborted requests."""
        waiting = [r for r in self.waiting if r.aborted]
        for request in waiting:
            self.waiting.remove(request)
        running = [r for r in self.running if r.stop is not None or r.aborted]
        for request in (*waiting, *running):
            request.stop = request.stop or Stop.ABORT
            self.give_back(request)
        if running:
            self.running = [r for r in self.running if r.stop is None]
        return waiting + running

    def restart(self) -> None:
        """All keys and values are computed anew, with the weights as they are then; what was sampled stays."""
        for request in reversed(self.running):
            self.give_back(request)
            self.waiting.appendleft(request)
        self.running.clear()

    def outdate(self) -> None:
        """The weights have changed, and requests keep their keys and values: no new request may share them."""
        for request in self.running:
            request.older = True

    def clear(self) -> None:
        """Forget all requests."""
        for request in self.running:
            self.give_back(request)
        self.waiting.clear()
        self.running.clear()
        self.drafts.lookups.clear()

    def give_back(self, request: Request) -> None:
        for page in request.pages:
            self.pages.release(page)
        request.pages, request.computed, request.older = [], 0, False


def leads(work: ScheduledTokens, request: Request) -> bool:
    """Does `request` go on from the very tokens whose logits `work` gives?"""
    return work.complete and not work.request.forced and work.request.ids == request.ids


def sharing(tables: list[list[int]], lengths: list[int], most: int = 8) -> tuple[list[int], list[int]]:
    """Neighbouring rows with common first pages, as (rows of each group, pages they share): full pages only."""
    groups: list[int] = []
    shared: list[int] = []
    first: list[int] = []
    for table, length in zip(tables, lengths, strict=True):
        if groups and groups[-1] < most:
            same = common_start(first, table, min(shared[-1], length // PAGE))
            if same and (same == shared[-1] or groups[-1] == 1 or 2 * same > shared[-1]):
                groups[-1] += 1
                shared[-1] = same
                continue
        first = table
        groups.append(1)
        shared.append(length // PAGE)
    return groups, shared


def common_start(a: list[int], b: list[int], limit: int) -> int:
    n = 0
    while n < limit and a[n] == b[n]:
        n += 1
    return n
