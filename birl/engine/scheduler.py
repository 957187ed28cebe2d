"""Scheduler of continuous batching. Pure Python: no tensors, no time, no threads, so that tests need numbers alone.

A running request owns the pages of its positions; full pages are shared by all requests with the same prefix, running,
finished or later: turns, groups, prompts with one system text (`pages.py`). New weights invalidate all of them.
Requests are admitted in order of arrival, those that are only scored first, while there are pages for their tokens. If
there is no page for a next token, the youngest request is preempted: it goes back to the head of the queue with its
sampled tokens, and is recomputed later, with the same result.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

from birl.engine.drafts import Drafts
from birl.engine.pages import Pages, pages_for
from birl.engine.request import Request
from birl.errors import BirlError
from birl.kernels.tensors import PAGE
from birl.text.pictures import is_picture
from birl.types import Stop

PREFILL = 2048  # prompt tokens per step, about
SOON = 4  # tokens in a row while others wait: for new requests, or for the slot of a sequence that ends
FORCED = 128  # given tokens per step: each needs its own logits


@dataclass(slots=True, kw_only=True)
class ScheduledTokens:
    """Compute `tokens`, the next positions of `request`. If that makes its context `complete`, `followers` use the same
    logits: requests with the same tokens so far, which then diverge. `drafts`: draft tokens after these, computed as if
    they were right."""

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
    """At most `max_batch` running requests, and about `prefill` prompt tokens per step. `cache`: prefix caching;
    `early`: also within the step that computes a prompt, which requires that every layer writes all keys and values
    before it reads any, and that nothing else of a position is kept. Both are False if layers have recurrent states,
    which are not in pages."""

    max_batch: int
    pages: Pages
    prefill: int = PREFILL
    cache: bool = True
    early: bool = True
    drafts: Drafts = field(default_factory=lambda: Drafts(0))
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)  # in order of admission
    places: list[int] = field(default_factory=list)  # free slots for layers' states
    preempted: int = 0
    reused: int = 0  # positions reused from the prefix cache
    prompts: int = 0  # prompt tokens in the newest plan

    def __post_init__(self) -> None:
        self.places = list(reversed(range(self.max_batch)))

    def add(self, request: Request) -> None:
        """Queue a request. Raises `BirlError` if it could not run even alone."""
        need = len(request.prompt) + request.max_tokens
        if pages_for(need) > self.pages.total:
            raise BirlError(
                f"The KV cache holds {self.pages.total * PAGE} tokens, but one sequence may need {need} "
                f"({len(request.prompt)} of prompt and {request.max_tokens} of answer). Raise engine.kv_cache_gb or "
                "lower rollout.max_tokens."
            )
        if request.only_scored:  # short, and after an update the learner waits for it (the canary): not after
            self.waiting.appendleft(request)  # requests whose KV cache is recomputed
        else:
            self.waiting.append(request)
        self.drafts.add(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self) -> list[ScheduledTokens]:
        """The work of this step, with pages allocated for all of it."""
        self.make_room()
        budget = self.prefill
        plan: list[ScheduledTokens] = []
        scored = False
        for request in self.running:
            self.keep(request, request.computed)
        for request in self.running:
            pending = request.piece(budget) if len(request) - request.computed > 1 else request.pending()
            budget -= len(pending) if len(pending) > 1 else 0
            if pending:
                plan.append(self.scheduled(request, pending))
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
                plan.append(self.scheduled(request, request.piece(budget)))
                budget -= len(plan[-1].tokens)
        self.prompts = self.prefill - budget
        for work in plan:
            self.force(work)
        if not self.prompts:
            self.guess(plan)
        return plan

    def scheduled(self, request: Request, tokens: list[int]) -> ScheduledTokens:
        """Schedule tokens; with `early` a prompt's pages are known to requests admitted after it."""
        if self.early and len(tokens) > 1:
            self.keep(request, request.computed + len(tokens))
        return ScheduledTokens(request=request, start=request.computed, tokens=tokens)

    def keep(self, request: Request, end: int) -> None:
        """Make full pages before position `end` known for reuse. If another page has the same tokens, it replaces the
        request's own, provided that it is computed."""
        if request.older or not self.cache:
            return
        for place in range(request.known, end // PAGE):
            own, before = request.pages[place], request.pages[place - 1] if place else request.first
            page = self.pages.keep((before, request.span(place * PAGE, (place + 1) * PAGE)), own)
            if page != own:
                if end > request.computed:
                    return
                request.pages[place] = self.pages.share(page)
                self.pages.release(own)
            elif request.routes:
                self.pages.routes[page] = request.routes[place * PAGE : (place + 1) * PAGE]
            request.known = place + 1

    def force(self, work: ScheduledTokens) -> None:
        """Schedule given tokens like drafts, as many at once as there are pages for."""
        request = work.request
        if request.forced and work.complete:
            work.drafts = list(request.forced[:FORCED])[:-1]
            while len(request.pages) < pages_for(len(request) + len(work.drafts)) and self.pages.room:
                request.pages.append(self.pages.take())
            del work.drafts[len(request.pages) * PAGE - len(request) :]

    def guess(self, plan: list[ScheduledTokens]) -> None:
        """Use rows that cost no time for drafts of the last few sequences, as evenly as possible; nothing is preempted
        for them. With more sequences a right draft rarely ends the batch earlier."""
        spare = self.drafts.rows - len(plan) if 4 * len(plan) <= self.drafts.rows else 0
        for place, work in enumerate(plan):
            if spare <= 0:
                return
            request = work.request
            if request.forced or request.guide or work.followers:
                continue
            guesses = self.drafts.guess(request, -(-spare // (len(plan) - place)))
            guesses = list(takewhile(lambda token: not is_picture(token), guesses))
            while len(request.pages) < pages_for(len(request) + len(guesses)) and self.pages.room:
                request.pages.append(self.pages.take())
            work.drafts = guesses[: len(request.pages) * PAGE - len(request)]
            spare -= len(work.drafts)

    def look_ahead(self, plan: list[ScheduledTokens], most: int) -> int:
        """Number of tokens in a row, at most `most`, that all requests in `plan` (decode only) can run without the
        scheduler; allocates their pages. 1 if there are too few pages, or more prompts are left than one step computes;
        few while others wait."""
        if self.prompts or self.waiting:
            most = min(most, SOON if self.prompts < self.prefill else 1)
        most = min(most, max((w.request.left for w in plan), default=1))
        while most > 1:
            wanted = [(w.request, pages_for(len(w.request) + min(most, w.request.left) - 1)) for w in plan]
            if sum(max(n - len(r.pages), 0) for r, n in wanted) <= self.pages.room:
                for request, n in wanted:
                    request.pages += [self.pages.take() for _ in range(n - len(request.pages))]
                break
            most //= 2
        return most

    def make_room(self) -> None:
        """Allocate a page for each next token that needs one; the youngest requests are preempted."""
        place = 0
        while place < len(self.running):
            request = self.running[place]
            if len(request.pages) >= pages_for(len(request)):
                place += 1
            elif self.pages.room:
                request.pages.append(self.pages.take())
            else:
                lost = self.running.pop()
                self.give_back(lost)
                self.waiting.appendleft(lost)
                self.preempted += 1

    def admit(self, request: Request, leader: ScheduledTokens | None) -> bool:
        """Allocate pages for a request's tokens, reusing known ones; at least one token is left to compute, unless a
        leader computes all."""
        if leader is not None:
            known, computed = leader.request.pages[: len(request) // PAGE], len(request)
        else:
            known = self.pages.find(request.ids[:-1], request.first)
            computed = len(known) * PAGE
        need = pages_for(len(request)) - len(known)
        spare = min(len(self.running), self.pages.total // 8)  # so that it is not preempted immediately
        if need + spare > self.pages.room - sum(page in self.pages.idle for page in known):
            return False
        request.pages = [*map(self.pages.share, known), *(self.pages.take() for _ in range(need))]
        request.computed, request.known = computed, 0 if leader else len(known)
        request.place = self.places.pop()
        request.routes = [route for page in known for route in self.pages.routes.get(page, ())]  # a leader's come later
        self.reused += computed
        request.cached = min(computed, len(request.prompt)) if request.cached < 0 else request.cached
        return True

    def retire(self) -> list[Request]:
        """Remove finished and aborted requests and return them."""
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
        """Recompute the whole KV cache with the weights at that time; sampled tokens are kept."""
        for request in reversed(self.running):
            self.give_back(request)
            self.waiting.appendleft(request)
        self.running.clear()
        self.pages.forget()

    def outdate(self) -> None:
        """Called when the weights change and requests keep their KV cache: no new request may share it."""
        for request in self.running:
            request.older = True
        self.pages.forget()

    def clear(self) -> None:
        """Forget all requests."""
        for request in self.running:
            self.give_back(request)
        self.pages.forget()
        self.waiting.clear()
        self.running.clear()
        self.drafts.lookups.clear()

    def give_back(self, request: Request) -> None:
        self.keep(request, request.computed)
        for page in reversed(request.pages):
            self.pages.release(page)
        self.places += [request.place] if request.place >= 0 else []
        request.pages, request.known, request.computed, request.older, request.place = [], 0, 0, False, -1


def leads(work: ScheduledTokens, request: Request) -> bool:
    """Whether `request` continues from exactly the tokens whose logits `work` computes."""
    same = work.request.ids == request.ids and work.request.adapter is request.adapter
    return work.complete and not (work.request.forced or work.request.older) and same
