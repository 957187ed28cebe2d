"""birl's engine on synthetic prompts, in this process; `shared_prefix` and `ceiling` time it and count its work."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from birl.engine.engine import EmbeddedEngine
from birl.engine.pages import sharing
from birl.engine.scheduler import ScheduledTokens
from birl.kernels.tensors import PAGE
from birl.models.slots import page_bytes
from birl.types import SamplingParams

Prompts = list[tuple[int, ...]]


def prompts(count: int, answers: int, length: int, vocabulary: int, distinct: bool = False) -> Prompts:
    """`count` random prompts of `length` tokens, each repeated `answers` times in a row. `distinct`: each has a
    different first token, so that nothing can be shared."""
    random = torch.Generator().manual_seed(length)
    rows = torch.randint(0, vocabulary, (-(-count // answers), length), generator=random).tolist()
    found = [tuple(rows[i // answers]) for i in range(count)]
    return [(i, *p[1:]) for i, p in enumerate(found)] if distinct else found


async def _answer(engine: EmbeddedEngine, asked: Prompts, tokens: int) -> float:
    start = time.perf_counter()
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i) for i in range(len(asked))]
    answers = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(asked, params, strict=True)))
    seconds = time.perf_counter() - start
    assert all(len(a.tokens) == tokens for a in answers)
    return seconds


def answer(engine: EmbeddedEngine, asked: Prompts, tokens: int) -> float:
    """Seconds to generate an answer of exactly `tokens` tokens to each prompt."""
    return asyncio.run(_answer(engine, asked, tokens))


@contextmanager
def replaced(owner: Any, name: str, function: Callable) -> Iterator[None]:
    """Context in which the object has another method of that name."""
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)


@dataclass(slots=True)
class Seen:
    """Work of `answer`. `read`: keys and values that a step reads while all answers are being decoded; pages that the
    kernel reads once for several sequences count once."""

    prefilled: int = 0  # prompt tokens computed
    pages: int = 0  # of the KV cache, peak
    read: float = 0.0  # bytes, mean over the steps
    positions: list[int] = field(default_factory=list[int])


def watch(engine: EmbeddedEngine, asked: Prompts, tokens: int) -> Seen:
    """Run `answer` and count its work."""
    seen, before, plain = Seen(), engine.counters.prefilled, engine.runner.run

    def run(plan: Sequence[ScheduledTokens]) -> Tensor:
        pages = engine.scheduler.pages
        seen.pages = max(seen.pages, pages.total - pages.room)
        if len(plan) == len(asked) and all(w.request.tokens for w in plan):
            lengths = [w.start + 1 for w in plan]
            groups, shared = sharing([w.request.pages for w in plan], lengths)
            twice = sum((n - 1) * s for n, s in zip(groups, shared, strict=True))
            seen.positions.append(sum(lengths) - twice * PAGE)
        return plain(plan)

    with replaced(engine.runner, "run", run):
        answer(engine, asked, tokens)
    seen.prefilled = engine.counters.prefilled - before
    seen.read = mean(seen.positions) * page_bytes(engine.runner.model) / PAGE
    return seen


def rate(engine: EmbeddedEngine, asked: Prompts, tokens: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens per second of decode only: from the end of the last prefill to the end of the last step, including the
    time between the steps."""
    counters, plain = engine.counters, engine.steps.step
    ends: list[tuple[float, int, int]] = []

    def step() -> list:
        finished = plain()
        ends.append((clock(), counters.prefilled, counters.tokens))
        return finished

    with replaced(engine.steps, "step", step):
        answer(engine, asked, tokens)
    last, prefilled, made = ends[-1]
    first, _, known = next(e for e in ends if e[1] == prefilled)
    return (made - known) / (last - first)
