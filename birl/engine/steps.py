"""Steps of the embedded engine, on the compute thread: the next token of every planned request, with its log-prob, and
the accepted draft tokens after it."""

from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from birl.engine.graphs import AHEAD
from birl.engine.request import Request
from birl.engine.runner import Runner
from birl.engine.sampler import given, sample, shaped, top_logprobs
from birl.engine.scheduler import ScheduledTokens, Scheduler
from birl.engine.truncation import supports
from birl.models.low_rank import HEAD
from birl.types import SamplingParams


@dataclass(slots=True)
class Counters:
    tokens: int = 0  # sampled
    scored: int = 0  # given tokens that only got their log-prob
    dropped: int = 0  # sampled for callers that were cancelled
    prefilled: int = 0  # computed prompt tokens: those of a group once,
    reused: int = 0  # and prompt tokens from the prefix cache
    drafted: int = 0  # draft tokens (`engine/drafts.py`),
    accepted: int = 0  # and the accepted ones
    seconds: float = 0.0  # spent computing
    running: int = 0
    waiting: int = 0
    finished: int = 0
    restarts: int = 0  # times that the KV cache was recomputed because the weights had changed

    def since(self, before: "Counters") -> "Counters":
        return Counters(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(Counters)))


@dataclass
class Steps:
    """Runs the steps of an engine. `context`: longest sequence [tokens]; `version`: of the weights that the KV cache
    was computed with, recorded with each token."""

    context: int
    runner: Runner
    scheduler: Scheduler
    version: int
    counters: Counters = field(default_factory=Counters)

    def renew(self, version: int, recompute: bool) -> None:
        """Switch to new weights: the KV cache of running requests is recomputed, or kept and not shared."""
        self.version = version
        if recompute:
            self.counters.restarts += bool(self.scheduler.running)
            self.scheduler.restart()
        else:
            self.scheduler.outdate()

    def step(self) -> list[Request]:
        """Sample one token for every running request; more if drafts are right, or if graphs run several. Work that
        cannot be captured, mainly prompts, runs before the graphed rows in the same step. Returns the requests that
        ended."""
        plan = self.scheduler.plan()
        graphed = [self.runner.captures(work) for work in plan]
        if not all(graphed):
            self.single([work for work, captured in zip(plan, graphed, strict=True) if not captured])
        if any(graphed):
            self.burst([work for work, captured in zip(plan, graphed, strict=True) if captured])
        finished = self.scheduler.retire()
        self.counters.finished += len(finished)
        return finished

    def single(self, plan: list[ScheduledTokens]) -> None:
        """One forward pass; rows of one adapter are adjacent, and of those sequences with common first pages."""
        plan.sort(key=lambda work: (-work.request.first, work.request.pages))
        hidden = self.runner.run(plan)
        params: list[SamplingParams] = []
        uniforms: list[float] = []
        for work in plan:
            work.request.computed += len(work.tokens)
            if work.start < len(work.request.prompt):
                self.counters.prefilled += len(work.tokens)
            for request in work.samplers:
                params += [request.params] * (len(work.drafts) + 1)
                uniforms += request.uniforms(len(work.drafts) + 1)
        if not params:
            return
        scored: dict[Request, list[tuple[int, float]]] = {}
        likely: dict[Request, Tensor] = {}
        if any(
            r.forced or r.guide or r.best or (r.adapter and HEAD in r.adapter.factors) for w in plan for r in w.samplers
        ):
            scores = self.runner.logits(plan, hidden)
            scored = self.score(plan, scores)
            likely = self.restrict(plan, scores)
            drawn = sample(scores, params, uniforms, self.runner.kernels)
        else:
            drawn = self.runner.sample(hidden, params, uniforms)
        pairs = zip(drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)
        kept = iter(supports(drawn.kept, params))
        for work in plan:
            for request in work.samplers:
                result = [next(pairs) for _ in range(len(work.drafts) + 1)]
                own = zip(scored.get(request, result), islice(kept, len(result)), strict=True)
                # a given token outside of its support counts as sampled from all tokens
                each = [(*pair, self.version, k if k is None or pair[0] in k else None) for pair, k in own]
                if not (request.guide and request.aborted):  # else the guide allows no token
                    before = len(request.tokens)
                    self.append(request, each, work.drafts)
                    if request.best is not None and request in likely:
                        tops = top_logprobs(likely[request], result, request.best.count)
                        request.best.places += tops[: len(request.tokens) - before]

    def score(self, plan: list[ScheduledTokens], logits: Tensor) -> dict[Request, list[tuple[int, float]]]:
        """For requests whose next tokens are given: these tokens with their log-probs."""
        result: dict[Request, list[tuple[int, float]]] = {}
        end = 0
        for work in plan:
            start, end = end, end + len(work.samplers) * (len(work.drafts) + 1)
            if work.complete and work.request.forced:
                tokens = work.request.forced[: len(work.drafts) + 1]
                asked = work.request.params
                logprobs = given(logits[start:end], tokens, asked, self.runner.kernels)
                if asked.told and logprobs.isinf().any():
                    whole = replace(asked, top_k=0, top_p=1.0, min_p=0.0)
                    others = given(logits[start:end], tokens, whole, self.runner.kernels)
                    logprobs = others.where(logprobs.isinf(), logprobs)
                result[work.request] = list(zip(tokens, logprobs.tolist(), strict=True))
                if work.request.best is not None:
                    best = work.request.best
                    best.places += top_logprobs(logits[start:end], result[work.request], best.count)
        return result

    def restrict(self, plan: list[ScheduledTokens], logits: Tensor) -> dict[Request, Tensor]:
        """Mask the tokens that guides do not allow. Returns the sampling logits of requests with `best`."""
        row, result = 0, {}
        for work in plan:
            for request in work.samplers:
                if request.guide is not None:
                    allowed = torch.from_numpy(request.guide.allowed(logits.shape[1]))
                    request.aborted = request.aborted or not bool(allowed.any())
                    if not request.aborted:
                        logits[row].masked_fill_(~allowed.to(logits.device), float("-inf"))
                if request.best is not None and not request.forced:
                    result[request] = shaped(logits[row : row + len(work.drafts) + 1], request.params)
                row += len(work.drafts) + 1
        return result

    def append(self, request: Request, drawn: list[tuple[int, float, int, Any]], drafts: list[int]) -> None:
        """Append the sampled tokens of a request: the next one, and those after it as far as the drafts were right."""
        given, right = bool(request.forced), 0
        request.append(*drawn[0])
        while right < len(drafts) and request.tokens[-1] == drafts[right] and request.stop is None:
            right += 1
            request.append(*drawn[right])
        request.computed += right
        if given:
            self.counters.scored += right + 1
            return
        if drafts:
            self.scheduler.drafts.judge(request, right)
        self.counters.tokens += right + 1
        self.counters.drafted += len(drafts)
        self.counters.accepted += right

    def burst(self, plan: list[ScheduledTokens]) -> None:
        """Sample several tokens for each request with captured graphs; tokens after an end are dropped."""
        # finished rows run on within a burst: not past the context, where a table of positions ends
        most = min(AHEAD, self.context + 1 - max(len(work.request) for work in plan))
        made = self.runner.burst(plan, self.scheduler.look_ahead(plan, most))
        for work, *drawn in zip(plan, *made, strict=True):
            for token, logprob, support in zip(*drawn, strict=True):
                work.request.append(token, logprob, self.version, support)
                work.request.computed += 1
                self.counters.tokens += 1
                if work.request.stop is not None:
                    break
