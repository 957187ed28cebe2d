"""One request of the engine."""

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
from birl.samples import Support
from birl.text.chat import StopChecker
from birl.text.grammar import Guide
from birl.types import Completion, SamplingParams, Stop

Place = tuple[list[tuple[int, float]], int]  # tokens with their log-probs, the most likely first; and a rank


@dataclass(slots=True)
class TopLogprobs:
    """The `count` most likely tokens at the position of each token, with their log-probs, and the token's own rank,
    from 1; at temperature 1 for given tokens, from the sampling distribution for sampled ones. `places` is filled."""

    count: int = 1
    places: list[Place] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """A sequence: prompt, sampled tokens, and sampling state.

    Random numbers are indexed, not consumed: token t of a request always uses number t of the stream of its seed. So a
    result depends neither on the rest of the batch nor on preemption or repetition.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # params.max_tokens, or the room left in the context
    end_ids: frozenset[int]
    checker: StopChecker | None
    future: "asyncio.Future[Completion]"
    session: str = ""
    sight: Sight | None = None  # images in the prompt
    guide: Guide | None = None  # constrains the answer
    adapter: AdapterWeights | None = None  # LoRA adapter, added to the model's weights
    best: TopLogprobs | None = None  # requested top log-probs
    watch: "Callable[[Request], None] | None" = None  # called after every step with new tokens
    told: int = 0  # tokens that `watch` has been called for
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[Any] = field(default_factory=list)  # for each token an array, or None for all tokens
    pages: list[int] = field(default_factory=list)  # of the KV cache, in order of position
    known: int = 0  # number of pages that are known (prefix cache)
    cached: int = -1  # positions of the prompt that were cached when it first ran
    place: int = -1  # slot of its layers' recurrent states, if any, among those of running requests
    computed: int = 0  # positions in the KV cache,
    older: bool = False  # some of them computed with replaced weights
    daring: int = 2  # number of draft tokens to try (`Drafts`),
    guess_from: int = 0  # after this many sampled tokens
    routes: list[bytes] = field(default_factory=list)  # experts that computed each position, if recorded
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
        """Stands for the page before the first: pages are shared by requests of one adapter."""
        return FIRST if self.adapter is None else FIRST - self.adapter.number

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)

    def span(self, start: int, end: int) -> tuple[int, ...]:
        """`ids[start:end]`, without building all ids."""
        n = len(self.prompt)
        return (*self.prompt[start:end], *self.tokens[max(start - n, 0) : max(end - n, 0)])

    def pending(self) -> list[int]:
        """Tokens that are not in the KV cache yet; the last one's logits give the next token."""
        start = self.computed - len(self.prompt)
        return self.tokens[start:] if start >= 0 else [*self.prompt[start:], *self.tokens]

    def piece(self, budget: int) -> list[int]:
        """The next pending tokens, about `budget`; an image's tokens are not split."""
        count = max(budget, 0)
        return self.pending()[: count if self.sight is None else self.sight.whole(self.computed, count)]

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - len(self.tokens)

    @property
    def forced(self) -> tuple[int, ...]:
        """The next tokens, if they are given."""
        return self.params.forced and self.params.forced[len(self.tokens) : self.max_tokens]

    @property
    def only_scored(self) -> bool:
        """Whether all tokens of the answer are given."""
        return len(self.params.forced) >= self.max_tokens

    def uniforms(self, n: int) -> list[float]:
        """Uniform random numbers of the next n tokens, in [0, 1); fewer at the end."""
        return self._uniforms[len(self.tokens) : len(self.tokens) + n]

    def append(self, token: int, logprob: float, version: int, support: Any = None) -> None:
        """Append a token. Raises `BirlError` if the log-prob is NaN."""
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
        """Routes of all positions but the last; all bits set for a position that was never computed."""
        if not self.routes:
            return b""
        known = self.routes[: len(self) - 1]
        return b"".join(known).ljust((len(self) - 1) * len(self.routes[0]), b"\xff")

    def completion(self) -> Completion:
        stop = self.stop or Stop.ABORT
        support = Support.of(self.supports) if self.params.told else None
        own = self.tokens, self.logprobs, self.versions, stop, self.known_routes(), max(self.cached, 0)
        return Completion.of(*own, support)
