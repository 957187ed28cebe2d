"""Draft tokens for speculative decoding, looked up in a request's prompt, its answer so far, and the other answers to
the same prompt (prompt lookup). Pure Python.

When only a few long answers are left, a step spends its time reading the weights, and computing 16 rows takes as long
as computing one. So the spare rows compute draft tokens. Token t of a request is what its t-th random number picks from
the distribution after t - 1 tokens, whether that was computed one step at a time or several at once: a draft is right
or wrong, and never changes what is sampled (`Steps.step` compares).
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from birl.engine.request import Request

LONGEST, SHORTEST = 4, 2  # length of the n-grams of context that must match
REST = 8  # tokens without drafts after a wrong one: a step with drafts costs a tenth more
REMEMBERED = 100_000  # tokens of prompts and answers, about 60 MB


@dataclass(slots=True)
class Lookup:
    """What followed the last occurrence of each n-gram in a prompt and its answers."""

    follows: dict[tuple[int, ...], tuple[list[int], int]] = field(default_factory=dict)
    texts: list[tuple[Request, list[int]]] = field(default_factory=list)  # running answers, and their indexed tokens
    indexed: int = 0

    def join(self, request: Request) -> None:
        """The prompt is indexed when drafts are first looked up: with many rows it never is."""
        self.texts.append((request, list(request.prompt) if self.texts or self.indexed else []))

    def __len__(self) -> int:
        """Number of tokens."""
        return self.indexed + sum(len(request) - len(text) for request, text in self.texts)

    @property
    def growing(self) -> bool:
        return any(request.stop is None for request, _ in self.texts)

    def index(self, text: list[int], start: int) -> None:
        for place in range(max(start, SHORTEST), len(text)):
            for n in range(SHORTEST, min(LONGEST, place) + 1):
                self.follows[tuple(text[place - n : place])] = text, place
        self.indexed += len(text) - start

    def read(self) -> None:
        """Index the tokens since the last call."""
        for request, text in self.texts:
            start = len(text)
            if len(request) > start:
                text += request.span(start, len(request))
                self.index(text, start)
        self.texts = [(r, t) for r, t in self.texts if r.stop is None]  # finished requests do not grow

    def guess(self, text: list[int], count: int) -> list[int]:
        """Up to `count` draft tokens: those that followed the longest n-gram that ends `text`, and so on from there."""
        context, guessed = text[-LONGEST:], 0
        while guessed < count:
            grams = (tuple(context[-n:]) for n in range(min(LONGEST, len(context)), SHORTEST - 1, -1))
            hit = next((after for gram in grams if (after := self.follows.get(gram))), None)
            if hit is None:
                break
            source, place = hit
            result = source[place : place + count - guessed]
            context += result
            guessed += len(result)
        return context[len(context) - guessed :]


@dataclass(slots=True)
class Drafts:
    """Lookups by prompt, evicted in LRU order. `rows`: number of rows that a step can compute in the time of one; 0
    disables drafts."""

    rows: int = 16
    lookups: OrderedDict[tuple[int, ...], Lookup] = field(default_factory=OrderedDict)

    def add(self, request: Request) -> None:
        if not self.rows:
            return
        lookup = self.lookups.setdefault(request.prompt, Lookup())
        lookup.join(request)
        self.lookups.move_to_end(request.prompt)

    def guess(self, request: Request, most: int) -> list[int]:
        """Up to `most` draft tokens. Their number depends on how many were right the last time, as text repeats itself
        in stretches."""
        if len(request.tokens) < request.guess_from:
            return []
        count = min(most, request.daring, request.left - 1)
        lookup = self.lookups.get(request.prompt)
        if count <= 0 or lookup is None:
            return []
        lookup.read()
        return lookup.guess([*request.prompt[-LONGEST:], *request.tokens[-LONGEST:]], count)

    def judge(self, request: Request, right: int) -> None:
        """Record that `right` drafts of a request were accepted."""
        request.daring = 2 * right + 2
        request.guess_from = len(request.tokens) + (0 if right else REST)

    def trim(self, most: int) -> None:
        """Forget the oldest prompts until at most `most` tokens are left, except those with running requests."""
        size = sum(map(len, self.lookups.values()))
        for prompt, lookup in tuple(self.lookups.items()):
            if size <= most:
                return
            if not lookup.growing:
                size -= len(self.lookups.pop(prompt))
