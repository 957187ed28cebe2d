"""One sequence on its way through the engine."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np

from birl.engine.pages import FIRST
from birl.errors import BirlError
from birl.models.low_rank import AdapterWeights
from birl.models.vision import Sight
from birl.support import Support
from birl.text.chat import StopChecker
from birl.text.grammar import Guide
from birl.types import Completion, SamplingParams, Stop

Place = tuple[list[tuple[int, float]], int]  # tokens with their log-probs, the most likely first; and a rank


@dataclass(slots=True)
class TopLogprobs:
    """The `count` most likely tokens in the place of each token, with their log-probs, and the token's own rank, from
    1. Of given tokens at temperature 1, of drawn ones as they were drawn from. `places` is filled."""

    count: int = 1
    places: list[Place] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """Prompt, what was sampled so far, and how to go on.

    Randomness is counted, not consumed: token t of a request always uses number t of the stream that its seed names. So
    a result depends neither on what else is in the batch nor on being preempted or run again.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # params.max_tokens, or what the context leaves
    end_ids: frozenset[int]
    checker: StopChecker | None
    future: "asyncio.Future[Completion]"
    session: str = ""
    sight: Sight | None = None  # the pictures in the prompt
    guide: Guide | None = None  # what the answer may be
    adapter: AdapterWeights | None = None  # what is added to the model's weights
    best: TopLogprobs | None = None  # what is wanted of the places of its tokens
    watch: "Callable[[Request], None] | None" = None  # called after every step that gave it tokens
    told: int = 0  # tokens that `watch` has heard of
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[Any] = field(default_factory=list)  # of each token, an array, or None for all tokens
    pages: list[int] = field(default_factory=list)  # of the KV cache, in order of position
    known: int = 0  # so many of them are reused by their tokens
    cached: int = -1  # positions of the prompt that were computed before it first ran
    place: int = -1  # of its layers' states, where they keep such, among those of running requests
    computed: int = 0  # positions whose keys and values are there,
    older: bool = False  # some of them with weights that were replaced since
    daring: int = 2  # tokens to guess ahead (`Drafts`),
    guess_from: int = 0  # once so many are sampled
    routes: list[bytes] = field(default_factory=list)  # which experts computed each position, where that is recorded
    stop: Stop | None = None
    aborted: bool = False
    _uniforms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        seed = secrets.randbits(64) if self.params.seed is None else self.params.seed
        self._uniforms = np.random.Generator(np.random.Philox(key=seed)).random(self.max_tokens).tolist()

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def first(self) -> int:
        """In place of the page before the first: pages are shared by requests of one adapter."""
        return FIRST if self.adapter is None else FIRST - self.adapter.number

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)

    def span(self, start: int, end: int) -> tuple[int, ...]:
        """`ids[start:end]`, without the rest."""
        n = len(self.prompt)
        return (*self.prompt[start:end], *self.tokens[max(start - n, 0) : max(end - n, 0)])

    def pending(self) -> list[int]:
        """Tokens whose keys and values are not there yet; the last one's logits give the next token."""
        start = self.computed - len(self.prompt)
        return self.tokens[start:] if start >= 0 else [*self.prompt[start:], *self.tokens]

    def piece(self, budget: int) -> list[int]:
        """The next of them, about `budget`: no token is computed without those that it sees."""
        count = max(budget, 0)
        return self.pending()[: count if self.sight is None else self.sight.whole(self.computed, count)]

    @property
    def left(self) -> int:
        """Tokens that it may still be given."""
        return self.max_tokens - len(self.tokens)

    @property
    def forced(self) -> tuple[int, ...]:
        """The next tokens, where they are given."""
        return self.params.forced and self.params.forced[len(self.tokens) : self.max_tokens]

    @property
    def only_scored(self) -> bool:
        """Is every token of its answer given?"""
        return len(self.params.forced) >= self.max_tokens

    def uniforms(self, n: int) -> list[float]:
        """The random numbers of the next n tokens, in [0, 1); fewer at the end."""
        return self._uniforms[len(self.tokens) : len(self.tokens) + n]

    def append(self, token: int, logprob: float, version: int, support: Any = None) -> None:
        """Raises `BirlError` where the log-prob is NaN."""
        if isnan(logprob):
            raise BirlError("The model's logits are not numbers any more: its weights are not finite, or too large.")
        self.tokens.append(token)
        self.supports.append(support)
        self.logprobs.append(logprob)
        self.versions.append(version)
        complete = self.guide is not None and self.guide.take(token)
        if token in self.end_ids or complete or (self.checker is not None and self.checker.feed(token)):
            self.stop = Stop.STOP
        elif len(self.tokens) >= self.max_tokens:
            self.stop = Stop.LENGTH

    def known_routes(self) -> bytes:
        """Of all positions but the last; all ones where one was never computed."""
        if not self.routes:
            return b""
        known = self.routes[: len(self) - 1]
        return b"".join(known).ljust((len(self) - 1) * len(self.routes[0]), b"\xff")

    def completion(self) -> Completion:
        stop = self.stop or Stop.ABORT
        support = Support.of(self.supports) if self.params.told else None
        own = self.tokens, self.logprobs, self.versions, stop, self.known_routes(), max(self.cached, 0)
        return Completion.of(*own, support)
